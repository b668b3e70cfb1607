"""`rawattn check`: the backends of this machine against the float64 reference."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ml_dtypes
import numpy as np

import rawattn
from rawattn import reference
from rawattn._compile.compiler import device_arch
from rawattn._console import table
from rawattn._console.progress import Progress
from rawattn._kernels.selection import only
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._runtime.devices import gpu_available

Array = np.ndarray[Any, Any]

_HEADER = ("backend", "dtype", "headdim", "mode", "out error", "bound", "lse error", "bound", "")
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_HEADDIMS = (64, 128, 256)
_ROWS, _HEADS, _HEADS_KV = 200, 4, 2
# The last rows of every sequence that has a length below its room are padding, and hold NaN.
_MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, packed": {
        "causal": True,
        "seqs": {"seqstart_q": [0, 130, 130, 131, 390], "seqlen_q": [130, 0, 1, 200],
                 "seqlen_k": [130, 0, 1, 200]},
    },
    "window + sinks, padded": {
        "window": (50, 10),
        "sink": 4,
        "seqs": {"seqlen_q": [200, 70], "seqlen_k": [150, 200]},
    },
}  # fmt: skip
_ULP32 = 2.0**-23


@dataclass(frozen=True, slots=True)
class _Backend:
    name: str
    keyword: Literal["cuda", "cpu"]
    place: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class _Error:
    """Where an array is furthest from the reference, measured by what it may be off there."""

    size: float
    bound: float

    @property
    def within(self) -> bool:  # not with NaN
        return self.size <= self.bound


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "check",
        description="Compute attention with every backend of this machine (each GPU, and the CPU) "
        "and compare it with the float64 reference. Padding rows hold NaN, which must not reach a "
        "result. The exit status is 1 if an error is above its bound.",
        epilog="A bound is the most that rounding can cost: of the probabilities and the result to "
        "the dtype, of the scores to float32. Shown is the element that comes closest to its own.",
    )
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="this one alone")


def run(args: argparse.Namespace) -> int:
    """Print a table; status 1 when an error is above its bound."""
    if args.backend == "cuda" and not gpu_available():
        print("rawattn check: no GPU that CuPy can use; `rawattn info` says why", file=sys.stderr)
        return 1
    grid = list(itertools.product(_backends(args.backend), _DTYPES, _HEADDIMS, _MODES))
    rows, failures = [], 0
    with Progress(len(grid)) as progress:
        for backend, dtype, headdim, mode in grid:
            errors = _check(backend, dtype, headdim, mode)
            passed = all(error.within for error in errors)
            failures += not passed
            verdict = "ok" if passed else "FAILED"
            figures = [f"{x:.1e}" for error in errors for x in (error.size, error.bound)]
            rows.append([backend.name, dtype, str(headdim), mode, *figures, verdict])
            progress.step(f"{backend.name} {dtype} {headdim} {mode}: {verdict}")
    print(table.render(_HEADER, rows, left=4))
    print(f"{len(rows) - failures} of {len(rows)} within their bounds")
    return 1 if failures else 0


def _backends(wanted: str | None) -> list[_Backend]:
    found = []
    if wanted != "cpu" and gpu_available():
        import cupy

        for device in range(cupy.cuda.runtime.getDeviceCount()):
            # What a caller gets, and where that is a kernel of this GPU's own also the portable one.
            families = ["sm90"] if device_arch(device) == sm90_forward.ARCH else []
            for family in (*families, "portable"):
                name = f"GPU {device} {family}"
                found.append(_Backend(name, "cuda", partial(_on, device, family)))
    if wanted != "cuda":
        found.append(_Backend("CPU", "cpu", nullcontext))
    return found


@contextmanager
def _on(device: int, family: str) -> Iterator[None]:
    import cupy

    with cupy.cuda.Device(device), only(family):
        yield


def _check(backend: _Backend, dtype: str, headdim: int, mode: str) -> tuple[_Error, _Error]:
    """Errors of out and lse."""
    options = dict(_MODES[mode])
    lengths = options.pop("seqs", {})
    if lengths:
        options["seqs"] = rawattn.SeqLayout(**lengths)
    rows, padding_q, padding_k = _rows(lengths)
    rng = np.random.default_rng(headdim)

    def normal(nheads: int, padding: Array) -> Array:
        array = rng.standard_normal((*rows, nheads, headdim)).astype(_DTYPES[dtype])
        array[padding] = np.nan
        return array

    q, k, v = normal(_HEADS, padding_q), normal(_HEADS_KV, padding_k), normal(_HEADS_KV, padding_k)
    with backend.place():
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend=backend.keyword)
    exact, exact_lse = reference.attention(q, k, v, **options, return_lse=True)

    # A score is a float32 sum of products: it is off by about an ulp of |q| |k| (Cauchy-Schwarz),
    # and moves every probability by as much, up or down, relative to itself. Rounding each
    # probability to the dtype costs half an ulp of the sum of p |v|, rounding the result half an
    # ulp of that.
    norms = [float(np.nanmax(np.linalg.norm(x.astype(np.float64), axis=-1))) for x in (q, k)]
    score = 4 * _ULP32 * max(1.0, norms[0] * norms[1] / headdim**0.5)
    weight = reference.attention(q, k, np.abs(v), **options)
    finfo = ml_dtypes.finfo(q.dtype)
    rounding = float(finfo.eps) / 2 * (weight + np.abs(exact)) + float(finfo.smallest_subnormal)
    size = np.abs(np.where(np.isfinite(exact_lse), exact_lse, 0.0))
    return (
        _furthest(out, exact, rounding + 2 * score * weight),
        _furthest(lse, exact_lse, score + _ULP32 * size),
    )


def _rows(lengths: dict[str, list[int]]) -> tuple[tuple[int, ...], Array, Array]:
    """Row axes of the arrays; which rows of q, and of k and v, are padding."""
    if "seqstart_q" in lengths:
        starts = lengths["seqstart_q"]
        padding = np.ones(starts[-1], bool)
        for start, length in zip(starts, lengths["seqlen_q"], strict=False):
            padding[start : start + length] = False
        return (starts[-1],), padding, padding
    row, full = np.arange(_ROWS), [_ROWS, _ROWS]
    padding_q, padding_k = (
        row >= np.reshape(lengths.get(name, full), (-1, 1)) for name in ("seqlen_q", "seqlen_k")
    )
    return (len(full), _ROWS), padding_q, padding_k


def _furthest(got: Array, exact: Array, bound: Array) -> _Error:
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got == exact, 0.0, np.abs(got - exact))
    place = np.unravel_index(np.argmax(error / bound), error.shape)  # NaN is the largest
    return _Error(float(error[place]), float(bound[place]))
