"""The kernels against the float64 reference."""

from __future__ import annotations

import pytest

from rawattn import _backends, _compile
from rawattn._kernels import FORWARD_FAMILIES, only, sm90_forward
from rawattn._kernels.sm90_forward import LONG_SEQLEN
from tests.cases import Case, curated, dense, ragged, repacked
from tests.frameworks import CuPy
from tests.tiles import TileShape, repacking, shared_limit, tile_shapes
from tests.verify import verify

CUPY = CuPy()


@pytest.mark.parametrize("family", FORWARD_FAMILIES)
@pytest.mark.parametrize("case", curated(), ids=str)
def test_curated(case: Case, family: str) -> None:
    with only(family):
        verify(case, CUPY)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_long_sequences(headdim: int, causal: bool) -> None:
    """Hopper's kernel has tiles of its own for them."""
    knobs = {"headdim": headdim, "causal": causal, "nheads_q": 1, "nheads_kv": 1}
    verify(dense("long", 1, 300, LONG_SEQLEN + 77, **knobs), CUPY)
    verify(ragged("long-ragged", (300, 9, 200), (40, LONG_SEQLEN + 1, 100), **knobs), CUPY)


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_copy_width(dtype: str, alignment: int) -> None:
    """Rows that begin at any multiple of the element size, from 2 or 4 bytes up to 16."""
    if dtype == "float32" and alignment < 4:
        pytest.skip("a float32 is 4 bytes")
    headdim = 48 + alignment // (2 if dtype == "float16" else 4)
    verify(dense(f"width{alignment}", 2, 70, 90, headdim=headdim, dtype=dtype, causal=True), CUPY)


@pytest.mark.parametrize("case", repacked(), ids=str)
def test_operands_that_hopper_cannot_read(case: Case) -> None:
    with repacking():
        verify(case, CUPY)
        prepared = list(_backends._prepared.values())
    if _compile.device_arch(0) == sm90_forward.ARCH:
        assert prepared and all(isinstance(each.config, sm90_forward.Config) for each in prepared)


@pytest.mark.parametrize("shape", tile_shapes(), ids=str)
def test_every_tile_shape(shape: TileShape) -> None:
    knobs = {"dtype": shape.dtype, "headdim": shape.headdim, "nheads_q": 4}
    lens = (130, 0, 65), (30, 9, 300)
    with shared_limit(shape.shared_limit):
        verify(dense("tile", 1, 200, 300, **knobs, causal=True), CUPY)
        verify(ragged("tile-ragged", *lens, **knobs, window=(60, 9), sink=5), CUPY)
