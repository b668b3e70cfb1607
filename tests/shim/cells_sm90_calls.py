"""Cells of Hopper's forward that vary the call: curated and random cases, lengths, masks, GQA groups, head dims, tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from rawattn._kernels import tile_tables
from rawattn._kernels.sm90 import tile_choice
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.random_cases import random_case
from tests.shim.cells_sm90 import (
    LATE,
    LONE,
    PAIR,
    SHAPES,
    SMALL,
    STORED,
    Sm90Cell,
    Sm90Tiles,
    chosen,
)

EDGES_Q = (0, 1, 16, 63, 64, 65, 128, 130)
EDGES_K = (0, 1, 15, 16, 17, 32, 33, 65)
WINDOWS = (
    ((0, 0), 0), ((15, 0), 0), ((16, 1), 16), ((17, 31), 1), ((40, 33), 15), ((5, 2), 1000),
    ((3, None), 0), ((16, None), 17), ((None, 0), 0), ((None, 17), 0),
)  # fmt: skip


def cells_of_curated() -> Iterable[Sm90Cell]:
    """Curated cases with the table's tile or small tiles in turn. Cases that share a kernel have the same tiles."""
    kernels: dict[object, int] = {}
    for case in curated():
        if case.scores <= 160_000 and case.batch <= 200 and applies(case):
            n = kernels.setdefault(Sm90Cell(case=case).config, len(kernels))
            yield Sm90Cell(
                case=case, shape=SMALL if case.batch > 100 else (None, SMALL, LATE)[n % 3]
            )


def cells_of_edges() -> Iterable[Sm90Cell]:
    """Every pair of lengths around the edges of tiles, in one batch, for every kind of mask."""
    lens_q, lens_k = zip(*itertools.product(EDGES_Q, EDGES_K), strict=True)
    one_head = {"nheads_q": 1, "nheads_kv": 1, "headdim": 16}
    for first, align in enumerate(("bottom-right", "top-left")):
        corner = {"bottom-right": "b", "top-left": "t"}[align]
        for n, (window, sink) in enumerate(WINDOWS):
            name = f"edges-{corner}{window[0]},{window[1]},{sink}".replace("None", "x")
            knobs = {**one_head, "align": align, "window": window, "sink": sink}
            shape = (SMALL, LATE)[(first + n) % 2]  # every window is run with both
            yield Sm90Cell(case=ragged(name, lens_q, lens_k, **knobs), shape=shape)
    for shape in (SMALL, LATE, STORED):
        yield Sm90Cell(case=ragged("edges", lens_q, lens_k, **one_head), shape=shape)


def cells_of_shapes() -> Iterable[Sm90Cell]:
    for n, (shape, dtype) in enumerate(itertools.product(SHAPES, ("float16", "bfloat16"))):
        mask = ({}, {"causal": True}, {"window": (30, 20), "sink": 9})[n % 3]
        dims = {"headdim": (40, 136)[n % 2], "headdim_v": (24, 72, 200)[n % 3]}
        case = dense(f"shape{n}", 1, 150, 118, dtype=dtype, **dims, **mask)
        yield Sm90Cell(case=case, shape=shape)


def cells_of_table() -> Iterable[Sm90Cell]:
    """Every tile of the tables, on calls a little longer than one query tile and two key tiles."""
    dtypes = itertools.cycle(("float16", "bfloat16"))
    for table in tile_tables.SCHEMAS[tile_choice.TILES].tables:
        mask: dict[str, Any] = {"window": (50, 9)} if table == "left" else {"causal": True}
        for row in tile_tables.table(tile_choice.TILES, table):
            shape = Sm90Tiles(**{name: row.fields[name] for name in Sm90Tiles._fields})
            knobs = {"headdim": row.headdim, "dtype": next(dtypes), **mask}
            rows_q, rows_k = 64 * shape.consumers + 9, 2 * shape.tile_k + 5
            case = dense(f"{table}-d{row.headdim}", 1, rows_q, rows_k, **knobs)
            yield Sm90Cell(case=case, shape=shape)


