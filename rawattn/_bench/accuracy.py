"""Errors of dq and dk against float64, divided by those of FlashAttention-2 on the same data, over many seeds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn._bench import machine, measure
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.ours import Ours
from rawattn._bench.peers import TorchFlash
from rawattn._bench.report import Figure

SEEDS = 20
_MOST = 1.05
_SEQLEN, _NHEADS = 1024, 4
_GRADIENTS = ("dq", "dk")


@dataclass(frozen=True, slots=True)
class Error:
    """The error of one gradient for one seed. max: the largest absolute error; rms: RMS error over the exact gradient's RMS."""

    max: float
    rms: float


def figures(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """A figure for each gradient and kind of error, whatever the dtype of the run."""
    import cupy

    sides = (Ours("rawattn"), TorchFlash())
    found = []
    for kind, case in cases():
        try:
            errors = case_errors(case, sides, functools.partial(_draw, case, kind), cupy)
        except Exception as error:  # its figures are shown without values
            found += lines(case, kind, {}, measure.describe(error))
        else:
            found += lines(case, kind, errors)
    return found


def cases() -> Iterator[tuple[str, Case]]:
    """(dtype, case) pairs."""
    heads = (_NHEADS, _NHEADS)
    for dtype, headdim, causal in itertools.product(
        ("bfloat16", "float16"), (64, 128), (True, False)
    ):
        label = f"S{_SEQLEN}"
        yield dtype, Case("accuracy", label, (_SEQLEN,), *heads, headdim, causal, backward=True)


def _draw(case: Case, dtype: str) -> Inputs:
    q, k, v, dout = (machine.random_array(shape, dtype) for shape in case.shapes)
    return Inputs((q, k, v), dout=dout)


def case_errors(
    case: Case, sides: Sequence[Contender], draw: Callable[[], Inputs], xp: Any
) -> dict[str, list[tuple[Error, ...]]]:
    """The errors of (dq, dk) by side, one tuple a seed. xp: the module of the input arrays, NumPy or CuPy."""
    errors: dict[str, list[tuple[Error, ...]]] = {side.name: [] for side in sides}
    for _ in range(SEEDS):
        inputs = draw()
        expected = exact(inputs, case.causal, xp)
        for side in sides:
            with side.scope():
                got = side.read(case, side.prepare(case, inputs)())
            pairs = zip(got, expected, strict=False)  # dv is not compared
            errors[side.name].append(tuple(_error(*pair) for pair in pairs))
    return errors


def exact(inputs: Inputs, causal: bool, xp: Any) -> tuple[Any, Any]:
    """dq and dk in float64. k and v must have as many heads as q."""
    q, k, v, dout = (_float64(x).transpose(0, 2, 1, 3) for x in (*inputs.qkv, inputs.dout))
    scale = q.shape[-1] ** -0.5
    s = scale * (q @ k.swapaxes(-1, -2))
    if causal:
        s = xp.where(xp.tri(*s.shape[-2:], dtype=bool), s, -xp.inf)
    p = xp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    return dq.transpose(0, 2, 1, 3), dk.transpose(0, 2, 1, 3)


def _float64(x: Any) -> Any:
    # By way of float32, which CuPy converts bfloat16 to.
    return x.astype(np.float32).astype(np.float64)


def _error(got: Any, expected: Any) -> Error:
    difference = _float64(got) - expected
    rms = float((difference**2).mean() / (expected**2).mean()) ** 0.5
    return Error(float(abs(difference).max()), rms)


def lines(
    case: Case, dtype: str, errors: Mapping[str, Sequence[tuple[Error, ...]]], reason: str = ""
) -> list[Figure]:
    """Ratios of our errors to the peer's: of the largest errors (mean over seeds), and of the relative RMS errors (RMS over
    seeds).
    """
    found = []
    for index, gradient in enumerate(_GRADIENTS):
        for what, mean in (("max", _mean_of_max), ("rms", _rms_of_rms)):
            name = f"{gradient} {what} error over {TorchFlash().name}'s: {dtype} {case.name}"
            figure = Figure(name, None, "x", _MOST, True, reason)
            if errors:
                ours, theirs = (mean([seed[index] for seed in side]) for side in errors.values())
                figure.value, figure.of = ours / theirs, f"{ours:.2e}, {theirs:.2e}"
            found.append(figure)
    return found


def _mean_of_max(errors: Sequence[Error]) -> float:
    return float(np.mean([error.max for error in errors]))


def _rms_of_rms(errors: Sequence[Error]) -> float:
    return float(np.sqrt(np.mean([error.rms**2 for error in errors])))
