"""A kernel and its header, to compile."""

from __future__ import annotations

from pathlib import Path

from rawattn._compile.compiler import Source

TEXT = '#include "tile/scale.cuh"\nextern "C" __global__ void k(float* x) { *x = scale(*x); }\n'
SCALE = "#pragma once\nconstexpr float scale(float x) { return 2.0f * x; }\n"
SOURCE = Source("k", TEXT, "test kernel k")


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def kernel(body: str, before: str = "") -> Source:
    return Source("k", f'{before}\nextern "C" __global__ void k(float* x) {{ {body} }}\n', "test")
