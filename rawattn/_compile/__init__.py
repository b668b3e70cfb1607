"""Generated source -> binary (NVRTC), and the cache on disk."""
