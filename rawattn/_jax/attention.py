"""`rawattn.jax.attention`: under jit, grad, vmap and scan, on XLA's buffers and XLA's stream. Imports JAX.

A call is a custom call of the compiled program, whose only attribute is a text that says all of it but the arrays (`Record`).
So a program can be cached or serialised, and nothing in this process has to outlive it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.gradients import Gradients
from rawattn._call.layout import Lengths
from rawattn._call.options import ForwardOptions, Options, flag
from rawattn._call.problem import Problem, describe
from rawattn._call.signatures import options_of, takes_options
from rawattn._interop import xla
from rawattn._interop.arrays import import_array
from rawattn._interop.integers import as_array
from rawattn._interop.xla import is_traced
from rawattn._jax import launch
from rawattn._jax.record import Record, read, with_operands
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime.option_arrays import named_gradients, told, with_arrays
from rawattn._runtime.verbs import FORWARD, Verb
from rawattn._strides import contiguous

if TYPE_CHECKING:  # type checkers bring it: nothing is installed for it
    from typing_extensions import Unpack

_INT64 = np.dtype(np.int64)
_TARGETS = {False: "rawattn_attention", True: "rawattn_attention_backward"}


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
        Lengths from the host are constants of the compiled program: other lengths are another compilation. Lengths
        that are traced are read when the program runs, by the kernels: bad values are not refused then, and never make
        one read or write outside its arrays. ``max_seqlen_*`` saves them empty work.
    return_lse : bool
        Also return lse, float32, (batch, nheads_q, seqlen_q) or (nheads_q, total_q). It is differentiable too.
    deterministic : bool
        Of the backward: the same bits run after run.
    bias, mask, alibi_slopes, sink_logits : array, optional
        As in `rawattn.attention`; JAX or NumPy, traced or not. `bias` and `sink_logits` have gradients, the others are
        constants: what would have a gradient with respect to slopes is a `ScoreMod` that captures them.
        Of a `BlockMask` the bits are constants of the program.
    score_mod : rawattn.ScoreMod, optional
        Made where the call is traced: its text and its numbers are constants of the program, the arrays that it captures may
        be traced, and those in its ``wrt`` have gradients.
    seed : int or array of one integer
        An int is a constant of the program, which then drops the same at every run. A traced one, as by
        ``jax.random.randint(key, (), 0, 2**31 - 1)``, is read when it runs; int32, or int64 in JAX's 64-bit mode.
    **options
        The others of `rawattn.attention` as there: Python values, constants of the compiled program.

    Returns
    -------
    out : array, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : array, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rawattn.attention`, while the call is traced. What only shows when the program runs (too little memory, no
        compiler) is an error of JAX's, as a rule ``jax.errors.JaxRuntimeError``, that ends in rawattn's own text.

    Notes
    -----
    There is no `out`, since JAX's arrays do not change, and no `backend`: a call runs where the program does, on a
    GPU in its kernels' stream, on the CPU in NumPy.

    `jax.vmap` makes the mapped axis a part of the batch, copying what is not mapped; of `bias`, `mask` and `alibi_slopes`
    with no batch of their own only what a gradient is taken of. What the calls of a map cannot share is a NotImplementedError
    that names it: a packed batch, `dropout_p`, a `BlockMask`, a `score_mod` that reads `batch`, mapped `sink_logits` or
    captured arrays, and gradients of a call with traced ones. `jax.lax.map` takes them all.

    There are no forward-mode and no second derivatives. Under a sharded `jit` use `jax.shard_map`, so that each device calls
    for its own shard.

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
            _check_numpy(name, array, "JAX arrays, traced or not, and NumPy arrays")
    verb, arrays, values, left = with_arrays(FORWARD, given)
    if isinstance(given.mask, BlockMask):
        arrays = tuple(
            _as_jax(x) if name.startswith("mask_") else x
            for name, x in zip(verb.extras, arrays, strict=True)
        )
    for n, array in enumerate(arrays, -len(arrays)):
        if type(array) is not np.ndarray and not isinstance(array, jax.Array):
            _check_numpy(told(verb, left)[n], array, "JAX and NumPy arrays")
    if any(x.dtype == _INT64 for x in arrays):
        arrays, left = _narrowed_options(verb, arrays, left)
    gradients, _ = named_gradients(Gradients(), given, None)
    if gradients:  # those that a backward gives: nobody takes that of a constant
        traced = {f"d{name}" for name, x in zip(verb.extras, arrays, strict=True) if is_traced(x)}
        gradients = tuple(name for name in gradients if name in traced)
    named = {name: _Form(x) for name, x in zip(verb.extras, arrays, strict=True)}
    try:
        problem, lengths = describe(q, k, v, left, "jax", named)
    except Exception:  # JAX's own too, of comparisons with a symbolic dimension
        _refuse_symbolic_shapes({"q": q, "k": k, "v": v, **named})
        raise
    more = verb.extras, gradients, values[0] if values else None
    if lengths.on_host:
        text, integers = _constant(problem, lengths, return_lse, deterministic, *more), ()
    else:
        lengths, operands = with_operands(lengths, _as_jax)
        integers = tuple(operands)
        text = _record(problem, lengths, return_lse, deterministic, *more).text
    q, k, v, *alike = _alike(q, k, v, *arrays)
    return _function(text)(q, k, v, tuple(alike), integers)


class _Form:
    """What a description asks of an array of an option: that of a tracer has no strides."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.strides = contiguous(self.shape, self.dtype.itemsize)


