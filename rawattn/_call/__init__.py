"""A call as plain values, and the checks of everything that a caller can get wrong."""
