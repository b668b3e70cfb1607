"""Partial results of attention, and the result of `combine` for them, for tests on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rawattn import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}
# Relative rounding of a result near 1: half a unit in the last place for 16-bit dtypes, 8 units for float32.
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 8 * 2.0**-23}


@dataclass(frozen=True)
class Form:
    """The partials of a call of `combine`: number, shape, dtypes and layout.

    layout: "dense", "heads" (heads before rows in memory), "gaps" (gaps between rows), "odd" (not aligned to 16 bytes),
    "reversed", "mixed" (one array of the list has another layout), "sparse" (last axis of stride 2).
    dead: the fraction of lse elements that are -inf; their rows of out are NaN.
    """

    name: str = "plain"
    count: int = 3
    shape: tuple[int, ...] = (2, 5, 4, 64)
    dtype: str = "float16"
    result: str | None = None
    stacked: bool = False
    stacked_lse: bool | None = None
    layout: str = "dense"
    dead: float = 0.2

    def __str__(self) -> str:
        return self.name

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-3], self.shape[-2], self.shape[-3])


FORMS = (
    Form(),
    Form("one", 1),
    Form("seventy", 70, (1, 3, 2, 16), "bfloat16"),
    Form("seventy-stacked", 70, (1, 3, 2, 16), "float32", stacked=True),
    Form("group", 4, (7, 4, 64), "bfloat16"),
    Form("group-stacked", 4, (7, 4, 64), stacked=True),
    Form("stacked-lse-alone", 3, stacked_lse=True),
    Form("stacked-out-alone", 3, stacked=True, stacked_lse=False),
    Form("float32", 5, (1, 9, 3, 128), "float32"),
    Form("float32-to-bfloat16", 5, (2, 3, 3, 128), "float32", "bfloat16"),
    Form("float32-to-float16", 2, (2, 3, 1, 256), "float32", "float16"),
    Form("bfloat16-to-float32", 2, (2, 3, 5, 256), "bfloat16", "float32"),
    Form("float16-to-bfloat16", 2, (2, 3, 5, 72), "float16", "bfloat16"),
    Form("d1", 3, (2, 3, 2, 1)),
    Form("d33", 3, (2, 3, 2, 33), "float32", "float16"),
    Form("d66", 3, (2, 3, 2, 66), "float16", "float32"),
    Form("d255", 3, (1, 3, 2, 255), "bfloat16"),
    Form("d96", 3, (1, 3, 5, 96), "float32"),
    Form("many-heads", 3, (1, 2, 33, 8)),
    Form("alive", 4, dead=0.0),
    Form("dead", 4, dead=1.0),
    *(Form(x, layout=x) for x in ("heads", "gaps", "odd", "reversed", "mixed", "sparse")),
    *(
        Form(f"{x}-stacked", dtype="float32", layout=x, stacked=True)
        for x in ("heads", "gaps", "odd", "reversed", "sparse")
    ),
    Form("no-rows", shape=(2, 0, 4, 64)),
    Form("no-batch", shape=(0, 3, 4, 64), stacked=True),
)


@dataclass(frozen=True)
class Call:
    """NumPy arrays as they are passed, and the same values as lists of separate arrays."""

    form: Form
    outs: Any
    lses: Any
    values: list[np.ndarray]
    logs: list[np.ndarray]

    def options(self) -> dict[str, Any]:
        return {} if self.form.result is None else {"dtype": self.form.result}

    def check(self, out: Any, lse: Any) -> None:
        """Check the results against the reference; they must not be NaN."""
        form = self.form
        exact, exact_lse = reference.combine(self.values, self.logs)
        name = form.result or form.dtype
        assert out.shape == form.shape
        assert out.dtype == DTYPES[name]
        assert lse.shape == form.lse_shape
        assert lse.dtype == np.float32
        got = out.astype(np.float64)
        assert not np.isnan(got).any()
        size = max(1.0, np.abs(exact).max(initial=0))
        np.testing.assert_allclose(got, exact, rtol=UNITS[name], atol=8 * 2.0**-23 * size)
        finite = np.isfinite(exact_lse)
        np.testing.assert_array_equal(lse[~finite], exact_lse[~finite])
        np.testing.assert_allclose(lse[finite], exact_lse[finite], rtol=1e-6, atol=1e-6)
        dead = np.swapaxes(~finite, -1, -2)
        assert (got[dead] == 0).all()


def call_of(form: Form, seed: int = 0) -> Call:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[form.dtype]
    values, logs = [], []
    for _ in range(form.count):
        out = rng.standard_normal(form.shape, np.float32).astype(dtype)
        lse = (8 * rng.standard_normal(form.lse_shape)).astype(np.float32)
        lse[rng.random(lse.shape) < form.dead] = -np.inf
        out[np.swapaxes(lse == -np.inf, -1, -2)] = np.nan
        values.append(out)
        logs.append(lse)
    if form.dead and values[0].size and form.count < 9:  # one row sees no key in any partial
        for out, lse in zip(values, logs, strict=True):
            lse[..., 0, 0] = -np.inf
            out[..., 0, 0, :] = np.nan
    stacked_lse = form.stacked if form.stacked_lse is None else form.stacked_lse
    outs = _given(values, form.stacked, form.layout)
    return Call(form, outs, _given(logs, stacked_lse, form.layout), values, logs)


def _given(arrays: list[np.ndarray], stacked: bool, layout: str) -> Any:
    if stacked:
        return lying(np.stack(arrays), layout)
    if layout == "mixed":
        return [*arrays[:-1], lying(arrays[-1], "heads")]
    return [lying(x, layout) for x in arrays]


def lying(array: np.ndarray, layout: str) -> np.ndarray:
    """Return the same values with the strides of `layout`."""
    if layout == "heads":
        return np.ascontiguousarray(array.swapaxes(-3, -2)).swapaxes(-3, -2)
    if layout == "reversed":
        return np.ascontiguousarray(array[::-1, ..., ::-1, :])[::-1, ..., ::-1, :]
    room = {"gaps": (3, 8, 1), "odd": (1, 1, 1), "sparse": (1, 0, 2)}.get(layout)
    if room is None:
        return array.copy()
    rows, columns, step = room
    shape = (*array.shape[:-2], array.shape[-2] + rows, step * array.shape[-1] + columns)
    buffer = np.full(shape, np.nan, array.dtype)
    view = buffer[..., rows:, columns : columns + step * array.shape[-1] : step]
    view[...] = array
    return view


def pieces(
    attend: Callable[..., Any], q: Any, k: Any, v: Any, ends: list[int], **options: Any
) -> tuple[list[Any], list[Any]]:
    """Attend to each piece of the keys separately; return the outs and lses."""
    bounds = zip([0, *ends], [*ends, k.shape[1]], strict=True)
    results = [attend(q, k[:, a:b], v[:, a:b], return_lse=True, **options) for a, b in bounds]
    return [out for out, _ in results], [lse for _, lse in results]
