"""Counters that one launch of a run leaves for another: no other run may come in between. Launches are recorded, not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, SeqLayout
from rawattn._kernels import params, structs
from rawattn._runtime import on_gpu
from tests.counting_gpu import KEYS, ROWS, Gpu

# Where the address of the sums of captured gradients is in the parameters of the kernels that use it.
SUMS_AT = {
    "rawattn_backward_dq": structs.offset(params.BACKWARD, "captured_sums"),
    "rawattn_backward_captured": structs.offset(params.CAPTURED_GRADIENT, "sums"),
}
ADDS, CLEARS = SUMS_AT


class Sums:
    """Records which sums are used: (entry, address) of each launch. before: called before each of these launches."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used: list[tuple[str, int]] = []
        self.before: Callable[[str], None] = lambda entry: None
        monkeypatch.setattr(gpu.device._machine, "run", self._run, raising=False)

    def _run(self, source: Any, *parameters: Any, **more: Any) -> None:
        if source.entry in SUMS_AT:
            self.before(source.entry)
            at = SUMS_AT[source.entry]
            address = parameters[0].tobytes()[at : at + 8]
            self.used.append((source.entry, int.from_bytes(address, "little")))

    def addresses(self) -> list[int]:
        """The sums of the runs since the last time, each of which adds to its own and clears the same ones."""
        used, self.used = self.used, []
        assert [entry for entry, _ in used] == [ADDS, CLEARS] * (len(used) // 2)
        assert used[::2] == [(ADDS, address) for _, address in used[1::2]]
        return [address for _, address in used[::2]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, "sm_80")


@pytest.fixture
def sums(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Sums:
    return Sums(gpu, monkeypatch)


@pytest.fixture(params=["dense", "ragged"])
def call(request: pytest.FixtureRequest, gpu: Gpu) -> Callable[[], Any]:
    """A backward with the gradient of a captured array."""
    q, k, v = gpu.arrays()
    lengths = np.array([ROWS, 7], np.int32), np.array([KEYS, 9], np.int32)
    seqs = (
        SeqLayout(seqlen_q=lengths[0], seqlen_k=lengths[1]) if request.param == "ragged" else None
    )
    out, dout = gpu.put(np.zeros(q.shape, q.dtype)), gpu.put(np.zeros(q.shape, q.dtype))
    lse = gpu.put(np.zeros((2, 4, ROWS), np.float32))
    slope = gpu.put(np.ones(4, np.float32))
    score_mod = ScoreMod("score * slope[head]", wrt="slope", slope=slope)
    return lambda: rawattn.attention_backward(
        dout, q, k, v, out, lse, seqs=seqs, score_mod=score_mod
    )


def test_runs_one_after_the_other_share_them(call: Callable[[], Any], sums: Sums) -> None:
    for _ in range(5):
        call()
    found = sums.addresses()
    assert len(found) == 5 and len({*found}) == 1


def test_another_run_between_two_launches(call: Callable[[], Any], sums: Sums) -> None:
    """Another thread may launch on the same stream at any time. The sums of both runs would be mixed."""
    for _ in range(3):
        call()
    sums.addresses()
    inner: list[tuple[str, int]] = []

    def meanwhile(entry: str) -> None:
        if entry == CLEARS and not inner:
            outer, sums.used, sums.before = sums.used, [], lambda entry: None
            call()
            inner.extend(sums.used)
            sums.used = outer

    sums.before = meanwhile
    call()
    (outer,) = sums.addresses()
    sums.used = inner
    assert sums.addresses() != [outer]
    call()
    assert len(sums.addresses()) == 1


def test_a_run_that_fails_leaves_none(
    call: Callable[[], Any], gpu: Gpu, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch may be refused, or the user may interrupt Python between two launches."""
    for _ in range(3):
        call()
    cleared: list[int] = []

    def interrupted(entry: str) -> None:
        if entry == CLEARS:
            raise KeyboardInterrupt

    sums.before = interrupted
    with pytest.raises(KeyboardInterrupt):
        call()
    sums.used.clear()
    sums.before = lambda entry: None
    (found,) = on_gpu._prepared.values()
    zeros = found.prepared.run_memory.zeros

    def recorded(stream: int, memory: Any) -> Any:
        made = zeros(stream, memory)
        cleared.extend(made[1])
        return made

    monkeypatch.setattr(found.prepared.run_memory, "zeros", recorded)
    for _ in range(2):
        call()
    assert sums.addresses() == cleared * 2


def test_counters_of_one_launch_stay_shared(gpu: Gpu) -> None:
    rawattn.attention(*gpu.arrays(), mask=gpu.mask(), causal=True)
    (found,) = on_gpu._prepared.values()
    assert not found.prepared.run_memory.spans_launches
