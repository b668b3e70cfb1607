"""Figures of the suite `models`: our time over that of the fastest peer, shape by shape, and the median."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import rawattn
from rawattn._bench import graph_peers, graphs, machine, model_cases
from rawattn._bench.graph_peers import Sides
from rawattn._bench.model_cases import Model
from rawattn._bench.report import Figure

_MOST = 1.0  # the bound on the ratio of one shape
_MOST_OF_MEDIAN = 1 / 1.1  # the bound on the median ratio


def figures(dtype: str, peers: Sequence[str], step: Callable[[str], None]) -> list[Figure]:
    """A figure for each shape, and one for the median. step(name) is called after each shape."""
    found = []
    for case in model_cases.CASES:
        found.append(_line(case, dtype, peers))
        step(case.name)
    ratios = [figure.value for figure in found if figure.value is not None]
    median = statistics.median(ratios) if ratios else None
    of = f"{len(ratios)} of {len(found)} shapes"
    name = "median over the fastest peer"
    return [*found, Figure(name, median, "x", _MOST_OF_MEDIAN, at_most=True, of=of)]


def _line(case: Model, dtype: str, peers: Sequence[str]) -> Figure:
    prepare = functools.partial(sides, case, dtype)
    return graph_peers.over_fastest(case.name, case.nbytes, prepare, peers, _MOST)


def sides(case: Model, dtype: str) -> Sides:
    """The call of a shape on random inputs, for us and for peers."""
    rows = []
    for _ in range(graphs.sets(case.nbytes)):
        q, k, v = (machine.random_array(shape, dtype) for shape in case.shapes)
        rows.append((q, k, v))
    ours = [functools.partial(rawattn.attention, *qkv, causal=case.causal) for qkv in rows]
    return Sides(ours, rows, case.causal)
