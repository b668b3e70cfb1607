"""Host arrays of every floating dtype, and an object that supports only DLPack."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._interop import dlpack

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


class Elsewhere:
    """An object that supports only DLPack, from a module without a from_dlpack."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> object:
        return dlpack.write(self.array, **keywords)
