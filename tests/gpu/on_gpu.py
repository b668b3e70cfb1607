"""Arrays on one of several GPUs, large enough that work on them takes a while."""

from __future__ import annotations

from typing import Any

import numpy as np

SIZE = 1 << 20


def on_gpu(jax: Any, values: np.ndarray, ordinal: int = 0) -> Any:
    return jax.device_put(values, jax.devices("gpu")[ordinal])
