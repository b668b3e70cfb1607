"""Benchmark scripts of the repository. The installed package has `rawattn bench`."""
