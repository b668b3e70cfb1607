"""The public verbs: signatures and their documentation. The work is the dispatcher's."""
