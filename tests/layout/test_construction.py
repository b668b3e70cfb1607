"""SeqLayout: what it accepts and what it refuses."""

from __future__ import annotations

import doctest
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from rawattn._call import seq_layout
from rawattn._call.seq_layout import SeqLayout
from tests.layout.on_device import OnDevice, batch, group, spans


def test_examples_of_the_docstring() -> None:
    failed, run = doctest.testmod(seq_layout)
    assert run > 0
    assert failed == 0


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        pytest.param([0, 3, 8], np.int64, id="list"),
        pytest.param((0, 3, 8), np.int64, id="tuple"),
        pytest.param(np.array([0, 3, 8], np.int32), np.int32, id="int32"),
        pytest.param(np.array([0, 3, 8], np.int64), np.int64, id="int64"),
        pytest.param(np.array([0, 9, 3, 9, 8], np.int32)[::2], np.int32, id="strided"),
    ],
)
def test_host_integers_become_private_contiguous_arrays(values: Any, dtype: Any) -> None:
    seqs = SeqLayout(seqstart_q=values)
    assert (seqs.batch, seqs.packed) == (2, True)
    assert seqs.seqstart_q.tolist() == [0, 3, 8]
    assert seqs.seqstart_q.dtype == dtype
    assert seqs.seqstart_q.flags.c_contiguous
    assert not seqs.seqstart_q.flags.writeable


def test_later_changes_of_a_host_array_do_not_reach_the_layout() -> None:
    lengths = np.array([3, 5])
    seqs = SeqLayout(seqlen_k=lengths)
    lengths[:] = 100
    assert spans(batch(seqs, 2, 4, 8))["len_k"] == [3, 5]


def test_a_layout_is_immutable_and_equal_to_itself_alone() -> None:
    seqs, twin = SeqLayout(seqstart_q=[0, 3]), SeqLayout(seqstart_q=[0, 3])
    with pytest.raises(FrozenInstanceError):
        seqs.seqstart_q = [0, 4]  # type: ignore[misc]
    assert seqs == seqs  # noqa: PLR0124
    assert seqs != twin
    assert len({seqs, twin}) == 2


def test_a_layout_can_be_replaced_and_pickled() -> None:
    seqs = SeqLayout(seqstart_q=[0, 3, 8])
    for same in (replace(seqs, max_seqlen_k=5), pickle.loads(pickle.dumps(seqs))):
        assert same.seqstart_q.tolist() == [0, 3, 8]
        assert spans(group(same, 8, 8))["len_k"] == [3, 5]
    assert replace(seqs, max_seqlen_k=5).max_seqlen_k == 5


def test_repr_is_short_and_reads_no_device_array() -> None:
    seqs = SeqLayout(
        seqstart_q=list(range(100)), seqlen_q=OnDevice([1] * 99), seqlen_k=[1] * 99, max_seqlen_k=7
    )
    assert repr(seqs) == (
        "SeqLayout(seqstart_q=<100 int64 on the host>, seqlen_q=<99 int32 on a GPU>, "
        "seqlen_k=<99 int64 on the host>, max_seqlen_k=7)"
    )
    assert repr(SeqLayout(cu_seqlen_q=[0, 2])) == "SeqLayout(cu_seqlen_q=[0, 2])"


def test_an_empty_layout_is_that_of_a_dense_batch() -> None:
    seqs = SeqLayout()
    assert (seqs.batch, seqs.packed) == (None, False)
    lengths = batch(seqs, 3, 4, 5)
    assert spans(lengths) == {
        "start_q": [0, 0, 0],
        "len_q": [4, 4, 4],
        "start_k": [0, 0, 0],
        "len_k": [5, 5, 5],
    }
    assert (lengths.q.length, lengths.k.length, lengths.q.padded) == (None, None, False)


