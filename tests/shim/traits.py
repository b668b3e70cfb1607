"""Traits of the test matrix's cells, by which tests/exhaustive.py chooses the cells of every run."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from tests.cases import Case

_DIMS = ("headdim", "headdim_v")


def of_case(case: Case) -> Iterable[Hashable]:
    """Traits that a kernel sees as run-time values: lengths, layouts, widths of masks, values."""
    yield from (("lengths", case.packed, case.by_q), ("keys' lengths", case.packed, case.by_k))
    yield "gaps", case.packed, case.lead + case.tail > 0
    yield "integers", case.packed, case.integers, case.on_device
    yield "bound", case.max_seqlen
    yield "layout", case.layout, case.give_out
    yield from (("values", case.values), ("dtype", case.dtype))
    yield "heads", case.nheads_q // case.nheads_kv
    left, right = case.window or (None, None)
    yield "mask", left is None, right is None, case.sink > 0, case.causal
    yield from (("left", _size(left)), ("right", _size(right)), ("sink", _size(case.sink)))
    yield "lse", case.return_lse
    yield "scale", case.scale is None, (case.scale or 1) > 0
    pairs = list(zip(case.lens_q, case.lens_k, strict=True))
    yield "sequences", len(pairs) == 0
    yield "no queries", any(q == 0 for q, _ in pairs), "no keys", any(k == 0 for _, k in pairs)
    yield "more queries than keys", any(q > k for q, k in pairs)


def _size(width: int | None) -> int | None:
    """The order of magnitude of a window's side: its number of bits."""
    return None if width is None else width.bit_length()


def of_call(case: Case) -> Iterable[Hashable]:
    """Traits of a call for a backend that does not compile a kernel for each head dim."""
    yield from of_case(case)
    yield "dims", case.headdim == case.headdim_v, case.headdim % 16 == 0, case.headdim // 64


def of_kernel(config: Any, tile: Iterable[str]) -> Iterable[Hashable]:
    """Traits of a kernel: each of its constants, each pair of its switches, and the constants named by `tile`."""
    found = dict(constants(config))
    yield from ((name, value) for name, value in found.items() if name not in _DIMS)
    switches = [each for each in found.items() if isinstance(each[1], bool)]
    yield from itertools.combinations(switches, 2)
    headdim, headdim_v = (found[name] for name in _DIMS)
    yield "dims", headdim == headdim_v, headdim % 16 == 0
    yield "dims", headdim // 64
    yield from (("tile", found["element"] == "float", name, found[name]) for name in tile)


def constants(config: Any) -> Iterable[tuple[str, Any]]:
    """The names and values of the constants that a kernel is compiled with."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from constants(value)
        else:
            yield field.name, value
