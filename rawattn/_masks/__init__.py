"""Masks that are built once and used by many calls: bits, and a map of granules."""
