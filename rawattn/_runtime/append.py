"""`append_kv` as a verb of the dispatcher, with and without queries, which turn like the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rawattn._call.append import describe
from rawattn._call.layout import HostLengths, Lengths
from rawattn._call.options import Options
from rawattn._call.problem import Problem
from rawattn._runtime.verbs import Extras, Shape, Verb


def _cpu(
    problem: Problem,
    lengths: HostLengths | None,
    inputs: Sequence[Any],
    results: Sequence[Any],
    flag: bool,
    extras: Extras,
    gradients: Sequence[str],
) -> None:
    from rawattn._cpu import append as cpu_append

    assert lengths is not None
    k, v, k_pages, v_pages, *queries = inputs
    cpu_append.append(problem, lengths, k, v, k_pages, v_pages, extras)
    for q, out in zip(queries, results, strict=True):
        cpu_append.write_rotated(problem, lengths, q, out, extras)


def _rotated_shape(
    problem: Problem, dtype: np.dtype[Any], flag: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    outer: Shape = () if problem.packed else (problem.batch,)
    return (((*outer, problem.rows_q, problem.nheads_q, problem.headdim), dtype),)


@lru_cache(maxsize=8)
def append_verb(turns: bool, interleaved: bool, queries: bool) -> Verb:
    """The verb of `append_kv`. turns: whether a call has a rotary embedding. queries: whether it has queries.

    The options' `seqs` is a `PagedLayout`.
    """
    rows = ("k", "v", "k_pages", "v_pages", *(("q",) if queries else ()))
    extras = ("block_table", *(("cos", "sin") if turns else ()))

    def bind(seqs: Any, inputs: Sequence[Any]) -> Lengths:
        lengths: Lengths = seqs.bind(inputs[0].shape, inputs[2].shape, inputs[len(rows)].shape)
        return lengths

    def described(
        named: Mapping[str, Any],
        options: Options,
        framework: str | None,
        arrays: Extras,
        number_scales: tuple[str, ...] = (),
    ) -> tuple[Problem, Lengths]:
        return describe(named, interleaved, options, framework, arrays, number_scales)

    return Verb(
        name="append_kv",
        lead="k",
        inputs=rows + extras,
        optional=frozenset(),
        c_order=frozenset(),
        written=frozenset({"k_pages", "v_pages"}),
        outputs=("out",) if queries else (),
        prefix="",
        results=_rotated_shape if queries else lambda problem, dtype, flag: (),
        check=lambda problem, arrays, framework: None,
        step_arguments=lambda flag: {},
        cpu=_cpu,
        padding=(0.0,) if queries else (),
        refuses_gradients=True,
        bind=bind,
        describe=described,
        extra_inputs=extras,
        dense=frozenset({"cos", "sin"}),
    )
