"""Whole calls with any option: NumPy arrays in, results out, through the same host code as calls on a GPU.

Arrays keep their strides and their address modulo 16, in memory that faults around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from rawattn import reference
from rawattn._call.gradients import Gradients
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._kernels.selection import only, using_tiles
from rawattn._kernels.tile_tables import SCHEMAS, Row
from rawattn._runtime import calls
from rawattn._runtime.option_arrays import named_gradients, with_arrays
from rawattn._runtime.verbs import BACKWARD, FORWARD, Verb
from rawattn._verbs import backward as verbs
from rawattn.reference._call import read
from rawattn.reference._passes import backward
from tests.gradient_errors import cancelling_terms
from tests.shim.device import Allocator, Device
from tests.shim.shim import POISON, Memory
from tests.tolerance import check, check_lse, column_orders, low_precision_attention, scale_of

Array = Any

# Small tiles, for many tile edges in a short sequence. Key: a kernel's tile table; value: the fields of a row of it.
SMALL: dict[str, tuple[int, ...]] = {
    "portable_forward": (32, 16, 2, 2, 1, False),
    "portable_decode": (16, 2, 3, 1),
    "sm90_decode": (16, 2, 3, 1),
    "portable_backward": (16, 32, 2, 1, 2, 1, 1, False),
    "portable_backward_dq": (32, 16, 2, 2, 1),
    "portable_backward_bias": (32, 32, 2, 2, 1),
}


@contextmanager
def small_tiles(**shapes: tuple[int, ...]) -> Iterator[None]:
    """Makes kernels use `shapes`, by the name of their tile table, and all others the tiles of `SMALL`."""
    with ExitStack() as stack:
        for kernel, shape in {**SMALL, **shapes}.items():
            schema = SCHEMAS[kernel]
            row = Row(256, tuple(zip(schema.fields, shape, strict=True)))
            for table in schema.tables:
                stack.enter_context(using_tiles(kernel, table, [row]))
        yield


class InMemory:
    """A NumPy array in memory of the shim, with the attributes of a view of an array on a GPU."""

    device = 0

    def __init__(self, name: str, array: Array, *, readonly: bool = True) -> None:
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype
        reach = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
        empty = 0 in array.shape
        below = 0 if empty else -sum(x for x in reach if x < 0)
        nbytes = 0 if empty else below + sum(x for x in reach if x > 0) + array.itemsize
        first = array.__array_interface__["data"][0] - below
        raw = np.full(nbytes, POISON, np.uint8)
        self._below = below
        self.memory = Memory(name, raw, phase=first % 16, readonly=readonly)
        self.address = self.memory.address + below
        if not empty:
            self._of(raw)[...] = array
        self.memory.write(raw)

    def array(self) -> Array:
        """The memory's present content."""
        return self._of(self.memory.array())

    def _of(self, raw: Array) -> Array:
        return np.ndarray(self.shape, self.dtype, raw, self._below, self.strides)


