"""One sequence over several GPUs: no part of this version. Who asks for it is told so, and where to read on."""

raise ModuleNotFoundError(
    "rawattn.parallel: one sequence over several GPUs is no part of this version; docs/guides/limits.md, 'Several GPUs, and "
    "what is not there yet', tells what several GPUs can do"
)
