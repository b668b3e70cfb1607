"""Random cases, from everything that a call may be."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cases import Case
from tests.memory import LAYOUTS


def random_case(seed: int) -> Case:
    """Return a random valid call, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def headdim() -> int:
        return int(some(64, 128, some(32, 96, 192, 256), rng.integers(1, 257)))

    def length(most: int) -> int:
        return int(some(0, 1, rng.integers(1, 1 + most), rng.integers(1, 1 + most)))

    packed = bool(rng.integers(2))
    batch = int(some(1, 2, 3, some(0, 5, 9, 40)))
    most = int(some(20, 140, 400)) if batch <= 3 else 90
    lens_q = [length(most) for _ in range(batch)]
    lens_k = lens_q if rng.random() < 0.2 else [length(most) for _ in range(batch)]
    by_q, by_k = (some("room", "seqlen", "cu_seqlen", "both") for _ in "qk")
    room_q, room_k = (
        _random_rooms(rng, lens, packed=packed, padded=by != "room")
        for lens, by in ((lens_q, by_q), (lens_k, by_k))
    )
    if by_q == "room":
        lens_q = list(room_q)
    if by_k == "room":
        lens_k = list(room_k)

    nheads_kv = int(rng.integers(1, 4))
    dim = headdim()
    dim_v = some(dim, dim, headdim())
    # Wide float32 kernels take several times as long to compile as the others, so they are drawn less often.
    wide = max(dim, dim_v) > 128 and rng.random() < 0.7
    window = some(
        None, None, (int(rng.integers(0, 100)), int(rng.integers(0, 100))),
        (int(rng.integers(0, 300)), None), (None, int(rng.integers(0, 50))), (0, 0),
    )  # fmt: skip
    knobs: dict[str, Any] = {}
    positions = np.random.default_rng([seed, 2])
    if batch and positions.random() < 0.15:
        for side in _some_sides(positions):
            knobs[f"positions_{side}"] = tuple(positions.integers(0, 2 * most, batch).tolist())
    return Case(
        name=f"seed{seed}",
        dtype=some("bfloat16", "float16", "float16" if wide else "float32"),
        nheads_q=nheads_kv * int(some(1, 1, 2, 5)),
        nheads_kv=nheads_kv,
        headdim=dim,
        headdim_v=dim_v,
        packed=packed,
        lens_q=tuple(lens_q),
        lens_k=tuple(lens_k),
        room_q=tuple(room_q),
        room_k=tuple(room_k),
        lead=int(some(0, 5)) if packed else 0,
        tail=int(some(0, 9)) if packed else 0,
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
        **knobs,
    )


def _some_sides(rng: Any) -> str:
    """One of both sides, or both."""
    return ("q", "k", "qk", "qk")[int(rng.integers(4))]


def _random_rooms(rng: Any, lens: list[int], *, packed: bool, padded: bool) -> list[int]:
    if not packed:
        room = max(lens, default=0) + (int(rng.integers(0, 40)) if padded else 0)
        return [room] * len(lens)
    return [n + int(rng.integers(0, 20)) if padded else n for n in lens]