# Each row: id, arguments, error, what the message says in this order (name, got, accepted).
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("scalar", {"seqlen_q": np.array(3)}, ValueError, r"seqlen_q: .*\(\).*\(batch,\)"),
    ("two-axes", {"seqlen_k": [[3]]}, ValueError, r"seqlen_k: .*\(1, 1\).*\(batch,\)"),
    ("no-start", {"seqstart_q": []}, ValueError, r"seqstart_q: .*\(0,\).*\(batch \+ 1,\)"),
    ("no-cu", {"cu_seqlen_q": []}, ValueError, r"cu_seqlen_q: .*\(0,\).*\(batch \+ 1,\)"),
    ("floats", {"seqlen_q": [1.0]}, TypeError, r"seqlen_q: .*float64.*int32 and int64"),
    ("float-array", {"seqstart_q": np.zeros(2, np.float32)}, TypeError, r"seqstart_q: .*float32"),
    ("bools", {"cu_seqlen_k": [True, True]}, TypeError, r"cu_seqlen_k: .*bool"),
    ("int16", {"seqlen_q": np.ones(2, np.int16)}, TypeError, r"seqlen_q: .*int16.*int32"),
    ("text", {"seqlen_q": "12"}, TypeError, r"seqlen_q: .*str"),
    (
        "past-int64",
        {"seqlen_q": [2**63, 1]},
        ValueError,
        r"seqlen_q: got 9223372036854775808 in a list, expected integers that fit int64",
    ),
    (
        "one-length",
        {"seqlen_k": 7},
        TypeError,
        r"seqlen_k: got the int 7, expected .*\[7\] for a batch of one.*max_seqlen_k=7",
    ),
    (
        "one-numpy-length",
        {"seqlen_q": np.int64(7)},
        TypeError,
        r"seqlen_q: got the int 7, expected .*\[7\] \* batch",
    ),
    (
        "one-start",
        {"seqstart_q": 7},
        TypeError,
        r"seqstart_q: got the int 7, expected .*\[0, 7\] for one sequence of 7 rows",
    ),
    ("one-bool", {"seqlen_q": True}, TypeError, r"seqlen_q: got bool"),
    ("starts-fall", {"seqstart_q": [0, 6, 5]}, ValueError, r"seqstart_q: .*5 after 6.*index 2"),
    ("starts-below-0", {"seqstart_q": [-2, 3]}, ValueError, r"seqstart_q: .*-2.*>= 0"),
    (
        "k-starts-fall",
        {"seqstart_q": [0, 1, 2], "seqstart_k": [4, 3, 9]},
        ValueError,
        r"seqstart_k: .*3 after 4.*index 1.*not decrease",
    ),
    ("cu-falls", {"cu_seqlen_k": [0, 6, 5]}, ValueError, r"cu_seqlen_k: .*5 after 6.*not decrease"),
    ("cu-below-0", {"cu_seqlen_q": [-1, 5]}, ValueError, r"cu_seqlen_q: .*-1.*>= 0"),
    (
        "cu-wraps-around",
        {"cu_seqlen_q": [2**63 - 1, -(2**63)]},
        ValueError,
        r"cu_seqlen_q: .*after.*not decrease",
    ),
    ("length-below-0", {"seqlen_q": [3, -4]}, ValueError, r"seqlen_q: .*-4.*index 1.*>= 0"),
    (
        "past-its-room",
        {"seqstart_q": [2, 5, 9], "seqlen_q": [3, 5]},
        ValueError,
        r"seqlen_q: .*5 for sequence 1.*at most 4.*seqstart_q",
    ),
    (
        "k-past-its-room",
        {"seqstart_q": [2, 5, 9], "seqstart_k": [0, 1, 2], "cu_seqlen_k": [4, 5, 7]},
        ValueError,
        r"cu_seqlen_k: .*2 for sequence 1.*at most 1.*seqstart_k",
    ),
    (
        "past-the-room-of-q",
        {"seqstart_q": [2, 5, 9], "seqlen_k": [4, 4]},
        ValueError,
        r"seqlen_k: .*4 for sequence 0.*at most 3.*seqstart_k \(by default seqstart_q\)",
    ),
    (
        "k-starts-alone",
        {"seqstart_k": [0, 3]},
        ValueError,
        r"seqstart_k: .*without seqstart_q.*expected both",
    ),
    (
        "batches-differ",
        {"seqstart_q": [0, 3, 5], "seqlen_k": [1, 2, 2]},
        ValueError,
        r"seqlen_k: .*3 entries, expected 2: seqstart_q.*2 sequences",
    ),
    (
        "cumulative-batches-differ",
        {"seqlen_q": [3], "cu_seqlen_q": [0, 1, 2]},
        ValueError,
        r"cu_seqlen_q: .*3 entries, expected 2: seqlen_q.*1 sequences",
    ),
    (
        "device-batch-differs",
        {"seqlen_q": [3], "seqlen_k": OnDevice([1, 2])},
        ValueError,
        r"seqlen_k: .*2 entries, expected 1",
    ),
    (
        "device-two-axes",
        {"seqlen_k": OnDevice([[1, 2]])},
        ValueError,
        r"seqlen_k: .*\(1, 2\).*\(batch,\)",
    ),
    (
        "device-strided",
        {"seqlen_k": OnDevice([1, 2], contiguous=False)},
        ValueError,
        r"seqlen_k: .*stride 8 bytes.*contiguous.*copy",
    ),
    ("max-below-0", {"max_seqlen_q": -1}, ValueError, r"max_seqlen_q: .*-1.*>= 0"),
    ("max-float", {"max_seqlen_q": 4.0}, TypeError, r"max_seqlen_q: .*float.*int >= 0"),
    ("max-bool", {"max_seqlen_k": True}, TypeError, r"max_seqlen_k: .*bool.*int >= 0"),
    (
        "max-below-a-length",
        {"seqlen_k": [2, 7], "max_seqlen_k": 6},
        ValueError,
        r"max_seqlen_k: .*6.*at least 7.*seqlen_k",
    ),
    (
        "max-below-a-slot",
        {"seqstart_q": [0, 2, 9], "max_seqlen_q": 6},
        ValueError,
        r"max_seqlen_q: .*6.*at least 7.*seqstart_q",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "says"), [pytest.param(*row, id=name) for name, *row in REFUSED]
)
def test_construction_refuses(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        SeqLayout(**arguments)
