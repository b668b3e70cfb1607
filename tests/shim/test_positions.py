"""Sequences that are parts of longer ones, in every kernel that asks which keys a row sees or where a score stands."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, SeqLayout
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.score_calls import BFLOAT16, normal
from tests.shim.whole import small_tiles, verify_backward, verify_forward

_SLOPES = np.array([0.5, 0.1], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (12, 4), "sink": 25},
    "left": {"window": (9, None), "sink": 60},
    "alibi": {"alibi_slopes": _SLOPES},
    "line": {"score_mod": ScoreMod("score + t[head] * (kv_idx - q_idx)", t=_SLOPES), "causal": True},
    "text": {"score_mod": ScoreMod("score + t[head] * sin(q_idx - 2 * kv_idx)", t=_SLOPES, wrt="t")},
    "bias": {"bias": normal(30, 44, dtype=np.float32), "causal": True},
}  # fmt: skip
# Keys before, around and behind the queries.
AT = {"position_q": [40, 0, 7], "position_k": [10, 300, 0]}
LAYOUTS = {
    "dense": SeqLayout(**AT),
    "padded": SeqLayout(seqlen_q=[30, 7, 21], seqlen_k=[44, 9, 0], **AT),
    "of-q": SeqLayout(position_q=AT["position_q"]),
}
PACKED = SeqLayout(seqstart_q=[0, 30, 37, 60], seqstart_k=[0, 44, 50, 90], **AT)


def arrays(dtype: Any, packed: bool) -> list[Any]:
    shapes = [(60,), (90,), (90,)] if packed else [(3, 30), (3, 44), (3, 44)]
    return [normal(*x, n, 16, dtype=dtype) for x, n in zip(shapes, (2, 1, 1), strict=True)]


def traits(case: tuple[str, str, bool]) -> Iterator[Hashable]:
    options, name, on_device = case
    yield options, name == "packed"
    yield name, on_device


each_call = pytest.mark.parametrize(
    ("options", "name", "on_device"),
    exhaustive.mark(
        itertools.product(OPTIONS, [*LAYOUTS, "packed"], [False, True]),
        traits,
        lambda case: [case[:2]],
    ),
)


@each_call
def test_portable(machine: MakeDevice, options: str, name: str, on_device: bool) -> None:
    seqs = LAYOUTS.get(name, PACKED)
    given = arrays(np.float32, name == "packed")
    with small_tiles():
        for check in (verify_forward, verify_backward):
            device = machine()
            check(device, "portable", *given, seqs=seqs, on_device=on_device, **OPTIONS[options])


@each_call
def test_hopper(hopper: MakeDevice, options: str, name: str, on_device: bool) -> None:
    seqs = LAYOUTS.get(name, PACKED)
    given = arrays(BFLOAT16, name == "packed")
    device = hopper(seed=7)
    verify_forward(device, "sm90", *given, seqs=seqs, on_device=on_device, **OPTIONS[options])


@pytest.mark.parametrize("options", ["causal", "window", "alibi", "text"])
def test_decoding(machine: MakeDevice, options: str) -> None:
    q, k, v = (normal(3, n, 2, 16, dtype=np.float32) for n in (1, 90, 90))
    for seqs in (SeqLayout(**AT), SeqLayout(seqlen_k=[90, 33, 1], **AT)):
        verify_forward(machine(), "decode", q, k, v, seqs=seqs, **OPTIONS[options])


def test_dbias_of_sequences_with_unlike_diagonals(machine: MakeDevice) -> None:
    """Sequences of equal lengths that share a bias, which one block reads for all, see different parts of it."""
    q, k, v = (normal(3, 30, 2, 16, dtype=np.float32) for _ in range(3))
    bias = normal(30, 30, dtype=np.float32)
    seqs = SeqLayout(position_q=[0, 20, 90])
    with small_tiles():
        verify_backward(machine(), "portable", q, k, v, seqs=seqs, bias=bias, causal=True)


@pytest.mark.parametrize("family", ["portable", "sm90"])
def test_lists_of_a_mask(machine: MakeDevice, hopper: MakeDevice, family: Any) -> None:
    """A mask's lists of tiles follow from positions too, so a mask does not keep them for other positions."""
    dtype, make = (BFLOAT16, hopper) if family == "sm90" else (np.float32, machine)
    given = arrays(dtype, packed=False)
    mask = rawattn.block_mask(np.random.default_rng(0).random((30, 44)) < 0.4)
    device = make()
    for positions in (AT["position_q"], [0, 90, 13]):
        seqs = SeqLayout(position_q=positions)
        verify_forward(device, family, *given, seqs=seqs, mask=mask, window=(20, 0), sink=3)
