"""From a described call to launches on a GPU, or to the CPU backend."""
