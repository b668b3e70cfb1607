"""Gradients where scores and probabilities are changed, by whole calls on the CPU machine, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.shim.device import Device
from tests.shim.test_scores import (
    BFLOAT16,
    DTYPES,
    OPTIONS,
    PADDED,
    RAGGED,
    WAVES,
    arrays,
    hiding,
    machine,
    normal,
    option,
)
from tests.shim.whole import small_tiles, verify_backward

__all__ = ["machine"]

MakeDevice = Callable[..., Device]

CASES = [
    pytest.param(
        name,
        WAVES[n % 2],
        DTYPES[n % 3],
        n % 4 == 3,
        id=f"{name}-wave{WAVES[n % 2]}-{DTYPES[n % 3]}",
    )
    for n, name in enumerate(OPTIONS)
] + [
    pytest.param(
        name, 32, dtype, n % 2 == 0, id=f"{name}-wave32-{dtype}-{'dq' if n % 2 == 0 else 'main'}"
    )
    for n, name in enumerate(OPTIONS)
    for dtype in DTYPES
    if (n % 2, dtype) != (0, DTYPES[n % 3])
]


@pytest.mark.parametrize(("name", "wave", "dtype", "deterministic"), CASES)
def test_backward(
    machine: MakeDevice, name: str, wave: int, dtype: Any, deterministic: bool
) -> None:
    with small_tiles():
        verify_backward(
            machine(wave),
            "portable",
            *arrays(dtype),
            dlse=normal(2, 4, 45),
            deterministic=deterministic,
            **option(name, dtype),
        )
