"""Curated cases: shapes, head dims, masks, lengths, layouts, values, and a few of full size."""

from __future__ import annotations

from dataclasses import replace

from tests.cases import Case, dense, padded, ragged
from tests.memory import DTYPES, LAYOUTS


def unaligned() -> list[Case]:
    """Calls whose q, k and v Hopper's forward cannot read in place."""
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


def curated() -> list[Case]:
    """The curated cases: cheap ones and a few of full size (`Case.scores` tells them apart)."""
    cases = [
        *(*_shapes(), *_head_dims(), *_masks(), *_ragged(), *_positions()),
        *(*_memory(), *_values(), *_long()),
    ]
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
        dense("gqa-5-rows", 2, 25, 190, nheads_q=10, nheads_kv=2, headdim=128, causal=True),
        dense(
            "gqa-7-rows",
            1,
            20,
            300,
            nheads_q=7,
            nheads_kv=1,
            window=(90, 3),
            sink=5,
            dtype="float16",
        ),
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


def _positions() -> list[Case]:
    """Sequences that are parts of longer ones: keys before, at, around and behind the queries."""
    three = {"positions_q": (0, 300, 90), "positions_k": (500, 0, 100)}
    four = {"positions_q": (250, 9, 0, 1000), "positions_k": (0, 9, 500, 990)}
    lens = (130, 0, 70, 1), (140, 20, 300, 90)
    slots = {
        "room_q": (140, 3, 70, 5),
        "room_k": (150, 20, 333, 91),
        "by_q": "seqlen",
        "by_k": "cu_seqlen",
    }
    return [
        *_each_dtype(dense("positions-causal", 3, 133, 290, **three, causal=True)),
        *_each_dtype(dense("positions-window", 3, 133, 290, **three, window=(200, 30), sink=110)),
        dense("positions-full", 3, 70, 90, **three),
        dense("positions-top-left", 3, 70, 90, **three, causal=True, align="top-left"),
        dense("positions-q", 2, 150, 200, positions_q=(20, 190), causal=True, headdim=128),
        dense("positions-k", 2, 150, 200, positions_k=(20, 190), causal=True, headdim=128),
        dense("positions-d256", 3, 133, 290, **three, window=(200, 0), sink=600, headdim=256),
        dense("positions-one-query", 3, 1, 290, **three, causal=True, nheads_q=8),
        dense("positions-few", 3, 4, 900, **three, window=(100, 0), sink=110, nheads_q=8),
        dense("positions-long-keys", 1, 256, 9000, positions_q=(4000,), causal=True, nheads_q=8, headdim=128),
        padded("positions-padded", *lens, 150, 333, **four, causal=True, on_device=True),
        padded("positions-padded-left", *lens, 150, 333, **four, window=(80, None), sink=9, integers="int64"),
        ragged("positions-ragged", *lens, **four, causal=True, nheads_q=4, integers="list"),
        ragged("positions-slots", *lens, **slots, **four, window=(80, 5), sink=995, lead=3, tail=9),
        ragged("positions-device", *lens, **slots, **four, causal=True, on_device=True, integers="int64"),
        ragged("positions-many", (2,) * 100, (30,) * 100, positions_q=tuple(range(100)), causal=True),
    ]  # fmt: skip


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
        ragged("gqa-5", (40, 1, 0, 19), (90, 200, 12, 33), nheads_q=5, nheads_kv=1, causal=True),
        padded("gqa-9", (14, 7), (200, 40), 16, 210, nheads_q=18, nheads_kv=2, headdim_v=40),
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
