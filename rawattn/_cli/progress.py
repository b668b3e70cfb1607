"""Moved to `rawattn._console.progress`; modules that still import it from here."""

from rawattn._console.progress import Progress

__all__ = ["Progress"]
