"""The public verbs: their signatures and documentation. The dispatcher does the work."""
