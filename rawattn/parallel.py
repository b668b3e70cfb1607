"""Reserved for one sequence over several GPUs, which this version does not support. Importing it raises, with advice."""

raise ModuleNotFoundError(
    "rawattn.parallel: one sequence over several GPUs is no part of this version; docs/guides/limits.md, 'Several GPUs, and "
    "what is not there yet', tells what several GPUs can do"
)
