"""Fast path of repeated calls: a call like an earlier one is launched without checking or planning it again.

On the slow path a verb's own function checks its arguments and returns a `CallRequest`; the dispatcher prepares and runs it.
A closure that launches the call again is kept in `closures_by_call`. The key is the form of the arrays (shapes, strides,
dtypes, device) and the names, values and types of the options as the caller wrote them. The next call with the same key
runs that closure. The second call that does is given a guarded call, which later ones find without their key.

Options that are arrays, of the same type as the verb's own arrays, are read together with these. A `BlockMask` has a fast path
too, if no other option holds arrays. Neither has one in a call with `seqs`. Calls with other options that hold arrays (a
`ScoreMod`), or that become numbers for kernels (a seed with dropout), always take the slow path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from rawattn._call.argument_kinds import argument_kinds, check_arguments
from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.layout_keys import addresses_of, bounds_of
from rawattn._call.options import ARRAYS
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import token
from rawattn._eviction import evict_if_full
from rawattn._interop import dynamo
from rawattn._interop.arrays import (
    framework_of,
    is_recording,
    refuse_gradients_of_written,
    refuse_jit_trace,
)
from rawattn._interop.native import Read, native_of
from rawattn._interop.written import bump_versions
from rawattn._jax import eager
from rawattn._kernels.selection import UNCHANGED, selection
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import dispatch
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.calls import refuse_gradients_of_read
from rawattn._runtime.repeated import Repeated, repeated_call
from rawattn._runtime.verbs import Verb

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# For each function, by its name: repeatable calls by key. A layout is in the key by its structure, not its values.
closures_by_call: dict[str, dict[Any, Any]] = {}
_MAX_CLOSURES = 512  # entries for each function
_MAX_KEPT = 32  # entries of `SeqLayout._calls`
_UNKNOWN = False  # in place of a guarded call, where the call has not been repeated yet; None where it has once

# Options that may be arrays, in the order of a verb's inputs.
_ARRAYS = ("dlse", *ARRAYS, "seed")

# How the arrays of a call are read, where its first one is of a type: what reads them, a function that reads them, one that
# reads an array to write too, and `Native.is_traced`.
_Known = tuple[
    Any, Callable[..., Read | None], Callable[..., Read | None], Callable[[], bool] | None
]

# Types of options whose equal values mean equal calls.
_SCALARS = {bool, int, float, str, type(None)}
_PLAIN = _SCALARS | {tuple}


def with_fast_path(
    verb: Verb, out: str = ""
) -> Callable[[Callable[Parameters, CallRequest[Result]]], Callable[Parameters, Result]]:
    """Decorator: turns a verb's own function, which returns a `CallRequest`, into the public function, with a fast path.

    out: the name of the option that is the array to write, which is the first output.
    """

    def decorate(read_call: Callable[..., CallRequest[Result]]) -> Callable[..., Result]:
        signature = inspect.signature(read_call)
        parameters = signature.parameters.values()
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        count, name = len(names), read_call.__name__
        kinds = argument_kinds(f"rawattn.{name}", signature)
        known: dict[type, _Known] = {}  # by the type of the first array

        @functools.wraps(read_call)
        def call(*args: Any, **options: Any) -> Result:
            # Split the options, then repeat the call: by a guarded call, else by its key, else on the slow path.
            # options_key: the options' part of the key. arrays: all that are read. written: the array to write.
            # guarded_calls, guarded_key: where a guarded call is found.
            options_key = written = seqs = mask = None
            option_arrays: tuple[Any, ...] = ()
            if len(args) < count:
                args = _by_position(names, args, options)
            first: Any = type(args[0]) if len(args) == count else None
            kind = known.get(first)
            if kind is None:
                return slow_path(args, options, None, (), None)
            native, reader, writer, is_traced = kind
            arrays = args
            guarded: Any = _UNKNOWN
            guarded_calls: Any = None
            guarded_key: Any = None
            # The commonest calls come first: no options, only a layout, only an array to write, only a plain value.
            if options:
                if len(options) == 1 and "seqs" in options:
                    seqs = options["seqs"]
                elif len(options) == 1 and options.get(out) is not None:
                    written = options[out]
                elif len(options) == 1 and type(value := next(iter(options.values()))) in _SCALARS:
                    options_key = (*options, value, type(value))
                else:
                    types = tuple(map(type, options.values()))
                    if BlockMask in types:
                        mask = _mask_with_fast_path(options, native)
                        if mask is None:
                            return slow_path(args, options, None, (), None)
                        others = {n: x for n, x in options.items() if n != "mask"}
                        options_key, _, written, _ = _split_options(others, out, first)
                    elif (
                        SeqLayout in types
                        or tuple in types
                        or first in types
                        or options.get(out) is not None
                    ):
                        split = _split_options(options, out, first)
                        options_key, seqs, written, option_arrays = split
                    else:
                        options_key = (*options, *options.values(), *types)
                if option_arrays:
                    more = option_arrays if written is None else (*option_arrays, written)
                    arrays, reader = (*args, *more), native.reader(count + len(more))
                elif written is not None:
                    arrays, reader = (*args, written), writer
            if mask is None and (is_traced is None or not is_traced()):
                try:
                    if seqs is None:
                        guarded_calls = closures_by_call[name]
                        shape = args[0].shape
                        guarded_key = first, shape
                        if options:
                            guarded_key = first, shape, options_key
                            if arrays is not args:
                                guarded_key = first, shape, options_key, len(arrays)
                        guarded = guarded_calls.get(guarded_key, _UNKNOWN)
                    elif type(seqs) is SeqLayout:
                        guarded_calls = seqs._calls
                        guarded_key = (name, options_key, len(arrays)) if len(options) > 1 else name
                        guarded = guarded_calls.get(guarded_key, _UNKNOWN)
                except (TypeError, RuntimeError):
                    # An option that cannot be hashed, or a tensor without a shape. The slow path raises the proper error.
                    return slow_path(args, options, None, (), None)
                if guarded and selection() is UNCHANGED:
                    result = guarded(*arrays)
                    if result is not None:
                        if written is not None:
                            bump_versions(written)
                        return result  # type: ignore[no-any-return]
            read = reader(*arrays)
            if read is None:
                return slow_path(args, options, None, option_arrays, mask)
            addresses, form, tracked = read
            lengths: Any = None
            key = starts = None
            try:
                if seqs is not None:
                    layout_key = seqs._key
                    if layout_key is None:
                        lengths = _bound(verb, seqs, form)
                        layout_key = token(lengths)
                    elif seqs._start_values is None:
                        lengths = addresses_of(seqs._arrays), None
                    else:
                        # `form` has shape, strides, dtype and device of each array; k follows q.
                        at, starts = 4 * verb.lead_index, seqs
                        rows_q, rows_k = form[at][-3], form[at + 4][-3]
                        bounds = bounds_of(seqs._start_values, seqs._arrays, rows_q, rows_k)
                        layout_key = layout_key, bounds
                    options_key = options_key, layout_key
                key = form if options_key is None else (form, options_key)
                if mask is not None:
                    q = args[verb.lead_index]
                    located = mask.located(q, form[4 * verb.lead_index + 3], native.address)
                    key = (form, options_key, located.key)
                repeated = closures_by_call[name].get(key)
                if starts is not None and repeated is not None:
                    lengths = repeated.of_starts(starts)
            except (TypeError, ValueError, IndexError, AttributeError):
                # A layout that does not fit or is traced, or an option that cannot be hashed. The slow path raises the proper
                # error.
                repeated = key = None
            if repeated is not None and selection() is UNCHANGED:
                if tracked and is_recording():
                    refuse_gradients_of_read(
                        verb,
                        _named(verb.inputs[:count], options, option_arrays),
                        (*args, *option_arrays),
                    )
                    if written is not None:
                        refuse_gradients_of_written((out,), (written,))
                if mask is not None:
                    addresses[count:count] = located.addresses
                result = repeated.repeat(addresses, written, lengths if mask is None else mask.memo)
                if result is not None:
                    if not guarded and repeated.guarded is not None:
                        # Made where the call is repeated once more: layouts are often used once.
                        if guarded is None:
                            # Those that no layout keeps are found by the type and the shape of the first array.
                            guarded_calls[guarded_key] = repeated.guarded(
                                form, lengths, seqs is None
                            )
                        else:
                            most = _MAX_CLOSURES if seqs is None else _MAX_KEPT
                            if len(guarded_calls) >= most:
                                evict_if_full(guarded_calls, most)
                            guarded_calls[guarded_key] = None
                    if written is not None:
                        bump_versions(written)
                    return result  # type: ignore[no-any-return]
            return slow_path(args, options, key, option_arrays, mask)

        @dynamo.untraced
        def slow_path(
            args: tuple[Any, ...],
            options: dict[str, Any],
            key: Any,
            option_arrays: tuple[Any, ...],
            mask: BlockMask | None,
        ) -> Result:
            if len(args) != count:
                check_arguments(kinds, args, options)
            request = read_call(*args, **options)
            inputs, targets, returned = request.inputs, request.targets, request.returned
            call = request.verb, inputs, targets, request.options, request.flag
            framework = framework_of(inputs[verb.lead_index])
            if framework == "torch":
                refuse_jit_trace()
            native: Any
            results: Sequence[Any]
            programs = framework == "jax" and eager.is_compilable(*call[:4], request.backend)
            if programs:
                results = eager.attention(inputs, request.options, request.flag)
                native = eager.JaxReader(type(inputs[verb.lead_index]))
            else:
                results = dispatch.run(*call, request.backend, request.values, request.memo)
                native = native_of(framework)
            if native is None or selection() is not UNCHANGED or request.backend == "cpu":
                return returned(results)
            if (kind := type(args[0])) not in known and kind in native.kinds:
                readers = native.reader(count), native.reader(count + 1)
                known[kind] = native, *readers, native.is_traced
            elif key is not None and _key_is_complete(
                verb, request, args, options, key, out, option_arrays, mask
            ):
                repeated: Repeated | None
                if programs:
                    repeated = Repeated(eager.repeated(request.options, request.flag))
                else:
                    masked = mask is not None
                    keyed = getattr(options.get("seqs"), "_key", None) is not None
                    repeated = repeated_call(native, *call, framework, returned, masked, keyed)
                if repeated is not None:
                    remember_call(closures_by_call[name], key, repeated)
            return returned(results)

        closures_by_call[name] = {}
        return with_signature_of(call, read_call)

    return decorate


def with_signature_of(
    call: Callable[..., Result], read_call: Callable[..., CallRequest[Result]]
) -> Callable[..., Result]:
    """`call` with the signature of `read_call`, whose return annotation ``CallRequest[Result]`` becomes ``Result``."""
    signature = inspect.signature(read_call)
    result = signature.return_annotation.removeprefix("CallRequest[").removesuffix("]")
    vars(call)["__signature__"] = signature.replace(return_annotation=result)
    call.__annotations__ = {**read_call.__annotations__, "return": result}
    return call


def _by_position(
    names: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Arguments with arrays that are given by name moved to their positions, if none is missing.

    Removes these from `options`.
    """
    missing = names[len(args) :]
    if not all(name in options for name in missing):
        return args
    return (*args, *[options.pop(name) for name in missing])


