"""Every Hopper variant the chooser can pick compiles into the schedule its source describes. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

import pytest

from bench.tuning import gate
from rawattn._compile import compiler
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.variants import common_variants
from tests import exhaustive

VARIANTS = [
    source
    for source in common_variants(sm90_forward.ARCH, every=True)
    if source.entry == sm90_forward.ENTRY
]


def traits(source: compiler.Source) -> Iterable[Hashable]:
    """Each tile at each head dim, and each word of the summary at each head dim."""
    kernel, _, constants = source.summary.partition(" D=")
    headdim, tile, *words = constants.split()
    yield headdim, tile
    yield kernel, tile
    yield from ((headdim, word) for word in words)


each_variant = pytest.mark.parametrize(
    "source",
    exhaustive.mark(VARIANTS, traits, lambda source: [source]),
    ids=lambda source: source.summary,
)


@each_variant
def test_no_spills_and_no_serialised_products(source: compiler.Source) -> None:
    cubin = compiler.compile_source(source, sm90_forward.ARCH)
    assert cubin.meta["spills"] == 0
    assert not gate.serialised(cubin.log)


@each_variant
def test_exponentials_come_in_one_stretch(source: compiler.Source) -> None:
    """Behind the wait for P V, which holds the registers that they are converted into."""
    tool = gate.disassembler()
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    cubin = compiler.compile_source(source, sm90_forward.ARCH)
    tile_k = int(re.search(r"kTileK = (\d+)", source.text)[1])  # type: ignore[index]
    assert gate.schedule_fault(cubin.image, tile_k, tool) == ""
