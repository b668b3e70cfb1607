"""The implementation of `rawattn.jax`. `record` and `launch` import no JAX: they describe a call and launch it."""
