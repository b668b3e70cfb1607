"""Moved to `rawattn._console.table`; modules that still import it from here."""

from rawattn._console.table import age, render, size

__all__ = ["age", "render", "size"]