def run_forward(
    device: Device,
    family: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    on_device: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """Returns `out` and `lse` of a call. on_device: lengths are in the device's memory, and the host does not read them."""
    given = with_arrays(FORWARD, Options(**options))
    inputs = (q, k, v, *given.arrays)
    out, lse = run_verb(device, family, given, inputs, (None, None), True, on_device)
    return out, lse


def run_backward(
    device: Device,
    family: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    on_device: bool = False,
    **options: Any,
) -> Gradients:
    """As `rawattn.attention_backward`. into: arrays whose strides the results have; they are not written themselves."""
    targets = into or Gradients()
    names, written = named_gradients(targets, Options(**options), want_dbias)
    given = with_arrays(BACKWARD, Options(**options), names)
    inputs = (dout, q, k, v, out, lse, dlse, *given.arrays)
    results = run_verb(
        device, family, given, inputs, (*targets[:3], *written), deterministic, on_device
    )
    return verbs.gradients(names, options.get("score_mod"), results)


def run_verb(
    device: Device,
    family: str,
    given: Any,
    inputs: Sequence[Array | None],
    targets: Sequence[Array | None],
    flag: bool,
    on_device: bool,
    *,
    written: dict[str, Array] | None = None,
) -> list[Any]:
    """Returns the outputs of a call of a verb. given: the result of `with_arrays`.

    written: receives the inputs that the call changes, by name.
    """
    verb: Verb = given.verb
    in_memory = [
        None
        if x is None
        else InMemory(name, x, readonly=name in verb.inputs and name not in verb.written)
        for name, x in zip(verb.inputs + verb.outputs, (*inputs, *targets), strict=True)
    ]
    device.memory += [x.memory for x in in_memory if x is not None]
    addresses = [0 if x is None else x.address for x in in_memory]
    extras = slice(len(verb.inputs) - len(verb.extra_inputs), len(verb.inputs))
    pointers = 0
    for n, address in enumerate(addresses):
        pointers |= 0 if extras.start <= n < extras.stop else address
    alignments = tuple(address % 16 for address in addresses[extras])
    with only(family), _lengths_on(device) if on_device else ExitStack():
        call = calls.prepare(verb, in_memory, given.options, flag, 0, pointers, "numpy", alignments)
    for n in np.flatnonzero(call.copies or ()):
        copy = in_memory[n] = InMemory(verb.inputs[n], np.ascontiguousarray(inputs[n]))
        device.memory.append(copy.memory)
        addresses[n] = copy.address
    results = in_memory[len(inputs) :]
    for n, shape, dtype in call.allocated_outputs:
        blank = np.full(shape, POISON, np.uint8).astype(dtype)
        blank.reshape(-1).view(np.uint8)[:] = POISON
        results[n] = InMemory(verb.outputs[n], blank, readonly=False)
        device.memory.append(results[n].memory)
        addresses[len(inputs) + n] = results[n].address
    call.prepared.run([*addresses, *given.values], 0, Allocator(device), call.lengths)
    if written is not None:
        named = zip(verb.inputs, in_memory, strict=False)
        written |= {name: x.array() for name, x in named if name in verb.written and x is not None}
    return [None if x is None else x.array() for x in results]


@contextmanager
def _lengths_on(device: Device) -> Iterator[None]:
    describe = calls.describe

    def described(*given: Any) -> tuple[Any, Lengths, Any]:
        problem, lengths, results = describe(*given)
        return problem, device.lengths(lengths), results

    with mock.patch.object(calls, "describe", described):
        yield


def logical_rows(q: Array, k: Array, v: Array, options: dict[str, Any]) -> tuple[Array, Array]:
    """Two bool arrays, True for the rows of q and of k that belong to a sequence, in the shapes of the arrays' row axes."""
    call = read(q, k, v, Options(seqs=options.get("seqs")))
    rows, keys = (np.zeros(x.shape[0], bool) for x in (call.q, call.k))
    for start_q, len_q, start_k, len_k, *_ in call.sequences:
        rows[start_q : start_q + len_q] = True
        keys[start_k : start_k + len_k] = True
    return rows.reshape(q.shape[:-2]), keys.reshape(k.shape[:-2])


def poisoned(array: Array, rows: Array) -> Array:
    """A copy with NaN in all but these rows."""
    copy = array.copy()
    copy[~rows] = np.nan
    return copy


def of_lse(rows: Array, nheads: int) -> Array:
    """A bool array: which elements of an lse belong to these rows."""
    return np.broadcast_to(rows[..., None, :], (*rows.shape[:-1], nheads, rows.shape[-1]))


def verify_forward(
    device: Device,
    family: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    on_device: bool = False,
    **options: Any,
) -> None:
    """Checks a forward against the reference. Padding rows of the inputs hold NaN; those of out must be 0, of lse -inf."""
    rows, keys = logical_rows(q, k, v, options)
    given = poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)
    out, lse = run_forward(device, family, *given, on_device=on_device, **options)
    exact_out, exact_lse = reference.attention(q, k, v, **options, return_lse=True)
    low_out, low_lse = low_precision_attention(q, k, v, **options)
    check(out[rows], exact_out[rows], tuple(x[rows] for x in low_out), what="out")
    own = of_lse(rows, q.shape[-2])
    check_lse(lse[own], exact_lse[own], tuple(x[own] for x in low_lse))
    assert not np.any(out[~rows].astype(np.float32)), "padding rows of out are not 0"
    assert np.all(lse[~own] == -np.inf), "padding rows of lse are not -inf"


