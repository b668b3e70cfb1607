"""The inputs of a backward call and the gradients it must return, for every `Case`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

import rawattn
from rawattn import reference
from rawattn._call.gradients import Gradients
from tests.cases import Case
from tests.frameworks import Framework
from tests.gradient_errors import cancelling_terms, low_precision_gradients, sizes_of_sums
from tests.inputs import Inputs, _logical_rows, materialise
from tests.memory import CANARY, Strided, option_array, strided
from tests.score_arrays import SCORE_MODS, pairs_used
from tests.tolerance import check
from tests.verify import layout, options_of

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class OfOption:
    """The gradient of an option's array.

    name: dbias, dsink_logits, or the name of a captured array. where: True for elements that belong to a sequence.
    """

    name: str
    where: np.ndarray
    dtype: np.dtype
    into: Strided | None

    def of(self, gradients: Any) -> Any:
        captured = gradients.captured or {}
        return captured[self.name] if self.name in captured else getattr(gradients, self.name)


@dataclass(frozen=True, eq=False)
class Backward:
    """One backward call. Padding rows of all its inputs are NaN.

    The reference runs only when a property asks for its results, so tests can describe a call by its layout alone. `exact`,
    `low` and `terms` hold values for dq, dk and dv first, then for `others`.
    """

    case: Case
    inputs: Inputs
    dout: Strided
    logical_dlse: np.ndarray | None  # holds numbers in padding rows too
    into: tuple[Strided, ...] | None  # dq, dk, dv
    rows: tuple[np.ndarray, ...]  # True for the logical rows of dq, dk and dv
    others: tuple[OfOption, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return *NAMES, *(each.name for each in self.others)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(x.shape for x in (self.inputs.q, self.inputs.k, self.inputs.v))

    @cached_property
    def out(self) -> Strided:
        """The reference's out, with the strides of `dout`."""
        rows = self.rows[0]
        array = _like_out(self.case, self.dout.shape, self.dout.buffer.dtype)
        array.view()[rows] = self._forward[0][rows].astype(array.buffer.dtype)
        return array

    @cached_property
    def lse(self) -> np.ndarray:
        return self._poisoned(self._forward[1])

    @cached_property
    def dlse(self) -> np.ndarray | None:
        return None if self.logical_dlse is None else self._poisoned(self.logical_dlse)

    @cached_property
    def exact(self) -> tuple[np.ndarray, ...]:
        """The exact gradients: the logical rows of dq, dk and dv, and the elements of `others` that belong to a sequence."""
        return self._reference(*self._forward)

    @cached_property
    def low(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """For each gradient, its low-precision evaluations, restricted as in `exact`."""
        low = low_precision_gradients(
            self.dout.view(), *self._arrays, *self._given, self.logical_dlse, **self._options
        )
        return tuple(zip(*map(self._logical, low), strict=True))

    @cached_property
    def of_given(self) -> tuple[np.ndarray, ...]:
        """As `exact`, from the rounded out and lse."""
        return self._reference(*self._given)

    @cached_property
    def terms(self) -> tuple[float, ...]:
        """The size of what cancels in each gradient: see `cancelling_terms`."""
        arrays = self.dout.view(), *self._arrays, *self._forward
        terms = cancelling_terms(*arrays, self.rows, **self._options)
        if not self.others:
            return terms
        sizes = sizes_of_sums(*arrays, self.logical_dlse, **self._options)
        return *terms, *(float(each.of(sizes)[each.where].max(initial=0)) for each in self.others)

    def _reference(self, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, ...]:
        options, dlse = self._options, self.logical_dlse
        return self._logical(
            reference.attention_backward(
                self.dout.view(), *self._arrays, out, lse, dlse=dlse, **options
            )
        )

    def _logical(self, gradients: Gradients) -> tuple[np.ndarray, ...]:
        qkv = (x[rows] for x, rows in zip(gradients[:3], self.rows, strict=True))
        return *qkv, *(each.of(gradients)[each.where] for each in self.others)

    @property
    def _arrays(self) -> list[np.ndarray]:
        return [x.view() for x in (self.inputs.q, self.inputs.k, self.inputs.v)]

    @property
    def _options(self) -> dict[str, Any]:
        return {**self.inputs.options, "seqs": layout(self.inputs)}

    @cached_property
    def _forward(self) -> tuple[np.ndarray, np.ndarray]:
        return reference.attention(*self._arrays, **self._options, return_lse=True)

    @property
    def _given(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounded out and lse that the kernels get, which are not to blame for that rounding."""
        out, lse = self._forward
        return out.astype(self.dout.buffer.dtype), lse.astype(np.float32)

    def _poisoned(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        x.swapaxes(-1, -2)[~self.rows[0]] = np.nan
        return x


@lru_cache(maxsize=4)
def backward_of(case: Case) -> Backward:
    inputs = materialise(case)
    dtype = inputs.q.buffer.dtype
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    rows_q, rows_k = inputs.rows, _logical_rows(case, *case.side_k)
    shape = (*rows_q.shape, case.nheads_q, inputs.v.shape[-1])
    dout = _like_out(case, shape, dtype)
    dout.view()[rows_q] = rng.standard_normal(shape)[rows_q].astype(dtype)
    dlse = None
    if case.return_lse and rng.random() < 0.5:
        *lead, nrows = rows_q.shape
        dlse = rng.standard_normal((*lead, case.nheads_q, nrows)).astype(np.float32)
    into = None
    if case.give_out:
        dense = case.layout in ("steps", "shared-heads")
        into = tuple(
            strided(x.shape, dtype, "dense" if dense else case.layout)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        for array in into:
            array.buffer.view(np.uint8)[:] = CANARY
    rows = rows_q, rows_k, rows_k
    return Backward(case, inputs, dout, dlse, into, rows, tuple(_others(case, inputs)))


def _others(case: Case, inputs: Inputs) -> Iterator[OfOption]:
    """Yield the gradients of options, in the order in which a backward returns them."""
    given: dict[str, tuple[Strided, np.ndarray]] = {}
    if case.bias is not None:
        array = inputs.arrays["bias"]
        used = pairs_used(case, case.bias).reshape(array.shape)
        given["dbias"] = array, used
    if case.sink_logits:
        array = inputs.arrays["sink_logits"]
        given["dsink_logits"] = array, np.ones(array.shape, bool)
    if case.score_mod:
        for name in SCORE_MODS[case.score_mod][2]:
            array = inputs.captured[name]
            given[name] = array, np.ones(array.shape, bool)
    for name, (array, where) in given.items():
        dtype, into = array.buffer.dtype, None
        if case.give_out:
            into = option_array(array.shape, dtype, "odd")
            into.buffer.view(np.uint8)[:] = CANARY
        yield OfOption(name, where, dtype, into)


def _like_out(case: Case, shape: tuple[int, ...], dtype: np.dtype) -> Strided:
    return strided(shape, dtype, case.layout if case.layout != "shared-heads" else "bhsd")


def check_gradient(call: Backward, n: int, got: np.ndarray) -> None:
    """Apply `check` to gradient n: dq, dk, dv (n = 0, 1, 2) or one of `others`, without padding."""
    exact, low = call.exact[n], call.low[n]
    if not exact.size:
        return
    left = 8 * 2.0**-24 * call.terms[n]
    size = np.sqrt(np.mean(np.square(exact)))
    units = 16 if got.dtype.itemsize == 4 else 0.5
    usual = units * float(ml_dtypes.finfo(got.dtype).eps) * size
    floor = usual + left if left > usual else None
    try:
        check(got, exact, low, what=call.names[n], floor=floor)
    except AssertionError:
        # Where dP and delta cancel, what the rounding of out adds may be most of the error, and roundings of the evaluation in
        # low precision may undo it by chance.
        check(got, exact, (*low, call.of_given[n]), what=call.names[n], floor=floor)


def verify(
    case: Case,
    framework: Framework,
    *,
    backend: str | None = None,
    deterministic: bool = False,
) -> None:
    """Check values against the reference, padding against the contract, and that no other memory is written."""
    call = backward_of(case)
    gradients, into = run(call, framework, backend=backend, deterministic=deterministic)
    assert isinstance(gradients, Gradients)
    kind = type(framework.array(call.inputs.q))
    for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
        gradient = gradients[n]
        assert type(gradient) is kind, f"{name}: got {type(gradient)} for a {kind}"
        result = framework.host(gradient)
        assert result.shape == call.shapes[n] and result.dtype == call.inputs.q.buffer.dtype
        check_gradient(call, n, result[rows])
        if into is None:
            assert not np.any(result[~rows].astype(np.float32) != 0), f"{name}: padding is not 0"
        else:
            assert gradient is into[n], f"into.{name} was given, something else was returned"
            check_untouched(name, gradient, call.into[n], rows, framework)
    verify_others(call, framework, gradients, into)


def run(
    call: Backward, framework: Framework, *, backend: str | None = None, deterministic: bool = False
) -> tuple[Any, Any]:
    """Make the call; return its gradients, and the `into` arrays or None."""
    case, inputs = call.case, call.inputs
    q, k, v, out, dout = (
        framework.array(x) for x in (inputs.q, inputs.k, inputs.v, call.out, call.dout)
    )
    lse, dlse = (None if x is None else framework.array(_dense(x)) for x in (call.lse, call.dlse))
    into = None
    if call.into is not None and framework.writable:
        into = _into(call, framework)
    gradients = rawattn.attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        seqs=layout(inputs, case, framework),
        **options_of(inputs, framework),
        dlse=dlse,
        deterministic=deterministic,
        into=into,
        backend=backend,
    )
    return gradients, into


def verify_others(call: Backward, framework: Framework, gradients: Gradients, into: Any) -> None:
    """Check the gradients of option arrays, and that no other gradient is returned."""
    names = {each.name for each in call.others}
    assert (gradients.dbias is None) == ("dbias" not in names)
    assert (gradients.dsink_logits is None) == ("dsink_logits" not in names)
    assert set(gradients.captured or ()) == names - {"dbias", "dsink_logits"}
    for n, other in enumerate(call.others, len(NAMES)):
        gradient = other.of(gradients)
        assert type(gradient) is type(gradients.dq), f"{other.name}: got {type(gradient)}"
        result = framework.host(gradient)
        assert result.shape == other.where.shape and result.dtype == other.dtype
        check_gradient(call, n, result[other.where])
        unused = result[~other.where]
        if into is None:
            assert not np.any(unused.astype(np.float32) != 0), f"{other.name}: not 0 past sequences"
            continue
        assert other.into is not None
        assert gradient is other.of(into), f"into.{other.name} was given, not returned"
        # Elements past the sequences may be left unchanged or set to 0.
        bits = f"u{unused.itemsize}"
        canary = np.full(1, CANARY, np.uint8).repeat(unused.itemsize).view(bits)
        assert np.isin(unused.view(bits), (0, *canary)).all(), f"{other.name}: junk past sequences"
        everything = np.ones(other.where.shape, bool)
        check_untouched(other.name, gradient, other.into, everything, framework)


def _into(call: Backward, framework: Framework) -> Gradients:
    arrays = {each.name: framework.array(each.into) for each in call.others if each.into}
    of_options = {name: arrays.pop(name, None) for name in ("dbias", "dsink_logits")}
    assert call.into is not None
    return Gradients(*map(framework.array, call.into), **of_options, captured=arrays or None)


def check_untouched(
    name: str, gradient: Any, given: Strided, rows: np.ndarray, framework: Framework
) -> None:
    """Check that in the buffer of a gradient only these rows have changed."""
    buffer = framework.buffer_of(gradient, given)
    mine = replace(given, buffer=np.zeros(buffer.shape, bool))
    mine.view()[rows] = True
    bits = f"u{buffer.itemsize}"
    touched = buffer.view(bits) != given.buffer.view(bits)
    assert not np.any(touched & ~mine.buffer), f"{name}: memory outside its rows changed"


def _dense(array: np.ndarray) -> Strided:
    """Copy into a buffer with NaN around the array."""
    copy = strided(array.shape, array.dtype, "dense")
    copy.view()[...] = array
    return copy
