"""portable/forward.cu, with ragged_setup.cu, against the float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pytest

from rawattn._kernels import tile_tables
from rawattn._kernels.portable import forward as portable_forward
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.random_cases import random_case
from tests.shim.cells import Cell, Tiles, verify
from tests.shim.shim import Builder
from tests.shim.traits import of_case, of_kernel

WAVES = (32, 64)
# Small tiles, for many tile edges in a short sequence.
SMALL = Tiles(32, 16, 2, 1, False)
# Shapes that no table has: one or two stages, queries in registers or in shared memory, one to four waves, each with one to
# three blocks of rows.
SHAPES = (
    Tiles(32, 32, 2, 2, False),
    Tiles(16, 16, 1, 1, True),
    Tiles(64, 32, 2, 2, True),
    Tiles(48, 16, 1, 2, False),
    Tiles(32, 48, 1, 1, True),
    Tiles(64, 16, 4, 2, True),
)
TABLE = [
    *(("bfloat16", row) for row in tile_tables.table(portable_forward.TILES, "16bit")),
    *(("float32", row) for row in tile_tables.table(portable_forward.TILES, "32bit")),
]
AROUND_EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 48, 65)
WINDOWS = (
    ((0, 0), 0), ((15, 0), 0), ((16, 1), 16), ((17, 31), 1), ((40, 33), 15), ((5, 2), 1000),
    ((3, None), 0), ((16, None), 17), ((1 << 40, None), 0), ((None, 0), 0), ((None, 17), 0),
)  # fmt: skip


def each_wave(case: Case, **knobs: Any) -> list[Cell]:
    return [Cell(case=case, wave=wave, **knobs) for wave in WAVES]


def cells_of_curated() -> Iterable[Cell]:
    """Curated cases with tiles and wave sizes in turn. Cases that share a kernel have the same, to compile it only once."""
    kernels: dict[object, int] = {}
    for case in curated():
        # Arrays with a strided last axis are copied before they reach a kernel.
        if case.scores <= 200_000 and case.layout != "steps":
            n = kernels.setdefault(Cell(case=case).config, len(kernels))
            small = case.batch > 100 or (case.scores <= 60_000 and n // 2 % 2 == 1)
            yield Cell(case=case, wave=WAVES[n % 2], tiles=SMALL if small else None)


def cells_of_edges() -> Iterable[Cell]:
    """Every pair of lengths around the edges of tiles, in one batch, for every kind of mask."""
    lens_q, lens_k = zip(*itertools.product(AROUND_EDGES, AROUND_EDGES), strict=True)
    one_head = {"nheads_q": 1, "nheads_kv": 1, "headdim": 16}
    for align in ("bottom-right", "top-left"):
        corner = {"bottom-right": "b", "top-left": "t"}[align]
        for window, sink in WINDOWS:
            name = f"edges-{corner}{window[0]},{window[1]},{sink}".replace("None", "x")
            knobs = {**one_head, "align": align, "window": window, "sink": sink}
            yield from each_wave(ragged(name, lens_q, lens_k, **knobs), tiles=SMALL)
    yield from each_wave(ragged("edges", lens_q, lens_k, **one_head), tiles=SMALL)


def cells_of_shapes() -> Iterable[Cell]:
    dtypes = itertools.cycle(("float16", "bfloat16", "float32"))
    for n, (tiles, wave) in enumerate(itertools.product(SHAPES, WAVES)):
        mask = ({}, {"causal": True}, {"window": (30, 20), "sink": 9})[n % 3]
        dims = {"headdim": 40, "headdim_v": (24, 72)[n % 2], "dtype": next(dtypes)}
        yield Cell(case=dense(f"shape{n % 3}", 1, 75, 118, **dims, **mask), wave=wave, tiles=tiles)


def cells_of_table() -> Iterable[Cell]:
    """Every tile of the tables, for GPUs of any shared-memory size."""
    for dtype, row in TABLE:
        fields = row.fields
        held = fields["query_in_registers"]
        tiles = Tiles(fields["tile_q"], fields["tile_k"], fields["waves"], fields["stages"], held)
        knobs = {"headdim": row.headdim, "dtype": dtype, "causal": True}
        case = dense(f"table-d{row.headdim}", 1, tiles.tile_q + 9, 2 * tiles.tile_k + 5, **knobs)
        yield from each_wave(case, tiles=tiles)


def cells_of_widths() -> Iterable[Cell]:
    """Rows aligned to the element's size and to each larger power of 2 up to the widest copy."""
    for itemsize, width in ((2, 2), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16)):
        dtype = {2: "float16", 4: "float32"}[itemsize]
        headdim = 32 + width // itemsize
        case = dense(f"width{width}", 2, 40, 50, headdim=headdim, dtype=dtype, causal=True)
        yield from each_wave(case, tiles=SHAPES[2])
        yield Cell(case=case, tiles=SMALL, checked=True)


