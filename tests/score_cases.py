"""Calls with the options that change scores and probabilities: curated and random ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.memory import LAYOUTS_OF_OPTIONS
from tests.random_cases import random_case
from tests.score_arrays import OPTIONS, SCORE_MODS, Pairs

_TWO = {"nheads_q": 4, "nheads_kv": 2}
_LENS = (130, 0, 33, 70), (200, 9, 0, 31)
_ROOMS = {
    "room_q": (140, 3, 33, 75),
    "room_k": (210, 20, 5, 31),
    "by_q": "seqlen",
    "by_k": "seqlen",
}
# The arguments that turn on each option, as small as they can be and still have an effect.
EACH: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.5},
    "score_mod": {"score_mod": "slopes"},
    "bias": {"bias": Pairs()},
    "alibi_slopes": {"alibi_slopes": "heads"},
    "mask": {"mask": Pairs(values="random")},
    "sink_logits": {"sink_logits": "hidden"},
    "dropout_p": {"dropout_p": 0.3},
}


# The number of cases that `_alone` has for each option; the two 16-bit dtypes come first.
_CASES_OF_ONE = 10


def curated_scores() -> list[Case]:
    """The curated cases."""
    cases = [*_alone(), *_together(), *_broadcast(), *_memory(), *_dead(), *_dims(), *_numbers()]
    assert len({str(case) for case in cases}) == len(cases), "two cases share a name"
    return cases


def few(cases: list[Case]) -> list[Any]:
    """Parameters of a test that cover each combination of options, each dtype and each batch layout.

    The other cases are marked as exhaustive.
    """
    return exhaustive.mark(
        cases,
        lambda case: {
            ("options", case.score_options),
            ("dtype", case.dtype),
            ("layout", case.packed, case.by_q == "room"),
        },
    )


def scores_of_kernels() -> list[Case]:
    """The cases for a GPU, where each new constant of a kernel costs seconds of compilation.

    They hold each option alone in one 16-bit dtype and in float32, and everything that reaches a kernel as numbers. They only
    sample the pairs of options, and the options at the six head dims.
    """
    rng = np.random.default_rng(0)
    pairs = set(rng.choice(21, 6, replace=False).tolist())
    cases: list[Case] = []
    for n, case in enumerate(_alone()):
        # Options alternate between the 16-bit dtypes, between causal and window, and between packed and padded batches.
        option, which = divmod(n, _CASES_OF_ONE)
        if which not in ((1, 4, 6), (0, 3, 5))[option % 2]:
            cases.append(case)
    cases += [case for n, case in enumerate(_together()) if n >= 21 or n in pairs]
    cases += [*_broadcast(), *_memory(), *_dead()]
    cases += [case for n, case in enumerate(_dims()) if n >= 18 or n % 3 == n // 3 % 3]
    scored = [case for case in _numbers() if case.score_mod]
    cases += [case for n, case in enumerate(scored) if n % 4 in (0, 3)]
    return [*cases, *(case for case in _numbers() if not case.score_mod)]


def _alone() -> list[Case]:
    cases = []
    for option, knobs in EACH.items():
        name = option.replace("_", "-")
        for dtype in ("bfloat16", "float16", "float32"):
            cases.append(dense(name, 2, 150, 190, **_TWO, **knobs, dtype=dtype))
        cases += [
            dense(f"{name}-causal", 1, 200, 133, **knobs, causal=True, headdim=128),
            dense(f"{name}-window", 1, 133, 290, **knobs, window=(60, 9), sink=5, align="top-left"),
            ragged(f"{name}-packed", *_LENS, **_TWO, **_ROOMS, **knobs, lead=3, tail=9),
            padded(f"{name}-padded", (30, 0, 64), (90, 17, 0), 70, 95, **_TWO, **knobs, causal=True,
                   on_device=True, give_out=True),
            dense(f"{name}-empty-batch", 0, 5, 7, **knobs),
            dense(f"{name}-no-keys", 2, 9, 0, **knobs),
            dense(f"{name}-one-row", 3, 1, 300, nheads_q=8, nheads_kv=1, **knobs),
        ]  # fmt: skip
    return cases


def _together() -> list[Case]:
    everything: dict[str, Any] = {}
    for knobs in EACH.values():
        everything |= knobs
    cases = [
        dense("-".join(pair), 1, 130, 150, **_TWO, **EACH[pair[0]], **EACH[pair[1]], dtype=dtype)
        for n, pair in enumerate(combinations(OPTIONS, 2))
        for dtype in (("bfloat16", "float16", "float32")[n % 3],)
    ]
    return [
        *cases,
        dense("every-option", 1, 150, 200, **_TWO, **everything),
        dense("every-option-causal", 2, 90, 140, **everything, causal=True, dtype="float32"),
        ragged("every-option-packed", *_LENS, **_TWO, **_ROOMS, **everything, window=(90, 9)),
        padded("every-option-padded", (70, 5), (90, 17), 70, 95, **everything, scale=-0.2, on_device=True),
    ]  # fmt: skip


def _broadcast() -> list[Case]:
    """Every pattern of broadcast axes of a bias and a few of a mask, in both modes, with and without leading axes."""
    cases = []
    for n in range(24):
        heads = ("one", "kv", "q")[n % 3]
        batch, rows, keys = (bool(n // 3 >> bit & 1) for bit in range(3))
        axes = {"batch": batch, "heads": heads, "rows": rows, "keys": keys, "short": n % 2 == 0}
        name = f"axes-{'b' if batch else 1}{heads}{'r' if rows else 1}{'k' if keys else 1}"
        cases.append(
            dense(f"bias-{name}", 2, 70, 150, **_TWO, bias=Pairs(**axes, float32=n % 4 == 1))
        )
        if n % 3 == n // 3 % 3:
            mask = Pairs(**axes, values="random")
            cases += [
                dense(f"mask-{name}", 2, 70, 150, **_TWO, mask=mask),
                ragged(f"mask-{name}-packed", *_LENS, **_TWO, mask=replace(mask, beyond=(3, 5))),
            ]
        if n % 3 != n // 3 % 3:
            bias = Pairs(**axes, beyond=(0, 7) if n % 2 else (9, 0))
            cases.append(ragged(f"bias-{name}-packed", *_LENS, **_TWO, **_ROOMS, bias=bias))
    return cases  # fmt: skip


def _memory() -> list[Case]:
    cases = []
    for n, layout in enumerate(LAYOUTS_OF_OPTIONS):
        pairs = Pairs(layout=layout)
        mask = replace(pairs, values="random")
        out = {"give_out": n % 2 == 0}
        cases += [
            dense(f"bias-{layout}", 2, 75, 90, **_TWO, bias=pairs, **out, causal=True),
            dense(f"bias-{layout}-odd-keys", 1, 75, 91, bias=replace(pairs, float32=True), **out),
            dense(f"bias-{layout}", 1, 75, 92, bias=pairs, **out, dtype="float32", headdim=40),
            dense(f"mask-{layout}", 2, 75, 90, **_TWO, mask=mask, **out),
            ragged(f"bias-mask-{layout}-packed", *_LENS, **_TWO, bias=pairs, mask=mask, **_ROOMS, **out),
        ]  # fmt: skip
    for by in ("int32", "int64"):
        for seed in (0, 1):
            cases.append(
                dense(f"seed-{by}-{seed}", 1, 70, 90, dropout_p=0.5, drawn_by=by, seed=seed)
            )
    for n in range(3):  # slopes and sinks of both precisions, strided
        knobs = {"alibi_slopes": "batch", "sink_logits": "normal", "seed": n}
        cases.append(
            dense(f"slopes-{n}", 2, 70, 90, nheads_q=6, nheads_kv=2, **knobs, causal=n == 1)
        )
    return cases


def _dead() -> list[Case]:
    """Tiles, rows and calls in which no key is visible."""
    cases = []
    for values in (
        "late-keys", "early-keys", "some-rows", "late-start", "anti-causal", "checkerboard", "tiles", "diagonal",
        "sparse", "nothing",
    ):  # fmt: skip
        pairs = Pairs(values=values, batch=False, heads="one")
        cases += [
            dense(f"mask-{values}", 1, 300, 400, mask=pairs),
            dense(f"mask-{values}-causal", 1, 300, 300, mask=pairs, causal=True, headdim=128),
            dense(f"bias-{values}", 1, 300, 400, bias=pairs, dtype="float16"),
            dense(f"bias-{values}", 1, 130, 333, bias=replace(pairs, heads="q"), dtype="float32"),
            ragged(f"mask-{values}-sinks", *_LENS, **_TWO, mask=pairs, sink_logits="hidden"),
        ]
    for values in ("least", "least-rows"):
        for dtype in ("bfloat16", "float16", "float32"):
            pairs = Pairs(values=values)
            cases.append(dense(f"bias-{values}", 1, 150, 300, bias=pairs, dtype=dtype))
    cases += [
        dense("mask-everything", 1, 150, 300, mask=Pairs(values="everything")),
        dense("mask-of-heads", 1, 150, 300, **_TWO, mask=Pairs(values="tiles", heads="kv", batch=False)),
        ragged("mask-empty-entry", (0, 70, 9), (30, 200, 0), mask=Pairs(values="random"), dtype="float16"),
        ragged("bias-empty-entry", (0, 70, 9), (30, 200, 0), bias=Pairs(values="random")),
        dense("mask-and-minus-infinity", 1, 150, 300, mask=Pairs(values="tiles"), bias=Pairs(values="some-rows")),
        dense("hidden-by-function", 1, 150, 300, score_mod="hidden", mask=Pairs(values="checkerboard")),
        dense("lines-of-a-function", 1, 300, 300, **_TWO, score_mod="slopes", causal=True, dtype="bfloat16"),
    ]  # fmt: skip
    return cases


def _dims() -> list[Case]:
    bias, mask = Pairs(), Pairs(values="late-start")
    cases = []
    for headdim in (32, 64, 96, 128, 192, 256):
        knobs = {"headdim": headdim, **_TWO}
        cases += [
            dense(f"bias-d{headdim}", 1, 150, 210, **knobs, bias=bias, causal=headdim % 128 == 0),
            dense(f"mask-softcap-d{headdim}", 1, 150, 210, **knobs, mask=mask, softcap=3.0),
            ragged(
                f"dropout-sinks-d{headdim}", *_LENS, **knobs, dropout_p=0.2, sink_logits="normal"
            ),
        ]
    for headdim, headdim_v in ((1, 1), (3, 66), (33, 65), (100, 4), (192, 128), (255, 255)):
        knobs = {"headdim": headdim, "headdim_v": headdim_v, "alibi_slopes": "heads"}
        cases.append(dense(f"d{headdim}-dv{headdim_v}-bias", 1, 71, 151, **knobs, bias=bias))
    cases.append(
        dense("d72-float32-bias", 1, 71, 151, headdim=72, bias=bias, mask=mask, dtype="float32")
    )
    return cases


def _numbers() -> list[Case]:
    bias = Pairs()
    cases = [
        dense(
            f"scale{scale}-bias", 1, 66, 130, scale=scale, bias=bias, window=(100, 20), dtype=dtype
        )
        for scale in (0.0, -0.2, 3.0)
        for dtype in ("bfloat16", "float32")
    ]
    cases += [
        dense(
            f"score-{name}", 1, 90, 140, **_TWO, score_mod=name, causal=name == "table", dtype=dtype
        )
        for name in SCORE_MODS
        for dtype in ("float16", "float32")
    ]
    return [
        *cases,
        dense("bias-large", 1, 90, 300, bias=Pairs(values="large")),
        dense("softcap-large", 1, 90, 300, softcap=5.0, values="large"),
        dense("softcap-wide", 1, 90, 300, softcap=1000.0, dtype="float32"),
        dense("softcap-bias-mask", 1, 90, 300, softcap=2.0, bias=bias, mask=Pairs(values="random")),
        dense("softcap-negative-scale", 1, 90, 300, softcap=2.0, scale=-0.3, causal=True),
        dense("bias-of-keys-once", 1, 90, 300, bias=Pairs(keys=False)),  # its gradient is 0
        dense("dropout-most", 1, 90, 300, dropout_p=0.9),
        dense("dropout-0", 1, 90, 300, dropout_p=0.0, sink_logits="normal"),
        dense("alibi-wide", 1, 70, 1000, alibi_slopes="heads", nheads_q=8, nheads_kv=2),
        dense("alibi-top-left", 1, 70, 300, alibi_slopes="heads", align="top-left"),
        # In rows past the last one, which the last tile still computes, probabilities would overflow.
        dense("alibi-negative", 1, 70, 1000, alibi_slopes="negative", causal=True),
        ragged("alibi-negative-packed", *_LENS, **_TWO, alibi_slopes="negative", causal=True),
        # The backward's score accumulators start from multiples of slope / scale, with a tiny scale in place of 0.
        dense("alibi-scale-0", 1, 90, 300, alibi_slopes="heads", scale=0.0, causal=True),
        dense("alibi-negative-scale", 1, 90, 300, alibi_slopes="heads", scale=-0.3, causal=True),
        # Masks that depend on the key only, which Hopper's forward reads as they are.
        *(
            dense(f"mask-of-keys-{form}-d{d}", 3, 150, 333, **_TWO, headdim=d, **more,
                  mask=Pairs(values=form, heads="one", rows=False))
            for form, d, more in (
                ("random", 64, {}), ("late-start", 128, {"causal": True}), ("late-keys", 96, {"window": (90, 8), "sink": 3}),
                ("sparse", 256, {"sink_logits": "normal"}), ("random", 32, {"align": "top-left", "causal": True}),
            )
        ),
        dense("mask-of-keys-once", 2, 700, 900, **_TWO, mask=Pairs(values="late-start", batch=False, heads="one", rows=False)),
        dense("alibi-tiny-scale", 1, 90, 300, alibi_slopes="heads", scale=1e-25),
        # Keys on both sides of the diagonal, also in rows whose diagonal lies before the first key or past the last one.
        *(
            dense(f"alibi-both-sides-d{d}", 2, *lens, **_TWO, headdim=d, alibi_slopes="heads")
            for d, lens in ((64, (300, 210)), (96, (130, 700)), (128, (300, 210)), (256, (150, 333)))
        ),
        dense("alibi-negative-both-sides", 1, 200, 300, **_TWO, alibi_slopes="negative"),
        ragged("alibi-both-sides-packed", *_LENS, **_TWO, alibi_slopes="batch"),
        ragged("alibi-batch-packed", *_LENS, **_TWO, alibi_slopes="batch", dtype="float32"),
        *_positions(),
    ]  # fmt: skip


def _positions() -> list[Case]:
    """Sequences that are parts of longer ones, with options that depend on positions in these."""
    at = {"positions_q": (100, 7), "positions_k": (30, 0)}
    of_four = {"positions_q": (250, 0, 40, 3), "positions_k": (0, 9, 0, 31)}
    rows = Pairs(values="random", batch=False)
    cases = [
        dense("positions-alibi", 2, 150, 200, **_TWO, **at, alibi_slopes="heads"),
        dense("positions-alibi-causal", 2, 150, 200, **_TWO, **at, alibi_slopes="batch", causal=True),
        dense("positions-bias", 2, 150, 200, **_TWO, **at, bias=Pairs(batch=False), causal=True),
        dense("positions-mask", 2, 150, 200, **_TWO, **at, mask=rows, window=(90, 4), sink=40),
        dense("positions-few", 2, 2, 700, **_TWO, **at, alibi_slopes="heads", causal=True),
        ragged("positions-packed", *_LENS, **_TWO, **of_four, alibi_slopes="heads", causal=True),
        ragged("positions-packed-bias", *_LENS, **_TWO, **of_four, bias=Pairs(batch=False), window=(60, 0)),
    ]  # fmt: skip
    return cases + [
        dense(
            f"positions-{name}", 2, 150, 200, **_TWO, **at, score_mod=name, causal=name == "slopes"
        )
        for name in SCORE_MODS
    ]


def random_score_case(seed: int) -> Case:
    """A `random_case` with random score options, the same for the same seed."""
    case, rng = random_case(seed), np.random.default_rng([seed, 1])

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def pairs(*values: str) -> Pairs:
        return Pairs(
            values=some(*values),
            batch=bool(rng.integers(2)),
            heads=some("one", "kv", "q"),
            rows=rng.random() < 0.8,
            keys=rng.random() < 0.8,
            short=bool(rng.integers(2)),
            beyond=some((0, 0), (int(rng.integers(9)), int(rng.integers(9)))),
            layout=some("dense", "dense", *LAYOUTS_OF_OPTIONS),
            float32=bool(rng.integers(2)),
        )

    least = ("least",) if case.scale is None else ()
    drawn = {
        "softcap": float(some(1.5, 30.0, 4)),
        "score_mod": some(*SCORE_MODS),
        "bias": pairs("normal", "normal", "large", "random", "some-rows", "late-keys", "late-start", *least),
        "alibi_slopes": some("heads", "batch"),
        "mask": pairs("random", "sparse", "checkerboard", "tiles", "anti-causal", "late-keys", "late-start"),
        "sink_logits": some("normal", "hidden"),
        "dropout_p": float(some(0.1, 0.5, 0.9)),
    }  # fmt: skip
    count = int(some(1, 2, 2, 3, 4))
    chosen = rng.choice(len(OPTIONS), count, replace=False)
    if "dropout_p" in {OPTIONS[n] for n in chosen}:  # not implemented with positions
        case = replace(case, positions_q=(), positions_k=())
    return replace(
        case,
        name=f"scores-{case.name}",
        **{OPTIONS[n]: drawn[OPTIONS[n]] for n in chosen},
        drawn_by=some("int", "int32", "int64"),
    )
