"""The variants compiled ahead of time are those that calls take, and no others."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._call.structure import structure
from rawattn._kernels import registry
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.target import Target, without_device
from rawattn._kernels.variants import common_variants
from rawattn._strides import contiguous


def test_pages_are_never_copied() -> None:
    """Kernels that make aligned copies are compiled for the listed head dims of rows only: pages are never copied."""
    every = common_variants("sm_90a", every=True)
    copies = {x.summary for x in every if x.summary.startswith("portable align_rows")}
    dims = ("D=36 8B", "D=34 4B", "D=7 2B")
    assert copies == {f"portable align_rows 16bit {each}" for each in dims}


@pytest.mark.parametrize("headdim", [64, 96, 128])
def test_backwards_of_few_rows_and_of_many(headdim: int) -> None:
    """The backward takes small tiles for few rows if an SM runs several of their blocks at once. The usual variants of both
    sizes are compiled ahead of time."""

    def chosen(arch: str, rows: int, keys: int, **options: Any) -> str:
        q, k = (np.broadcast_to(np.float16(0), (2, n, 4, headdim)) for n in (rows, keys))
        problem, _ = describe(q, k, k, **options)
        config = portable_backward.choose(problem, without_device(arch), Operands())
        return f"{config.tile_q}x{config.tile_k}"

    many = chosen("sm_90a", 2048, 2048)
    assert many == ("128x128" if headdim == 64 else "64x128")
    assert chosen("sm_90a", 60, 60) == chosen("sm_90a", 5000, 60) == "32x64"
    assert chosen("sm_90a", 60, 100) == many  # all keys in one tile
    assert chosen("sm_90a", 60, 2000) == "32x64"
    assert chosen("sm_90a", 60, 60, softcap=3.0, dropout_p=0.1, seed=1) != "32x64"
    assert chosen("sm_89", 60, 2000) == chosen("sm_89", 2048, 2048)
    ahead = {source.summary for source in common_variants("sm_90a", purpose="training")}
    everywhere = (many, f"{many} lone", "32x64 lone")
    for tile, ragged in (*itertools.product(everywhere, (False, True)), ("32x64", True)):
        shape, *lone = tile.split()
        assert any(
            f"portable backward float16 D={headdim} {shape} " in each
            and ("one-key-tile" in each) == bool(lone)
            and (" ragged" in each) == ragged
            for each in ahead
        ), (tile, ragged)
    for kernel in ("backward_prepare", "backward_setup"):
        assert any(f"portable {kernel} float16 D={headdim},{headdim} " in each for each in ahead)


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "heads"),
    [(1, 1024, 1024, (16, 16)), (4, 2048, 2048, (32, 8)), (8, 1, 2048, (32, 8))],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gpu", [("sm_90a", 232448, 132), ("sm_80", 166912, 108)])
def test_plain_calls(
    batch: int,
    rows: int,
    keys: int,
    heads: tuple[int, int],
    causal: bool,
    gpu: tuple[str, int, int],
) -> None:
    """What plain calls on a GPU of the architecture load is compiled ahead of time."""
    ahead = set(common_variants(gpu[0]))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        q, k = (
            np.broadcast_to(dtype(0), (batch, n, h, 128))
            for n, h in zip((rows, keys), heads, strict=True)
        )
        problem, lengths = describe(q, k, k, causal=causal)
        strides = {
            name: contiguous(x.shape, 2) for name, x in {"q": q, "k": k, "v": k, "out": q}.items()
        }
        call = problem, Operands(strides), Target(*gpu)
        family = registry.choose("attention", call[0], call[2], call[1])
        steps = family.steps(problem, structure(lengths), call[1], call[2])
        assert {step.source for step in steps.launches} <= ahead
