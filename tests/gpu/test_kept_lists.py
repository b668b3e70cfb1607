"""With the tile lists that a `BlockMask` keeps, calls give the results of a first call, on any stream and in graphs."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import block_mask, reference
from rawattn._kernels.selection import only
from tests.gpu.gate import closed, of_torch, still_closed

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BATCH, HEADS, ROWS, KEYS = 2, 2, 520, 700
RNG = np.random.default_rng(0)
QKV = [
    RNG.standard_normal(shape).astype(BFLOAT16)
    for shape in ((BATCH, ROWS, 4, 64), (BATCH, KEYS, HEADS, 64), (BATCH, KEYS, HEADS, 64))
]
# The fractions of visible tiles of two masks. Their lists differ, and those of the second are longer.
SHARES = (0.25, 0.75)


def blocks(share: float) -> np.ndarray:
    kinds = np.random.default_rng(int(100 * share)).random((BATCH, HEADS, 9, 11)) < share
    return np.repeat(np.repeat(kinds, 64, 2), 64, 3)[:, :, :ROWS, :KEYS]


KEEPS = [blocks(share) for share in SHARES]


def bits(array: Any) -> bytes:
    return bytes(array.get().tobytes())


def call(mask: Any, given: Any = None) -> Any:
    return rawattn.attention(*(given or map(cupy.asarray, QKV)), mask=mask)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """The result for each mask, from lists made for a single call."""
    return [bits(call(block_mask(cupy.asarray(keep)))) for keep in KEEPS]


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("family", ["sm90", "portable"])
def test_two_masks_in_turn(family: str, options: dict[str, Any]) -> None:
    masks = [block_mask(cupy.asarray(keep)) for keep in KEEPS]
    given = list(map(cupy.asarray, QKV))
    with only(family):
        found = [rawattn.attention(*given, mask=masks[n % 2], **options) for n in range(6)]
    for n, keep in enumerate(KEEPS):
        exact = reference.attention(*QKV, mask=keep, **options)
        np.testing.assert_allclose(found[n].get().astype(np.float64), exact, atol=0.03)
        assert len({bits(x) for x in found[n::2]}) == 1
        assert masks[n].memo


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_two_masks_in_turn(deterministic: bool) -> None:
    masks = [block_mask(cupy.asarray(keep)) for keep in KEEPS]
    for n in (0, 1, 0, 1):
        out, lse = reference.attention(*QKV, mask=KEEPS[n], return_lse=True)
        dout = np.ones(out.shape, BFLOAT16)
        exact = reference.attention_backward(dout, *QKV, out, lse, mask=KEEPS[n])
        given = (dout, *QKV, out.astype(BFLOAT16), lse.astype(np.float32))
        got = rawattn.attention_backward(
            *map(cupy.asarray, given), mask=masks[n], deterministic=deterministic
        )
        for ours, wanted in zip(got[:3], exact[:3], strict=True):
            left = np.linalg.norm(ours.get().astype(np.float64) - wanted)
            assert left <= 0.02 * np.linalg.norm(wanted)


def test_another_stream_does_not_wait_for_them(expected: list[bytes]) -> None:
    """Another stream neither waits for lists that are still to be made nor reads them."""
    mask, given = block_mask(cupy.asarray(KEEPS[0])), list(map(cupy.asarray, QKV))
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for stream in (first, second):
        with stream:
            call(block_mask(cupy.asarray(KEEPS[1])))  # loads the kernels and allocates the counters
    cupy.cuda.Device().synchronize()
    with closed(first):
        with first:
            late = call(mask, given)
        for _ in range(2):
            with second:
                assert bits(call(mask, given)) == expected[0]
        assert still_closed(first)
    assert bits(late) == expected[0]


def test_masks_that_die_before_their_calls_are_done(expected: list[bytes]) -> None:
    """A mask may be freed while its calls still wait: the next mask's lists may take the same memory, on the same stream and on
    another."""
    given = list(map(cupy.asarray, QKV))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    call(block_mask(cupy.asarray(KEEPS[0])), given)
    words = [block_mask(cupy.asarray(keep)).buffers for keep in KEEPS]
    cupy.cuda.Device().synchronize()
    found = []
    with closed(streams[0]):
        for n in range(12):
            mask = rawattn.BlockMask(words[n % 2], KEEPS[0].shape)
            for stream in streams:
                with stream:
                    found.append((n % 2, call(mask, given)))
            del mask
    cupy.cuda.Device().synchronize()
    assert all(bits(out) == expected[n] for n, out in found)


def test_threads_with_their_own_streams(expected: list[bytes]) -> None:
    masks = [block_mask(cupy.asarray(keep)) for keep in KEEPS]
    given = list(map(cupy.asarray, QKV))
    cupy.cuda.Device().synchronize()
    wrong: list[int] = []

    def work(first: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            wrong.extend(
                n
                for n in range(20)
                if bits(call(masks[(first + n) % 2], given)) != expected[(first + n) % 2]
            )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_default_streams_of_threads(expected: list[bytes]) -> None:
    """Per-thread default streams have one handle, but a call does not read lists that another thread has yet to make."""
    mask, given = block_mask(cupy.asarray(KEEPS[0])), list(map(cupy.asarray, QKV))
    call(block_mask(cupy.asarray(KEEPS[1])), given)
    cupy.cuda.Device().synchronize()
    found: list[bytes] = []

    def work() -> None:
        with cupy.cuda.Stream.ptds:
            found.extend(bits(call(mask, given)) for _ in range(2))

    thread = threading.Thread(target=work)
    with closed(cupy.cuda.Stream.ptds):
        with cupy.cuda.Stream.ptds:
            late = call(mask, given)
        thread.start()
        thread.join()
        assert still_closed(cupy.cuda.Stream.ptds)
    with cupy.cuda.Stream.ptds:
        assert bits(late) == expected[0]
    assert found == [expected[0]] * 2


@pytest.mark.parametrize("known", [False, True])
def test_a_graph_owns_what_it_uses(known: bool, expected: list[bytes]) -> None:
    """A graph owns the lists that it uses, whether it is captured before the first call with the mask or after it."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mask, given = block_mask(cupy.asarray(KEEPS[0])), list(map(cupy.asarray, QKV))
        call(mask if known else block_mask(cupy.asarray(KEEPS[1])), given)
        stream.synchronize()
        stream.begin_capture()
        out = call(mask, given)
        graph = stream.end_capture()
        assert bool(mask.memo) == known
        assert bits(call(mask, given)) == expected[0]
        mask.memo.clear()
        others = [cupy.full(1 << n, 165, np.uint8) for n in range(9, 22) for _ in range(4)]
        for _ in range(2):
            out.fill(0)
            graph.launch(stream)
            assert bits(out) == expected[0]
        assert all(bool((other == 165).all()) for other in others)


