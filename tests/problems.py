"""Shapes of small calls, the `Problem` of a call as a verb describes it, and a GPU for which tests choose kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from rawattn._call.options import Options
from rawattn._call.problem import Problem, describe
from rawattn._kernels.target import without_device
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD

INT32_MAX = 2**31 - 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# D 8, Dv 16, four query heads in groups of two.
BATCH = {"q": (3, 5, 4, 8), "k": (3, 7, 2, 8), "v": (3, 7, 2, 16)}
PACKED = {"q": (15, 4, 8), "k": (21, 2, 8), "v": (21, 2, 16)}
H200 = replace(without_device("sm_90a"), multiprocessors=132)
CALL_OF_MANY = Problem(
    dtype="bfloat16",
    batch=1,
    nheads_q=71,
    nheads_kv=1,
    headdim=128,
    headdim_v=128,
    packed=False,
    rows_q=1,
    rows_k=128,
    max_seqlen_q=1,
    max_seqlen_k=128,
    ragged=False,
    window_left=None,
    window_right=0,
    sink=0,
    top_left=False,
    scale=1.0,
)


def arrays(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float16) -> dict[str, np.ndarray]:
    """Return arrays of any size that take almost no memory."""
    return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape in shapes.items()}


def problem(shapes: dict[str, tuple[int, ...]] = BATCH, **options: Any) -> Problem:
    """Return the `Problem` that a verb makes of a call. Arrays of options are separate inputs."""
    given = with_arrays(FORWARD, Options(**options))
    named = dict(zip(given.verb.extra_inputs, given.arrays, strict=True))
    return describe(**arrays(shapes), options=given.options, arrays=named)[0]
