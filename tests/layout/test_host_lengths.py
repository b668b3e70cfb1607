"""Starts and lengths as integers of the host: read at each call, and inside the arrays whatever they hold."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn._call import integers
from rawattn._call.layout import host_lengths
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import structure
from rawattn._runtime.lengths import LengthsMemory, _any_on_host
from tests.layout.on_device import OnDevice, batch, group, spans


def test_device_arrays_are_held_by_reference_and_read_at_each_call() -> None:
    lens = OnDevice([1, 2])
    lengths = batch(SeqLayout(seqlen_k=lens), 2, 4, 5)
    assert lengths.k.length is lens
    lens.readable = True
    assert spans(lengths)["len_k"] == [1, 2]
    lens._values[:] = [5, 0]
    assert spans(lengths)["len_k"] == [5, 0]


NAMES = ("seqstart_q", "seqlen_q", "position_q", "seqstart_k", "seqlen_k", "position_k")


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_needed_where_any_integers_are_on_the_host(name: str) -> None:
    integers = {each: [0, 3, 5] if "start" in each else [2, 1] for each in NAMES}
    there: dict[str, Any] = {each: OnDevice(x) for each, x in integers.items()}
    assert not _any_on_host(group(SeqLayout(**there), 5, 5))
    assert _any_on_host(group(SeqLayout(**{**there, name: integers[name]}), 5, 5))


@pytest.mark.parametrize("batch", range(1, 10))
@pytest.mark.parametrize("left_out", [(), ("seqlen_q",), ("seqstart_k", "position_q"), NAMES[2:]])
def test_each_array_is_where_its_address_says(batch: int, left_out: tuple[str, ...]) -> None:
    """The integers of the host, which are sent as one piece of memory, overlap neither each other nor what lies behind."""
    lens = np.arange(1, batch + 1)
    starts = np.append(0, 2 * np.cumsum(lens))
    integers = {name: starts if "start" in name else lens + n for n, name in enumerate(NAMES)}
    integers.update(seqlen_q=lens, seqlen_k=2 * lens)
    given = {name: x for name, x in integers.items() if name not in left_out}
    lengths = group(SeqLayout(**given), int(starts[-1]), int(starts[-1]))
    memory = LengthsMemory(structure(lengths), 0, [40])
    keeping: Any = SimpleNamespace(keep=lambda nbytes, device: (nbytes, 1 << 12))
    nbytes, addresses, data, to = memory.addresses(lengths, keeping)
    assert to == 1 << 12 and len(data) <= addresses.pop() - to == nbytes - 40
    given.setdefault("seqstart_k", starts)
    names = (*NAMES[:2], *NAMES[3:5], NAMES[2], NAMES[5])
    for name, address in zip(names, addresses, strict=False):
        assert (address > 0) == (name in given)
        if name in given:
            sent = data[address - to :][: 4 * len(given[name])]
            np.testing.assert_array_equal(np.frombuffer(sent, np.int32), given[name])


def test_differences_of_int32_do_not_overflow() -> None:
    lens = OnDevice([-(2**31), 2**31 - 1])
    lens.readable = True
    assert spans(batch(SeqLayout(cu_seqlen_k=lens), 1, 4, 5))["len_k"] == [5]


JUNK = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20)


@given(
    data=st.lists(JUNK, min_size=9, max_size=9),
    cumulative=st.booleans(),
    rows=st.integers(0, 15),
)
def test_junk_on_the_device_stays_inside_the_array(
    data: list[int], cumulative: bool, rows: int
) -> None:
    starts = OnDevice(data[:5], np.int64)
    lens = OnDevice(data[4:] if cumulative else data[5:], np.int64)
    starts.readable = lens.readable = True
    name = "cu_seqlen_q" if cumulative else "seqlen_q"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integers, "import_integers", lambda _, value: value)
        seqs = SeqLayout(seqstart_q=starts, **{name: lens})
    lengths = group(seqs, rows, rows)
    host = host_lengths(lengths)
    for start, length in ((host.start_q, host.len_q), (host.start_k, host.len_k)):
        assert np.all(start >= 0)
        assert np.all(length >= 0)
        assert np.all(start + length <= rows)
    # Where the junk makes sense, it is what counts.
    slots = [(a, b) for a, b in itertools.pairwise(data[:5])]
    for i, (a, b) in enumerate(slots):
        if 0 <= a <= b <= rows:
            assert host.start_k[i] == a
            assert host.len_k[i] == b - a


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int, list[tuple[int, int]]]:
    """Arguments for one side in group mode, its rows, and (start, length) of its sequences."""
    gaps = draw(st.lists(st.integers(0, 3), max_size=6))
    lens = [draw(st.integers(0, 5)) for _ in gaps]
    lead, tail = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    starts = [lead, *(lead + sum(lens[:i]) + sum(gaps[:i]) for i in range(1, len(lens) + 1))]
    sequences = list(zip(starts, lens, strict=False))
    arguments: dict[str, Any] = {"seqstart": starts}
    how = draw(st.sampled_from(["seqlen", "cu_seqlen"] + ["physical"] * (sum(gaps) == 0)))
    if how == "seqlen":
        arguments["seqlen"] = lens
    elif how == "cu_seqlen":
        base = draw(st.integers(0, 4))
        arguments["cu_seqlen"] = [base + sum(lens[:i]) for i in range(len(lens) + 1)]
    return arguments, starts[-1] + tail, sequences


@given(layouts())
def test_random_packed_batches(drawn: tuple[dict[str, Any], int, list[tuple[int, int]]]) -> None:
    arguments, rows, sequences = drawn
    seqs = SeqLayout(**{f"{name}_{side}": x for name, x in arguments.items() for side in "qk"})
    lengths = group(seqs, rows, rows)
    got = spans(lengths)
    for side in "qk":
        assert list(zip(got[f"start_{side}"], got[f"len_{side}"], strict=True)) == sequences
    covered = {row for start, length in sequences for row in range(start, start + length)}
    assert lengths.q.padded == (len(covered) < rows)
    assert lengths.q.max_seqlen == max((length for _, length in sequences), default=0)
