"""What `rawattn.torch` is made of. Imports torch, and is imported by `rawattn.torch` alone."""
