"""`rawattn check`: compares the backends of this machine with the float64 reference."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
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
from rawattn._runtime.devices import gpu_available, why_no_gpu

Array = np.ndarray[Any, Any]

_HEADER = ("backend", "dtype", "headdim", "mode", "out error", "bound", "lse error", "bound", "")
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_HEADDIMS = (64, 128, 256)
_ROWS, _HEADS, _HEADS_KV = 200, 4, 2
# Options of each mode. If a sequence is shorter than its room, the rest of its rows are padding and hold NaN.
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
# Calls on pages: (new rows of each sequence, whether pages hold float8).
_IN_PAGES: dict[str, tuple[int, bool]] = {
    "chunks in pages": (40, False),
    "decoding": (1, False),
    "decoding, float8": (1, True),
}
_APPEND, _COMBINE = "append: k, v", "combine"
_LENGTHS, _PAGE_SIZE = (200, 70), 16
_ULP32 = 2.0**-23


@dataclass(frozen=True, slots=True)
class _Backend:
    name: str
    keyword: Literal["cuda", "cpu"]
    current: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class _Error:
    """The error of the element that comes closest to its bound, or exceeds it most, and that bound."""

    size: float
    bound: float

    @property
    def within(self) -> bool:  # False for NaN
        return self.size <= self.bound


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "check",
        description="Compute attention with every backend of this machine (each GPU, and the CPU) "
        "and compare it with the float64 reference: on rows and on pages, with what is appended to "
        "them, and partial results that are merged. Padding rows hold NaN, which must not reach a "
        "result. The exit status is 1 if an error is above its bound.",
        epilog="A bound is the most that rounding can cost: of the probabilities and the result to "
        "the dtype, of the scores to float32. Shown is the element that comes closest to its own.",
    )
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="this one alone")


def run(args: argparse.Namespace) -> int:
    """Print a table; status 1 if an error is above its bound."""
    if args.backend == "cuda" and not gpu_available():
        print(f"rawattn check: no usable GPU: {why_no_gpu()}", file=sys.stderr)
        return 1
    modes = (*_MODES, *_IN_PAGES, _APPEND, _COMBINE)
    grid = [
        cell
        for cell in itertools.product(_backends(args.backend), _DTYPES, _HEADDIMS, modes)
        # `combine` takes no backend: NumPy arrays are merged on the GPU if there is one.
        if cell[3] != _COMBINE or cell[0].keyword == "cuda" or not gpu_available()
    ]
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
            # The family that calls use, and on Hopper the portable family too.
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
    """The errors of out and lse; for the append mode those of keys and values."""
    if mode in _IN_PAGES:
        return _check_pages(backend, dtype, headdim, *_IN_PAGES[mode])
    if mode == _APPEND:
        return _check_append(backend, dtype, headdim)
    if mode == _COMBINE:
        return _check_combine(backend, dtype, headdim)
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
    with backend.current():
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend=backend.keyword)
    exact = reference.attention(q, k, v, **options, return_lse=True)
    weight = reference.attention(q, k, np.abs(v), **options)
    return _errors((out, lse), exact, weight, (q, k))


def _check_pages(
    backend: _Backend, dtype: str, headdim: int, rows: int, float8: bool
) -> tuple[_Error, _Error]:
    rng, table = np.random.default_rng(headdim), _table()
    q = _normal(rng, (len(_LENGTHS), rows, _HEADS, headdim), _DTYPES[dtype])
    of_pages = ml_dtypes.float8_e4m3fn if float8 else _DTYPES[dtype]
    shape = (table.size, _PAGE_SIZE, _HEADS_KV, headdim)
    k, v = (_normal(rng, shape, of_pages) for _ in "kv")
    options: dict[str, Any] = {"seqlen_k": [*_LENGTHS], "causal": True}
    # Calls of few rows use the decode family.
    with backend.current(), only("decode") if rows == 1 else nullcontext():
        got = rawattn.paged_attention(
            q, k, v, table, **options, return_lse=True, backend=backend.keyword
        )
    exact = reference.paged_attention(q, k, v, table, **options, return_lse=True)
    weight = reference.paged_attention(q, k, np.abs(v), table, **options)
    return _errors(got, exact, weight, (q, k))


def _check_append(backend: _Backend, dtype: str, headdim: int) -> tuple[_Error, _Error]:
    """The bounds: new keys get their rotary embedding in float32 and are rounded once; values are copied."""
    rng, table = np.random.default_rng(headdim), _table()
    shape = (len(_LENGTHS), 3, _HEADS_KV, headdim)
    k, v = (_normal(rng, shape, _DTYPES[dtype]) for _ in "kv")
    pools = [np.zeros((table.size, _PAGE_SIZE, *shape[2:]), k.dtype) for _ in "kv"]
    phases = np.outer(np.arange(max(_LENGTHS)), 1e4 ** -np.linspace(0, 1, headdim // 2))
    rotary = np.cos(phases).astype(np.float32), np.sin(phases).astype(np.float32)
    options: dict[str, Any] = {"seqlen_k": [*_LENGTHS], "rotary": rotary}
    k_pages, v_pages = pools
    exact_k, exact_v, _ = reference.append_kv(k, v, k_pages, v_pages, table, **options)
    with backend.current():
        rawattn.append_kv(k, v, k_pages, v_pages, table, **options, backend=backend.keyword)
    finfo = ml_dtypes.finfo(k.dtype)
    smallest = float(finfo.smallest_subnormal)
    turning = 4 * _ULP32 * float(np.abs(k.astype(np.float64)).max())
    rounding = float(finfo.eps) / 2 * np.abs(exact_k) + smallest
    return (
        _worst_error(k_pages, exact_k, rounding + turning),
        _worst_error(v_pages, exact_v, np.full(exact_v.shape, smallest)),
    )


def _check_combine(backend: _Backend, dtype: str, headdim: int) -> tuple[_Error, _Error]:
    rng = np.random.default_rng(headdim)
    outs = [_normal(rng, (2, _ROWS, _HEADS, headdim), _DTYPES[dtype]) for _ in range(3)]
    lses = [_normal(rng, (2, _HEADS, _ROWS), np.float32) for _ in outs]
    with backend.current():
        out, lse = rawattn.combine(outs, lses)
    exact, exact_lse = reference.combine(outs, lses)
    weight, _ = reference.combine([np.abs(x) for x in outs], lses)
    finfo = ml_dtypes.finfo(outs[0].dtype)
    rounding = float(finfo.eps) / 2 * np.abs(exact) + float(finfo.smallest_subnormal)
    return (
        _worst_error(out, exact, rounding + 8 * _ULP32 * weight),
        _worst_error(lse, exact_lse, 4 * _ULP32 * (1 + np.abs(exact_lse))),
    )


def _table() -> Array:
    """A block table whose pages are in random order."""
    count = -(-max(_LENGTHS) // _PAGE_SIZE)
    ids = np.random.default_rng(0).permutation(len(_LENGTHS) * count)
    return ids.reshape(len(_LENGTHS), count).astype(np.int32)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def _errors(
    got: Sequence[Array], wanted: Sequence[Array], weight: Array, inputs: tuple[Array, Array]
) -> tuple[_Error, _Error]:
    """The errors of out and lse. weight: out computed with the magnitudes of v. inputs: q and k."""
    (out, lse), (exact, exact_lse), (q, k) = got, wanted, inputs
    # A score is a float32 sum of products. Its error is about an ulp of |q| |k| (Cauchy-Schwarz), which is also the
    # relative error that it causes in a probability. Rounding the probabilities to the dtype costs half an ulp of the
    # sum of p |v|, and rounding the result half an ulp of the result.
    norms = [float(np.nanmax(np.linalg.norm(x.astype(np.float64), axis=-1))) for x in (q, k)]
    score = 4 * _ULP32 * max(1.0, norms[0] * norms[1] / q.shape[-1] ** 0.5)
    finfo = ml_dtypes.finfo(q.dtype)
    rounding = float(finfo.eps) / 2 * (weight + np.abs(exact)) + float(finfo.smallest_subnormal)
    size = np.abs(np.where(np.isfinite(exact_lse), exact_lse, 0.0))
    return (
        _worst_error(out, exact, rounding + 2 * score * weight),
        _worst_error(lse, exact_lse, score + _ULP32 * size),
    )


def _rows(lengths: dict[str, list[int]]) -> tuple[tuple[int, ...], Array, Array]:
    """The row axes of the arrays, and which rows of q, and of k and v, are padding."""
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


def _worst_error(got: Array, exact: Array, bound: Array) -> _Error:
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got == exact, 0.0, np.abs(got - exact))
    index = np.unravel_index(np.argmax(error / bound), error.shape)  # NaN counts as the largest
    return _Error(float(error[index]), float(bound[index]))
