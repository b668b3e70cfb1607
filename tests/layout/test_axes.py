"""Axes of a bias or mask that positions count along, where lengths are on a GPU and nothing reads them back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from tests.layout.on_device import OnDevice
from tests.problems import PACKED, problem


def broadcast(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


@pytest.mark.parametrize("promise", [{}, {"max_seqlen_q": 0, "max_seqlen_k": 0}])
@pytest.mark.parametrize("shape", [(1, 1, 0, 21), (1, 1, 15, 0)])
@pytest.mark.parametrize(("name", "dtype"), [("bias", np.float16), ("mask", np.bool_)])
def test_an_axis_that_lengths_on_a_gpu_count_along_is_not_empty(
    name: str, dtype: Any, shape: tuple[int, ...], promise: dict[str, int]
) -> None:
    """Kernels read the last element of an axis in place of those beyond it, and no length on a GPU is trusted."""
    starts = SeqLayout(seqstart_q=OnDevice([0, 5, 15]), seqstart_k=OnDevice([0, 7, 21]), **promise)
    with pytest.raises(ValueError, match=rf"^{name}: got shape .*1 or >= 1 \(longest sequence\)"):
        problem(PACKED, seqs=starts, **{name: broadcast(*shape, dtype=dtype)})


def test_an_axis_without_rows_may_be_empty() -> None:
    shapes = {"q": (0, 4, 8), "k": (0, 2, 8), "v": (0, 2, 16)}
    starts = SeqLayout(seqstart_q=OnDevice([0, 0]))
    assert problem(shapes, seqs=starts, bias=broadcast(1, 1, 0, 0)).bias is not None
    on_host = SeqLayout(seqstart_q=[0, 15], seqlen_q=[0], seqlen_k=[0], seqstart_k=[0, 21])
    assert problem(PACKED, seqs=on_host, bias=broadcast(1, 1, 0, 0)).bias is not None