def cells_of_sections() -> Iterable[Cell]:
    """Sections of one head, of several, of all, and a last section that is smaller."""
    for section_keys in (1, 100, 250, 1 << 30):
        many_heads = {"nheads_q": 10, "nheads_kv": 5, "headdim": 16}
        both = (
            dense("heads", 2, 70, 100, **many_heads, causal=True),
            ragged("ragged-heads", (70, 0, 33), (100, 50, 300), **many_heads, causal=True),
        )
        for case in both:
            yield Cell(case=case, tiles=SMALL, section_keys=section_keys)


def cells_of_chance() -> Iterable[Cell]:
    for seed in range(55):
        case = random_case(seed)
        if case.layout == "steps" or case.scores > 150_000:
            continue
        rng = np.random.default_rng(seed)
        tiles = (None, SMALL, *SHAPES)[int(rng.integers(2 + len(SHAPES)))]
        section_keys = int(rng.integers(1, 400)) if rng.random() < 0.5 else None
        wave = WAVES[int(rng.integers(2))]
        checked = rng.random() < 0.15
        yield Cell(case=case, wave=wave, tiles=tiles, section_keys=section_keys, checked=checked)


def cells_of_checks() -> Iterable[Cell]:
    """One cell of each kind with the undefined-behaviour sanitizer."""
    lens_q, lens_k = (40, 0, 3, 65), (33, 20, 0, 130)
    rooms = {"room_q": (41, 5, 9, 65), "room_k": (40, 20, 7, 131), "lead": 3, "tail": 4}
    kinds = (
        dense("dense", 2, 70, 90, nheads_q=4, layout="bhsd", headdim=24),
        dense("reversed", 2, 33, 40, nheads_q=4, layout="reversed", dtype="float32", headdim=7),
        dense("odd", 1, 33, 40, layout="odd", give_out=True, causal=True, headdim=8),
        dense("tall", 1, 90, 20, causal=True, dtype="float16", headdim=33, headdim_v=80),
        dense("scale", 1, 33, 40, scale=-0.3, window=(9, None), sink=20, headdim=64),
        ragged("slots", lens_q, lens_k, by_q="seqlen", by_k="cu_seqlen", **rooms, window=(9, 9)),
        padded("padded", lens_q, lens_k, 70, 140, integers="int64", causal=True, align="top-left"),
        ragged("many", lens_q * 40, lens_k * 40, headdim=16, dtype="float32"),
    )
    for n, case in enumerate(kinds):
        yield from each_wave(case, tiles=SHAPES[n % len(SHAPES)], checked=True)


def cells_of_other_fibers() -> Iterable[Cell]:
    """Cells that switch stacks by ucontext, as the simulator does on CPUs other than x86-64."""
    yield from each_wave(ragged("ucontext", (40, 7), (33, 50), causal=True), fibers="ucontext")


CELLS = [
    *cells_of_curated(),
    *cells_of_edges(),
    *cells_of_shapes(),
    *cells_of_table(),
    *cells_of_widths(),
    *cells_of_sections(),
    *cells_of_chance(),
    *cells_of_checks(),
    *cells_of_other_fibers(),
]


TILE = ("tile_q", "tile_k", "waves", "stages", "query_in_registers")


def traits(cell: Cell) -> Iterable[Hashable]:
    yield from of_kernel(cell.config, TILE)
    yield "access", cell.wave, cell.config.copy_bytes
    yield "machine", cell.wave, cell.checked, cell.fibers
    yield "sections", cell.section_keys is not None
    yield from of_case(cell.case)


@pytest.mark.parametrize("cell", exhaustive.mark(CELLS, traits, lambda cell: cell.builds), ids=str)
def test_forward(cell: Cell, builder: Builder) -> None:
    verify(cell, builder)
