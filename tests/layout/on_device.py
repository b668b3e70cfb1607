"""An array that stands for one of CuPy, and what tests of layouts ask of a bound one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn._call.binding import bind
from rawattn._call.layout import Lengths, host_lengths
from rawattn._call.seq_layout import SeqLayout

later = partial(partial, SeqLayout)  # a layout to be made in the test


class OnDevice:
    """Stands for a CuPy array. Reading it back is an error unless the test allows it."""

    def __init__(self, values: Any, dtype: Any = np.int32, *, contiguous: bool = True) -> None:
        self._values = np.array(values, dtype)
        self.readable = False
        self.shape, self.ndim, self.size = (
            self._values.shape,
            self._values.ndim,
            self._values.size,
        )
        self.dtype = self._values.dtype
        self.strides = self._values.strides if contiguous else (2 * self.dtype.itemsize,)
        self.flags = SimpleNamespace(c_contiguous=contiguous)

    def __len__(self) -> int:
        return len(self._values)

    def get(self) -> np.ndarray:
        assert self.readable, "a device array was read back"
        return self._values


def group(seqs: SeqLayout, rows_q: int, rows_k: int) -> Lengths:
    return bind(seqs, batch=None, rows_q=rows_q, rows_k=rows_k)


def batch(seqs: SeqLayout | None, count: int, rows_q: int, rows_k: int) -> Lengths:
    return bind(seqs, batch=count, rows_q=rows_q, rows_k=rows_k)


def spans(lengths: Lengths) -> dict[str, list[int]]:
    host = host_lengths(lengths)
    names = ("start_q", "len_q", "start_k", "len_k")
    arrays = {name: getattr(host, name) for name in names}
    assert all(array.dtype == np.int64 for array in arrays.values())
    assert all(array.shape == (lengths.batch,) for array in arrays.values())
    return {name: array.tolist() for name, array in arrays.items()}
