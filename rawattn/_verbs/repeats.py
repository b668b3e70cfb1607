"""Calls like earlier ones, found by their arguments as they come: nothing of them is looked at twice.

A verb's own function checks its arguments and says what is asked for; the dispatcher prepares that and runs it. What it
prepared is kept by the form of the arrays and the spelling of the options, and the next call with these is launched from
there. Options that are arrays of the same type are read beside the others. Those that hold arrays, or become numbers for
kernels, are no part of a key: calls with them always go to the dispatcher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from rawattn._call.argument_kinds import argument_kinds, check_arguments
from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.layouts_alike import addresses_of, bounds_of
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import token
from rawattn._forgetting import make_room
from rawattn._interop import dynamo
from rawattn._interop.arrays import (
    framework_of,
    is_recording,
    refuse_gradients,
    refuse_gradients_of_written,
    refuse_jit_trace,
)
from rawattn._interop.forward_mode import refuse_tangents
from rawattn._interop.native import Native, Read, native
from rawattn._interop.written import tell_written
from rawattn._jax import eager
from rawattn._kernels.selection import UNCHANGED, selection
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import dispatch, on_gpu
from rawattn._runtime.asked import Asked
from rawattn._runtime.option_arrays import ARRAYS
from rawattn._runtime.verbs import Verb

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# By the names of functions: calls by what tells them apart, of which layouts are told by their structure alone.
known: dict[str, dict[Any, Any]] = {}
_MAX_KNOWN = 512
_MAX_KEPT = 32  # by a layout

# Options that may be arrays, in the order of the verbs' inputs.
_ARRAYS = ("dlse", *ARRAYS, "seed")

_PLAIN = {bool, int, float, str, tuple, type(None)}


def repeating(
    verb: Verb, out: str = ""
) -> Callable[[Callable[Parameters, Asked[Result]]], Callable[Parameters, Result]]:
    """Makes the public function of a verb of the one that says what is asked for.

    out: the name of the option that is an array to write, the first output.
    """

    def decorate(ask: Callable[..., Asked[Result]]) -> Callable[..., Result]:
        signature = inspect.signature(ask)
        parameters = signature.parameters.values()
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        count, name = len(names), ask.__name__
        kinds = argument_kinds(f"rawattn.{name}", signature)
        # By the type of the first array: what reads all of a call, without and with one to write.
        readers: dict[type, Callable[..., Read | None]] = {}
        writers: dict[type, Callable[..., Read | None]] = {}
        natives: dict[type, Native] = {}  # what makes readers of more arrays

        @functools.wraps(ask)
        def call(*args: Any, **options: Any) -> Result:
            spelled = written = lengths = starts = key = read = None
            seqs: Any = None
            beside: tuple[Any, ...] = ()  # arrays of options
            mask: BlockMask | None = None
            if not options and len(args) == count:
                reader = readers.get(type(args[0]))
                read = None if reader is None else reader(*args)
            else:
                if len(args) < count:
                    args = _by_position(names, args, options)
                reader = readers.get(type(args[0])) if len(args) == count else None
                if reader is None:
                    pass
                elif len(options) == 1 and "seqs" in options:
                    seqs = options["seqs"]
                    read = reader(*args)
                elif len(options) == 1 and options.get(out) is not None:
                    written = options[out]
                    read = writers[type(args[0])](*args, written)
                else:
                    types = tuple(map(type, options.values()))
                    kind = type(args[0])
                    if BlockMask in types:
                        mask = _mask_alone(options, kind, natives)
                        if mask is None:
                            reader = None
                        else:
                            others = {n: x for n, x in options.items() if n != "mask"}
                            spelled, _, written, _ = _spelling(others, out, kind)
                            if written is not None:
                                reader = writers[kind]
                    elif (
                        SeqLayout in types
                        or tuple in types
                        or kind in types
                        or options.get(out) is not None
                    ):
                        spelled, seqs, written, beside = _spelling(options, out, kind)
                        if beside:
                            more = count + len(beside) + (written is not None)
                            reader = natives[kind].reader(more)
                        elif written is not None:
                            reader = writers[kind]
                    else:
                        spelled = (*options.items(), *types)
                    if reader is None:
                        pass
                    elif written is None:
                        read = reader(*args, *beside)
                    else:
                        read = reader(*args, *beside, written)
            if read is not None:
                addresses, form, tracked = read
                repeat = None
                alone = spelled is None and type(seqs) is SeqLayout
                if alone and (latest := seqs._calls.get(name)) is not None and latest[0] == form:
                    _, lengths, repeat = latest
                else:
                    try:
                        if seqs is not None:
                            told = seqs._told
                            if told is None:
                                lengths = _bound(verb, seqs, form)
                                told = token(lengths)
                            elif seqs._values is None:
                                lengths = addresses_of(seqs._arrays), None
                            else:
                                at, starts = 4 * verb.q, seqs
                                rows_q, rows_k = form[at][-3], form[at + 4][-3]
                                told = told, bounds_of(seqs._values, seqs._arrays, rows_q, rows_k)
                            spelled = spelled, told
                        key = form if spelled is None else (form, spelled)
                        if mask is not None:
                            q = args[verb.q]
                            located = mask.located(q, form[4 * verb.q + 3], natives[kind].address)
                            key = (form, spelled, located.told)
                        repeat = known[name].get(key)
                        if starts is not None and repeat is not None:
                            lengths = _of_starts(starts, repeat)
                    except (TypeError, ValueError, IndexError, AttributeError):
                        # A layout that does not fit or is traced, or what cannot be hashed: the way of a first call tells
                        # what is wrong.
                        repeat = key = None
                    if alone and repeat is not None:
                        seqs._calls[name] = form, lengths, repeat
                if repeat is not None and selection() is UNCHANGED:
                    if tracked and is_recording():
                        refuse = refuse_gradients if verb.refuses_gradients else refuse_tangents
                        refuse(_named(verb.inputs[:count], options, beside), (*args, *beside))
                        if written is not None:
                            refuse_gradients_of_written((out,), (written,))
                    if mask is not None:
                        addresses[count:count] = located.addresses
                    result = repeat(addresses, written, lengths if mask is None else mask.memo)
                    if result is not None:
                        if written is not None:
                            tell_written(written)
                        return result  # type: ignore[no-any-return]
            return anew(args, options, key, beside, mask)

        @dynamo.untraced
        def anew(
            args: tuple[Any, ...],
            options: dict[str, Any],
            key: Any,
            beside: tuple[Any, ...],
            mask: BlockMask | None,
        ) -> Result:
            if len(args) != count:
                check_arguments(kinds, args, options)
            asked = ask(*args, **options)
            inputs, targets, returned = asked.inputs, asked.targets, asked.returned
            call = asked.verb, inputs, targets, asked.options, asked.flag
            framework = framework_of(inputs[verb.q])
            if framework == "torch":
                refuse_jit_trace()
            own: Any
            results: Sequence[Any]
            programs = framework == "jax" and eager.takes(*call[:4], asked.backend)
            if programs:
                results = eager.attention(inputs, asked.options, asked.flag)
                own = eager.Jax(type(inputs[verb.q]))
            else:
                results = dispatch.run(*call, asked.backend, asked.values, asked.memo)
                own = native(framework)
            if own is None or selection() is not UNCHANGED or asked.backend == "cpu":
                return returned(results)
            if (kind := type(args[0])) not in readers and kind in own.kinds:
                # In this order: another thread that finds the one looks for the other.
                natives[kind] = own
                writers[kind] = own.reader(count + 1)
                readers[kind] = own.reader(count)
            elif key is not None and _is_told(verb, asked, args, options, key, out, beside, mask):
                repeat: Any
                if programs:
                    repeat = eager.repeated(asked.options, asked.flag)
                else:
                    masked = mask is not None
                    told = getattr(options.get("seqs"), "_told", None) is not None
                    repeat = on_gpu.repeated(own, *call, framework, returned, masked, told)
                if repeat is not None:
                    remember(known[name], key, repeat)
            return returned(results)

        known[name] = {}
        return shown(call, ask)

    return decorate


def shown(call: Callable[..., Result], ask: Callable[..., Asked[Result]]) -> Callable[..., Result]:
    """`call`, of which people are shown what it gives back, where `ask` gives what is asked for."""
    signature = inspect.signature(ask)
    result = signature.return_annotation.removeprefix("Asked[").removesuffix("]")
    vars(call)["__signature__"] = signature.replace(return_annotation=result)
    call.__annotations__ = {**ask.__annotations__, "return": result}
    return call


def _by_position(
    names: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Arrays given by name at their positions, if all are given."""
    missing = names[len(args) :]
    if not all(name in options for name in missing):
        return args
    return (*args, *[options.pop(name) for name in missing])


