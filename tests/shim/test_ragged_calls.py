"""Whole calls on packed and padded batches: few and many sequences, empty ones, padding rows, plans that leave padding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.options import Options
from rawattn._kernels.selection import only
from rawattn._kernels.sm90.forward_config import MOST_ORDERED
from rawattn._runtime import calls
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD
from tests.shim.device import Allocator, MakeDevice
from tests.shim.score_calls import BFLOAT16, normal
from tests.shim.shim import POISON
from tests.shim.whole import InMemory, _lengths_on, verify_forward

SETUP, CARRYING = "rawattn_ragged_setup", "rawattn_carrying_setup"
FILLED = (slice(5, 8), slice(25, 45))


def many(count: int) -> SeqLayout:
    """A layout of `count` sequences, every other one empty."""
    return SeqLayout(seqstart_q=np.cumsum([1, *([0, 3] * count)[:count]]))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("rows", "seqs"),
    [
        (13, SeqLayout(seqstart_q=[0, 4, 9, 13], seqlen_q=[0, 0, 0], seqlen_k=[0, 0, 0])),
        (13, SeqLayout(seqstart_q=[0, 0, 0, 0], seqstart_k=[0, 5, 9, 13])),
        (13, SeqLayout(seqstart_q=[2, 9])),
        (90, SeqLayout(seqstart_q=[5, 25, 45, 90], seqlen_q=[3, 20, 7], seqlen_k=[19, 0, 30])),
        (100, many(MOST_ORDERED)),
        (100, many(MOST_ORDERED + 1)),
    ],
    ids=["all-empty", "no-queries", "one", "gaps", "most", "more"],
)
def test_hopper(hopper: MakeDevice, rows: int, seqs: SeqLayout, on_device: bool) -> None:
    q, k, v = (normal(rows, heads, 16, dtype=BFLOAT16) for heads in (2, 1, 1))
    device = hopper(seed=3)
    verify_forward(device, "sm90", q, k, v, seqs=seqs, on_device=on_device, causal=True)
    # Ordering many sequences takes a launch of its own; with lengths on the host, that launch also carries them.
    setup = SETUP if on_device else CARRYING
    assert (setup in device.launched) == (seqs.batch > MOST_ORDERED)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("lens", [([0, 0, 0], [0, 0, 0]), ([9, 0, 3], [0, 9, 4])], ids=str)
def test_padded_batches(hopper: MakeDevice, lens: Sequence[list[int]], on_device: bool) -> None:
    q, k, v = (normal(3, 9, heads, 16, dtype=BFLOAT16) for heads in (2, 1, 1))
    seqs = SeqLayout(seqlen_q=lens[0], seqlen_k=lens[1])
    verify_forward(hopper(seed=5), "sm90", q, k, v, seqs=seqs, on_device=on_device)


@pytest.mark.parametrize("family", ["sm90", "portable"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("theirs", [("out",), ("lse",), ("out", "lse")], ids="-".join)
def test_a_plan_leaves_padding_rows_of_arrays_to_write(
    hopper: MakeDevice, family: Any, on_device: bool, theirs: tuple[str, ...]
) -> None:
    """A plan leaves padding rows of the caller's arrays alone, also between calls into its own arrays, where it fills them."""
    device, rows = hopper(seed=3), 60
    seqs = SeqLayout(seqstart_q=[5, 25, 45], seqlen_q=[3, 20], seqlen_k=[19, 4])
    given = with_arrays(FORWARD, Options(seqs=seqs))
    inputs = [
        InMemory(name, normal(rows, heads, 16, dtype=BFLOAT16))
        for name, heads in zip("qkv", (2, 1, 1), strict=True)
    ]
    device.memory += [x.memory for x in inputs]
    with only(family), _lengths_on(device) if on_device else nullcontext():
        call = calls.prepare(
            given.verb, [*inputs, None, None], given.options, True, 0, 0, "numpy", ()
        )
    own = call.prepared.plan_memory(Allocator(device), 0, call.lengths)
    real = np.zeros(rows, bool)
    for span in FILLED:
        real[span] = True
    for kept in (theirs, (), theirs):
        written = {}
        for n, shape, dtype in call.allocated_outputs:
            array = np.empty(shape, dtype)
            array.reshape(-1).view(np.uint8)[:] = POISON
            name = given.verb.outputs[n]
            written[name] = InMemory(name, array, readonly=False)
            device.memory.append(written[name].memory)
        addresses = [x.address for x in (*inputs, *written.values())]
        indices = [len(inputs) + n for n, name in enumerate(written) if name in kept]
        own.run(addresses, 0, None, indices)
        out = written["out"].array()[~real].view(np.uint8)
        lse = np.ascontiguousarray(written["lse"].array()[:, ~real])
        assert np.all(out == POISON) if "out" in kept else not np.any(out)
        assert np.all(lse.view(np.uint8) == POISON) if "lse" in kept else np.all(lse == -np.inf)
        assert not np.isnan(written["out"].array()[real].astype(np.float32)).any()
