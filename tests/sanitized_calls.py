"""A small set of calls that together take every path of every kernel, for compute-sanitizer (tests/sanitize.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rawattn._kernels.selection import only
from rawattn._kernels.sm90.tile_choice import LONG_SEQLEN
from tests import gradients, hidden_nan
from tests.append import Appended, appended
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import unaligned
from tests.frameworks import TightCuPy
from tests.gpu.pages import check_pages
from tests.gpu.test_append import write
from tests.gpu.test_decode_scores import SHAPES as DECODED
from tests.gpu.test_decode_scores import test_rows as check_decoded_scores
from tests.gpu.test_decode_scores import test_short_sequences as check_short_sequences
from tests.gpu.test_gather import RULES
from tests.gpu.test_gather import test_calls as check_gathered
from tests.gpu.test_gather import test_few_rows as check_gathered_rows
from tests.gpu.test_gather import test_gradients as check_gathered_gradients
from tests.gpu.test_hidden_nan import check_call as check_hidden_nan
from tests.gpu.test_hidden_nan import differentiate as check_nan_gradients
from tests.gpu.test_masks import blocky
from tests.gpu.test_masks import test_few_rows_on_many_keys as check_few_rows
from tests.gpu.test_masks import test_ranges_and_predicates as check_ranges_and_predicates
from tests.gpu.test_paged_kernels import test_many_short_sequences as check_many_short_sequences
from tests.paged import Paged, paged
from tests.score_arrays import Pairs
from tests.score_cases import EACH
from tests.tiles import (
    TileShape,
    aligning,
    backward_tile_shapes,
    clusters,
    large_tiles,
    shared_limit,
    sharing,
    splitting,
    splitting_by_length,
    splitting_in_clusters,
    tensor_stores,
    tile_shapes,
    whole_tiles,
)
from tests.verify import verify

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@dataclass(frozen=True)
class Step:
    """A call, and the shared memory limit that selects its tile shape (None: the GPU's own limit)."""

    case: Case
    shared_limit: int | None = None
    backward: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self) -> None:
        with shared_limit(self.shared_limit), self.around():
            if self.backward:
                gradients.verify(self.case, TightCuPy())
                gradients.verify(self.case, TightCuPy(), deterministic=True)
            else:
                verify(self.case, TightCuPy())


_AT: dict[str, Any] = {
    "positions_q": (90, 0),
    "positions_k": (30, 7),
}  # of two sequences in longer ones


