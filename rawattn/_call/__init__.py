"""A call as plain values. Everything that a caller can get wrong is answered here."""
