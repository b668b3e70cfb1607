"""Reserved for one sequence over several GPUs, which this version does not support. Importing it raises, with advice."""

raise ModuleNotFoundError(
    "rawattn.parallel: one sequence over several GPUs is no part of this version, which has no communication between GPUs: no "
    "groups of processes, no sharded attention; each call runs on one GPU, that of q, so split the batch or the heads and call "
    "rawattn.attention once for each GPU, in JAX under jax.shard_map"
)
