"""Calls of the contract as data: each `Case` names one, `materialise` makes its arrays.

`curated()` are the calls worth a name, `random_case(seed)` draws from everything that is allowed.
Whatever a call must not read is NaN: padding rows, gaps between rows, memory around the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tests.memory import CANARY, DTYPES, LAYOUTS, Strided, strided
from tests.score_arrays import OPTIONS, Pairs, arrays_of, captured_arrays, score_mod_of, seed_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths are logical, rooms physical; by default they are equal."""

    name: str = ""
    dtype: str = "bfloat16"
    nheads_q: int = 2
    nheads_kv: int = 2
    headdim: int = 64
    headdim_v: int | None = None
    group: bool = False
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    room_q: tuple[int, ...] | None = None
    room_k: tuple[int, ...] | None = None
    lead: int = 0  # group mode: rows before the first sequence
    tail: int = 0  # and after the last
    by_q: str = "room"  # where lengths come from: room (physical), seqlen, cu_seqlen, both
    by_k: str = "room"
    integers: str = "int32"  # or int64, list
    on_device: bool = False  # the integers
    max_seqlen: bool = False
    share_starts: bool = False  # leave seqstart_k to its default
    causal: bool = False
    align: str = "bottom-right"
    window: tuple[int | None, int | None] | None = None
    sink: int = 0
    scale: float | None = None
    layout: str = "dense"
    give_out: bool = False
    return_lse: bool = True
    values: str = "normal"  # or uniform, large, constant, negative (scores, rising with the key)
    softcap: float | None = None
    bias: Pairs | None = None
    mask: Pairs | None = None
    alibi_slopes: str = ""  # or heads, batch: what they have an axis for
    sink_logits: str = ""  # or normal, hidden (-inf in some heads)
    score_mod: str = ""  # or a name of SCORE_MODS
    dropout_p: float = 0.0
    drawn_by: str = "int"  # or int32, int64: the seed of the dropout in an array
    num_splits: int | None = None  # of the forward
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.lens_q) == len(self.lens_k), self
        for by, lens, rooms in ((self.by_q, *self.side_q), (self.by_k, *self.side_k)):
            assert len(rooms) == len(lens), self
            assert self.group or len(set(rooms)) <= 1, self
            assert all(0 <= n <= room for n, room in zip(lens, rooms, strict=True)), self
            assert by != "room" or lens == rooms, self

    @property
    def side_q(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lens_q, self.lens_q if self.room_q is None else self.room_q

    @property
    def side_k(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lens_k, self.lens_k if self.room_k is None else self.room_k

    @property
    def batch(self) -> int:
        return len(self.lens_q)

    @property
    def scores(self) -> int:
        """Score elements of the call: what a check in NumPy costs."""
        return self.nheads_q * sum(a * b for a, b in zip(self.lens_q, self.lens_k, strict=True))

    @property
    def score_options(self) -> tuple[str, ...]:
        """Of those that change scores or probabilities, the ones it has."""
        return tuple(name for name in OPTIONS if getattr(self, name))

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays and keywords of a call.

    options: with NumPy arrays. Of those that take an array, `arrays` and `captured` say how it lies in memory.
    """

    q: Strided
    k: Strided
    v: Strided
    out: Strided | None
    integers: dict[str, np.ndarray]  # keywords of SeqLayout
    maxima: dict[str, int]  # more keywords of SeqLayout
    rows: np.ndarray  # True for the logical rows of q: (batch, rows) or (total,)
    options: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Strided] = field(default_factory=dict)
    captured: dict[str, Strided] = field(default_factory=dict)

    @cached_property
    def logical_out(self) -> np.ndarray:
        """Where in `out.buffer` results belong."""
        assert self.out is not None
        inside = replace(self.out, buffer=np.zeros(self.out.buffer.shape, bool))
        inside.view()[self.rows] = True
        return inside.buffer


def repacked() -> list[Case]:
    """Calls whose q, k and v Hopper's forward cannot read where they lie."""
    badly = {"nheads_q": 4, "nheads_kv": 2, "layout": "odd"}
    lens = (70, 0, 129), (30, 9, 290)
    slots = {"room_q": (75, 4, 129), "room_k": (30, 20, 300), "by_q": "seqlen", "by_k": "cu_seqlen"}
    return [
        dense("dims", 2, 150, 190, headdim=20, headdim_v=36, nheads_q=2, causal=True),
        dense("bhsd", 2, 133, 290, headdim=7, headdim_v=66, nheads_q=2, layout="bhsd", dtype="float16"),
        dense("d100", 1, 200, 300, headdim=100, nheads_q=8, nheads_kv=2, window=(90, 20), sink=3),
        dense("d255", 1, 70, 200, headdim=255, headdim_v=129, give_out=True, dtype="float16"),
        dense("odd", 1, 140, 250, headdim=64, **badly, give_out=True, causal=True),
        padded("padded", *lens, 140, 300, headdim=12, on_device=True, causal=True, dtype="float16"),
        ragged("ragged", *lens, headdim=9, **badly, **slots, window=(20, 3), lead=3, tail=9),
    ]  # fmt: skip


def materialise(case: Case) -> Inputs:
    rng = np.random.default_rng([case.seed, *case.name.encode()])
    headdim_v = case.headdim if case.headdim_v is None else case.headdim_v
    rows_q = _logical_rows(case, *case.side_q)
    rows_k = _logical_rows(case, *case.side_k)

    def values(rows: np.ndarray, nheads: int, headdim: int, what: str) -> Strided:
        array = strided((*rows.shape, nheads, headdim), DTYPES[case.dtype], case.layout)
        drawn = rng.standard_normal((np.count_nonzero(rows), nheads, headdim))
        if case.values == "uniform":
            drawn = rng.random(drawn.shape)
        elif case.values == "negative":
            drawn = rng.random(drawn.shape) * {"q": 4, "k": -1, "v": 1}[what]
            if what == "k":
                drawn *= np.linspace(4, 1, len(drawn))[:, None, None]
        elif case.values == "large" and what == "q":
            drawn *= 30
        elif case.values == "constant" and what == "v":
            drawn[:] = rng.standard_normal((nheads, headdim))
        array.view()[rows] = drawn.astype(array.buffer.dtype)
        return array

    q = values(rows_q, case.nheads_q, case.headdim, "q")
    k = values(rows_k, case.nheads_kv, case.headdim, "k")
    v = values(rows_k, case.nheads_kv, headdim_v, "v")
    out = None
    if case.give_out:
        layout = "dense" if case.layout in ("steps", "shared-heads") else case.layout
        out = strided((*rows_q.shape, case.nheads_q, headdim_v), q.buffer.dtype, layout)
        out.buffer.view(np.uint8)[:] = CANARY

    integers: dict[str, np.ndarray] = {}
    maxima: dict[str, int] = {}
    for side, by, (lens, rooms) in (("q", case.by_q, case.side_q), ("k", case.by_k, case.side_k)):
        if case.group and not (side == "k" and case.share_starts):
            integers[f"seqstart_{side}"] = case.lead + _cumulative(rooms)
        if by == "both":
            # The cumulative lengths win: these would be wrong, but are legal.
            integers[f"seqlen_{side}"] = np.zeros(case.batch, np.int64)
        elif by == "seqlen":
            integers[f"seqlen_{side}"] = np.array(lens, np.int64)
        if by in ("cu_seqlen", "both"):
            # Only differences count, so the first need not be 0.
            integers[f"cu_seqlen_{side}"] = case.lead + _cumulative(lens)
        if case.max_seqlen:
            maxima[f"max_seqlen_{side}"] = max(lens, default=0)
    if case.integers != "list":
        integers = {name: x.astype(case.integers) for name, x in integers.items()}

    defaults = Case()
    options = {
        name: getattr(case, name)
        for name in ("causal", "align", "window", "sink", "scale", "softcap", "dropout_p")
        if getattr(case, name) != getattr(defaults, name)
    }
    if not case.score_options:
        return Inputs(q, k, v, out, integers, maxima, rows_q, options)
    arrays, captured = arrays_of(case), captured_arrays(case)
    if case.dropout_p:
        options["seed"] = seed_of(case)
    options |= {name: array.view() for name, array in arrays.items()}
    if case.score_mod:
        views = {name: array.view() for name, array in captured.items()}
        options["score_mod"] = score_mod_of(case, views)
    return Inputs(q, k, v, out, integers, maxima, rows_q, options, arrays, captured)


def _cumulative(lens: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]).astype(np.int64)


def _logical_rows(case: Case, lens: tuple[int, ...], rooms: tuple[int, ...]) -> np.ndarray:
    if not case.group:
        return np.arange(max(rooms, default=0)) < np.reshape(lens, (-1, 1))
    pieces = [np.arange(room) < n for n, room in zip(lens, rooms, strict=True)]
    outside = [np.zeros(case.lead, bool)], [np.zeros(case.tail, bool)]
    return np.concatenate([*outside[0], *pieces, *outside[1]])


def dense(name: str, batch: int, seqlen_q: int, seqlen_k: int, **knobs: Any) -> Case:
    return Case(name=name, lens_q=(seqlen_q,) * batch, lens_k=(seqlen_k,) * batch, **knobs)


def padded(name: str, lens_q: Any, lens_k: Any, room_q: int, room_k: int, **knobs: Any) -> Case:
    """Batch mode with logical lengths."""
    rooms = {"room_q": (room_q,) * len(lens_q), "room_k": (room_k,) * len(lens_k)}
    knobs = {"by_q": "seqlen", "by_k": "seqlen", **knobs}
    return Case(name=name, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **rooms, **knobs)


def ragged(name: str, lens_q: Any, lens_k: Any, **knobs: Any) -> Case:
    """Group mode; without rooms the sequences lie back to back."""
    return Case(name=name, group=True, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **knobs)


def curated() -> list[Case]:
    """The calls worth a name, cheap ones and a few of full size (`Case.scores` tells)."""
    cases = [*_shapes(), *_head_dims(), *_masks(), *_ragged(), *_memory(), *_values(), *_long()]
    assert len({str(case) for case in cases}) == len(cases), "two cases share a name"
    return cases


def _each_dtype(case: Case) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in DTYPES]


