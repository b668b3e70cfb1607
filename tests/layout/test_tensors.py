"""Lengths in tensors of torch's on a GPU: read by their attributes, CuPy's arrays only where somebody asks for them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call import integers
from rawattn._call.pages import PagedLayout
from rawattn._call.structure import structure
from rawattn._interop import dlpack
from rawattn._interop.integers import TensorIntegers
from rawattn._jax.record import with_operands
from tests.layout.on_device import OnDevice, group, spans


class Tensor:
    """Stands for torch's."""

    def __init__(self, values: list[int], dtype: Any = np.int32) -> None:
        self.values, self.dtype = values, np.dtype(dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[OnDevice]:
    """What stands for arrays of CuPy's over tensors, as they are made."""
    found: list[OnDevice] = []

    def of_torch(tensor: Tensor) -> TensorIntegers:
        return TensorIntegers(1 << 20, len(tensor.values), tensor.dtype, 3, tensor)

    def device_array(address: int, shape: Any, dtype: Any, strides: Any, device: int, owner: Any) -> OnDevice:  # fmt: skip
        assert (address, strides, device) == (1 << 20, None, 3)
        array = OnDevice(owner.values, dtype)
        assert array.shape == shape
        array.data = SimpleNamespace(ptr=address, device_id=device)  # type: ignore[attr-defined]
        found.append(array)
        return array

    framework_of = integers.framework_of
    monkeypatch.setattr(
        integers, "framework_of", lambda x: "torch" if type(x) is Tensor else framework_of(x)
    )
    monkeypatch.setattr(integers, "of_torch", of_torch)
    monkeypatch.setattr(dlpack, "device_array", device_array)
    return found


def test_a_call_makes_no_array(made: list[OnDevice]) -> None:
    seqs = SeqLayout(seqstart_q=Tensor([0, 3, 5]), max_seqlen_q=4, max_seqlen_k=4)
    lengths = group(seqs, 5, 5)
    form = structure(lengths)
    assert (form.batch, form.packed, form.on_host, form.devices) == (2, True, False, (3,))
    assert (form.q.start, form.q.length, form.q.length_bound) == (4, 0, 4)
    assert lengths.q.start.data.ptr == 1 << 20
    assert lengths.k is lengths.q
    assert not made


def test_attributes_are_arrays(made: list[OnDevice]) -> None:
    starts, lengths = Tensor([0, 3, 5], np.int64), Tensor([2, 2])
    seqs = SeqLayout(seqstart_q=starts, seqlen_q=lengths, seqlen_k=[1, 2])
    array = seqs.seqstart_q
    assert made == [array]
    assert seqs.seqstart_q is array
    assert (array.size, array.dtype) == (3, np.int64)
    assert seqs.seqlen_q.size == 2
    assert isinstance(seqs.seqlen_k, np.ndarray)
    assert seqs.seqstart_k is None
    assert repr(seqs) == (
        "SeqLayout(seqstart_q=<3 int64 on a GPU>, seqlen_q=<2 int32 on a GPU>, seqlen_k=[1, 2])"
    )


def test_they_are_read_back_as_arrays_are(made: list[OnDevice]) -> None:
    seqs = SeqLayout(seqstart_q=Tensor([0, 3, 5]))
    seqs.seqstart_q.readable = True
    expected = {"start_q": [0, 3], "len_q": [3, 2], "start_k": [0, 3], "len_k": [3, 2]}
    assert spans(group(seqs, 5, 5)) == expected


def test_a_copy_has_memory_of_its_own(made: list[OnDevice]) -> None:
    seqs = SeqLayout(seqstart_q=Tensor([0, 3, 5]))
    copied = copy.deepcopy(seqs)
    assert type(copied._q.start) is OnDevice
    assert copied.seqstart_q is copied._q.start
    assert copied.seqstart_q is not seqs.seqstart_q


def test_programs_of_jax_get_arrays(made: list[OnDevice]) -> None:
    _, operands = with_operands(group(SeqLayout(seqstart_q=Tensor([0, 3, 5])), 5, 5))
    assert operands == made
    assert len(made) == 1


def test_pages_have_arrays(made: list[OnDevice]) -> None:
    layout = PagedLayout(SeqLayout(seqstart_q=Tensor([0, 1, 2])), Tensor([3, 4]), Tensor([0, 1, 2]))
    assert [layout.seqlen_k, layout.indptr] == made
    assert layout.seqstart_q is made[2]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("seqstart_k", [0, 1], r"seqstart_k: got 2 entries, expected 3"),
        ("seqlen_q", [0], r"seqlen_q: got 1 entries, expected 2"),
    ],
)
def test_of_another_batch(made: list[OnDevice], name: str, values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeqLayout(seqstart_q=Tensor([0, 3, 5]), **{name: Tensor(values)})
    assert not made


def test_the_class_has_no_integers() -> None:
    with pytest.raises(AttributeError, match="seqlen_q"):
        SeqLayout.seqlen_q  # noqa: B018
