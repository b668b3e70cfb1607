"""The implementation of `rawattn.torch`. Imports torch, and is imported by `rawattn.torch` alone."""