def _shapes() -> list[Case]:
    cases = []
    for seqlen_q, seqlen_k in (
        (1, 1), (1, 10), (3, 99), (55, 256), (64, 64), (100, 51), (113, 129), (128, 128),
        (129, 63), (33, 0), (0, 17), (0, 0),
    ):  # fmt: skip
        cases.append(dense(f"full-{seqlen_q}x{seqlen_k}", 2, seqlen_q, seqlen_k))
        cases.append(dense(f"causal-{seqlen_q}x{seqlen_k}", 2, seqlen_q, seqlen_k, causal=True))
    cases += [
        dense("empty-batch", 0, 5, 7),
        dense("gqa-4", 2, 70, 90, nheads_q=8, nheads_kv=2),
        dense("gqa-7", 1, 70, 90, nheads_q=7, nheads_kv=1, causal=True),
        dense("mqa-8", 1, 33, 140, nheads_q=8, nheads_kv=1, headdim=128),
        dense("gqa-12", 1, 130, 150, nheads_q=24, nheads_kv=2, headdim=128, window=(40, 5), sink=3),
        dense("gqa-16", 2, 77, 41, nheads_q=16, nheads_kv=1, dtype="float16", causal=True),
        dense("gqa-3-of-2", 3, 65, 65, nheads_q=6, nheads_kv=2, causal=True, dtype="float16"),
        dense("without-lse", 1, 130, 70, return_lse=False),
    ]
    return cases