def _check_numpy(name: str, array: Any, accepted: str) -> None:
    """TypeError for what is no array of NumPy's, and for those of its kinds whose values are not what they hold."""
    if not isinstance(array, np.ndarray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind}; accepted are {accepted}")
    import_array(name, array)


def _refuse_symbolic_shapes(arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if not all(isinstance(n, int) for n in array.shape):
            raise ValueError(
                f"{name}: got the symbolic shape {array.shape}, expected one of constants, for which kernels are chosen; "
                "export a program for each shape"
            ) from None


def _alike(*arrays: Any) -> tuple[Any, ...]:
    """Under jax.shard_map: arrays that all vary along the mesh axes along which one does.

    So keys that are the same on every device get the sum of the devices' gradients.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return arrays
    axes = [_varying(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*axes)
    return tuple(
        x if each == every else jax.lax.pcast(x, tuple(every - each), to="varying")
        for x, each in zip(arrays, axes, strict=True)
    )


def _varying(type_of_array: Any) -> frozenset[str]:
    """The mesh axes along which it varies."""
    manual = getattr(type_of_array, "manual_axis_type", None)  # since JAX 0.10
    axes: frozenset[str] = type_of_array.vma if manual is None else manual.varying
    return axes


@functools.lru_cache(maxsize=1024)
def _constant(
    problem: Problem,
    lengths: Lengths,
    lse: bool,
    deterministic: bool,
    options: tuple[str, ...],
    gradients: tuple[str, ...],
    seed: int | None = None,
) -> str:
    """The text of a call without operands. A layout bound to the same shapes again is the same object."""
    return _record(problem, lengths, lse, deterministic, options, gradients, seed).text


def _record(
    problem: Problem,
    lengths: Lengths,
    lse: bool,
    deterministic: bool,
    options: tuple[str, ...],
    gradients: tuple[str, ...],
    seed: int | None = None,
) -> Record:
    """Of a forward, that knows which gradients its backward gives."""
    more = {"options": options, "gradients": gradients, "seed": seed}
    return Record(problem, lengths, lse, deterministic, **more)  # type: ignore[arg-type]


def _as_jax(integers: Any) -> Any:
    """Those of a layout or of a BlockMask, in the dtype that XLA gets."""
    if not isinstance(integers, (jax.Array, np.ndarray)):
        # CuPy's, which a layout makes of what lies on a GPU. JAX narrows those unseen, and kernels clamp them.
        integers = jax.dlpack.from_dlpack(as_array(integers))
    return jnp.asarray(_narrowed("seqs", integers))


def _narrowed_options(
    verb: Verb, arrays: tuple[Any, ...], options: Options
) -> tuple[tuple[Any, ...], Options]:
    """Arrays of options as XLA gets them, and the options with the text of a score function that says so.

    Integers alone: floats and masks of int64 are refused as what they are.
    """
    names = told(verb, options)[-len(arrays) :]
    arrays = tuple(
        _narrowed(name, x) if extra.startswith(("captured", "seed")) else x
        for extra, name, x in zip(verb.extras, names, arrays, strict=True)
    )
    if options.score_mod is not None:
        text, scalars = options.score_mod
        dtypes = {name: x.dtype.name for name, x in zip(verb.extras, arrays, strict=True)}
        captured = tuple(
            (name, dtypes[f"captured{n}"], rank) for n, (name, _, rank) in enumerate(text.arrays)
        )
        options = options._replace(score_mod=(text._replace(arrays=captured), scalars))
    return arrays, options


def _narrowed(name: str, array: Any) -> Any:
    """As XLA gets it: without its 64-bit mode JAX makes int32 of int64, whatever the values are."""
    if array.dtype != _INT64 or jax.config.jax_enable_x64:
        return array
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name}: got a JAX array of int64, expected int32, all that JAX holds without its 64-bit mode; convert it "
            "by .astype('int32'), or set jax_enable_x64"
        )
    for value in (array.min(initial=0), array.max(initial=0)):
        if not -(2**31) <= value < 2**31:
            fix = (
                "pass a Python int, which is a constant of the program, or "
                if name == "seed"
                else ""
            )
            raise ValueError(
                f"{name}: got {value} in an array, expected -2**31 to 2**31 - 1, all that JAX holds without its 64-bit "
                f"mode; {fix}set jax_enable_x64"
            )
    return array.astype(np.int32)


@functools.lru_cache(maxsize=1024)
def _function(text: str) -> Any:
    """A function of q, k, v, the arrays of options and the operands.

    It is differentiable with respect to the first three and to the arrays whose gradients the record names.
    """
    record = read(text)
    saving = replace(record, lse=True)
    pulling = replace(record, backward=True)
    indices = {name: n for n, name in enumerate(record.options)}
    differentiated = [indices[name.removeprefix("d")] for name in record.gradients]

    @jax.custom_vjp  # type: ignore[untyped-decorator]  # JAX is not typed here
    def attention(
        q: Any, k: Any, v: Any, options: tuple[Any, ...], integers: tuple[Any, ...]
    ) -> Any:
        results = _call(record, (q, k, v, *options, *integers))
        return results if record.lse else results[0]

    def forward(q: Any, k: Any, v: Any, options: tuple[Any, ...], integers: tuple[Any, ...]) -> Any:
        out, lse = _call(saving, (q, k, v, *options, *integers))
        return (out, lse) if record.lse else out, (q, k, v, out, lse, options, integers)

    def backward(saved: Any, gradients: Any) -> Any:
        *arrays, options, integers = saved
        dout, *dlse = gradients if record.lse else (gradients,)
        found = _call(pulling, (dout, *arrays, *dlse, *options, *integers))
        of_options: list[Any] = [None] * len(options)
        for index, gradient in zip(differentiated, found[3:], strict=True):
            of_options[index] = _sharded_as(options[index], gradient)
        of_qkv = map(_sharded_as, arrays[:3], found)
        return (*of_qkv, tuple(of_options), None)

    attention.defvjp(forward, backward)
    return jax.jit(attention, inline=True)


def _sharded_as(array: Any, gradient: Any) -> Any:
    """On a mesh with explicit axes, where a sharding is part of a type, and the results of a custom call have none."""
    wanted = jax.typeof(array).sharding
    if jax.typeof(gradient).sharding.spec == wanted.spec:
        return gradient
    return jax.sharding.reshard(gradient, wanted)


def _call(record: Record, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of one custom call of the program."""

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def call(*arrays: Any) -> Any:
        results = jax.eval_shape(results_like, *arrays)
        return jax.ffi.ffi_call(_TARGETS[record.backward], results)(*arrays, record=record.text)

    def results_like(*arrays: Any) -> Any:
        """Arrays of the shapes and dtypes of the results, that vary over a mesh wherever one of `arrays` does."""
        some = sum(x.sum().astype(np.float32) for x in arrays)
        return tuple(jnp.broadcast_to(some, shape).astype(dtype) for shape, dtype in record.outputs)

    @call.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, is_mapped: Sequence[bool], *arrays: Any) -> Any:
        if record.problem.group:
            raise NotImplementedError(
                "jax.vmap: a packed batch (seqs with seqstart_q) cannot be mapped; put the sequences of all calls into "
                "one packed batch, or use jax.lax.map"
            )
        options = dict(enumerate(record.options, record.first_option))
        # A gradient is wanted for each call by itself.
        given_once = {
            name
            for n, name in options.items()
            if not is_mapped[n]
            and record.form(name).shape[0:1] == (1,)
            and not (record.backward and f"d{name}" in record.gradients)
        }
        folded = record.folded(size, given_once)
        inputs = [
            _of_calls(array, size, given, like[0], record, options.get(n))
            for n, (array, given, like) in enumerate(
                zip(arrays, is_mapped, folded.inputs, strict=True)
            )
        ]
        results = tuple(
            _of_each(result, size, shape)
            for result, (shape, _) in zip(_call(folded, tuple(inputs)), record.outputs, strict=True)
        )
        return results, (True,) * len(results)

    results: tuple[Any, ...] = call(*arrays)
    return results


def _of_calls(
    array: Any,
    size: int,
    is_mapped: bool,
    shape: tuple[int, ...],
    record: Record,
    option: str | None,
) -> Any:
    """An array of all calls of a map, in the shape that it has in the one that is made of them. option: its name, if it is
    one of an option."""
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


def _of_each(result: Any, size: int, shape: tuple[int, ...]) -> Any:
    """What each call of a map gives: a gradient of what its batch shares is the sum over that."""
    if result.size == size * math.prod(shape):
        return result.reshape(size, *shape)
    return result.reshape(size, -1, *result.shape[1:]).sum(1).reshape(size, *shape)


# XLA calls these as long as the process lives.
_HANDLERS = {"cpu": xla.handler(launch.cpu), "CUDA": xla.handler(launch.cuda)}
for _platform, _handler in _HANDLERS.items():
    for _target in _TARGETS.values():
        jax.ffi.register_ffi_target(_target, jax.ffi.pycapsule(_handler), platform=_platform)
