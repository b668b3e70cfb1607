"""Host twins of kernels_cu/sm90, by name."""
