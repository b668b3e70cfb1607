"""`rawattn.jax.attention`: under jit, grad, vmap and scan, on XLA's buffers and XLA's stream. Imports JAX.

A call becomes a custom call in the compiled program. Its only attribute is a text that describes everything but the arrays
(`Record`). So a program can be cached or serialised, and depends on no object of this process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.gradients import Gradients
from rawattn._call.layout import Lengths
from rawattn._call.options import ForwardOptions, flag
from rawattn._call.problem import Problem, describe
from rawattn._call.signatures import options_of, takes_options
from rawattn._interop import xla
from rawattn._interop.xla import is_traced
from rawattn._jax import at_exit, launch
from rawattn._jax.arrays import (
    INT64,
    Form,
    as_jax,
    check_numpy,
    narrowed_options,
    no_numbers,
    refuse_symbolic_shapes,
    sharded_as,
    sharding_of_mapped,
    unsharded,
    vary_over_same_axes,
    with_wrt_limited_to,
)
from rawattn._jax.derivatives import constant, first_derivatives_alone
from rawattn._jax.record import Record, read, with_operands
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime.option_arrays import caller_names, named_gradients, with_arrays
from rawattn._runtime.verbs import FORWARD

if TYPE_CHECKING:  # type checkers ship it; it is no dependency of this package
    from typing_extensions import Unpack

_TARGETS = {False: "rawattn_attention", True: "rawattn_attention_backward"}


ArrayT = TypeVar("ArrayT")


class JaxOptions(ForwardOptions, total=False):
    """For type checkers: the keywords of `attention`, except `return_lse`."""

    deterministic: bool


@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[JaxOptions],
) -> ArrayT: ...


@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[JaxOptions]
) -> tuple[ArrayT, Any]: ...


@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: bool, **options: Unpack[JaxOptions]
) -> ArrayT | tuple[ArrayT, Any]: ...


@checks_arguments("rawattn.jax.attention")
@takes_options(ForwardOptions)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Unpack[ForwardOptions],
) -> Any:
    """`rawattn.attention` of JAX arrays, traced or not, differentiable once in reverse mode.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        JAX or NumPy; float16, bfloat16 or float32.
    k : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    v : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    seqs : SeqLayout, optional
        Lengths from the host are constants of the compiled program; other lengths need another compilation. Traced lengths
        are read by the kernels when the program runs. Bad values in them are not refused then, but never make a kernel read
        or write outside its arrays. ``max_seqlen_*`` saves the kernels empty work.
    return_lse : bool
        Also return lse, float32, (batch, nheads_q, seqlen_q) or (nheads_q, total_q). It is differentiable too.
    deterministic : bool
        Whether the backward gives the same bits run after run.
    bias, mask, alibi_slopes, sink_logits : array, optional
        As in `rawattn.attention`; JAX or NumPy, traced or not. `bias` and `sink_logits` have gradients, the others have none.
        A gradient with respect to `alibi_slopes` raises TypeError; for learned slopes, use a `ScoreMod` that captures them and
        names them in ``wrt``. The bits of a `BlockMask` are constants of the program.
    score_mod : rawattn.ScoreMod, optional
        It may be made inside the traced function. Its text and its numbers are constants of the program. The arrays that it
        captures may be traced, and those in its ``wrt`` have gradients. Gradients with respect to the others raise TypeError.
    seed : int or array of one integer
        An int is a constant of the program, so every run drops the same probabilities. A traced seed, as by
        ``jax.random.randint(key, (), 0, 2**31 - 1)``, is read when the program runs; int32, or int64 in JAX's 64-bit mode.
    **options
        The other options of `rawattn.attention`, as there: Python values, constants of the compiled program.

    Returns
    -------
    out : array, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : array, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rawattn.attention`, while the call is traced. Failures that show only when the program runs (too little memory, no
        compiler) raise an exception of JAX, as a rule ``jax.errors.JaxRuntimeError``, whose message ends in rawattn's own.

    Notes
    -----
    There is no `out`, since JAX arrays are immutable, and no `backend`: a call runs where the program runs, on a GPU on
    the stream of the program, on the CPU in NumPy.

    `jax.vmap` folds the mapped axis into the batch. If q, k, v or lengths are not mapped, they are copied for every call of
    the map. `bias`, `mask` and `alibi_slopes` that are not mapped are copied only if they have a batch axis of their own or
    their gradient is taken. These raise NotImplementedError, which names them: a packed batch, `dropout_p`, a `BlockMask`, a
    `score_mod` that reads `batch`, mapped `sink_logits` or captured arrays, and gradients of a call in which `sink_logits` or
    captured arrays are traced. `jax.lax.map` takes them all.

    There are no forward-mode and no second derivatives. Under a sharded `jit` use `jax.shard_map`, so that each device
    makes a call for its own shard.

    Examples
    --------
    >>> import jax, rawattn.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 16))
    >>> rawattn.jax.attention(q, k, v, causal=True).shape
    (2, 5, 4, 16)
    >>> loss = lambda q: rawattn.jax.attention(q, k, v, causal=True).sum()
    >>> jax.jit(jax.grad(loss))(q).shape
    (2, 5, 4, 16)
    """
    given = options_of(options, ForwardOptions, "rawattn.jax.attention", attention)
    return_lse, deterministic = flag("return_lse", return_lse), flag("deterministic", deterministic)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if type(array) is not np.ndarray and not isinstance(array, jax.Array):
            check_numpy(name, array, "JAX arrays, traced or not, and NumPy arrays")
    verb, arrays, values, left = with_arrays(FORWARD, given)
    if isinstance(given.mask, BlockMask):
        arrays = tuple(
            as_jax(x) if name.startswith("mask_") else x
            for name, x in zip(verb.extra_inputs, arrays, strict=True)
        )
    for n, array in enumerate(arrays, -len(arrays)):
        if type(array) is not np.ndarray and not isinstance(array, jax.Array):
            check_numpy(caller_names(verb, left)[n], array, "JAX and NumPy arrays")
        if not isinstance(array.dtype, np.dtype):
            raise no_numbers(caller_names(verb, left)[n], array)
    if any(x.dtype == INT64 for x in arrays):
        arrays, left = narrowed_options(verb, arrays, left)
    gradients, _ = named_gradients(Gradients(), given, None)
    if gradients:  # those that a backward gives: only of traced arrays, since nobody can ask for that of a constant
        traced = {
            f"d{name}" for name, x in zip(verb.extra_inputs, arrays, strict=True) if is_traced(x)
        }
        gradients = tuple(name for name in gradients if name in traced)
        left = with_wrt_limited_to(left, traced)
    arrays = tuple(
        constant(caller_names(verb, left)[n], x, given.align)
        if name.startswith(("captured", "alibi_slopes")) and f"d{name}" not in gradients
        else x
        for n, (name, x) in enumerate(zip(verb.extra_inputs, arrays, strict=True), -len(arrays))
    )
    named = {name: Form(x) for name, x in zip(verb.extra_inputs, arrays, strict=True)}
    try:
        problem, lengths = describe(q, k, v, left, "jax", named)
    except Exception:  # also JAX's own, raised where a check compares a symbolic dimension
        refuse_symbolic_shapes({"q": q, "k": k, "v": v, **named})
        raise
    more = verb.extra_inputs, gradients, values[0] if values else None
    integers: tuple[Any, ...] = ()
    if not lengths.on_host:  # else they are constants of the program
        lengths, operands = with_operands(lengths, as_jax)
        integers = tuple(operands)
    text = _record(problem, lengths, return_lse, deterministic, *more).text
    q, k, v, *others = vary_over_same_axes(q, k, v, *arrays, *integers)
    count = len(arrays)
    return _function(text)(q, k, v, tuple(others[:count]), tuple(others[count:]))


def _record(
    problem: Problem,
    lengths: Lengths,
    lse: bool,
    deterministic: bool,
    options: tuple[str, ...],
    gradients: tuple[str, ...],
    seed: int | None = None,
) -> Record:
    """The record of a forward, which also says which gradients its backward gives."""
    more = {"options": options, "gradients": gradients, "seed": seed}
    return Record(problem, lengths, lse, deterministic, **more)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _function(text: str) -> Any:
    """A function of q, k, v, the arrays of options and the operands.

    It is differentiable with respect to the first three and to the arrays whose gradients the record names.
    """
    record = read(text)
    forward_record = replace(record, lse=True)
    backward_record = replace(record, backward=True)
    indices = {name: n for n, name in enumerate(record.options)}
    differentiated = [indices[name.removeprefix("d")] for name in record.gradients]

    @jax.custom_vjp  # type: ignore[untyped-decorator]  # JAX is not typed here
    def attention(
        q: Any, k: Any, v: Any, options: tuple[Any, ...], integers: tuple[Any, ...]
    ) -> Any:
        results = _call(record, (q, k, v, *options, *integers))
        return results if record.lse else results[0]

    def forward(q: Any, k: Any, v: Any, options: tuple[Any, ...], integers: tuple[Any, ...]) -> Any:
        out, lse = _call(forward_record, (q, k, v, *options, *integers))
        return (out, lse) if record.lse else out, (q, k, v, out, lse, options, integers)

    def backward(saved: Any, gradients: Any) -> Any:
        *arrays, options, integers = saved
        dout, *dlse = gradients if record.lse else (gradients,)
        found = _call(backward_record, (dout, *arrays, *dlse, *options, *integers))
        of_options: list[Any] = [None] * len(options)
        for index, gradient in zip(differentiated, found[3:], strict=True):
            of_options[index] = sharded_as(options[index], gradient)
        of_qkv = map(sharded_as, arrays[:3], found)
        return (*of_qkv, tuple(of_options), None)

    attention.defvjp(forward, backward)
    return jax.jit(attention, inline=True)


def _call(record: Record, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of one custom call of the program."""

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def call(*arrays: Any) -> Any:
        results = jax.eval_shape(results_like, *arrays)
        return jax.ffi.ffi_call(_TARGETS[record.backward], results)(*arrays, record=record.text)

    def results_like(*arrays: Any) -> Any:
        """Arrays of the results' shapes and dtypes, which vary over every mesh axis over which one of `arrays` varies."""
        some = sum(x.sum().astype(np.float32) for x in arrays)
        return tuple(jnp.broadcast_to(some, shape).astype(dtype) for shape, dtype in record.outputs)

    @call.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, is_mapped: Sequence[bool], *arrays: Any) -> Any:
        if record.problem.packed:
            raise NotImplementedError(
                "jax.vmap: a packed batch (seqs with seqstart_q) cannot be mapped; put the sequences of all calls into "
                "one packed batch, or use jax.lax.map"
            )
        options = dict(enumerate(record.options, record.first_option))
        # Arrays that stay one for all calls. One whose gradient is taken does not: each call needs a gradient of its own.
        given_once = {
            name
            for n, name in options.items()
            if not is_mapped[n]
            and record.form(name).shape[0:1] == (1,)
            and not (record.backward and f"d{name}" in record.gradients)
        }
        folded = record.folded(size, given_once)
        mapped_as = sharding_of_mapped(arrays, is_mapped)
        arrays = tuple(map(unsharded, arrays))
        inputs = [
            _fold_input(array, size, given, like[0], record, options.get(n))
            for n, (array, given, like) in enumerate(
                zip(arrays, is_mapped, folded.inputs, strict=True)
            )
        ]
        results = tuple(
            _unfold_result(result, size, shape)
            for result, (shape, _) in zip(_call(folded, tuple(inputs)), record.outputs, strict=True)
        )
        return tuple(mapped_as(x) for x in results), (True,) * len(results)

    results: tuple[Any, ...] = first_derivatives_alone(call)(*arrays)
    return results


def _fold_input(
    array: Any,
    size: int,
    is_mapped: bool,
    shape: tuple[int, ...],
    record: Record,
    option: str | None,
) -> Any:
    """An array of all `size` calls of a map, in `shape`: the shape that the one call made of them takes.

    option: its name if it is an array of an option, else None.
    """
    if option is not None and not is_mapped and array.shape == shape:  # one for all calls
        return array
    whole = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
    if option is None:
        if whole.size != math.prod(shape):  # cumulative lengths
            whole = jnp.diff(whole, axis=1)
        return whole.reshape(shape)
    if option not in ("bias", "mask", "alibi_slopes"):
        name = "score_mod" if option.startswith("captured") else option
        raise NotImplementedError(
            f"{name}: jax.vmap of its array is not possible, since a call has one for all of its batch; use jax.lax.map"
        )
    own = record.form(option).shape
    each = jnp.broadcast_to(whole.reshape(size, *own), (size, record.problem.batch, *own[1:]))
    return each.reshape(shape)


def _unfold_result(result: Any, size: int, shape: tuple[int, ...]) -> Any:
    """The result of each call of a map, split off the result of the one call that was made of them.

    The gradient of an array that a call's batch shares is summed over that batch.
    """
    if result.size == size * math.prod(shape):
        return result.reshape(size, *shape)
    return result.reshape(size, -1, *result.shape[1:]).sum(1).reshape(size, *shape)


def _run_on_cpu(call: xla.Call) -> None:
    with at_exit.running():
        launch.cpu(call)


# XLA may call these for the life of the process, so they are never freed.
_HANDLERS = {"cpu": xla.handler(_run_on_cpu), "CUDA": xla.handler(launch.cuda)}
for _platform, _handler in _HANDLERS.items():
    for _target in _TARGETS.values():
        jax.ffi.register_ffi_target(_target, jax.ffi.pycapsule(_handler), platform=_platform)
