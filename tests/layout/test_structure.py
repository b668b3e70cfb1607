"""What of lengths decides launches: `_call.structure`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.layout import Lengths
from rawattn._call.layout_keys import addresses_of
from rawattn._call.structure import structure, token
from tests.layout.on_device import OnDevice, group


def on_device(values: list[int]) -> OnDevice:
    array = OnDevice(values)
    array.data = SimpleNamespace(ptr=1 << 20, device_id=0)  # type: ignore[attr-defined]
    return array


def lengths_of(longest: int, rows: int = 1000) -> Lengths:
    starts = on_device([0, longest, rows])
    return group(
        SeqLayout(seqstart_q=starts, max_seqlen_q=longest, max_seqlen_k=longest), rows, rows
    )


@pytest.mark.parametrize(
    ("longest", "bound"),
    [(0, 0), (1, 1), (2, 2), (15, 15), (17, 18), (112, 112), (127, 128), (129, 144), (990, 1000)],
)
def test_the_bound_of_lengths(longest: int, bound: int) -> None:
    assert structure(lengths_of(longest)).k.length_bound == bound


def test_lengths_of_one_bound_share_a_token() -> None:
    assert token(lengths_of(130)) is token(lengths_of(144))
    assert token(lengths_of(130)) is not token(lengths_of(145))


def test_keys_with_the_sequences_of_the_queries() -> None:
    starts, apart = on_device([0, 40, 70]), on_device([0, 40, 70])
    alone = group(SeqLayout(seqstart_q=starts, max_seqlen_q=40, max_seqlen_k=40), 70, 70)
    both = group(
        SeqLayout(seqstart_q=starts, seqstart_k=apart, max_seqlen_q=40, max_seqlen_k=40), 70, 70
    )
    assert structure(alone).shared
    assert not structure(both).shared
    assert token(alone) is not token(both)


def test_integers_of_the_host_are_sent_as_int32() -> None:
    """Memory for them, and what kernels read there, follow from the bytes of each, whatever dtype they were given in."""
    starts, lens = np.int64([0, 40, 70]), np.int64([30, 9])
    for named in ({"seqlen_q": lens}, {"cu_seqlen_q": np.int64([5, 35, 44])}):
        form = structure(group(SeqLayout(seqstart_q=starts, **named, position_q=lens), 70, 70))
        assert (form.q.start, form.q.length, form.q.position) == (4, 4, 4)
        assert not form.q.cumulative


def test_addresses_of_positions_of_one_side() -> None:
    position = on_device([3, 5])
    for n, name in enumerate(("position_q", "position_k")):
        found = addresses_of({name: position})
        assert found == [0, 0, 0, 0, *([0] * n), 1 << 20, *([0] * (1 - n))]
