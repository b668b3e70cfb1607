"""Run a case through `rawattn.attention` and check its results against the contract."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

import rawattn
from rawattn import reference
from tests.cases import Case
from tests.frameworks import Framework
from tests.inputs import Inputs, materialise
from tests.tolerance import check, check_lse, low_precision_attention


class Expected(NamedTuple):
    """The logical rows of a result, exact and in low precision: (rows, heads[, dim])."""

    out: np.ndarray
    lse: np.ndarray
    low_out: tuple[np.ndarray, ...]
    low_lse: tuple[np.ndarray, ...]


@lru_cache(maxsize=4)
def expected(case: Case) -> Expected:
    inputs = materialise(case)
    arrays = [array.view() for array in (inputs.q, inputs.k, inputs.v)]
    options = {**inputs.options, "seqs": layout(inputs)}
    out, lse = reference.attention(*arrays, **options, return_lse=True)
    low_out, low_lse = low_precision_attention(*arrays, **options)
    rows = inputs.rows
    return Expected(
        out[rows],
        _by_row(lse)[rows],
        tuple(x[rows] for x in low_out),
        tuple(_by_row(x)[rows] for x in low_lse),
    )


def layout(inputs: Inputs, case: Case | None = None, framework: Framework | None = None) -> Any:
    """Return the SeqLayout of a call, or None: with NumPy integers, or with integers in the form that `case` asks for."""
    integers: dict[str, Any] = dict(inputs.integers)
    if case is not None and framework is not None and case.on_device:
        integers = {name: framework.integers(x) for name, x in integers.items()}
    elif case is not None and case.integers == "list":
        integers = {name: x.tolist() for name, x in integers.items()}
    if not integers and not inputs.maxima:
        return None
    return rawattn.SeqLayout(**integers, **inputs.maxima)


def options_of(inputs: Inputs, framework: Framework) -> dict[str, Any]:
    """Return the other keywords, with arrays of the framework."""
    options = dict(inputs.options)
    for name, array in inputs.arrays.items():
        made = getattr(framework, name, framework.array)
        options[name] = made(array)
    if framework.name == "jax" and options.get("seed") is not inputs.options.get("seed"):
        # JAX has only int32 unless its 64-bit mode is on.
        seed = inputs.options["seed"]
        options["seed"] = framework.integers(seed) if seed.itemsize == 4 else int(seed.item())
    if inputs.captured:
        captured = {name: framework.array(array) for name, array in inputs.captured.items()}
        given = inputs.options["score_mod"].text
        options["score_mod"] = rawattn.ScoreMod(given.forward, wrt=given.wrt, **captured)
    return options


def run(case: Case, framework: Framework, *, backend: str | None = None) -> Any:
    """Make the call; return (out, lse or None, the given `out` or None, inputs)."""
    inputs = materialise(case)
    q, k, v = (framework.array(array) for array in (inputs.q, inputs.k, inputs.v))
    given = None
    if inputs.out is not None and framework.writable:
        given = framework.array(inputs.out)
    result = rawattn.attention(
        q,
        k,
        v,
        seqs=layout(inputs, case, framework),
        **options_of(inputs, framework),
        num_splits=case.num_splits,
        return_lse=case.return_lse,
        out=given,
        backend=backend,
    )
    out, lse = result if case.return_lse else (result, None)
    assert type(out) is type(q), f"got {type(out)} for a {type(q)}"
    return out, lse, given, inputs


def verify(case: Case, framework: Framework, *, backend: str | None = None) -> None:
    """Check values against the reference, padding against the contract, and that no other memory is written."""
    out, lse, given, inputs = run(case, framework, backend=backend)
    exact = expected(case)
    rows = inputs.rows

    result = framework.host(out)
    headdim_v = inputs.v.shape[-1]
    assert result.shape == (*rows.shape, case.nheads_q, headdim_v)
    assert result.dtype == inputs.q.buffer.dtype
    check(result[rows], exact.out, exact.low_out, what="out")
    if given is None:
        assert not np.any(result[~rows].astype(np.float32) != 0), "padding rows of out are not 0"
    else:
        assert out is given, "out= was given, something else was returned"
        assert inputs.out is not None
        buffer = framework.buffer_of(given, inputs.out)
        bits = f"u{buffer.itemsize}"
        touched = buffer.view(bits) != inputs.out.buffer.view(bits)
        assert not np.any(touched & ~inputs.logical_out), "memory outside the rows of out= changed"

    if lse is not None:
        log = framework.host(lse)
        assert log.dtype == np.float32
        assert log.shape == (*rows.shape[:-1], case.nheads_q, rows.shape[-1])
        log = _by_row(log)
        check_lse(log[rows], exact.lse, exact.low_lse)
        assert np.all(log[~rows] == -np.inf), "padding rows of lse are not -inf"


def _by_row(lse: np.ndarray) -> np.ndarray:
    """(..., heads, rows) -> (..., rows, heads)"""
    return lse.swapaxes(-1, -2)
