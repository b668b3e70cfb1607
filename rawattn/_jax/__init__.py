"""What `rawattn.jax` is made of: what a call is, and how it is launched. `attention` alone imports JAX."""
