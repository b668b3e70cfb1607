"""Kernel families: a call's problem -> configuration -> source and steps. Each module is the twin of a file of kernels_cu/."""
