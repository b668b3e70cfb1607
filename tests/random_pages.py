"""Random paged calls, from everything that one may be."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.paged import BFLOAT16, Paged, paged


class RandomPages(NamedTuple):
    """on_device: whether lengths and tables are arrays on the GPU. portable: whether the portable forward is to take it."""

    call: Paged
    options: dict[str, Any]
    on_device: bool
    portable: bool


def random_pages(seed: int) -> RandomPages:
    """Return a random paged call, the same for the same seed. Half of the pools hold 8-bit elements."""
    rng = np.random.default_rng([seed, 8])

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def headdim() -> int:
        return int(some(64, 128, some(32, 96, 192, 256), rng.integers(1, 257)))

    batch = int(some(1, 2, 3, 7))
    lens_k = tuple(int(some(0, 1, *rng.integers(1, 600, 3))) for _ in range(batch))
    most = int(some(1, 1, 4, 20, 150))
    lens_q = tuple(int(min(rng.integers(0, most + 1), n)) for n in lens_k)
    nheads_kv = int(rng.integers(1, 4))
    dim = headdim()
    packed = bool(rng.integers(2))
    rows: Any = lens_q if packed or rng.integers(2) else most
    call = paged(
        lens_k,
        int(some(16, 16, 128, some(1, 7, 8, 24, 64, 300, 1024))),
        rows=rows,
        packed=packed,
        room_q=None if packed else most,
        heads=(nheads_kv * int(some(1, 2, 4, 5, 8, some(17, 37, 71))), nheads_kv),
        dims=(dim, some(dim, dim, headdim())),
        dtype=some(BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)),
        integers=some(np.int32, np.int64),
        pair=bool(rng.integers(2)),
        heads_first=bool(rng.integers(2)),
        shared=int(some(0, 0, 2)),
        float8=some("", "", "", "plain", "numbers", "arrays"),
        seed=seed,
    )
    options = _random_options(rng, call, max(*lens_q, most))
    return RandomPages(call, options, bool(rng.integers(2)), _is_portable(seed))


def random_batch(seed: int) -> RandomPages:
    """Return a random call of many short sequences with few rows each, as a server decodes them. Half of the pools hold 8-bit
    elements.
    """
    rng = np.random.default_rng([seed, 17])

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    batch, nheads_kv = int(some(20, 50, 90, 140, 300)), int(some(1, 2, 4, 8))
    while batch * nheads_kv > 700:
        nheads_kv //= 2
    group, most = int(some(1, 2, 4, 5, 6, 8, 16)), int(some(1, 1, 1, 2, 3, 4, 6))
    while nheads_kv * group > 40:
        group = -(-group // 2)
    longest = int(some(60, 200, 500))
    lens_k = tuple(int(some(0, longest, *rng.integers(1, longest, 10))) for _ in range(batch))
    lens_q: tuple[int, ...] = (most,) * batch
    if some(False, False, True):
        lens_q = tuple(int(min(rng.integers(0, most + 1), n)) for n in lens_k)
    packed = bool(rng.integers(3) == 0)
    dim = int(some(64, 128, 128, some(32, 96, 192, 256), rng.integers(1, 257)))
    call = paged(
        lens_k,
        int(some(16, 16, 1, 128, some(7, 8, 24, 64, 300))),
        rows=lens_q,
        packed=packed,
        room_q=None if packed else most,
        heads=(nheads_kv * group, nheads_kv),
        dims=(dim, int(some(dim, dim, dim, rng.integers(1, 257)))),
        dtype=some(BFLOAT16, np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)),
        integers=some(np.int32, np.int64),
        pair=bool(rng.integers(2)),
        heads_first=bool(rng.integers(2)),
        float8=some("", "", "plain", "arrays"),
        seed=seed,
    )
    options, portable = _random_options(rng, call, most), _is_portable(seed)
    if (packed or portable) and batch > 100 and options["num_splits"]:
        # Each sequence of a packed batch may have most of its rows, and a piece of the portable forward leaves a tile of 128
        # rows, whichever are real. So many pieces take more memory than a GPU has, or has beside the tests of other processes.
        options["num_splits"] = min(options["num_splits"], 16)
    return RandomPages(call, options, bool(rng.integers(4)), portable)


def _is_portable(seed: int) -> bool:
    """One seed of three, so that calls for other kernels take the portable forward, too."""
    return seed % 3 == 2


def _random_options(rng: np.random.Generator, call: Paged, rows: int) -> dict[str, Any]:
    """rows: the most query rows of a sequence."""

    def some(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    nheads_q = call.q.shape[-2]
    options: dict[str, Any] = {
        "causal": bool(rng.integers(2)),
        "align": some("bottom-right", "bottom-right", "top-left"),
        "window": some(None, None, (int(rng.integers(0, 100)), 0), (int(rng.integers(0, 300)), None)),
        "sink": int(some(0, 0, rng.integers(0, 40))),
        "scale": some(None, None, 0.3, -0.05),
        "num_splits": some(None, None, 1, 3, 256),
    }  # fmt: skip
    more = some("", "", "", "softcap", "sink_logits", "alibi_slopes", "mask")
    if more == "softcap":
        options[more] = 5.0
    elif more == "mask":
        options[more] = rng.random((1, rows, max(call.seqlen_k) + 1)) < 0.8
    elif more:
        options[more] = rng.standard_normal(nheads_q).astype(np.float32) / 4
    return options
