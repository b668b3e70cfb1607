"""Strides of arrays without gaps: `rawattn/_strides.py`."""

from __future__ import annotations

from rawattn._strides import contiguous


def test_strides_in_c_order() -> None:
    assert contiguous((), 4) == ()
    assert contiguous((3,), 4) == (4,)
    assert contiguous((2, 3, 5), 2) == (30, 10, 2)
