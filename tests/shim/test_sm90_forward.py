"""sm90/forward.cu against the float64 reference: its copies, barriers and products on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._kernels import tile_tables
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_steps
from rawattn._kernels.target import without_device
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.random_cases import random_case
from tests.shim.cells import call_of, verify
from tests.shim.cells_sm90 import Sm90Cell, Sm90Tiles, chosen
from tests.shim.shim import Builder
from tests.shim.traits import of_case, of_kernel

# Many tile edges in a short sequence.
SMALL = Sm90Tiles(16, 2, 2, True)
LATE = Sm90Tiles(16, 3, 2, False, late_scaling=True)
LONE = Sm90Tiles(16, 1, 2, False)
# Shapes that no table has: rings of one to three slots, consumers that take turns or do not.
SHAPES = (
    Sm90Tiles(16, 2, 1, False),
    Sm90Tiles(32, 3, 2, True),
    Sm90Tiles(48, 2, 1, True),
    Sm90Tiles(16, 3, 3, False),
    Sm90Tiles(32, 2, 3, True),
    Sm90Tiles(32, 4, 2, True, late_scaling=True),
    Sm90Tiles(16, 4, 1, False),
    Sm90Tiles(48, 1, 3, False, late_scaling=True),
    LONE,
)
# Blocks that load for each other.
PAIR = Sm90Tiles(16, 2, 2, True, cluster=2)
LATE_PAIR = Sm90Tiles(32, 3, 2, False, late_scaling=True, cluster=2)
# Outputs that TMA stores.
STORED = Sm90Tiles(16, 2, 2, True, tensor_stores=True)
LATE_STORED = Sm90Tiles(32, 3, 1, False, late_scaling=True, tensor_stores=True)
EDGES_Q = (0, 1, 16, 63, 64, 65, 128, 130)
EDGES_K = (0, 1, 15, 16, 17, 32, 33, 65)
WINDOWS = (
    ((0, 0), 0), ((15, 0), 0), ((16, 1), 16), ((17, 31), 1), ((40, 33), 15), ((5, 2), 1000),
    ((3, None), 0), ((16, None), 17), ((None, 0), 0), ((None, 17), 0),
)  # fmt: skip


def cells_of_curated() -> Iterable[Sm90Cell]:
    """The tile of the table or small tiles in turn, the same for cases that are one kernel."""
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
            shape = (SMALL, LATE)[(first + n) % 2]  # every window meets both
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
    """Every tile of the tables, a little longer than one tile of queries and two of keys."""
    dtypes = itertools.cycle(("float16", "bfloat16"))
    for table in tile_tables.SCHEMAS[sm90_forward.TILES].tables:
        mask: dict[str, Any] = {"window": (50, 9)} if table == "left" else {"causal": True}
        for row in tile_tables.table(sm90_forward.TILES, table):
            shape = Sm90Tiles(**{name: row.fields[name] for name in Sm90Tiles._fields})
            knobs = {"headdim": row.headdim, "dtype": next(dtypes), **mask}
            rows_q, rows_k = 64 * shape.consumers + 9, 2 * shape.tile_k + 5
            case = dense(f"{table}-d{row.headdim}", 1, rows_q, rows_k, **knobs)
            yield Sm90Cell(case=case, shape=shape)


def cells_of_sections() -> Iterable[Sm90Cell]:
    """Heads in sections: one at a time, some, a last one that is smaller, or all."""
    for section_keys in (1, 100, 250, 1 << 30):
        many_heads = {"nheads_q": 10, "nheads_kv": 5, "headdim": 16, "causal": True}
        for case in (
            dense("heads", 2, 70, 100, **many_heads),
            ragged("ragged-heads", (70, 0, 33), (100, 50, 300), **many_heads),
        ):
            yield Sm90Cell(case=case, shape=SMALL, section_keys=section_keys)


def cells_of_kept_tiles() -> Iterable[Sm90Cell]:
    """Tiles that come after those of all heads and sequences: none, some, all, with heads in one section or more."""
    case = dense("kept", 2, 200, 210, nheads_q=2, nheads_kv=2, headdim=16, causal=True)
    group = dense("kept-group", 2, 150, 130, nheads_q=4, nheads_kv=2, headdim=16, causal=True)
    for kept_tiles, section_keys in itertools.product((0, 1, 2), (1, 1 << 30)):
        for each in (case, group):
            yield Sm90Cell(case=each, shape=SMALL, section_keys=section_keys, kept_tiles=kept_tiles)
    yield Sm90Cell(case=group, shape=SMALL, kept_tiles=3)


def cells_of_interleaved() -> Iterable[Sm90Cell]:
    """Heads of a group query by query, in tiles whose last rows are nobody's: for every kind of mask, and in pieces."""
    masks: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"window": (9, 4), "sink": 3}, {"window": (None, 3), "align": "top-left"}, {"softcap": 3.0}
    )  # fmt: skip
    shapes = itertools.cycle((SMALL, LONE, LATE, Sm90Tiles(16, 4, 2, False), PAIR))
    groups = itertools.cycle((5, 7, 3, 9, 40, 8, 16, 6))
    for n, (mask, kind) in enumerate(itertools.product(masks, range(5))):
        group, shape = next(groups), next(shapes)
        rows = 64 * shape.consumers // group  # queries of a tile
        knobs = {"nheads_kv": 2, "nheads_q": 2 * group, "headdim": (16, 72)[n % 2], **mask}
        knobs |= {"headdim_v": (16, 80, 40)[n % 3], "dtype": ("bfloat16", "float16")[n // 2 % 2]}
        lens = (rows, 1, 0, max(1, rows // 2)), (33, 20, 17, 97)
        name, half = f"interleaved{n}", max(1, rows // 2)
        sharing = {"blocks": 7, "stream_k": True, "by_length": "causal" in mask}
        cell = (
            Sm90Cell(case=dense(name, 2, half, 101, **knobs), shape=shape, seed=n),
            Sm90Cell(case=ragged(name, *lens, **knobs, on_device=n % 2 == 0), shape=shape, seed=n),
            Sm90Cell(case=padded(name, *lens, rows + 3, 100, **knobs), shape=shape, seed=n),
            Sm90Cell(case=dense(name, 1, half, 400, **knobs), shape=shape, seed=n, **sharing),
            Sm90Cell(case=ragged(name, *lens, **knobs), shape=shape, blocks=9, stream_k=True),
        )[kind]
        if cell.config.interleaved:
            yield cell


def cells_of_groups() -> Iterable[Sm90Cell]:
    """Rows of a group's heads in one tile: whole and parts of a consumer's 64 rows, for every kind of mask."""
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


def cells_of_orders() -> Iterable[Sm90Cell]:
    """The same calls with turns taken and copies arriving in many orders."""
    slots = {"room_q": (140, 5, 9, 70), "room_k": (40, 20, 7, 131), "lead": 3, "tail": 4}
    lens = (129, 0, 3, 65), (33, 20, 0, 130)
    by = {"by_q": "seqlen", "by_k": "cu_seqlen", "dtype": "float16"}
    orders = (
        (dense("order", 1, 200, 120, nheads_q=4, causal=True), SMALL),
        (dense("order", 1, 200, 120, nheads_q=4, causal=True), Sm90Tiles(16, 3, 1, True)),
        (dense("order-full", 2, 70, 260, headdim=72, headdim_v=136), SHAPES[0]),
        (ragged("order-slots", *lens, **slots, **by, window=(9, 9), sink=4), SMALL),
    )
    for (case, shape), seed in itertools.product(orders, range(8)):
        yield Sm90Cell(case=case, shape=shape, blocks=(1, 2, 5)[seed % 3], seed=seed)


def cells_of_checks() -> Iterable[Sm90Cell]:
    """One of each kind under the undefined-behaviour sanitizer."""
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
    """Head dims that are no multiples of 8, in rows that begin at multiples of 16 bytes: stores of every width."""
    lens = (40, 0, 3, 165), (33, 20, 0, 130)
    masks: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (30, 20), "sink": 9}, {})
    for n, (headdim, headdim_v) in enumerate(((20, 36), (34, 66), (7, 1), (100, 9), (64, 255))):
        knobs = {"headdim": headdim, "headdim_v": headdim_v, "layout": "aligned", **masks[n % 3]}
        knobs |= {"dtype": ("float16", "bfloat16")[n % 2], "give_out": n % 2 == 0}
        for case in (dense(f"dim{n}", 1, 150, 118, **knobs), ragged(f"dim{n}", *lens, **knobs)):
            yield Sm90Cell(case=case, shape=SHAPES[n] if headdim_v < 200 else None, checked=n == 2)


def cells_of_clusters() -> Iterable[Sm90Cell]:
    """Two blocks to a cluster: sequences that end in the tile of its first block, in the second's, where it does."""
    masks: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window": (30, 20), "sink": 9}, {"window": (None, 3), "align": "top-left"}
    )  # fmt: skip
    heads = {"nheads_q": 2, "nheads_kv": 2, "headdim": 16}
    lens = (256, 0, 130, 5, 384, 97, 0, 300), (70, 33, 0, 130, 400, 64, 0, 17)
    slots = {"room_q": (260, 5, 130, 9, 384, 97, 1, 300), "lead": 3, "tail": 4}
    for n, mask in enumerate(masks):
        shape = (PAIR, LATE_PAIR)[n % 2]
        rows = 2 * 64 * shape.consumers
        for rows_q in (9, rows // 2 + 9, rows, rows + 20):
            case = dense(f"pair{n}-{rows_q}", 2, rows_q, 118, **heads, **mask)
            yield Sm90Cell(case=case, shape=shape, blocks=4)
        cases = (
            ragged(f"pair{n}", *lens, by_q="seqlen", by_k="cu_seqlen", **slots, **heads, **mask),
            padded(f"pair{n}", *lens, 390, 405, on_device=True, **heads, **mask),
        )
        for case, shape in zip(cases, (PAIR, LATE_PAIR), strict=True):
            yield Sm90Cell(case=case, shape=shape, blocks=6)
    for group, (n, mask) in itertools.product((4, 12), enumerate(masks[1:3])):
        many = {"nheads_q": 2 * group, "nheads_kv": 2, "headdim": 16, **mask}
        for each in (
            dense(f"pair-group{group}-{n}", 2, 70, 90, **many),
            ragged(f"pair-group{group}-{n}", (5, 0, 41, 130), (33, 20, 0, 130), **many),
        ):
            yield Sm90Cell(case=each, shape=PAIR, blocks=6, section_keys=60)
    kept = dense("pair-kept", 2, 600, 210, **heads, causal=True)
    for kept_tiles in (1, 3, None):
        yield Sm90Cell(case=kept, shape=PAIR, blocks=4, kept_tiles=kept_tiles)
    for headdim, tile_k, late in ((64, 128, True), (128, 80, False), (256, 64, False)):
        shape = Sm90Tiles(tile_k, 2, 2, True, late, cluster=2)
        for n, mask in enumerate(masks[:3]):
            case = dense(f"pair-d{headdim}-{n}", 1, 300, 150, headdim=headdim, **mask)
            yield Sm90Cell(case=case, shape=shape)
    many_tiles = dense("pair-order", 1, 500, 90, **heads, causal=True)
    empty = ragged("pair-order", (130, 0, 3, 300), (33, 20, 0, 130), dtype="float16", **heads)
    for case, seed in itertools.product((many_tiles, empty), range(1, 6)):
        yield Sm90Cell(case=case, shape=PAIR, blocks=(2, 4)[seed % 2], seed=seed)
    yield Sm90Cell(case=empty, shape=PAIR, blocks=4, checked=True)


def cells_of_stores() -> Iterable[Sm90Cell]:
    """Boxes of the output that end with a sequence, a warp's rows or the head dim, and outputs that take none."""
    lens = (256, 0, 130, 5, 97, 16, 1, 48), (70, 33, 0, 130, 64, 9, 0, 17)
    slots = {"room_q": (260, 5, 130, 9, 97, 17, 1, 48), "lead": 3, "tail": 4}
    masks: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window": (30, 20), "sink": 9}, {"window": (None, 3), "align": "top-left"}
    )  # fmt: skip
    shapes = STORED, LATE_STORED, STORED._replace(cluster=2)
    dims = itertools.cycle(((16, 16), (40, 72), (64, 64), (24, 104), (128, 128), (96, 8)))
    for n, (mask, (heads_q, heads_kv)) in enumerate(
        itertools.product(masks, ((2, 2), (4, 1), (24, 2)))
    ):
        heads = {"nheads_q": heads_q, "nheads_kv": heads_kv}
        kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
            (ragged, {"by_q": "seqlen", "by_k": "cu_seqlen", **slots}),
            (ragged, {"give_out": True, "layout": "gaps"}),
            (padded, {"on_device": True, "layout": "bhsd", "return_lse": False}),
        )
        for kind, (case_of, more) in enumerate(kinds):
            headdim, headdim_v = next(dims)
            rooms = (270, 150) if case_of is padded else ()
            knobs = {**heads, **mask, **more, "headdim": headdim, "headdim_v": headdim_v}
            case = case_of(
                f"store{n}", *lens, *rooms, **knobs, dtype=("float16", "bfloat16")[n % 2]
            )
            shape = shapes[(n + kind) % 3]
            yield Sm90Cell(case=case, shape=shape, blocks=4, checked=n == 5)
    for seed in range(1, 13):
        order = ragged(
            "store-order", (129, 0, 3, 165), (33, 20, 0, 130), dtype="float16", headdim=72
        )
        yield Sm90Cell(
            case=order, shape=(STORED, LATE_STORED)[seed % 2], blocks=1 + seed % 3, seed=seed
        )
    odd = {"layout": "aligned", "headdim": 36, "give_out": True, "causal": True}
    yield Sm90Cell(case=ragged("store-odd", *lens, **odd), shape=STORED)


def cells_of_sharing() -> Iterable[Sm90Cell]:
    """Last tiles in pieces: of several tiles each in two or more, of one in many; with whole rounds before or without."""
    heads = {"nheads_q": 2, "nheads_kv": 2, "headdim": 16}
    calls = (
        dense("share", 1, 300, 200, **heads),
        dense("share-one", 1, 100, 300, nheads_q=1, nheads_kv=1, headdim=24, headdim_v=72),
        dense("share-batch", 3, 70, 150, **heads, layout="bhsd", dtype="float16"),
        dense("share-group", 1, 90, 260, nheads_q=12, nheads_kv=1, headdim=16, give_out=True, layout="gaps"),
        dense("share-few", 2, 3, 400, nheads_q=8, nheads_kv=2, headdim=40, dtype="float16"),
        dense("share-dims", 1, 200, 130, nheads_q=2, headdim=16, headdim_v=34, layout="aligned"),
        dense("share-scale", 1, 140, 100, nheads_q=2, headdim=128, scale=-0.3),
        dense("share-no-lse", 1, 200, 130, nheads_q=2, headdim=64, return_lse=False),
    )  # fmt: skip
    shapes = (SMALL, LATE, PAIR, Sm90Tiles(32, 3, 1, True), LATE_PAIR)
    blocks = itertools.cycle((2, 3, 4, 5, 7, 8, 12))
    for n, (case, shape) in enumerate(itertools.product(calls, shapes)):
        section_keys = (None, 100)[n // 2 % 2]
        yield Sm90Cell(
            case=case, shape=shape, blocks=next(blocks), section_keys=section_keys, stream_k=True
        )
    yield from cells_of_unlike_tiles(shapes, blocks)
    for seed, shape in itertools.product(range(1, 6), (SMALL, LATE_PAIR)):
        yield Sm90Cell(
            case=calls[0], shape=shape, blocks=(3, 4, 10)[seed % 3], seed=seed, stream_k=True
        )
    yield Sm90Cell(case=calls[3], shape=PAIR, blocks=8, checked=True, stream_k=True)
    for headdim in (64, 96, 128, 192, 256):
        yield Sm90Cell(
            case=dense(f"share-d{headdim}", 1, 150, 400, headdim=headdim), blocks=5, stream_k=True
        )


def cells_of_unlike_tiles(shapes: Iterable[Sm90Tiles], blocks: Iterator[int]) -> Iterable[Sm90Cell]:
    """Limits, and lengths of which the kernel alone knows: tiles without keys, of fewer tiles than they have pieces."""
    heads = {"nheads_q": 4, "nheads_kv": 2, "headdim": 16}
    by = {"by_q": "seqlen", "by_k": "cu_seqlen"}
    lens = (70, 0, 33, 150), (100, 50, 300, 0)
    calls = (
        dense("share-causal", 1, 300, 200, **heads, causal=True),
        dense("share-chunk", 2, 90, 300, **heads, causal=True, dtype="float16"),
        dense("share-top-left", 1, 200, 120, **heads, causal=True, align="top-left"),
        dense("share-window", 1, 170, 260, **heads, window=(70, 3), sink=5),
        dense("share-left", 1, 170, 60, **heads, window=(30, None)),
        dense("share-behind", 1, 260, 60, **heads, causal=True),
        ragged("share-ragged", *lens, **heads, causal=True),
        ragged("share-lengths", *lens, **heads, on_device=True),
        ragged("share-one-by-one", (1, 5, 300), (400, 3, 90), **heads, causal=True, layout="gaps"),
        padded("share-padded", (60, 7, 150), (90, 200, 31), 150, 200, **heads, window=(40, 0)),
        ragged("share-slots", *lens, **by, **heads, room_q=(160,) * 4, room_k=(310,) * 4, causal=True),
    )  # fmt: skip
    for case, shape in itertools.product(calls, shapes):
        yield Sm90Cell(case=case, shape=shape, blocks=next(blocks), stream_k=True)
    # Lines of all tiles and of the longest alone, pieces of several tiles, tiles without keys, neighbours of a cluster.
    by_length = (
        *(calls[0], calls[1], calls[2], calls[5]),
        dense("share-limit", 1, 170, 160, **heads, window=(None, 9)),
        dense("share-batches", 3, 100, 100, **heads, causal=True, dtype="float16", layout="bhsd"),
        dense("share-small", 1, 33, 33, **heads, causal=True),
    )
    for case, shape in itertools.product(by_length, shapes):
        for count in (next(blocks), 2 * next(blocks) + 5):
            yield Sm90Cell(case=case, shape=shape, blocks=count, stream_k=True, by_length=True)


def applies(case: Case) -> bool:
    """Whether the kernel takes this call as it is, at first by what needs no arrays."""
    dims = case.headdim, case.headdim if case.headdim_v is None else case.headdim_v
    return all(dim % 8 == 0 for dim in dims) and chosen(case) is not None


CELLS = [
    *cells_of_curated(),
    *cells_of_edges(),
    *cells_of_shapes(),
    *cells_of_table(),
    *cells_of_sections(),
    *cells_of_kept_tiles(),
    *cells_of_interleaved(),
    *cells_of_groups(),
    *cells_of_dims(),
    *cells_of_chance(),
    *cells_of_orders(),
    *cells_of_checks(),
    *cells_of_clusters(),
    *cells_of_stores(),
    *cells_of_sharing(),
]


TILE = ("tile_k", "consumers", "stages", "cluster", "ping_pong", "late_scaling")


def traits(cell: Sm90Cell) -> Iterable[Hashable]:
    yield from of_kernel(cell.config, TILE)
    yield "checked", cell.checked
    yield "sections", cell.section_keys is not None
    yield "kept tiles", cell.kept_tiles
    yield "blocks", cell.blocks
    yield "order", cell.seed % 4
    yield from of_case(cell.case)


@pytest.mark.parametrize("cell", exhaustive.mark(CELLS, traits, lambda cell: cell.builds), ids=str)
def test_sm90_forward(cell: Sm90Cell, builder: Builder) -> None:
    verify(cell, builder)


def test_tiles_are_kept_where_some_are_longer() -> None:
    def kept(case: Case, blocks: int = 132) -> tuple[int, int]:
        cell = Sm90Cell(case=case)
        tiles = -(-cell.call.problem.rows_q // cell.config.schedule_rows)
        return forward_steps.kept_tiles(cell.call.problem, cell.config, blocks), tiles

    causal = dense("causal", 1, 2000, 300, nheads_q=16, nheads_kv=16, causal=True)
    few, tiles = kept(causal)
    assert 0 < few < tiles
    assert few < kept(causal, blocks=500)[0] <= tiles
    assert kept(causal, blocks=10**6)[0] == tiles
    for other in (
        dense("full", 1, 2000, 300, nheads_q=16),
        dense("window", 1, 2000, 300, nheads_q=16, window=(9, 0)),
        ragged("ragged", (2000, 3), (300, 5), causal=True),
    ):
        assert kept(other)[0] == 0


def test_fewer_consumers_where_tiles_leave_multiprocessors_idle() -> None:
    """And those of the usual table where tiles fill them, though the last are shared out, and where nobody knows how many."""

    def consumers(case: Case, multiprocessors: int = 132) -> int:
        call = call_of(case)
        target = replace(without_device(sm90_forward.ARCH), multiprocessors=multiprocessors)
        return sm90_forward.choose(call.problem, target, call.operands).consumers

    def causal(rows: int, heads: int, **knobs: Any) -> Case:
        return dense("fill", 1, rows, rows, nheads_q=heads, nheads_kv=heads, headdim=128, causal=True, **knobs)  # fmt: skip

    assert consumers(causal(2048, 25)) == 3
    assert consumers(causal(2048, 16)) == 2
    assert consumers(causal(1024, 4)) == 1
    assert consumers(causal(1024, 4), multiprocessors=1) == 3
    assert consumers(dense("full", 1, 2048, 300, nheads_q=12, nheads_kv=12, headdim=128)) == 3
    assert consumers(dense("full", 1, 2048, 1024, nheads_q=8, nheads_kv=8, headdim=128)) == 2
    long = sm90_forward.STREAM_K_ALWAYS_KEYS
    assert consumers(dense("few", 1, 64, long, nheads_q=1, nheads_kv=1, headdim=128)) == 1
    assert consumers(dense("rounds", 1, 3000, long, nheads_q=9, nheads_kv=9, headdim=128)) == 3
    packed = {"headdim": 128, "causal": True}
    assert consumers(ragged("lengths", (9, 2000), (9, 2000), **packed)) == 1
    assert consumers(ragged("many", (2000,) * 30, (2000,) * 30, **packed)) == 3
    # Of a padded batch nobody knows how much is real: unless there are few tiles however much it is.
    assert consumers(padded("rooms", (9, 2000), (9, 2000), 2000, 2000, **packed)) == 1
    assert consumers(padded("rooms", (2000,) * 30, (2000,) * 30, 2000, 2000, **packed)) == 3