def _head_dims() -> list[Case]:
    cases = []
    for headdim in (32, 64, 96, 128, 192, 256):
        knobs = {"headdim": headdim, "causal": headdim in (64, 128)}
        cases += _each_dtype(dense(f"d{headdim}", 1, 150, 210, **knobs))
        cases.append(ragged(f"ragged-d{headdim}", (130, 0, 70, 1), (140, 20, 3, 90), **knobs))
    for headdim, headdim_v in (
        (1, 1), (3, 5), (7, 64), (24, 48), (40, 64), (72, 72), (80, 80), (120, 160), (17, 250),
        (192, 128), (128, 256), (256, 108), (100, 4), (255, 255),
    ):  # fmt: skip
        case = dense(f"d{headdim}-dv{headdim_v}", 1, 70, 150, headdim=headdim, headdim_v=headdim_v)
        cases += _each_dtype(case) if headdim in (3, 72, 192, 256) else [case]
    return cases


def _masks() -> list[Case]:
    cases = []
    for align in ("bottom-right", "top-left"):
        corner = {"bottom-right": "b", "top-left": "t"}[align]
        for window, sink in (
            ((128, 30), 0), ((4, 35), 0), ((0, 0), 0), ((None, 5), 0), ((7, None), 0),
            ((2, 0), 2), ((0, 3), 2), ((30, 10), 100), ((33, 4), 1000), ((70, 0), 65),
        ):  # fmt: skip
            left, right = ("x" if end is None else str(end) for end in window)
            name = f"window-{corner}{left},{right}" + (f",{sink}" if sink else "")
            knobs = {"window": window, "sink": sink, "align": align}
            cases.append(dense(name, 1, 260, 300, **knobs))
            cases.append(dense(f"{name}-tall", 1, 210, 90, **knobs))
        cases += [
            dense(f"causal-{corner}-tall", 1, 200, 70, causal=True, align=align),
            dense(f"causal-{corner}-wide", 1, 70, 200, causal=True, align=align, dtype="float32"),
            dense(f"causal-{corner}-window", 1, 300, 300, causal=True, window=(50, 9), align=align),
        ]
    cases += [
        dense("sink-without-left", 1, 100, 100, window=(None, 3), sink=8),
        dense("window-wider-than-keys", 1, 90, 80, window=(1 << 40, 1 << 40)),
        dense("causal-align-irrelevant", 1, 90, 90, causal=True, align="top-left"),
        dense("no-window-top-left", 1, 90, 50, align="top-left"),
        dense("window-sink-float16", 1, 200, 400, window=(40, 8), sink=20, dtype="float16"),
        dense("window-sink-float32", 1, 200, 400, window=(40, 8), sink=20, dtype="float32"),
        dense("window-d256", 1, 200, 400, window=(90, 0), sink=3, headdim=256),
    ]
    return cases


