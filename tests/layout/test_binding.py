"""A layout and the arrays of a call: where its sequences lie, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from rawattn._call.binding import bind
from rawattn._call.integers import LONGEST
from rawattn._call.seq_layout import SeqLayout
from tests.layout.on_device import OnDevice, batch, group, later, spans

MISFITS: list[tuple[str, Any, int | None, int, int, type[Exception], str]] = [
    (
        "max-below-a-shared-slot",
        later(seqstart_q=[0, 2, 9], max_seqlen_k=6),
        *(None, 9, 9),
        ValueError,
        r"max_seqlen_k: .*6.*at least 7.*by default seqstart_q",
    ),
    ("no-layout", [0, 5], None, 5, 5, TypeError, r"seqs: got list, expected a SeqLayout"),
    ("packed-without", None, None, 5, 5, ValueError, r"seqs: got None.*seqstart_q"),
    (
        "packed-without-starts",
        later(cu_seqlen_q=[0, 5]),
        None,
        5,
        5,
        ValueError,
        r"seqs: got a SeqLayout without seqstart_q.*expected SeqLayout\(seqstart_q",
    ),
    (
        "starts-in-batch-mode",
        later(seqstart_q=[0, 5]),
        1,
        5,
        5,
        ValueError,
        r"seqs: got seqstart_q.*four axes.*expected lengths alone",
    ),
    (
        "batch-of-another-size",
        later(seqlen_k=[1, 2, 3]),
        2,
        5,
        5,
        ValueError,
        r"seqs: .*3 sequences, expected 2",
    ),
    (
        "end-past-q",
        later(seqstart_q=[0, 6], seqstart_k=[0, 5]),
        None,
        5,
        5,
        ValueError,
        r"seqstart_q: .*6, expected at most 5, the rows of q",
    ),
    (
        "end-past-k",
        later(seqstart_q=[0, 5], seqstart_k=[0, 6]),
        None,
        5,
        5,
        ValueError,
        r"seqstart_k: .*6, expected at most 5, the rows of k",
    ),
    (
        "shared-starts-but-fewer-keys",
        later(seqstart_q=[0, 6]),
        None,
        6,
        5,
        ValueError,
        r"seqstart_k: got None.*seqstart_q.*q has 6 rows and k has 5; pass seqstart_k",
    ),
    (
        "shared-starts-but-more-keys",
        later(seqstart_q=[0, 3, 5], seqlen_k=[2, 2]),
        None,
        5,
        9,
        ValueError,
        r"seqstart_k: got None.*seqstart_q.*q has 5 rows and k has 9; pass seqstart_k",
    ),
    (
        "shared-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6])),
        None,
        6,
        7,
        ValueError,
        r"seqstart_k: got None.*q has 6 rows and k has 7",
    ),
    (
        "start-past-q-in-an-empty-batch",
        later(seqstart_q=[6]),
        None,
        5,
        6,
        ValueError,
        r"seqstart_q: .*6, expected at most 5",
    ),
    (
        "length-past-q",
        later(seqlen_q=[5, 6]),
        2,
        5,
        5,
        ValueError,
        r"seqlen_q: .*6 for sequence 1, expected at most 5, the rows of q",
    ),
    (
        "cu-past-k",
        later(cu_seqlen_k=[0, 6]),
        1,
        9,
        5,
        ValueError,
        r"cu_seqlen_k: .*6 for sequence 0, expected at most 5, the rows of k",
    ),
    (
        "length-past-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6]), seqlen_q=[1, 7]),
        None,
        6,
        6,
        ValueError,
        r"seqlen_q: .*7 for sequence 1, expected at most 6",
    ),
    (
        "all-past-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6]), cu_seqlen_k=[0, 4, 7]),
        None,
        6,
        6,
        ValueError,
        r"cu_seqlen_k: .*7 rows in all, expected at most 6",
    ),
    (
        "max-below-the-shape",
        later(max_seqlen_q=4),
        2,
        5,
        5,
        ValueError,
        r"max_seqlen_q: got 4, expected at least 5.*shape of q",
    ),
    (
        "sequence-past-the-longest",
        None,
        1,
        LONGEST + 1,
        5,
        ValueError,
        rf"q: .*{LONGEST + 1} rows, expected at most {LONGEST}$",
    ),
    (
        "device-sequence-past-the-longest",
        later(seqstart_q=[0, 5], seqstart_k=OnDevice([0, 5])),
        None,
        5,
        2**40,
        ValueError,
        rf"k: .*{2**40} rows, expected at most {LONGEST}; give SeqLayout\(max_seqlen_k",
    ),
]


@pytest.mark.parametrize(
    ("seqs", "count", "rows_q", "rows_k", "error", "says"),
    [pytest.param(*row, id=name) for name, *row in MISFITS],
)
def test_bind_refuses(
    seqs: Any, count: int | None, rows_q: int, rows_k: int, error: type[Exception], says: str
) -> None:
    seqs = seqs() if callable(seqs) else seqs
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(error, match=f"^{says}"):
            bind(seqs, batch=count, rows_q=rows_q, rows_k=rows_k)


def test_the_longest_sequence_is_legal() -> None:
    assert batch(None, 1, LONGEST, 5).q.max_seqlen == LONGEST


def test_lengths_of_a_dense_batch() -> None:
    lengths = batch(None, 2, 4, 5)
    assert (lengths.batch, lengths.packed, lengths.on_host) == (2, False, True)
    for side, rows in ((lengths.q, 4), (lengths.k, 5)):
        assert (side.start, side.length) == (None, None)
        assert (side.rows, side.max_seqlen, side.padded) == (rows, rows, False)


@pytest.mark.parametrize(
    ("given", "length", "lens"),
    [
        pytest.param({}, None, [4, 6], id="physical"),
        pytest.param({"seqlen_k": [1, 6]}, [1, 6], [1, 6], id="seqlen"),
        pytest.param({"cu_seqlen_k": [0, 3, 5]}, [0, 3, 5], [3, 2], id="cu_seqlen"),
        pytest.param(
            {"seqlen_k": [1, 6], "cu_seqlen_k": [0, 3, 5]}, [0, 3, 5], [3, 2], id="cu-over-seqlen"
        ),
        pytest.param(
            {"seqlen_k": [-1, 600], "cu_seqlen_k": [10, 13, 15]},
            [10, 13, 15],
            [3, 2],
            id="values-of-the-loser-do-not-count",
        ),
    ],
)
def test_precedence_of_logical_lengths(given: Any, length: Any, lens: list[int]) -> None:
    seqs = SeqLayout(seqstart_q=[0, 1, 1], seqstart_k=[2, 6, 12], **given)
    lengths = group(seqs, 1, 12)
    assert (None if lengths.k.length is None else lengths.k.length.tolist()) == length
    assert lengths.k.cumulative == ("cu_seqlen_k" in given)
    assert lengths.k.max_seqlen == max(lens)
    assert spans(lengths) == {
        "start_q": [0, 1],
        "len_q": [1, 0],
        "start_k": [2, 6],
        "len_k": lens,
    }


def test_sides_are_independent() -> None:
    lengths = batch(SeqLayout(seqlen_q=[1, 2], cu_seqlen_k=[0, 7, 7]), 2, 3, 8)
    assert spans(lengths)["len_q"] == [1, 2]
    assert spans(lengths)["len_k"] == [7, 0]
    assert (lengths.q.cumulative, lengths.k.cumulative) == (False, True)


def test_starts_of_k_default_to_those_of_q() -> None:
    lengths = group(SeqLayout(seqstart_q=[1, 4, 6], seqlen_q=[2, 2]), 7, 7)
    assert lengths.k.start is lengths.q.start
    assert spans(lengths) == {
        "start_q": [1, 4],
        "len_q": [2, 2],
        "start_k": [1, 4],
        "len_k": [3, 2],
    }


@pytest.mark.parametrize(
    ("seqs", "count", "rows", "padded"),
    [
        pytest.param(later(seqstart_q=[0, 2, 5]), None, 5, False, id="packed-full"),
        pytest.param(later(seqstart_q=[1, 2, 5]), None, 5, True, id="packed-lead"),
        pytest.param(later(seqstart_q=[0, 2, 5]), None, 6, True, id="packed-tail"),
        pytest.param(later(seqstart_q=[0, 2, 5], seqlen_q=[2, 2]), None, 5, True, id="gap"),
        pytest.param(later(seqstart_q=[0, 2, 5], seqlen_q=[2, 3]), None, 5, False, id="no-gap"),
        pytest.param(later(seqstart_q=OnDevice([0, 5])), None, 5, True, id="device-starts"),
        pytest.param(later(seqstart_q=OnDevice([0, 5]), seqlen_q=[5]), None, 5, True, id="mixed"),
        pytest.param(
            later(seqstart_q=[0, 5], seqlen_q=OnDevice([5])), None, 5, True, id="mixed-too"
        ),
        pytest.param(later(seqstart_q=OnDevice([0, 5])), None, 0, False, id="device-no-rows"),
        pytest.param(later(seqstart_q=[0]), None, 3, True, id="no-sequence-but-rows"),
        pytest.param(later(seqstart_q=[0]), None, 0, False, id="no-sequence-no-rows"),
        pytest.param(later(seqlen_q=[5, 5]), 2, 5, False, id="batch-full"),
        pytest.param(later(cu_seqlen_q=[0, 5, 9]), 2, 5, True, id="batch-short"),
        pytest.param(later(seqlen_q=OnDevice([5, 5])), 2, 5, True, id="batch-device"),
        pytest.param(later(seqlen_k=OnDevice([5, 5])), 2, 5, False, id="other-side-on-device"),
        pytest.param(later(seqlen_q=OnDevice([])), 0, 5, False, id="batch-0"),
    ],
)
def test_padded_is_false_only_when_that_is_proven(
    seqs: Any, count: int | None, rows: int, padded: bool
) -> None:
    rows_k = rows if count is None else 5
    assert bind(seqs(), batch=count, rows_q=rows, rows_k=rows_k).q.padded is padded


@pytest.mark.parametrize(
    ("seqs", "count", "rows", "bound"),
    [
        pytest.param(later(seqlen_q=[3, 2]), 2, 9, 3, id="host-lengths"),
        pytest.param(later(seqlen_q=[3, 2], max_seqlen_q=8), 2, 9, 3, id="host-over-given"),
        pytest.param(later(seqstart_q=[0, 4, 5]), None, 9, 4, id="host-starts"),
        pytest.param(later(seqlen_q=OnDevice([3, 2])), 2, 9, 9, id="device-lengths"),
        pytest.param(later(seqlen_q=OnDevice([3, 2]), max_seqlen_q=4), 2, 9, 4, id="device-given"),
        pytest.param(
            later(seqlen_q=OnDevice([3, 2]), max_seqlen_q=2**40), 2, 9, 9, id="given-past-rows"
        ),
        pytest.param(later(seqstart_q=OnDevice([0, 4, 5])), None, 9, 9, id="device-starts"),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4, 5]), max_seqlen_q=5), None, 9, 5, id="starts-given"
        ),
        pytest.param(
            later(seqstart_q=[0, 4, 5], seqlen_q=OnDevice([3, 1])), None, 9, 4, id="host-slots"
        ),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4, 5]), seqlen_q=[3, 1]), None, 9, 3, id="host-lens"
        ),
        pytest.param(later(max_seqlen_q=20), 2, 9, 9, id="physical"),
        pytest.param(later(seqlen_q=[0, 0], max_seqlen_q=0), 2, 9, 0, id="all-empty"),
        pytest.param(later(max_seqlen_q=3), 0, 9, 9, id="batch-0"),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4]), max_seqlen_q=4, max_seqlen_k=4),
            None,
            2**40,
            4,
            id="huge-total",
        ),
    ],
)
def test_max_seqlen_is_the_tightest_bound_that_needs_no_read(
    seqs: Any, count: int | None, rows: int, bound: int
) -> None:
    rows_k = rows if count is None else 5
    assert bind(seqs(), batch=count, rows_q=rows, rows_k=rows_k).q.max_seqlen == bound


@pytest.mark.parametrize(
    ("seqs", "on_host"),
    [
        pytest.param(later(seqstart_q=[0, 3], seqlen_k=[2]), True, id="host"),
        pytest.param(later(seqstart_q=OnDevice([0, 3])), False, id="starts-on-device"),
        pytest.param(later(seqstart_q=[0, 3], seqlen_k=OnDevice([2])), False, id="mixed"),
        pytest.param(
            later(seqstart_q=[0, 3], seqlen_k=OnDevice([2]), cu_seqlen_k=[0, 2]),
            True,
            id="the-loser-on-device",
        ),
    ],
)
def test_on_host(seqs: Any, on_host: bool) -> None:
    assert group(seqs(), 3, 3).on_host is on_host


def test_binding_is_remembered_per_shape() -> None:
    seqs = SeqLayout(seqlen_k=OnDevice([1, 2]))
    first = batch(seqs, 2, 4, 5)
    assert batch(seqs, 2, 4, 5) is first
    assert batch(seqs, 2, 4, 6).k.rows == 6
    assert batch(None, 2, 4, 5) is batch(None, 2, 4, 5)


def test_bindings_do_not_pile_up() -> None:
    seqs = SeqLayout(seqlen_k=OnDevice([1, 2]))
    for rows in range(3, 200):
        assert batch(seqs, 2, 4, rows).k.rows == rows
    assert len(seqs._bindings) <= 16


def test_an_empty_batch() -> None:
    nothing = {"start_q": [], "len_q": [], "start_k": [], "len_k": []}
    assert spans(batch(None, 0, 4, 5)) == nothing
    assert spans(batch(SeqLayout(seqlen_q=[], cu_seqlen_k=[3]), 0, 4, 5)) == nothing
    assert spans(group(SeqLayout(seqstart_q=[2]), 4, 4)) == nothing
    assert group(SeqLayout(seqstart_q=[2]), 4, 4).batch == 0
