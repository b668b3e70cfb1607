"""The CPU backend: NumPy, tile by tile, on threads."""
