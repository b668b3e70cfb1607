"""attn/schedule/order_sequences.cuh orders sequences as a stable sort does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import Case, padded, ragged
from tests.shim.cells import call_of
from tests.shim.launch import Machine, ordered
from tests.shim.shim import Builder

SMALL = {"nheads_q": 1, "nheads_kv": 1, "headdim": 1}


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    cases = []
    for batch in (1, 2, 5, 127, 128, 129, 300):
        # Few different lengths, so that many are equal: those must stay in the order of the batch.
        lens_q, lens_k = rng.integers(0, 40, batch).tolist(), rng.integers(0, 9, batch).tolist()
        cases.append(ragged(f"group-{batch}", lens_q, lens_k, **SMALL))
        for by in ("seqlen", "cu_seqlen"):
            knobs = {**SMALL, "by_q": by, "by_k": by, "integers": ("int32", "int64")[batch % 2]}
            cases.append(padded(f"padded-{by}-{batch}", lens_q, lens_k, 45, 10, **knobs))
    return [*cases, ragged("one-long", (3,) * 40, (*(7,) * 20, 500, *(7,) * 19), **SMALL)]


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("tile_q", [16, 128])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_longest_keys_first(case: Case, tile_q: int, wave: int, builder: Builder) -> None:
    found = ordered(call_of(case).forward().schedule(Machine(builder, wave), tile_q))

    expected = np.argsort(-np.array(case.lens_k), kind="stable")
    tiles = -(-np.array(case.lens_q)[expected] // tile_q)
    np.testing.assert_array_equal(found["sequence"][:-1], expected)
    np.testing.assert_array_equal(found["first_tile"], [0, *np.cumsum(tiles)])
    np.testing.assert_array_equal(found["tiled_length"][:-1], np.array(case.lens_q)[expected])
    np.testing.assert_array_equal(found["other_length"][:-1], np.array(case.lens_k)[expected])