def _ragged() -> list[Case]:
    every_length = tuple(range(141))
    eff_q, eff_k = (50, 60, 40), (128, 256, 192)
    cases = [
        ragged("lengths", (5, 130, 64, 1, 200), (5, 130, 64, 1, 200), causal=True),
        ragged("shared-starts", (5, 130, 64), (5, 130, 64), share_starts=True),
        ragged("with-empty", (0, 70, 0, 9, 0), (30, 0, 0, 65, 3)),
        ragged("all-empty", (0, 0, 0), (0, 0, 0)),
        ragged("no-keys", (10, 200), (0, 0)),
        ragged("no-queries", (0, 0), (10, 200)),
        ragged("no-sequences", (), (), lead=3, tail=4),
        ragged("every-key-length", (3,) * 141, every_length, nheads_q=1, nheads_kv=1),
        ragged(
            "every-query-length", every_length, (66,) * 141, nheads_q=1, nheads_kv=1, causal=True
        ),
        ragged("one-long", (900, *(20,) * 40), (900, *(20,) * 40), causal=True),
        ragged("many", (1,) * 700, tuple(n % 5 for n in range(700)), nheads_q=4, nheads_kv=1),
        ragged("lead-and-tail", (30, 65), (90, 40), lead=7, tail=11),
        ragged("gqa", (40, 130, 7), (300, 10, 128), nheads_q=6, nheads_kv=2, headdim=128),
        ragged("gqa-8", (40, 200, 7), (300, 210, 9), nheads_q=16, nheads_kv=2, causal=True),
        ragged("window-sink", (90, 200, 3), (250, 200, 100), window=(30, 5), sink=4),
        ragged("window-top-left", (90, 200), (250, 60), window=(30, 5), sink=70, align="top-left"),
        padded("one-row-of-three", (1, 2, 1, 2), (3, 2, 1, 3), 3, 3),
        padded("short-keys", (33,), (10,), 33, 32, causal=True),
        padded("zero-lengths", (0, 40, 17), (60, 0, 60), 70, 60),
        padded("only-k", (40, 40), (5, 55), 40, 64, by_q="room"),
        padded("only-q", (40, 11), (64, 64), 50, 64, by_k="room", causal=True),
        padded("one-sequence-of-many", (0, 0, 90, 0), (0, 0, 200, 0), 100, 300, headdim=96),
    ]
    rooms = {"room_q": (64, 64, 64), "room_k": (160, 288, 224)}
    for by in ("seqlen", "cu_seqlen", "both"):
        both = {"by_q": by, "by_k": by}
        cases += [
            ragged(f"slots-{by}", eff_q, eff_k, **rooms, **both, lead=2, tail=5, causal=True),
            padded(f"padded-{by}", (55, 60), (200, 256), 64, 256, **both, dtype="float16"),
        ]
        for where in ({"integers": "int64"}, {"integers": "list"}):
            kind = where["integers"]
            cases.append(ragged(f"slots-{by}-{kind}", eff_q, eff_k, **rooms, **both, **where))
        for device in ({}, {"max_seqlen": True}, {"max_seqlen": True, "integers": "int64"}):
            tag = "-".join(["device", *(str(x) for x in device.values())])
            knobs = {**both, **device, "on_device": True}
            cases += [
                ragged(f"slots-{by}-{tag}", eff_q, eff_k, **rooms, **knobs, window=(60, 4)),
                padded(f"padded-{by}-{tag}", (55, 0, 60), (200, 256, 0), 64, 256, **knobs),
            ]
    cases += [
        ragged("slots-q-only", eff_q, eff_k, room_q=(64, 64, 64), by_q="seqlen"),
        ragged("slots-k-only", eff_q, eff_k, room_k=(160, 288, 224), by_k="cu_seqlen"),
        ragged("mixed-sources", eff_q, eff_k, **rooms, by_q="seqlen", by_k="cu_seqlen", tail=1),
        ragged(
            "max-seqlen-host", eff_q, eff_k, **rooms, by_q="seqlen", by_k="both", max_seqlen=True
        ),
        ragged("starts-on-device", eff_q, eff_k, on_device=True, max_seqlen=True, dtype="float32"),
    ]
    return cases