def matrix() -> list[Step]:
    """Return the calls of attention and its backward."""
    steps = [
        Step(case, shape.shared_limit, backward)
        for backward, shapes in ((False, tile_shapes()), (True, backward_tile_shapes()))
        for n, shape in enumerate(shapes)
        for case in cases_of(shape, n)
    ]
    one = {"nheads_q": 1, "nheads_kv": 1}
    slots = {"room_q": (70, 90), "room_k": (150, 40), "by_q": "seqlen", "by_k": "cu_seqlen"}
    device = {"on_device": True, "integers": "int64"}
    cases = [
        dense("full", 2, 100, 130, headdim=64, nheads_q=4),
        dense("odd-memory", 1, 70, 90, **one, headdim=80, layout="odd", give_out=True),
        dense("d33", 1, 70, 90, **one, headdim=33, headdim_v=65, dtype="float32"),
        dense("d34", 1, 70, 90, **one, headdim=34, headdim_v=250),
        dense("d1", 1, 70, 90, **one, headdim=1, dtype="float16"),
        dense("d36", 1, 70, 90, **one, headdim=36, window=(9, None), align="top-left"),
        dense("negative-scale", 1, 70, 90, **one, scale=-0.3, window=(20, 3)),
        dense("no-keys", 1, 70, 0, **one),
        dense("without-lse", 1, 70, 90, **one, return_lse=False),
        dense("reversed", 1, 70, 90, **one, layout="reversed", give_out=True, causal=True),
        padded("padded", (5, 90), (100, 0), 128, 128, **device, causal=True),
        ragged("slots", (60, 90), (150, 1), **slots, lead=3, tail=40, **device, headdim=128),
        ragged("out", (60, 90), (150, 1), **slots, tail=40, give_out=True, layout="gaps"),
        ragged("many", (1,) * 300, (2,) * 300, **one),
        dense("top-left", 1, 140, 201, **one, causal=True, align="top-left"),
        ragged(
            "positions", (60, 90), (150, 1), **slots, **_AT, lead=3, tail=40, **device, causal=True
        ),
        dense("positions", 2, 140, 201, **one, **_AT, window=(60, 9), sink=70, headdim=128),
    ]
    # Few rows on many keys: by TMA, and by lanes where rows of keys begin at no multiples of 16 bytes.
    few: dict[str, Any] = {"nheads_q": 8, "nheads_kv": 2}
    for headdim in (128, 66):
        knobs = {**few, "headdim": headdim}
        cases += [
            dense("few-window", 2, 3, 700, **knobs, window=(90, 0), sink=3),
            dense("few-positions", 2, 3, 700, **knobs, **_AT, window=(90, 0), sink=40),
            dense("few-top-left", 1, 3, 700, **knobs, window=(0, 300), align="top-left"),
            ragged("few-packed", (3, 0, 1), (700, 500, 40), **knobs, causal=True),
        ]
    for headdim in (64, 96, 128, 192, 256):  # the largest GPU's own kernels
        cases.append(dense("causal", 1, 200, 300, **one, headdim=headdim, causal=True))
        cases.append(
            ragged(
                "window", (130, 0, 33), (30, 9, 200), **one, headdim=headdim, window=(60, 9), sink=5
            )
        )
        # GQA groups whose heads share a query tile of Hopper's forward: at D 128 with 48 rows of each of 4 heads, or 16 of each
        # of 12.
        for n, heads in enumerate((4, 12)):
            knobs = {"headdim": headdim, "nheads_q": heads, "nheads_kv": 1}
            masks: dict[str, Any] = {"window": (40, 9)} if n else {"causal": True}
            cases.append(ragged("group", (130, 0, 33), (30, 9, 200), **knobs, **masks))
        # GQA groups of 5, whose rows Hopper's forward orders query by query.
        knobs = {"headdim": headdim, "nheads_q": 10, "nheads_kv": 2}
        cases.append(ragged("chunks", (30, 0, 17), (90, 9, 200), **knobs, causal=True))
        # Hopper's tiles for long sequences.
        cases.append(dense("long", 1, 70, LONG_SEQLEN + 9, **one, headdim=headdim, causal=True))
    steps += [Step(case) for case in cases]
    top_left = dense("top-left", 1, 140, 201, **one, window=(60, 4), align="top-left")
    steps.append(Step(top_left, around=partial(only, "portable")))
    negative = dense("negative-scale", 1, 70, 90, **one, scale=-0.3)
    steps.append(Step(negative, around=partial(only, "portable")))
    steps += [Step(case, around=aligning) for case in unaligned()]
    for headdim in (128, 192, 256):
        knobs = {"headdim": headdim, "nheads_kv": 1}
        for case in (
            dense("causal", 1, 400, 300, **knobs, nheads_q=1, causal=True),
            ragged("group", (300, 0, 33), (30, 9, 200), **knobs, nheads_q=4, window=(60, 9)),
            # Some tiles of a head are kept for the end, but not all.
            dense("kept", 5, 600, 600, headdim=headdim, nheads_q=14, nheads_kv=14, causal=True),
        ):
            steps.append(Step(case, around=clusters))
    for headdim in (64, 96, 128):
        knobs = {"headdim": headdim, "nheads_kv": 1}
        lens = (300, 0, 33, 130), (30, 9, 200, 150)
        for case in (
            ragged("stores", *lens, **knobs, nheads_q=1, causal=True),
            ragged("group", *lens, **knobs, nheads_q=4, window=(60, 9), headdim_v=40),
            padded("padded", *lens, 310, 200, **knobs, nheads_q=1, give_out=True, layout="gaps"),
        ):
            steps.append(Step(case, around=tensor_stores))
    for headdim in (64, 96, 128, 192, 256):
        for n, heads in enumerate((2, 12)):
            knobs = {"headdim": headdim, "nheads_q": heads, "nheads_kv": 2}
            around = splitting_in_clusters if n else splitting
            steps.append(Step(dense("shared", 1, 500, 600 + n, **knobs), around=around))
    # Tiles with rows for one consumer, whole and split.
    for headdim, window in ((64, None), (96, (600, None)), (128, None), (192, None), (256, None)):
        case = dense("one-consumer", 1, 256 + 20, 700, **one, headdim=headdim, window=window)
        steps.append(Step(case, around=whole_tiles))
    knobs = {"nheads_q": 8, "nheads_kv": 2, "causal": True}
    split = dense("one-consumer-split", 1, 3 * 48 + 10, 12_000, **knobs, headdim=128)
    steps.append(Step(split, around=splitting))
    steps.append(Step(dense("shared-causal", 1, 200, 900, **knobs), around=splitting))
    steps.append(Step(dense("by-length", 1, 1200, 1200, **knobs), around=splitting_by_length))
    for headdim in (40, 64, 128):
        keys = {"nheads_q": 2, "nheads_kv": 1, "headdim": headdim}
        steps.append(Step(dense("lone", 1, 90, 60, **keys), backward=True))
        steps.append(Step(dense("lone", 1, 70, 100, **keys, causal=True), backward=True))
        lens = (60, 0, 9) if headdim == 64 else (100, 0, 9)
        packed = ragged("lone-packed", lens, lens, **keys, share_starts=True, causal=True)
        steps.append(Step(packed, backward=True))
    steps.append(Step(dense("lone-split", 1, 3000, 60, **one), backward=True))
    lens = (2000, 0, 90), (60, 9, 200)
    steps.append(Step(ragged("ragged-parts", *lens, **one, headdim=64), backward=True))
    masked = dense("mask-parts", 1, 2000, 200, **one, headdim=64, mask=Pairs(values="random"))
    steps.append(Step(masked, backward=True))
    sinks = dense("sinks-parts", 1, 3000, 3000, **one, headdim=64, window=(60, 0), sink=4)
    steps.append(Step(sinks, backward=True))
    # These are split along keys without being forced to: with one consumer warpgroup, which merges two items at a time.
    for headdim in (64, 128, 256):
        steps.append(Step(dense("few", 1, 40, 1500, **knobs, headdim=headdim)))
    lens = (150, 9, 0), (700, 500, 40)
    steps.append(Step(ragged("shared-ragged", *lens, **knobs, on_device=True), around=splitting))
    lens = (200, 210, 255), (1500, 1430, 1480)
    weighed = padded("weighed", *lens, 255, 1500, **one, headdim=128, on_device=True)
    steps.append(Step(weighed, around=splitting))
    steps.append(Step(dense("kept", 5, 600, 600, nheads_q=14, nheads_kv=14, causal=True)))
    steps += [
        Step(case, backward=True, around=large_tiles if n % 2 else nullcontext)
        for n, case in enumerate(cases)
        if case.name not in FORWARD_ALONE
    ]
    return steps + score_steps()


