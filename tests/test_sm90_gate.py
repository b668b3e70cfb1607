"""Every Hopper variant of the tile tables compiles into the schedule its source describes. Needs no GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from bench.tuning import gate
from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem
from rawattn._compile import compiler
from rawattn._kernels import tile_tables
from rawattn._kernels.operands import ITEMSIZE, Operands, strides_of_pages
from rawattn._kernels.selection import using_tiles
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import tile_choice
from rawattn._kernels.target import without_device
from rawattn._kernels.tile_tables import Row
from rawattn._kernels.variants import common_variants
from tests import exhaustive


def usual_variants() -> Iterator[compiler.Source]:
    """All variants of Hopper's forward but those with dropout and a bias together, which no tile table is for: they need more
    registers than there are."""
    every = common_variants(sm90_forward.ARCH, every=True)
    own = (source for source in every if source.entry == sm90_forward_config.ENTRY)
    return (
        source for source in own if not ("dropout" in source.summary and "bias" in source.summary)
    )


def variants_of_scores() -> Iterator[compiler.Source]:
    """Variants of the tile tables for windows, masks of keys, options of scores, few tiles and pages: each row in calls that
    its table is for."""
    lengths = {"ragged": True, "packed": True}
    limited = {"window_left": 50, **lengths}
    slopes = {"alibi_slopes": ArrayForm("float32", (2,), (2,))}
    both_sides = {"window_right": None}
    of_keys = {"mask": ArrayForm("bool", (1, 1, 1, 128), (1, 1, 1, 128))}
    pages = PageForm(page_size=16, num_pages=8, entries=8, has_indptr=False, dtype="int32")
    paged = {"pages": pages, "ragged": True}
    copied = {"pages": pages._replace(page_size=1), "ragged": True}
    uses: dict[str, tuple[dict[str, Any], ...]] = {
        "any": (of_keys, {**of_keys, "window_right": None}),
        "left": ({**of_keys, "window_left": 50},),
        # Not with a window: the limits that it keeps for each row would spill 24 bytes.
        "bias": (bias_of(128), {**bias_of(128), **lengths}, bias_of(1)),
        "dropout": ({"dropout_p": 0.1}, {"dropout_p": 0.1, **limited}),
        "held": (bias_of(128, "float32"), {**bias_of(128, "float32"), **limited}),
        "alibi": (slopes, {**slopes, **lengths}, {**slopes, **both_sides}),
        "alibi_long": (slopes, {**slopes, **lengths}, {**slopes, **both_sides}),
        "few": (
            {},
            of_keys,
            bias_of(128),
            {**bias_of(128), **limited},
            paged,
            {**paged, "float8": True},
        ),
        "paged": (paged, {**paged, "window_left": 50}),
        "paged_rows": (copied, {**copied, "window_left": 50}),
        "paged_8bit": tuple(
            {**paged, "float8": True, **more} for more in ({}, {"window_left": 50})
        ),
    }
    for table, calls in uses.items():
        for row, call in itertools.product(tile_tables.table(tile_choice.TILES, table), calls):
            # At head dim 256 these tables leave no registers for the limits of a window.
            windows = ("paged", "paged_rows", "left")
            if table in windows and row.headdim == 256 and "window_left" in call:
                continue
            if table != "few" or not call or _blocks(row) == 1:
                yield variant(row, call)


def _blocks(row: Row) -> int:
    return sm90_forward_config.blocks_per_sm(
        row.fields["consumers"], row.fields["consumer_registers"]
    )


def bias_of(rows: int, dtype: str = "bfloat16") -> dict[str, Any]:
    shape = (1, 2, rows, 128)
    return {"bias": ArrayForm(dtype, shape, shape)}


def variant(row: Row, call: dict[str, Any]) -> compiler.Source:
    problem = Problem(**{**CALL, "headdim": row.headdim, "headdim_v": row.headdim, **call})
    operands = Operands(strides_of_pages(problem))
    if problem.bias is not None:
        size = ITEMSIZE[problem.bias.dtype]
        line, plane = 128 * size, 128 * size * problem.bias.shape[2]
        operands = Operands(
            option_strides={"bias": (2 * plane, plane, line, size)}, alignments={"bias": 0}
        )
    elif problem.alibi_slopes is not None:
        operands = Operands(option_strides={"alibi_slopes": (4,)})
    with ExitStack() as stack:
        for table in tile_tables.SCHEMAS[tile_choice.TILES].tables:
            stack.enter_context(using_tiles(tile_choice.TILES, table, (replace(row, headdim=256),)))
        target = without_device(sm90_forward.ARCH)
        config = sm90_forward.choose(problem, target, operands)
    # Shared memory has slots only for a bias whose elements have 16 bits.
    assert (config.bias_stages > 0) == (problem.bias is not None and size == 2)
    return config.source()


SCORED = {
    "alibi",
    "bias",
    "bias-pairs",
    "block-mask",
    "dropout",
    "score-mod",
    "sink-logits",
    "softcap",
}
CALL: dict[str, Any] = {
    **{"dtype": "bfloat16", "batch": 1, "nheads_q": 2, "nheads_kv": 2, "packed": False},
    **{"rows_q": 128, "rows_k": 128, "max_seqlen_q": 128, "max_seqlen_k": 128, "ragged": False},
    **{"window_left": None, "window_right": 0, "sink": 0, "top_left": False, "scale": 1.0},
}
# The most bytes of spills. The producer may spill: it has few registers, and it finds the next query tile while the consumers
# work on another. With a mask of keys it may spill more: there it may learn how many key tiles to load only after it has loaded
# the first one. That consumers do not spill is checked in the disassembly.
PRODUCER_SPILLS, MASKED_PRODUCER_SPILLS = 128, 256
_USUAL = list(usual_variants())
VARIANTS = list(dict.fromkeys((*_USUAL, *variants_of_scores())))
PLAIN = [source for source in _USUAL if not SCORED.intersection(source.summary.split())]
OTHERS = [source for source in VARIANTS if source not in PLAIN]


def words(source: compiler.Source) -> Iterable[Hashable]:
    """The words of the summary behind the tile shape, but for those that have a value."""
    _, _, constants = source.summary.partition(" D=")
    return (word for word in constants.split()[2:] if "=" not in word)


def options_of_scores(source: compiler.Source) -> Iterable[Hashable]:
    return SCORED.intersection(source.summary.split())


MARKED = [
    *exhaustive.mark(PLAIN, words, lambda source: [source]),
    *exhaustive.mark(OTHERS, options_of_scores),
]


def curated() -> list[compiler.Source]:
    """The variants that every run of the tests compiles."""
    return [source for source in MARKED if isinstance(source, compiler.Source)]


@pytest.mark.parametrize("source", MARKED, ids=lambda source: source.summary)
def test_machine_code(source: compiler.Source) -> None:
    """The machine code spills little and serialises no wgmma. The exponentials of a tile, but for a few, are in one stretch
    behind the wait for P V, which reads the registers that they are converted into."""
    cubin = compiler.compile_source(source, sm90_forward.ARCH)
    masked = "key_mask" in source.summary.split()
    assert cubin.meta["spills"] <= (MASKED_PRODUCER_SPILLS if masked else PRODUCER_SPILLS)
    assert not gate.serialised(cubin.log)
    tool = gate.disassembler()
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    tile_k = int(re.search(r"kTileK = (\d+)", source.text)[1])  # type: ignore[index]
    # How many exponentials may come before the wait for P V. They are more where there is more work beside the first ones: with
    # a bias, exponents are multiplied once more, and dropout generates random bits.
    words = source.summary.split()
    early = tile_k // 6 if "dropout" in words else tile_k // 8 if "bias" in words else 4
    assert gate.schedule_fault(cubin.image, tile_k, tool, early) == ""