def test_a_mask_that_a_graph_makes(expected: list[bytes]) -> None:
    """Calls outside the graph that makes a mask see the bits of its last replay."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given, keep = list(map(cupy.asarray, QKV)), cupy.asarray(KEEPS[0])
        call(block_mask(keep), given)
        stream.synchronize()
        stream.begin_capture()
        mask = block_mask(keep)
        graph = stream.end_capture()
        others = [cupy.full(1 << n, 165, np.uint8) for n in range(9, 22) for _ in range(4)]
        for n in (0, 1, 0):
            keep.set(KEEPS[n])
            graph.launch(stream)
            assert bits(call(mask, given)) == expected[n]
        assert all(bool((other == 165).all()) for other in others)


def test_tensors_of_torch(torch: Any) -> None:
    mask = block_mask(KEEPS[0])
    whole = torch.from_numpy(KEEPS[0]).cuda()
    given = [torch.from_numpy(x.astype(np.float32)).cuda().bfloat16() for x in QKV]
    wanted = rawattn.attention(*given, mask=whole)
    rawattn.attention(*given, mask=block_mask(KEEPS[1]))
    first = torch.cuda.Stream()
    mask.on_device_of(given[0])
    torch.cuda.synchronize()
    with closed(of_torch(first)):
        with torch.cuda.stream(first):
            late = rawattn.attention(*given, mask=mask)
        for _ in range(2):
            assert torch.equal(rawattn.attention(*given, mask=mask), wanted)
    assert torch.equal(late, wanted)
    assert mask.memo

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rawattn.attention(*given, mask=mask)
    mask.memo.clear()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_gradients_of_torch(torch: Any) -> None:
    from rawattn.torch import attention

    mask, found = block_mask(KEEPS[0]), []
    whole = torch.from_numpy(KEEPS[0]).cuda()
    for given in (whole, mask, mask):
        leaves = [torch.from_numpy(x.astype(np.float32)).cuda().requires_grad_() for x in QKV]
        attention(*leaves, mask=given).square().sum().backward()
        found.append([x.grad for x in leaves])
    for wanted, *ours in zip(*found, strict=True):
        for each in ours:
            torch.testing.assert_close(each, wanted, rtol=1e-3, atol=1e-3)