def cells_of_interleaved() -> Iterable[Sm90Cell]:
    """Tiles that interleave a GQA group's heads query by query and end in unused rows: every kind of mask, and split keys."""
    masks: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"window": (9, 4), "sink": 3}, {"window": (None, 3), "align": "top-left"}, {"softcap": 3.0}
    )  # fmt: skip
    shapes = itertools.cycle((SMALL, LONE, LATE, Sm90Tiles(16, 4, 2, False), PAIR))
    groups = itertools.cycle((5, 7, 3, 9, 40, 8, 16, 6))
    for n, (mask, kind) in enumerate(itertools.product(masks, range(5))):
        group, shape = next(groups), next(shapes)
        rows = 64 * shape.consumers // group  # queries in a tile
        knobs = {"nheads_kv": 2, "nheads_q": 2 * group, "headdim": (16, 72)[n % 2], **mask}
        knobs |= {"headdim_v": (16, 80, 40)[n % 3], "dtype": ("bfloat16", "float16")[n // 2 % 2]}
        lens = (rows, 1, 0, max(1, rows // 2)), (33, 20, 17, 97)
        name, half = f"interleaved{n}", max(1, rows // 2)
        split_keys = {"blocks": 7, "stream_k": True, "by_length": "causal" in mask}
        cell = (
            Sm90Cell(case=dense(name, 2, half, 101, **knobs), shape=shape, seed=n),
            Sm90Cell(case=ragged(name, *lens, **knobs, on_device=n % 2 == 0), shape=shape, seed=n),
            Sm90Cell(case=padded(name, *lens, rows + 3, 100, **knobs), shape=shape, seed=n),
            Sm90Cell(case=dense(name, 1, half, 400, **knobs), shape=shape, seed=n, **split_keys),
            Sm90Cell(case=ragged(name, *lens, **knobs), shape=shape, blocks=9, stream_k=True),
        )[kind]
        if cell.config.interleaved:
            yield cell


def cells_of_groups() -> Iterable[Sm90Cell]:
    """Tiles with rows of several heads of a GQA group: all or part of a consumer's 64 rows each, for every kind of mask."""
    lens = (5, 0, 41, 130, 16, 1), (33, 20, 0, 130, 97, 64)
    slots = {
        "room_q": (9, 5, 41, 133, 16, 1),
        "room_k": (40, 20, 7, 131, 97, 64),
        "lead": 3,
        "tail": 4,
    }
    masks: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"window": (9, 4), "sink": 3}, {"window": (None, 3), "align": "top-left"}, {}
    )  # fmt: skip
    shapes = itertools.cycle((SMALL, LATE, Sm90Tiles(16, 4, 2, False), Sm90Tiles(32, 3, 1, True)))
    for n, (group, mask) in enumerate(itertools.product((2, 3, 4, 8, 12), masks)):
        heads = {"nheads_kv": 2, "nheads_q": 2 * group, "headdim": 16, **mask}
        name = f"group{group}-{n}"
        cases = (
            dense(name, 2, 70, 90, layout="bhsd", dtype="float16", **heads),
            ragged(name, *lens, by_q="seqlen", by_k="cu_seqlen", **slots, **heads),
            padded(name, *lens, 140, 135, on_device=True, **heads),
        )
        yield Sm90Cell(case=cases[n % 3], shape=next(shapes), section_keys=(None, 60)[n // 2 % 2])
    for headdim in (64, 128, 256):
        case = dense(f"group-d{headdim}", 1, 150, 200, nheads_q=8, headdim=headdim, causal=True)
        yield Sm90Cell(case=case)


def cells_of_chance() -> Iterable[Sm90Cell]:
    for seed in range(60):
        case = random_case(seed)
        if case.scores <= 120_000 and applies(case):
            rng = np.random.default_rng(seed)
            shape = (None, SMALL, *SHAPES)[int(rng.integers(2 + len(SHAPES)))]
            section_keys = int(rng.integers(1, 400)) if rng.random() < 0.5 else None
            blocks = int(rng.integers(1, 9))
            yield Sm90Cell(case=case, shape=shape, section_keys=section_keys, blocks=blocks)


def cells_of_checks() -> Iterable[Sm90Cell]:
    """One cell of each kind with the undefined-behaviour sanitizer."""
    lens_q, lens_k = (40, 0, 3, 165), (33, 20, 0, 130)
    rooms = {"room_q": (41, 5, 9, 165), "room_k": (40, 20, 7, 131), "lead": 3, "tail": 4}
    kinds = (
        dense("dense", 2, 70, 90, nheads_q=4, layout="bhsd", headdim=24),
        dense("gaps", 1, 33, 40, layout="gaps", give_out=True, causal=True, headdim=8),
        dense("tall", 1, 190, 20, causal=True, dtype="float16", headdim=80, headdim_v=136),
        dense("scale", 1, 33, 40, scale=-0.3, window=(9, None), sink=20, headdim=64),
        ragged("slots", lens_q, lens_k, by_q="seqlen", by_k="cu_seqlen", **rooms, window=(9, 9)),
        padded("padded", lens_q, lens_k, 170, 140, integers="int64", causal=True, align="top-left"),
        ragged("many", lens_q * 10, lens_k * 10, headdim=16, dtype="float16", on_device=True),
    )
    for n, case in enumerate(kinds):
        yield Sm90Cell(case=case, shape=(*SHAPES, None, SMALL)[n], checked=True)


def cells_of_dims() -> Iterable[Sm90Cell]:
    """Head dims that are not multiples of 8, in rows aligned to 16 bytes: stores of every width."""
    lens = (40, 0, 3, 165), (33, 20, 0, 130)
    masks: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (30, 20), "sink": 9}, {})
    for n, (headdim, headdim_v) in enumerate(((20, 36), (34, 66), (7, 1), (100, 9), (64, 255))):
        knobs = {"headdim": headdim, "headdim_v": headdim_v, "layout": "aligned", **masks[n % 3]}
        knobs |= {"dtype": ("float16", "bfloat16")[n % 2], "give_out": n % 2 == 0}
        for case in (dense(f"dim{n}", 1, 150, 118, **knobs), ragged(f"dim{n}", *lens, **knobs)):
            yield Sm90Cell(case=case, shape=SHAPES[n] if headdim_v < 200 else None, checked=n == 2)


def applies(case: Case) -> bool:
    """Whether the kernel takes this call without copies. The cheap checks, which need no arrays, come first."""
    dims = case.headdim, case.headdim if case.headdim_v is None else case.headdim_v
    return all(dim % 8 == 0 for dim in dims) and chosen(case) is not None
