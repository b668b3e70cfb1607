"""Which calls with a mask make lists of its tiles, and which find kept ones. Launches are counted, not run."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, topk_mask
from rawattn._kernels.selection import only
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import prepared
from tests.counting_gpu import KEEP, KEYS, ROWS, Gpu
from tests.paged import paged


@pytest.fixture(params=["sm_80", "sm_90a"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, request.param)


def backward(gpu: Gpu, **options: Any) -> Callable[[], Any]:
    q, k, v = gpu.arrays()
    out, dout = gpu.put(np.zeros(q.shape, q.dtype)), gpu.put(np.zeros(q.shape, q.dtype))
    lse = gpu.put(np.zeros((2, 4, ROWS), np.float32))
    return lambda: rawattn.attention_backward(dout, q, k, v, out, lse, **options)


def test_calls_with_one_mask_share_its_lists(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    calls: list[Callable[[], Any]] = [
        lambda: rawattn.attention(*arrays, mask=mask),
        lambda: rawattn.attention(*arrays, mask=mask, causal=True),
        lambda: rawattn.attention_vjp(*arrays, mask=mask),
    ]
    assert [gpu.lists(call) for call in calls * 2] == [1] * 3 + [0] * 3
    assert gpu.lists(lambda: rawattn.attention(*gpu.arrays(), mask=mask)) == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_backwards_share_them(gpu: Gpu, deterministic: bool) -> None:
    call = backward(gpu, mask=gpu.mask(), deterministic=deterministic)
    assert [gpu.lists(call) for _ in range(3)] == [1 + deterministic, 0, 0]


def test_only_lists_are_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[str, int]] = []
    call = backward(gpu, mask=gpu.mask())

    def recorded(name: str) -> Callable[[int, int], Any]:
        take = getattr(gpu.own, name)

        def taken(nbytes: int, device: int) -> Any:
            sizes.append((name, nbytes))
            return take(nbytes, device)

        return taken

    for name in ("keep", "allocate"):
        monkeypatch.setattr(gpu.own, name, recorded(name))
    call(), call()
    (_, lists), *scratch = sizes
    assert [name for name, _ in sizes] == ["keep", "allocate", "allocate"]
    assert scratch[0] == scratch[1]
    gpu.capturing, gpu.own.current = True, 8
    call()
    assert sizes[-1] == ("allocate", lists + scratch[0][1])


def test_other_masks_of_the_same_form(gpu: Gpu) -> None:
    arrays, first = gpu.arrays(), gpu.mask()
    assert gpu.lists(lambda: rawattn.attention(*arrays, mask=first)) == 1
    second = gpu.mask(~KEEP)
    for mask in (second, copy.copy(first), pickle.loads(pickle.dumps(second))):
        mask._copies.update(second._copies)
        found = [gpu.lists(lambda mask=mask: rawattn.attention(*arrays, mask=mask)) for _ in "12"]  # type: ignore[misc]
        assert found == [1, 0]
    assert gpu.lists(lambda: rawattn.attention(*arrays, mask=first)) == 0


def test_other_calls_with_the_same_mask(gpu: Gpu) -> None:
    mask = gpu.mask(KEEP[:, :, :1])
    for dtype in (np.float16, np.float32):
        for rows in (ROWS, ROWS - 1):
            arrays = gpu.arrays(rows, dtype)
            found = [gpu.lists(lambda x=arrays: rawattn.attention(*x, mask=mask)) for _ in "12"]  # type: ignore[misc]
            assert found == [1, 0]


def test_each_stream_has_its_own(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    found = []
    for gpu.own.current in (0, 8, 0, 8, 16):
        found.append(gpu.lists(lambda: rawattn.attention(*arrays, mask=mask)))
    assert found == [1, 1, 0, 0, 1]


def test_default_streams_of_threads_have_their_own(gpu: Gpu) -> None:
    """Per-thread default streams, which share a handle, each have their own lists and their own counters."""
    mask, arrays, found = gpu.mask(), gpu.arrays(), []
    gpu.own.current = 2

    def work() -> None:
        for _ in range(2):
            found.append(gpu.lists(lambda: rawattn.attention(*arrays, mask=mask)))

    work()
    thread = threading.Thread(target=work)  # this thread lives on, so its identifier is not reused
    thread.start()
    thread.join()
    assert found == [1, 0, 1, 0]
    (call,) = {prepared for prepared, _ in mask.memo or {}}
    assert len(call.run_memory.counters) in (0, 2)


def test_a_graph_makes_its_own(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    found = []
    gpu.own.current = 8
    for gpu.capturing in (True, False, True, False):
        found.append(gpu.lists(lambda: rawattn.attention(*arrays, mask=mask)))
    assert found == [1, 1, 1, 0]


def test_a_mask_that_a_graph_fills(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    replayed = BlockMask(mask.buffers, mask.shape, replayed=True)
    replayed._copies.update(mask._copies)
    for each in (replayed, copy.copy(replayed)):
        each._copies.update(mask._copies)
        for _ in range(2):
            assert gpu.lists(lambda x=each: rawattn.attention(*arrays, mask=x)) == 1  # type: ignore[misc]


def test_bits_and_lists_of_bools_are_made_each_time(gpu: Gpu) -> None:
    keep, arrays = gpu.put(KEEP), gpu.arrays()
    for _ in range(3):
        assert gpu.lists(lambda: rawattn.attention(*arrays, mask=keep)) == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_lengths(gpu: Gpu, on_device: bool) -> None:
    lengths = np.array([150, 30], np.int32)
    mask, arrays = gpu.mask(), gpu.arrays()
    padded = SeqLayout(seqlen_q=gpu.put(lengths) if on_device else lengths)
    for _ in range(2):
        assert gpu.lists(lambda: rawattn.attention(*arrays, mask=mask, seqs=padded)) == 1
    assert not mask.memo


def test_pages(gpu: Gpu) -> None:
    call = paged((70, 3, 129), 16, rows=90)
    mask, inputs = gpu.mask(np.ones((1, 2, 90, 200), bool)), list(map(gpu.put, call.inputs[:4]))
    lengths = gpu.put(call.seqlen_k)
    for _ in range(2):
        found = gpu.lists(lambda: rawattn.paged_attention(*inputs, seqlen_k=lengths, mask=mask))
        assert found == 1
    assert not mask.memo


def test_kept_keys_are_gathered_each_time(gpu: Gpu) -> None:
    """Each call gathers the kept keys by one launch, which also makes the lists."""
    mask, arrays = topk_mask(np.arange(2 * KEYS).reshape(2, 1, 1, KEYS), 40), gpu.arrays()
    mask._copies["", 0] = tuple(map(gpu.put, mask.arrays))
    for _ in range(2):
        before = len(gpu.device.launched)
        rawattn.attention(*arrays, mask=mask)
        setup, attention = gpu.device.launched[before:]
        assert setup == "rawattn_kept_setup"
        assert attention.endswith("_forward")
    assert not mask.memo


def test_a_plan_makes_them_in_each_call(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    with only("portable"):
        planned = rawattn.plan(rawattn.attention, *arrays, mask=mask)
        rawattn.attention(*arrays, mask=mask)
    for _ in range(2):
        assert gpu.lists(lambda: planned(*arrays)) == 1


def test_a_mask_keeps_few_of_them(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    for gpu.own.current in range(0, 8 * 3 * prepared._MAX_LISTED, 8):
        call = lambda: rawattn.attention(*arrays, mask=mask)  # noqa: E731
        assert [gpu.lists(call), gpu.lists(call)] == [1, 0]
        assert mask.memo is not None
        assert len(mask.memo) <= prepared._MAX_LISTED


def test_they_go_with_the_mask(gpu: Gpu) -> None:
    mask = gpu.mask()
    rawattn.attention(*gpu.arrays(), mask=mask)
    assert mask.memo is not None
    ((owner, _),) = mask.memo.values()
    gone = weakref.ref(owner)
    del owner, mask
    assert gone() is None


def test_no_memory_to_keep(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(nbytes: int, device: int) -> Any:
        raise MemoryError

    mask, arrays = gpu.mask(), gpu.arrays()
    with monkeypatch.context() as patched:
        rawattn.attention(*arrays, mask=gpu.mask())  # its counters are kept from here on
        patched.setattr(gpu.own, "keep", keep)
        for _ in range(2):
            assert gpu.lists(lambda: rawattn.attention(*arrays, mask=mask)) == 1
    assert not mask.memo


def test_a_launch_that_fails_keeps_nothing(gpu: Gpu) -> None:
    mask, arrays = gpu.mask(), gpu.arrays()
    run = gpu.device._machine.run

    def failing(source: Any, *given: Any, **more: Any) -> None:
        if source.entry != "rawattn_mask_tiles":
            raise RuntimeError("no launch")

    gpu.device._machine.run = failing
    with pytest.raises(RuntimeError, match="no launch"):
        rawattn.attention(*arrays, mask=mask)
    gpu.device._machine.run = run
    assert gpu.lists(lambda: rawattn.attention(*arrays, mask=mask)) == 1
