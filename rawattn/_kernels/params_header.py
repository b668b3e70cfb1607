"""Generates the headers of the parameter structs: `params` becomes kernels_cu/attn/params.cuh, `helper_params`
kernels_cu/attn/helper_params.cuh. A test compares the files with these texts.

python -m rawattn._kernels.params_header kernels_cu/attn
"""

from __future__ import annotations

import sys
from pathlib import Path

from rawattn._kernels import helper_params, params, structs


def texts() -> dict[str, str]:
    """The texts of the files by name."""
    declared_in = "rawattn/_kernels/{}.py"
    return {
        "params.cuh": structs.text(
            params.STRUCTS, declared_in.format("params"), "target/target.cuh"
        ),
        "helper_params.cuh": structs.text(
            helper_params.STRUCTS, declared_in.format("helper_params"), "attn/params.cuh"
        ),
    }


if __name__ == "__main__":
    for name, text in texts().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