def _spelling(
    options: Mapping[str, Any], out: str, kind: type
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """What tells options apart, None where all have their defaults; the layout; the array to write; other arrays of `kind`.

    Types are part of it: True == 1 == 1.0, and not all of them are accepted everywhere.
    """
    names = [name for name in options if name not in ("seqs", out)]
    spelled: Any = None
    beside: tuple[Any, ...] = ()
    if names:
        types = [type(options[name]) for name in names]
        if kind in types:
            beside = tuple([x for name in _ARRAYS if type(x := options.get(name)) is kind])
            values = tuple([x if type(x := options[name]) is not kind else None for name in names])
        else:
            values = tuple([options[name] for name in names])
        types += [type(end) for x in values if type(x) is tuple for end in x]  # of a window
        spelled = (*names, values, *types)
    return spelled, options.get("seqs"), options.get(out), beside


def _mask_alone(
    options: Mapping[str, Any], kind: type, natives: Mapping[type, Any]
) -> BlockMask | None:
    """The mask, where no other option holds arrays and `seqs` is not given; None: the call is none of those here."""
    mask = options.get("mask")
    if type(mask) is not BlockMask or options.get("seqs") is not None:
        return None
    # Programs of JAX take no mask.
    return None if type(natives[kind]) is eager.Jax else mask


def _of_starts(seqs: SeqLayout, repeat: Any) -> Any:
    """What a repeated call is given of a layout of starts on the host, found once for both."""
    found = seqs._calls.get(repeat)
    if found is None:
        found = vars(repeat)["of_starts"](seqs)
        make_room(seqs._calls, _MAX_KEPT)
        seqs._calls[repeat] = found
    return found


def _bound(verb: Verb, seqs: Any, form: tuple[Any, ...]) -> Lengths:
    """The sequences of a call, whose arrays have this form."""
    at = 4 * verb.q
    q: tuple[int, ...] = form[at]
    rows_q, rows_k = q[-3], form[at + 4][-3]
    batch = q[0] if len(q) == 4 else None
    return bind(seqs, batch=batch, rows_q=rows_q, rows_k=rows_k)


def _is_told(
    verb: Verb,
    asked: Asked[Any],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    key: Any,
    out: str,
    beside: tuple[Any, ...],
    mask: BlockMask | None,
) -> bool:
    """Whether `key` tells all that there is to a call: options that are equal and of the same types mean the same."""
    if mask is not None:
        others = {name: x for name, x in options.items() if name != "mask"}
        mine = all(name.startswith("mask_") for name in asked.verb.extras)
        return mine and are_plain(others, out) and not asked.values
    if beside:
        # Kernels read arrays of options by where each begins within 16 bytes, and lengths are held against their shapes.
        inputs = [x for x in asked.inputs if x is not None]
        same = [x is y for x, y in zip(inputs, (*args, *beside), strict=False)]
        return (
            are_plain(options, out, beside)
            and options.get("seqs") is None
            and len(inputs) == len(same) == len(args) + len(beside)
            and all(same)
            and key[0][-1] == 0
            and not asked.values
        )
    # Inputs that are read in ways of their own may lie otherwise where the key tells the same of all.
    aligned = not verb.extras or key[-1] == 0
    return asked.verb is verb and aligned and are_plain(options, out)


def are_plain(options: Mapping[str, Any], out: str, beside: tuple[Any, ...] = ()) -> bool:
    """Whether options that are equal and of the same types mean the same, but for arrays that are read beside the others."""
    found = {type(x) for name, x in options.items() if name != out} - {SeqLayout}
    found |= {type(end) for x in options.values() if type(x) is tuple for end in x}
    return found - {type(x) for x in beside} <= _PLAIN


def _named(
    names: Sequence[str], options: Mapping[str, Any], beside: tuple[Any, ...]
) -> tuple[str, ...]:
    """The names of all arrays that a call reads."""
    return (*names, *[next(name for name in options if options[name] is x) for x in beside])


def remember(table: dict[Any, Any], key: Any, repeat: Any) -> None:
    make_room(table, _MAX_KNOWN)
    table[key] = repeat
