"""The dtypes of q, k and v, and their names."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
# The keys are dtypes, not names: a name does not say the byte order.
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
