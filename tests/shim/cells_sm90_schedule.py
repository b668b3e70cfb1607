"""Cells of Hopper's forward that vary its schedule: sections, kept tiles, orders, clusters, stores, split keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from tests.cases import dense, padded, ragged
from tests.shim.cells_sm90 import (
    LATE,
    LATE_PAIR,
    LATE_STORED,
    PAIR,
    SHAPES,
    SMALL,
    STORED,
    Sm90Cell,
    Sm90Tiles,
)


def cells_of_sections() -> Iterable[Sm90Cell]:
    """Sections of one head, of several, of all, and a last section that is smaller."""
    for section_keys in (1, 100, 250, 1 << 30):
        many_heads = {"nheads_q": 10, "nheads_kv": 5, "headdim": 16, "causal": True}
        for case in (
            dense("heads", 2, 70, 100, **many_heads),
            ragged("ragged-heads", (70, 0, 33), (100, 50, 300), **many_heads),
        ):
            yield Sm90Cell(case=case, shape=SMALL, section_keys=section_keys)
    # The sections of the last sequence depend on the number of blocks, unless most of its keys come before its queries.
    lens = {"last-sections": (130, 130, 130), "last-sections-cached": (130, 300, 300)}
    for (name, (rows, *keys)), blocks in itertools.product(lens.items(), (1, 3, 7)):
        case = ragged(name, (rows, rows), keys, **many_heads)
        yield Sm90Cell(case=case, shape=SMALL, section_keys=100, blocks=blocks)


def cells_of_kept_tiles() -> Iterable[Sm90Cell]:
    """No, some or all of a head's tiles kept until after those of all heads and sequences, in one section or several."""
    case = dense("kept", 2, 200, 210, nheads_q=2, nheads_kv=2, headdim=16, causal=True)
    group = dense("kept-group", 2, 150, 130, nheads_q=4, nheads_kv=2, headdim=16, causal=True)
    for kept_tiles, section_keys in itertools.product((0, 1, 2), (1, 1 << 30)):
        for each in (case, group):
            yield Sm90Cell(case=each, shape=SMALL, section_keys=section_keys, kept_tiles=kept_tiles)
    yield Sm90Cell(case=group, shape=SMALL, kept_tiles=3)


def cells_of_orders() -> Iterable[Sm90Cell]:
    """The same calls with threads and copies in many orders."""
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


def cells_of_clusters() -> Iterable[Sm90Cell]:
    """Clusters of two blocks: sequences that end in the first block's tile, in the second's, or at the cluster's end."""
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
    """TMA stores of boxes that end at a sequence's end, a warp's rows or the head dim, and outputs that TMA cannot store."""
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


def cells_of_split_keys() -> Iterable[Sm90Cell]:
    """Last tiles whose keys are split: several tiles in two or more pieces each, or one in many; after whole rounds or none."""
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
    # Last tiles with rows for one of two consumers, for one or two of three, and for one of several heads' rows.
    three = Sm90Tiles(16, 3, 2, False)
    for rows, shape in ((140, SMALL), (200, three), (330, three), (264, LATE)):
        for count in (2, 5, 11):
            case = dense(f"share-last-{rows}", 2, rows, 210, **heads)
            yield Sm90Cell(case=case, shape=shape, blocks=count, stream_k=True)
    group = dense("share-last-group", 2, 50, 210, nheads_q=8, nheads_kv=2, headdim=16, causal=True)
    for count in (3, 7):
        yield Sm90Cell(case=group, shape=three, blocks=count, stream_k=True)
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
    """Split keys under masks and device lengths: query tiles without keys, or with fewer key tiles than pieces."""
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
    # Split by length: of all tiles or of the longest alone, pieces that span several tiles, tiles without keys, clusters.
    by_length = (
        *(calls[0], calls[1], calls[2], calls[5]),
        dense("share-limit", 1, 170, 160, **heads, window=(None, 9)),
        dense("share-batches", 3, 100, 100, **heads, causal=True, dtype="float16", layout="bhsd"),
        dense("share-small", 1, 33, 33, **heads, causal=True),
    )
    for case, shape in itertools.product(by_length, shapes):
        for count in (next(blocks), 2 * next(blocks) + 5):
            yield Sm90Cell(case=case, shape=shape, blocks=count, stream_k=True, by_length=True)


def cells_of_shared_keys() -> Iterable[Sm90Cell]:
    """Query tiles with rows for one consumer alone and enough keys for all to share, before, between and after other tiles."""
    two, three = Sm90Tiles(16, 2, 2, True), Sm90Tiles(16, 3, 3, False)
    four = Sm90Tiles(16, 4, 4, False, late_scaling=True)
    stored = Sm90Tiles(32, 3, 3, True, tensor_stores=True)
    shapes = (two, three, four, stored, Sm90Tiles(16, 2, 4, False), Sm90Tiles(48, 3, 6, True))
    one = {"nheads_q": 1, "nheads_kv": 1, "headdim": 16}
    two_heads = {"nheads_q": 2, "nheads_kv": 2, "headdim": 24, "dtype": "float16"}
    group, five = {"nheads_kv": 2, "nheads_q": 8}, {"nheads_kv": 2, "nheads_q": 10}
    lens = (20, 0, 270, 9), (470, 60, 500, 440)
    calls = (
        dense("alone-few", 2, 20, 470, **one),
        dense("alone-behind", 1, 270, 481, **two_heads, causal=True),
        dense("alone-window", 1, 20, 560, **one, window=(450, None), sink=5),
        dense(
            "alone-dims", 1, 40, 500, nheads_q=1, nheads_kv=1, headdim=72, headdim_v=40, softcap=3.0
        ),
        ragged("alone-ragged", *lens, **one, on_device=True),
        padded("alone-padded", *lens, 280, 510, **two_heads, give_out=True, layout="gaps"),
        dense("alone-group", 1, 15, 490, **group, headdim=16, causal=True),
        dense("alone-interleaved", 2, 30, 470, **five, headdim=16, causal=True),
    )
    for n, (case, shape) in enumerate(itertools.product(calls, shapes)):
        cell = Sm90Cell(case=case, shape=shape, blocks=1 + n % 3)
        if cell.config.shares_keys:
            yield cell
    # Every number of key tiles that a consumer may have less than another, and threads and copies in many orders.
    for seed, shape in itertools.product(range(1, 7), (two, three, four)):
        case = dense("alone-keys", 1, 30, 440 + 16 * seed, **one, causal=seed % 2 == 0)
        yield Sm90Cell(case=case, shape=shape, blocks=1, seed=seed, checked=seed == 6)
    # Parts of split tiles.
    for count, shape in itertools.product((2, 3), (two, three, four)):
        yield Sm90Cell(
            case=dense("alone-part", 1, 30, 1500, **one), shape=shape, blocks=count, stream_k=True
        )
