"""What stands behind `rawattn.jax`, without JAX: what a call is, and how it is launched."""