def score_steps() -> list[Step]:
    """Each score option alone, and all of them, on Hopper's forward and on the portable kernels."""
    lens = (130, 0, 33), (30, 9, 200)
    sizes: dict[str, Any] = {"nheads_q": 4, "nheads_kv": 2, "headdim": 64}
    everything: dict[str, Any] = {}
    cases = []
    for n, (option, knobs) in enumerate(EACH.items()):
        everything |= knobs
        drawn = {"drawn_by": "int64"} if option == "dropout_p" else {}
        cases += [
            dense(option, 1, 140, 201, **sizes, **knobs, causal=n % 2 == 0),
            ragged(option, *lens, **sizes, **knobs, **drawn, give_out=True, layout="gaps"),
        ]
    one_row = Pairs(rows=False, float32=True, layout="odd", heads="kv")
    cases += [
        dense("everything", 1, 140, 200, **sizes, **everything),
        dense("everything-float32", 1, 140, 201, **sizes, **everything, dtype="float32"),
        ragged("everything", *lens, **{**sizes, "headdim": 128}, **everything, window=(60, 9)),
        ragged("bias-of-keys", *lens, **sizes, bias=one_row),
        dense("bias-transposed", 2, 70, 91, **sizes, bias=Pairs(layout="transposed", batch=False)),
        dense("mask-of-tiles", 1, 300, 400, **sizes, mask=Pairs(values="tiles", heads="kv")),
        dense("bias-of-16-bit-keys", 2, 140, 201, **sizes, bias=Pairs(rows=False)),
        dense("bias-of-short", 5, 49, 51, **sizes, bias=Pairs(), causal=True),
        dense("bias-copied", 3, 70, 91, **sizes, bias=Pairs(batch=False, heads="one")),
        dense("bias-by-rows", 1, 140, 203, **{**sizes, "headdim": 128}, bias=Pairs(heads="kv")),
    ]
    # In Hopper's forward: a mask of one bool for each key, and a ramp on one side of the diagonal or on both.
    of_keys = Pairs(values="random", heads="one", rows=False)
    for n, headdim in enumerate((64, 96, 128, 256)):
        knobs = {**sizes, "headdim": headdim}
        cases += [
            dense("mask-of-keys", 3, 140, 201, **knobs, mask=of_keys, causal=n % 2 == 0),
            dense("mask-of-keys-sinks", 2, 200, 333, **knobs, mask=of_keys, sink_logits="normal"),
            dense("ramp", 2, 140, 201, **knobs, alibi_slopes="heads", causal=True),
            dense("ramp-both-sides", 2, 300, 300, **knobs, alibi_slopes="batch"),
            ragged("ramp-ragged", *lens, **knobs, alibi_slopes="heads", window=(60, 9)),
        ]
    cases += [
        dense("mask-of-keys-window", 2, 140, 201, **sizes, mask=of_keys, window=(60, 9)),
        dense("ramp-bias", 2, 140, 200, **sizes, alibi_slopes="heads", bias=Pairs(), causal=True),
        dense("line", 2, 201, 201, **sizes, score_mod="slopes", causal=True),
        dense(
            "line-d128", 2, 201, 201, **{**sizes, "headdim": 128}, score_mod="slopes", causal=True
        ),
        dense("bias-of-rows", 2, 140, 201, **sizes, bias=Pairs(keys=False)),
        dense("bias-pairs", 2, 140, 202, **sizes, bias=Pairs(heads="kv")),
        dense(
            "bias-top-left",
            2,
            70,
            91,
            **sizes,
            bias=Pairs(batch=False),
            causal=True,
            align="top-left",
        ),
        dense(
            "mask-top-left",
            2,
            140,
            300,
            **sizes,
            mask=Pairs(values="random"),
            causal=True,
            align="top-left",
        ),
        dense("needs-score", 2, 140, 201, **sizes, score_mod="tanh"),
        dense("bias-positions", 2, 70, 91, **sizes, **_AT, bias=Pairs(batch=False), causal=True),
        dense(
            "mask-positions", 2, 140, 300, **sizes, **_AT, mask=Pairs(values="random"), causal=True
        ),
    ]
    # Only the portable kernels take float32.
    steps = [
        Step(case, around=partial(only, family))
        for case in cases
        for family in ("sm90", "portable")[case.dtype == "float32" :]
    ]
    steps += [
        Step(case, backward=True, around=nullcontext if n % 2 else large_tiles)
        for n, case in enumerate(cases)
    ]
    # More query tiles than SMs, whose lists are then ordered by length.
    many: dict[str, Any] = {"nheads_q": 16, "nheads_kv": 16, "headdim": 64}
    ordered = dense("mask-ordered", 3, 700, 64, **many, mask=Pairs(values="tiles", heads="one"))
    steps.append(Step(ordered, around=partial(only, "sm90")))
    return steps + split_steps(everything)