def _split_options(
    options: Mapping[str, Any], out: str, kind: type
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """The options' part of a key (None without options), the layout, the array to write, and other arrays, of type `kind`.

    Types are part of the key: True == 1 == 1.0, but an option may accept only one of them.
    """
    names = [name for name in options if name not in ("seqs", out)]
    options_key: Any = None
    option_arrays: tuple[Any, ...] = ()
    if names:
        types = [type(options[name]) for name in names]
        if kind in types:
            option_arrays = tuple([x for name in _ARRAYS if type(x := options.get(name)) is kind])
            values = tuple([x if type(x := options[name]) is not kind else None for name in names])
        else:
            values = tuple([options[name] for name in names])
        types += [type(end) for x in values if type(x) is tuple for end in x]  # of a window
        options_key = (*names, values, *types)
    return options_key, options.get("seqs"), options.get(out), option_arrays


def _mask_with_fast_path(options: Mapping[str, Any], native: Any) -> BlockMask | None:
    """The mask of a call that has a fast path for it: without `seqs`, on arrays that are not JAX's. Else None."""
    mask = options.get("mask")
    if type(mask) is not BlockMask or options.get("seqs") is not None:
        return None
    # The compiled programs of `_jax/eager.py` take no mask.
    return None if type(native) is eager.JaxReader else mask


def _bound(verb: Verb, seqs: Any, form: tuple[Any, ...]) -> Lengths:
    """The layout bound to a call's arrays, which have this form."""
    at = 4 * verb.lead_index
    q: tuple[int, ...] = form[at]
    rows_q, rows_k = q[-3], form[at + 4][-3]
    batch = q[0] if len(q) == 4 else None
    return bind(seqs, batch=batch, rows_q=rows_q, rows_k=rows_k)


def _key_is_complete(
    verb: Verb,
    request: CallRequest[Any],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    key: Any,
    out: str,
    option_arrays: tuple[Any, ...],
    mask: BlockMask | None,
) -> bool:
    """Whether every call with the same `key` is the same call but for addresses, so that this one's launches serve it."""
    if mask is not None:
        others = {name: x for name, x in options.items() if name != "mask"}
        mine = all(name.startswith("mask_") for name in request.verb.extra_inputs)
        return mine and are_plain(others, out) and not request.values
    if option_arrays:
        # The widths of a kernel's accesses to an option's array depend on its address modulo 16, so all addresses must be
        # aligned. No layout: lengths are checked against the shapes of such arrays at each call.
        inputs = [x for x in request.inputs if x is not None]
        same = [x is y for x, y in zip(inputs, (*args, *option_arrays), strict=False)]
        return (
            are_plain(options, out, option_arrays)
            and options.get("seqs") is None
            and len(inputs) == len(same) == len(args) + len(option_arrays)
            and all(same)
            and key[0][-1] == 0
            and not request.values
        )
    # The key has only the OR of all addresses modulo 16. It says something about each of `extra_inputs` only where it is 0.
    aligned = not verb.extra_inputs or key[-1] == 0
    return request.verb is verb and aligned and are_plain(options, out)


def are_plain(options: Mapping[str, Any], out: str, option_arrays: tuple[Any, ...] = ()) -> bool:
    """Whether all options but `out` and `option_arrays` have types of `_PLAIN`, or are a layout."""
    found = {type(x) for name, x in options.items() if name != out} - {SeqLayout}
    found |= {type(end) for x in options.values() if type(x) is tuple for end in x}
    return found - {type(x) for x in option_arrays} <= _PLAIN


def _named(
    names: Sequence[str], options: Mapping[str, Any], option_arrays: tuple[Any, ...]
) -> tuple[str, ...]:
    """The names of the arrays that a call reads: `names`, then those of `option_arrays`."""
    return (*names, *[next(name for name in options if options[name] is x) for x in option_arrays])


def remember_call(table: dict[Any, Any], key: Any, repeat: Any) -> None:
    evict_if_full(table, _MAX_CLOSURES)
    table[key] = repeat