def _memory() -> list[Case]:
    cases = []
    for layout in LAYOUTS:
        for give_out in (False, True):
            name = f"{layout}{'-out' if give_out else ''}"
            knobs = {"layout": layout, "give_out": give_out, "nheads_q": 4}
            cases += [
                dense(name, 2, 75, 90, **knobs, causal=True),
                padded(f"padded-{name}", (30, 64), (90, 0), 70, 95, **knobs, headdim=40),
                ragged(
                    f"ragged-{name}", (30, 0, 64), (90, 20, 5), room_q=(33, 4, 70), **knobs,
                    by_q="seqlen", lead=3, tail=9, headdim=128, headdim_v=80, dtype="float16",
                ),
            ]  # fmt: skip
        cases.append(dense(f"{layout}-float32", 2, 75, 90, layout=layout, dtype="float32"))
    for by in ("seqlen", "cu_seqlen"):
        knobs = {"on_device": True, "by_q": by, "by_k": by, "give_out": True, "tail": 2}
        cases.append(
            ragged(f"device-{by}-out", (30, 9), (20, 5), room_q=(70, 9), room_k=(33, 5), **knobs)
        )
    return cases


def _values() -> list[Case]:
    cases = []
    for values in ("uniform", "large", "constant", "negative"):
        cases += _each_dtype(dense(f"{values}", 1, 90, 300, values=values, causal=True))
    for scale in (0.0, -0.2, 1.0, 1e-30, 3.0):
        cases += _each_dtype(dense(f"scale{scale}", 1, 66, 130, scale=scale, window=(100, 20)))
    cases.append(dense("scale-integer", 1, 66, 130, scale=1, headdim=16))
    return cases


