"""Masks that are built once and used by many calls: a bit for each key, and a map of granules of 64 rows x 64 keys."""