def split_steps(everything: dict[str, Any]) -> list[Step]:
    """Split-KV calls, with and without score options.

    Some have pieces that see no key, others have pieces of several key tiles.
    """
    lens = (130, 0, 33), (30, 9, 1200)
    sizes: dict[str, Any] = {"nheads_q": 4, "nheads_kv": 2, "headdim": 64}
    cases = [
        dense("split", 1, 3, 1300, **sizes, causal=True, num_splits=5),
        dense("split-window", 1, 140, 900, **sizes, window=(100, 0), sink=3, num_splits=256),
        ragged("split", *lens, **sizes, causal=True, num_splits=3, give_out=True, layout="gaps"),
        ragged("split-chosen", *lens, **sizes),
        ragged("split-everything", *lens, **sizes, **everything, num_splits=3),
    ]
    cases += [replace(case, dtype="float32") for case in cases[:3]]
    cases += [
        dense("few-bias-pairs", 2, 3, 702, **sizes, bias=Pairs()),
        dense("few-negative-scale", 2, 3, 700, **sizes, scale=-0.3),
        dense("few-odd-negative-scale", 2, 3, 700, **{**sizes, "headdim": 66}, scale=-0.3),
        dense("few-of-many-heads", 2, 1, 700, nheads_q=37, nheads_kv=1, headdim=66),
        dense("few-line", 2, 3, 700, **{**sizes, "headdim": 66}, score_mod="relative"),
    ]
    # TMA brings no keys of 66 columns: these are decoded by lanes' copies.
    odd = {**sizes, "headdim": 66}
    for option in ("softcap", "score_mod", "bias", "alibi_slopes", "sink_logits"):
        cases.append(dense(f"few-{option}", 2, 3, 700, **odd, **EACH[option], causal=True))
    return [
        Step(case, around=partial(only, family))
        for case in cases
        for family in ("decode", "portable")
    ]


