"""Compiles generated sources to cubins with NVRTC, and caches them on disk."""
