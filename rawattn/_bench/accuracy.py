"""How far dq and dk are from float64, over how far FlashAttention-2's are: the same data, many seeds."""

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
    """Of one gradient of one seed: the largest, and the RMS over that of the exact gradient."""

    max: float
    rms: float


def figures(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """A line for each gradient and kind of error, whatever the dtype of the run."""
    import cupy

    sides = (Ours("rawattn"), TorchFlash())
    found = []
    for kind, case in cases():
        try:
            errors = case_errors(case, sides, functools.partial(_draw, case, kind), cupy)
        except Exception as error:  # its lines are shown all the same
            found += lines(case, kind, {}, measure.describe(error))
        else:
            found += lines(case, kind, errors)
    return found


def cases() -> Iterator[tuple[str, Case]]:
    """With the dtype of each."""
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
    """Errors of dq and dk by side, one tuple a seed. xp: NumPy or CuPy, whose arrays the inputs are."""
    errors: dict[str, list[tuple[Error, ...]]] = {side.name: [] for side in sides}
    for _ in range(SEEDS):
        inputs = draw()
        expected = exact(inputs, case.causal, xp)
        for side in sides:
            with side.scope():
                got = side.read(case, side.prepare(case, inputs)())
            pairs = zip(got, expected, strict=False)  # dv is not asked for
            errors[side.name].append(tuple(_error(*pair) for pair in pairs))
    return errors


def exact(inputs: Inputs, causal: bool, xp: Any) -> tuple[Any, Any]:
    """dq and dk in float64, with as many heads of k and v as of q."""
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
    """Ratios of ours to the peer's: the mean of the largest errors, and the RMS of relative RMS errors, over seeds."""
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