def _check_shared_pages(call: Paged, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Check pages whose key tiles consumers of Hopper's forward share, from few keys on."""
    with around(), sharing(240):
        check_pages(call, "sm90", causal=True)


def page_calls() -> list[Callable[[], None]]:
    """Paged calls: key tiles within a page, pages within a key tile, both forms of block table, and split-KV."""
    lens = (130, 0, 33, 700)
    masks: dict[str, Any] = {"window": (60, 0), "sink": 4}
    # Query tiles whose pieces begin in one and end in the next: every other one has rows for one consumer.
    shared: dict[str, Any] = {"rows": 48 + 16, "heads": (4, 1), "dims": (128, 128)}
    pieces = tuple(range(960, 610, -7))
    return [
        partial(check_pages, paged(lens, 16, rows=1, heads=(8, 2), dims=(128, 128)), causal=True),
        partial(check_pages, paged(lens, 7, rows=5, pair=True, dtype=F32), num_splits=4),
        partial(check_pages, paged(lens, 64, rows=(40, 0, 9, 130), packed=True), **masks),
        partial(check_pages, paged(lens, 1000, rows=2, integers=np.int64, heads_first=True)),
        partial(check_pages, paged(lens, 24, rows=3, dims=(7, 33)), **masks, num_splits=3),
        partial(check_pages, paged(lens, 1, rows=3, dims=(64, 96)), softcap=3.0),
        partial(check_pages, paged(lens, 16, rows=3, heads=(8, 2)), mask=blocky(4, 8, 3, 700)),
        partial(check_pages, paged(lens, 7, dtype=F32), mask=blocky(1, 1, 1, 700), num_splits=3),
        partial(check_pages, paged(lens, 16, rows=90), "sm90", mask=blocky(4, 1, 90, 700)),
        partial(check_pages, paged(lens, 256, rows=3, heads=(8, 2), dims=(66, 66))),
        partial(check_pages, paged((1500, 1100), 16, rows=20, heads=(8, 2), dims=(128, 128))),
        partial(check_pages, paged((1100, 33), 16, heads=(37, 1), dims=(128, 128)), causal=True),
        partial(check_pages, paged((15000, 70), 16, heads=(2, 1), dims=(64, 64))),
        partial(check_pages, paged((90,) * 40, 16, rows=1, heads=(8, 8), dims=(64, 64))),
        # Boxes of tiles that consumers share are divided among warps where tiles are split.
        partial(_check_shared_pages, paged(pieces, 16, **shared), splitting),
        partial(_check_shared_pages, paged(pieces, 40, **shared), splitting),
        partial(_check_shared_pages, paged(pieces, 7, **shared), splitting),
        partial(_check_shared_pages, paged((700, 90), 16, **shared), whole_tiles),
        partial(
            check_pages,
            paged(lens, 16, heads=(8, 2), dims=(128, 128), float8="arrays"),
            causal=True,
        ),
        partial(check_pages, paged(lens, 7, rows=5, dims=(40, 33), float8="numbers"), num_splits=4),
        partial(
            check_pages, paged(lens, 24, rows=(40, 0, 9, 130), packed=True, float8="plain"), **masks
        ),
        partial(check_pages, paged(lens, 16, rows=90, dims=(128, 128)), "sm90", num_splits=1),
        partial(check_pages, paged(lens, 1, rows=90, dims=(128, 128)), "sm90", causal=True),
        partial(
            check_pages,
            paged(lens, 16, rows=30, heads=(7, 1), dims=(128, 128)),
            "sm90",
            causal=True,
        ),
        partial(check_pages, paged(lens, 20, rows=90, dims=(64, 72)), "sm90", **masks),
        partial(check_pages, paged(lens, 32, rows=90, dims=(128, 128)), "sm90", causal=True),
        partial(check_pages, paged(lens, 256, rows=90, dims=(64, 64)), "sm90", **masks),
        partial(check_pages, paged(lens, 7, rows=90, float8="arrays"), "sm90", num_splits=1),
        partial(
            check_pages, paged(lens, 24, rows=90, dims=(64, 72)), "sm90", **masks, num_splits=1
        ),
        *(
            partial(check_pages, paged(lens, **shape), "sm90", num_splits=1, **options)
            for shape, options in (
                ({"page_size": 16, "rows": 90, "dims": (128, 128), "float8": "arrays"}, {}),
                ({"page_size": 24, "rows": 90, "dims": (64, 80), "float8": "numbers"}, masks),
                (
                    {
                        "page_size": 8,
                        "rows": 70,
                        "dims": (256, 192),
                        "dtype": F16,
                        "float8": "plain",
                    },
                    {"causal": True},
                ),
            )
        ),
    ]


def append_calls() -> list[Callable[[], None]]:
    """Calls of `append_kv`: both rotary styles and none, with wide and narrow memory accesses."""
    lens = (130, 1, 33, 700)
    new: dict[str, Any] = {"rows": (40, 0, 9, 130), "room_q": 140}
    calls = [
        appended(lens, 16, dims=(128, 128), heads=(8, 2), rotary_dim=128),
        appended(lens, 7, rotary_dim=16, interleaved=True, **new),
        appended(lens, 24, dims=(7, 33), rotary_dim=6, packed=True, pair=True, rows=new["rows"]),
        appended(lens, 1, dtype=F32, **new),
        appended(lens, 16, dims=(128, 128), rotary_dim=128, float8="arrays"),
        appended(lens, 7, dims=(7, 33), float8="numbers", **new),
    ]
    return [
        partial(_check_append, call, on_device) for call in calls for on_device in (False, True)
    ]


def gathered_calls() -> list[Callable[[], None]]:
    """Rows that share a list of kept keys: the forward of each family, the backward, and lists treated as sequences."""
    families = zip(("sm90", "portable"), RULES[1:], strict=True)
    return [
        *(partial(check_gathered, family, 100, options) for family, options in families),
        *(
            partial(check_gathered_gradients, n == 1, options)
            for n, options in enumerate(RULES[1:])
        ),
        partial(check_few_rows, "decode", 3, (6, 1), 96),
        partial(check_few_rows, "sm90", 60, (4, 2), 64),
        partial(check_gathered_rows, "decode", 1, (2, 2)),
        partial(check_gathered_rows, "decode", 3, (2, 1)),
    ]


def decoded_calls() -> list[Callable[[], None]]:
    """Few query rows with score options, short sequences that each are a part of their own, and masks of ranges."""
    names = ("bias", "alibi", "line", "text", "together", "bias-32", "bias-of-keys")
    return [
        *(
            partial(check_decoded_scores, *each, "decode")
            for each in zip(names, DECODED, strict=True)
        ),
        partial(check_short_sequences, (300, 20, 0, 255, 31), (8, 8)),
        partial(check_short_sequences, (90,), (35, 7)),
        partial(check_many_short_sequences, (64, 64), 70, "arrays"),
        partial(check_ranges_and_predicates),
    ]


def nan_calls() -> list[Callable[[], None]]:
    """Results with NaN of hidden keys and rows, which kernels compute again."""
    hiding, in_backward = (
        hidden_nan.hiding(2, 4, 70, 90),
        hidden_nan.hiding_in_backward(2, 4, 70, 96),
    )
    one_tile = hidden_nan.hiding_in_backward(2, 4, 40, 30)
    return [
        *(
            partial(check_hidden_nan, family, 64, how, (70, 90))
            for family in ("sm90", "portable")
            for how in ({"causal": True}, hiding["window"], hiding["mask"], hiding["bias"])
        ),
        *(
            partial(check_hidden_nan, "decode", 64, how, (5, 300))
            for how in ({"causal": True}, {"window": (20, 9), "sink": 3})
        ),
        *(
            partial(check_nan_gradients, where, options, 70, 96, 64, deterministic=n % 2 == 1)
            for n, options in enumerate(in_backward.values())
            for where in ("keys", "rows")
        ),
        *(
            partial(check_nan_gradients, where, one_tile[how], 40, 30, 64)
            for how in ("top-left", "score_mod", "bias")
            for where in ("keys", "rows")
        ),
    ]


def _check_append(call: Appended, on_device: bool) -> None:
    call.verify(*write(call, on_device=on_device))


# Names of cases that are not run backward.
FORWARD_ALONE = ("causal", "window", "group", "long", "without-lse")


def cases_of(shape: TileShape, n: int) -> list[Case]:
    """Return the cases for the n-th tile shape."""
    # float16 and bfloat16 kernels differ only in their mma instruction, so the shapes alternate between the two.
    dtype = "float16" if shape.dtype == "bfloat16" and n % 2 else shape.dtype
    knobs = {"dtype": dtype, "headdim": shape.headdim, "nheads_kv": 1}
    lens = (130, 0, 33), (30, 9, 200)
    return [
        dense("causal", 1, 140, 200, **knobs, causal=True),
        ragged("window", *lens, **knobs, window=(60, 9), sink=5),
    ]
