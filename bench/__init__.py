"""Scripts of the repository that measure; the package has `rawattn bench`."""
