"""Repeated calls whose options are arrays, masks or layouts, and what the fast path reads of arrays."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from rawattn._interop import native
from rawattn._verbs import fast_path
from tests.fast_path_fakes import (
    SHAPE,
    Array,
    Framework,
    arrays,
    bias,
    called_anew,
    known,
    of_backward,
)


def test_a_repeated_call_is_launched_with_the_arrays_of_its_options(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), causal=True, bias=bias()))
    q, k, v = arrays(64)
    other = bias(1 << 18)
    out = rawattn.attention(q, k, v, causal=True, bias=other)
    assert gpu.launched[-1] == [q.address, k.address, v.address, other.address, out.address, 0]
    slopes = Array(1 << 19, (2,))
    known(gpu, lambda: rawattn.attention(q, k, v, bias=other, alibi_slopes=slopes, out=out))
    found = [x.address for x in (q, k, v, other, slopes, out)]
    assert gpu.launched[-1] == [*found, 0]
    with pytest.raises(ValueError, match=r"^out: shares memory with"):
        rawattn.attention(q, k, v, bias=other, alibi_slopes=slopes, out=Array(other.address))


def test_a_repeated_backward_with_a_bias(gpu: Framework) -> None:
    given = of_backward()
    known(gpu, lambda: rawattn.attention_backward(*given, bias=bias()))
    found = rawattn.attention_backward(*given, bias=bias(1 << 20))
    made = [x.address for x in (*found[:3], found.dbias)]
    assert gpu.launched[-1] == [*(x.address for x in given), 0, 1 << 20, *made]
    # Gradients of some options only: want_dbias=False leaves dbias out.
    alone = lambda: rawattn.attention_backward(*given, bias=bias(), want_dbias=False)  # noqa: E731
    known(gpu, alone)
    assert gpu.launched[-1][:8] == [*(x.address for x in given), 0, 1 << 16]
    assert alone().dbias is None


def test_the_order_in_which_arrays_of_options_are_spelled_does_not_matter(gpu: Framework) -> None:
    q, k, v = arrays()
    slopes = Array(1 << 19, (2,))
    slopes.dtype = np.dtype(np.float32)
    known(gpu, lambda: rawattn.attention(q, k, v, alibi_slopes=slopes, bias=bias()))
    assert gpu.launched[-1][3:5] == [1 << 16, 1 << 19]
    given = of_backward()
    dlse = Array(1 << 21, (1, 2, 4))
    dlse.dtype = np.dtype(np.float32)
    for options in ({"bias": bias(), "dlse": dlse}, {"dlse": dlse, "bias": bias()}):
        known(gpu, lambda options=options: rawattn.attention_backward(*given, **options))
        assert gpu.launched[-1][6:8] == [1 << 21, 1 << 16]


def of_mask(monkeypatch: pytest.MonkeyPatch, first: int) -> tuple[rawattn.BlockMask, list[int]]:
    """A mask with fake arrays of this test's framework, and their addresses."""
    mask = rawattn.block_mask(np.ones((4, 4), bool))
    copies = []
    for n, words in enumerate(mask.arrays):
        array = Array(first + (n << 12), words.shape)
        array.dtype = words.dtype
        copies.append(array)
    monkeypatch.setitem(beside, mask.handle, tuple(copies))
    return mask, [x.address for x in copies]


beside: dict[Any, tuple[Array, ...]] = {}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_repeated_call_is_given_the_arrays_of_its_mask_and_its_memo(
    backward: bool, gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawattn.BlockMask, "on_device_of", lambda mask, q: beside[mask.handle])
    (one, _), (other, words) = (of_mask(monkeypatch, n << 24) for n in (1, 2))
    given = of_backward() if backward else arrays()
    call: Any = rawattn.attention_backward if backward else rawattn.attention
    known(gpu, lambda: call(*given, causal=True, mask=one))
    assert gpu.lengths[-1] is one.memo
    result = call(*given, causal=True, mask=other)
    assert gpu.lengths[-1] is other.memo
    made = [x.address for x in result[:3]] if backward else [result.address, 0]
    assert gpu.launched[-1] == [*(x.address for x in given), *[0] * backward, *words, *made]
    if not backward:
        out = Array(1 << 30)
        known(gpu, lambda: call(*given, causal=True, mask=other, out=out))
        assert gpu.launched[-1] == [*(x.address for x in given), *words, out.address, 0]
    assert called_anew(gpu, lambda: call(*given, causal=False, mask=other))


