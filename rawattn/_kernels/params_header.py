"""Generates kernels_cu/attn/params.cuh from `params` and `helper_params`. A test compares the file with this text.

python -m rawattn._kernels.params_header > kernels_cu/attn/params.cuh
"""

from __future__ import annotations

from rawattn._kernels import helper_params, params, structs


def text() -> str:
    """The text of the file."""
    declared = [*params.STRUCTS, *helper_params.STRUCTS]  # in this order: the second use the first
    return structs.text(declared, "params.py and helper_params.py in rawattn/_kernels")


if __name__ == "__main__":
    print(text(), end="")
