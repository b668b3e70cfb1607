"""What each verb takes and gives: the only things in which the dispatcher's calls differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem, result_shapes
from rawattn._cpu import backward as cpu_backward
from rawattn._cpu import forward as cpu_forward

FLOAT32 = np.dtype(np.float32)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """inputs: names of its arrays; `optional` ones may be None.

    whole: arrays in C order, copied where inputs are not; of others the last axis alone must be dense.
    outputs: names of its results. prefix: of these in messages, where they are arguments.
    flag: the name of the one choice that is no option of the problem.
    results: shape and dtype of each output, None for one that the flag leaves out, from (problem, dtype, flag).
    check: refuses inputs that the forward does not have, from (problem, arrays by name).
    more: what the steps of its kernels are made with, for the flag.
    cpu: from (problem, lengths, inputs, results, flag).
    padding: what padding rows of each output hold.
    refuses_gradients: whether a tensor that requires a gradient would lose it here without a word.
    """

    name: str
    inputs: tuple[str, ...]
    optional: frozenset[str]
    whole: frozenset[str]
    outputs: tuple[str, ...]
    prefix: str
    results: Callable[
        [Problem, np.dtype[Any], bool], tuple[tuple[Shape, np.dtype[Any]] | None, ...]
    ]
    check: Callable[[Problem, Mapping[str, Any]], None]
    more: Callable[[bool], dict[str, Any]]
    cpu: Callable[[Problem, HostLengths, Sequence[Any], Sequence[Any], bool], None]
    padding: tuple[float, ...]
    refuses_gradients: bool

    names: tuple[str, ...] = field(init=False)  # of all its arrays
    q: int = field(init=False)  # the place of q among the inputs
    required: int = field(init=False)  # how many inputs are not optional: those come first

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.inputs + self.outputs)
        object.__setattr__(self, "q", self.inputs.index("q"))
        object.__setattr__(self, "required", len(self.inputs) - len(self.optional))


def _forward_results(
    problem: Problem, dtype: np.dtype[Any], return_lse: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    out, lse = result_shapes(problem)
    return (out, dtype), (lse, FLOAT32) if return_lse else None


def _forward_cpu(
    problem: Problem,
    lengths: HostLengths,
    inputs: Sequence[Any],
    results: Sequence[Any],
    return_lse: bool,
) -> None:
    cpu_forward.forward(problem, lengths, *inputs, *results)


def _backward_results(
    problem: Problem, dtype: np.dtype[Any], deterministic: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    outer: Shape = () if problem.group else (problem.batch,)
    queries = (*outer, problem.rows_q, problem.nheads_q)
    keys = (*outer, problem.rows_k, problem.nheads_kv)
    dims = problem.headdim, problem.headdim_v
    return (
        ((*queries, dims[0]), dtype),
        ((*keys, dims[0]), dtype),
        ((*keys, dims[1]), dtype),
    )


def _check_backward(problem: Problem, arrays: Mapping[str, Any]) -> None:
    dtype = arrays["q"].dtype
    out_shape, lse_shape = result_shapes(problem)
    expected = {"dout": (out_shape, dtype), "out": (out_shape, dtype)}
    expected |= {"lse": (lse_shape, FLOAT32), "dlse": (lse_shape, FLOAT32)}
    for name, (shape, kind) in expected.items():
        array = arrays[name]
        if array is None:
            continue
        of = f"that of the forward's {name.removeprefix('d')}"
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, expected {shape}, {of}")
        if array.dtype != kind:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected {kind}, {of}; convert it, as by {name}.astype"
            )


def _backward_cpu(
    problem: Problem,
    lengths: HostLengths,
    inputs: Sequence[Any],
    results: Sequence[Any],
    deterministic: bool,
) -> None:
    # Sums are made in one order here, always.
    cpu_backward.backward(problem, lengths, *inputs, *results)


FORWARD = Verb(
    name="attention",
    inputs=("q", "k", "v"),
    optional=frozenset(),
    whole=frozenset({"lse"}),
    outputs=("out", "lse"),
    prefix="",
    results=_forward_results,
    check=lambda problem, arrays: None,
    more=lambda return_lse: {},
    cpu=_forward_cpu,
    padding=(0.0, -np.inf),
    refuses_gradients=True,
)

BACKWARD = Verb(
    name="attention_backward",
    inputs=("dout", "q", "k", "v", "out", "lse", "dlse"),
    optional=frozenset({"dlse"}),
    whole=frozenset({"lse", "dlse"}),
    outputs=("dq", "dk", "dv"),
    prefix="into.",
    results=_backward_results,
    check=_check_backward,
    more=lambda deterministic: {"deterministic": deterministic},
    cpu=_backward_cpu,
    padding=(0.0, 0.0, 0.0),
    refuses_gradients=False,
)
