"""Masks that are built once and used by many calls: bits, a map of granules, and what people see of them."""
