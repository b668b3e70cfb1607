"""Host twins of kernels_cu/portable, by name."""