def _long() -> list[Case]:
    one = {"nheads_q": 1, "nheads_kv": 1}
    pair = {"nheads_q": 2, "nheads_kv": 1, "headdim": 128}
    lens = (2000, 64, 700, 1, 130, 0, 333)
    slots = tuple(n + 17 for n in lens)
    return [
        dense("long-d64", 1, 1500, 2048, **one, dtype="float16"),
        dense("long-causal-d64", 1, 2048, 2048, **one, causal=True),
        dense("long-causal-d128", 1, 1024, 2048, **pair, causal=True),
        dense("long-d256", 1, 1000, 1500, **one, headdim=256),
        dense("long-float32", 1, 1024, 1024, **one, dtype="float32", causal=True),
        dense("long-window", 1, 2048, 2048, **pair, window=(300, 0), sink=130),
        dense("long-window-float32", 1, 1024, 1500, **one, window=(9, 99), dtype="float32"),
        ragged("long-ragged", lens, lens, **pair, causal=True),
        ragged(
            "long-slots", lens, lens, **one, room_q=slots, room_k=slots, by_q="seqlen",
            by_k="cu_seqlen", on_device=True, lead=5, window=(200, 10), dtype="float16",
        ),
    ]  # fmt: skip


def random_case(seed: int) -> Case:
    """Any call of the contract, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def headdim() -> int:
        return int(some(64, 128, some(32, 96, 192, 256), rng.integers(1, 257)))

    def length(most: int) -> int:
        return int(some(0, 1, rng.integers(1, 1 + most), rng.integers(1, 1 + most)))

    group = bool(rng.integers(2))
    batch = int(some(1, 2, 3, some(0, 5, 9, 40)))
    most = int(some(20, 140, 400)) if batch <= 3 else 90
    lens_q = [length(most) for _ in range(batch)]
    lens_k = lens_q if rng.random() < 0.2 else [length(most) for _ in range(batch)]
    by_q, by_k = (some("room", "seqlen", "cu_seqlen", "both") for _ in "qk")
    room_q, room_k = (
        _random_rooms(rng, lens, group=group, padded=by != "room")
        for lens, by in ((lens_q, by_q), (lens_k, by_k))
    )
    if by_q == "room":
        lens_q = list(room_q)
    if by_k == "room":
        lens_k = list(room_k)

    nheads_kv = int(rng.integers(1, 4))
    dim = headdim()
    dim_v = some(dim, dim, headdim())
    # Wide float32 kernels take several times as long to compile as the others: fewer of them.
    wide = max(dim, dim_v) > 128 and rng.random() < 0.7
    window = some(
        None, None, (int(rng.integers(0, 100)), int(rng.integers(0, 100))),
        (int(rng.integers(0, 300)), None), (None, int(rng.integers(0, 50))), (0, 0),
    )  # fmt: skip
    return Case(
        name=f"seed{seed}",
        dtype=some("bfloat16", "float16", "float16" if wide else "float32"),
        nheads_q=nheads_kv * int(some(1, 1, 2, 5)),
        nheads_kv=nheads_kv,
        headdim=dim,
        headdim_v=dim_v,
        group=group,
        lens_q=tuple(lens_q),
        lens_k=tuple(lens_k),
        room_q=tuple(room_q),
        room_k=tuple(room_k),
        lead=int(some(0, 5)) if group else 0,
        tail=int(some(0, 9)) if group else 0,
        by_q=by_q,
        by_k=by_k,
        integers=some("int32", "int64", "list"),
        on_device=bool(rng.integers(2)),
        max_seqlen=bool(rng.integers(2)),
        share_starts=room_q == room_k,
        causal=bool(rng.integers(2)),
        align=some("bottom-right", "bottom-right", "top-left"),
        window=window,
        sink=int(some(0, 0, rng.integers(0, 9), rng.integers(0, 200))),
        scale=some(None, None, 0.3, -0.05),
        layout=some("dense", "dense", *LAYOUTS),
        give_out=bool(rng.integers(2)),
        return_lse=rng.random() < 0.8,
        values=some("normal", "normal", "uniform", "large"),
        num_splits=some(None, None, None, 1, 2, 7, 256),
        seed=seed,
    )


def _random_rooms(rng: Any, lens: list[int], *, group: bool, padded: bool) -> list[int]:
    if not group:
        room = max(lens, default=0) + (int(rng.integers(0, 40)) if padded else 0)
        return [room] * len(lens)
    return [n + int(rng.integers(0, 20)) if padded else n for n in lens]