def verify_backward(
    device: Device,
    family: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    on_device: bool = False,
    seed_of_dout: int = 0,
    **options: Any,
) -> Gradients:
    """Checks a backward against the reference and returns its gradients. Padding rows hold NaN; their gradients must be 0."""
    rows, keys = logical_rows(q, k, v, options)
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    out, lse = out.astype(q.dtype), lse.astype(np.float32)
    dout = np.random.default_rng(seed_of_dout).standard_normal(out.shape).astype(q.dtype)
    own = of_lse(rows, q.shape[-2])
    given = [poisoned(x, rows) for x in (dout, q)]
    given += [poisoned(x, keys) for x in (k, v)]
    given += [poisoned(out, rows), poisoned(lse, own)]
    got = run_backward(
        device,
        family,
        *given,
        dlse=None if dlse is None else poisoned(dlse, own),
        want_dbias=want_dbias,
        deterministic=deterministic,
        into=into,
        on_device=on_device,
        **options,
    )
    want = {"want_dbias": want_dbias}
    whole = reference.attention(q, k, v, **options, return_lse=True)
    exact = reference.attention_backward(dout, q, k, v, *whole, dlse=dlse, **want, **options)
    low = low_precision(dout, q, k, v, out, lse, dlse, want_dbias=want_dbias, **options)
    terms = cancelling_terms(dout, q, k, v, *whole, (rows, keys, keys), **options)
    for name, mine, left in zip(("dq", "dk", "dv"), (rows, keys, keys), terms, strict=True):
        gradient = getattr(got, name)
        wanted = [getattr(x, name)[mine] for x in (exact, *low)]
        _check(name, gradient[mine], wanted, left)
        if into is None or getattr(into, name) is None:
            assert not np.any(gradient[~mine].astype(np.float32)), f"{name}: padding is not 0"
    for name in ("dbias", "dsink_logits"):
        gradient, wanted = getattr(got, name), [getattr(x, name) for x in (exact, *low)]
        assert (gradient is None) == (wanted[0] is None), name
        if gradient is not None:
            _check(name, gradient, wanted, terms_of_sums(dout, out, rows))
    assert (got.captured is None) == (exact.captured is None)
    for name, gradient in (got.captured or {}).items():
        wanted = [x.captured[name] for x in (exact, *low)]
        _check(name, gradient, wanted, terms_of_sums(dout, out, rows))
    return got


def terms_of_sums(dout: Array, out: Array, rows: Array) -> float:
    """The size of the terms that cancel in dP - delta, over all rows: it bounds the rounding error of a sum of dS."""
    size = np.abs(dout.astype(np.float64) * out).sum(axis=-1)[rows]
    return float(np.sqrt(np.square(size).sum()))


def _check(name: str, got: Array, wanted: Sequence[Array], terms: float) -> None:
    if not got.size:
        return
    exact, *low = wanted
    units = 16 * 2.0**-23 if got.dtype.itemsize == 4 else 0.5 * _epsilon(got.dtype)
    usual = units * float(np.sqrt(np.mean(np.square(exact))))
    left = 8 * 2.0**-24 * terms
    check(got, exact, tuple(low), what=name, floor=usual + left if left > usual else None)


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def low_precision(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None,
    *, want_dbias: bool | None, **options: Any,
) -> list[Gradients]:  # fmt: skip
    """Gradients of float32 arithmetic in which scores, probabilities, their gradients and the results are rounded to the
    dtypes that the kernels give them: one set for each of `column_orders`."""
    bias, score_mod = options.get("bias"), options.get("score_mod")
    wanted = bias is not None and want_dbias is not False
    options["scale"] = scale_of(q, options)

    def rounded(x: Array) -> Array:
        return x.astype(q.dtype).astype(np.float32)

    def stored(x: Array | None, like: Array) -> Array | None:
        return None if x is None else x.astype(like.dtype)

    found = []
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        each = backward(
            call,
            dout[..., order_v],
            out[..., order_v],
            lse,
            dlse,
            want_dbias=wanted,
            rounded=rounded,
        )
        back, back_v = np.argsort(order), np.argsort(order_v)
        captured = None
        if each.captured is not None:
            captured = {n: x.astype(score_mod.arrays[n].dtype) for n, x in each.captured.items()}
        found.append(
            Gradients(
                stored(each.dq[..., back], q),
                stored(each.dk[..., back], k),
                stored(each.dv[..., back_v], v),
                stored(each.dbias, bias),
                stored(each.dsink_logits, options.get("sink_logits")),
                captured,
            )
        )
    return found
