"""`combine` as a verb of the dispatcher: partials in lists, or stacked in one array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rawattn._call import partials
from rawattn._call.layout import HostLengths, Lengths
from rawattn._call.options import Options
from rawattn._call.partials import PartialsSide
from rawattn._call.problem import Problem, result_shapes
from rawattn._runtime.verbs import FLOAT32, Extras, Shape, Verb


def _results(
    problem: Problem, dtype: np.dtype[Any], flag: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    assert problem.partials is not None
    out, lse = result_shapes(problem)
    return (out, partials.result_dtype(problem.partials.result)), (lse, FLOAT32)


def _check_out(problem: Problem, arrays: Mapping[str, Any], framework: str | None) -> None:
    """TypeError for an `out` whose dtype is not that of the result. Its other checks are those of any array to write."""
    out = arrays["out"]
    if out is None:
        return
    (shape, dtype), _ = _results(problem, FLOAT32, False)  # type: ignore[misc]
    if tuple(out.shape) == shape and out.dtype != dtype:
        raise TypeError(
            f"out: got dtype {out.dtype}, expected {dtype}, that of the result; pass "
            f"dtype={str(out.dtype)!r} too, or an array of {dtype}"
        )


def _cpu(
    problem: Problem,
    lengths: HostLengths | None,
    inputs: Sequence[Any],
    results: Sequence[Any],
    flag: bool,
    extras: Extras,
    gradients: Sequence[str],
) -> None:
    from rawattn._cpu import combine as cpu_combine

    assert problem.partials is not None
    values, logs = (
        list(given) if listed else list(given[0])
        for listed, given in zip(
            problem.partials.listed, (inputs, list(extras.values())), strict=True
        )
    )
    cpu_combine.combine(values, logs, *results)


@lru_cache(maxsize=256)
def combine_verb(outs: int, lses: int, dtype: str | None) -> Verb:
    """The verb of `combine` for so many listed outs and lses, 0 where they are stacked. dtype: that of the result."""
    of_outs, of_lses = (
        tuple(f"{name}[{n}]" for n in range(count)) or (name,)
        for name, count in (("outs", outs), ("lses", lses))
    )

    def described(
        named: Mapping[str, Any], options: Options, framework: str | None, arrays: Extras
    ) -> tuple[Problem, Lengths]:
        sides = (
            PartialsSide("outs", tuple(named[name] for name in of_outs), outs > 0),
            PartialsSide("lses", tuple(named[name] for name in of_lses), lses > 0),
        )
        return partials.describe(*sides, dtype, framework)

    def bind(seqs: Any, inputs: Sequence[Any]) -> Lengths:
        raise AssertionError("combine has no layout")

    return Verb(
        name="combine",
        lead=of_outs[0],
        inputs=of_outs + of_lses,
        optional=frozenset(),
        c_order=frozenset({"lse"}),
        outputs=("out", "lse"),
        prefix="",
        results=_results,
        check=_check_out,
        step_arguments=lambda flag: {},
        cpu=_cpu,
        padding=(0.0, -np.inf),
        refuses_gradients=True,
        bind=bind,
        describe=described,
        extra_inputs=of_lses,
        any_alignment=True,
        same_strides=(of_outs, of_lses),
    )