def test_arrays_of_options_of_another_form(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), bias=bias()))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=bias(shape=(1, 4, 4))))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=None))
    mask = bias()
    mask.dtype = np.dtype(np.bool_)
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), mask=mask))
    # The choice of kernels depends on the alignment of such an array to 16 bytes.
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=bias((1 << 16) + 4)))


def test_a_gradient_of_an_array_of_options_is_not_lost(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), bias=bias()))
    refused: list[Any] = []
    monkeypatch.setattr(
        fast_path, "refuse_gradients_of_read", lambda _, names, x: refused.append(list(names))
    )
    tracked = bias()
    tracked.tracked = True
    rawattn.attention(*arrays(), bias=tracked)
    assert refused == [["q", "k", "v", "bias"]]


def test_layouts_of_one_structure_share_a_call_and_keep_their_lengths(gpu: Framework) -> None:
    packed = arrays(shape=(10, 2, 8))
    kept = SeqLayout(seqstart_q=[0, 4, 10])
    known(gpu, lambda: rawattn.attention(*packed, seqs=kept))
    assert not called_anew(
        gpu, lambda: rawattn.attention(*packed, seqs=SeqLayout(seqstart_q=[0, 6, 10]))
    )
    assert gpu.lengths[-1].q.start.tolist() == [0, 6, 10]
    assert called_anew(gpu, lambda: rawattn.attention(*packed, seqs=SeqLayout(seqstart_q=[0, 10])))
    for wrong in (SeqLayout(seqstart_q=[0, 4, 11]), SeqLayout(seqlen_q=[3])):
        with pytest.raises(ValueError, match=r"^seqs|^seqstart_q"):
            rawattn.attention(*packed, seqs=wrong)
    with pytest.raises(TypeError, match=r"^seqs"):
        rawattn.attention(*packed, seqs=[0, 4, 10])


def test_readers_read_what_is_given() -> None:
    own = Framework()
    q, k, v = arrays(4)
    addresses, form, tracked = own.read((q, None, v), 1) or ([], (), True)
    assert addresses == [q.address, 0, v.address]
    each = (SHAPE, True, np.dtype(np.float16), 0)
    assert form == (*each, None, *each, 4)
    assert not tracked
    k.tracked = True
    assert own.reader(2)(q, k)[2]  # type: ignore[index]
    assert own.read((q, None, v), 2) is None
    assert own.read((q, np.zeros(3), v), 3) is None


@pytest.mark.frameworks
def test_tensors_that_are_not_plain_are_not_read() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    from rawattn._interop.native import native_of

    own = native_of("torch")
    assert own is not None
    x = torch.zeros(1, 4, 2, 8)
    sparse = x.to_sparse()
    negated = torch.zeros(1, 4, dtype=torch.complex64).conj().imag
    assert [own.read((one,), 1) for one in (x, sparse, negated)] == [None] * 3


@pytest.mark.frameworks
def test_tensors_without_memory_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on a GPU whose storage is freed never reaches a kernel: its address is 0. One without elements is read."""
    torch = pytest.importorskip("torch")
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, alloc=None, get_current_stream=None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    plain = "({x}t := {x}.dtype) is not None and ({x}_ := 0) == 0"  # as if on GPU 0
    attributes = replace(native.Torch().attributes, plain=plain)
    read = attributes.reader((True, False, True))
    x, freed = torch.zeros(1, 4), torch.zeros(1, 4)
    freed.untyped_storage().resize_(0)
    for other in (freed, torch._efficientzerotensor((1, 4))):
        assert read(x, None, other) is None
    assert read(x, None, x)[0] == [x.data_ptr(), 0, x.data_ptr()]
    assert read(x, None, x[:0])[0] == [x.data_ptr(), 0, 0]
