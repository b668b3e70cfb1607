"""Errors about missing arguments, and about arguments by position where none is accepted.

Python's own messages would say neither which arguments are accepted nor what an argument of another library is called here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from rawattn._call.hints import layout_advice, refuse_unknown

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


# Functions whose other keywords are names of what a text captures.
_CAPTURING = ("rawattn.ScoreMod", "rawattn.block_mask")


class ArgumentKinds(NamedTuple):
    """The parameters of a function: those that may be given by position, those by name only, and those without a default."""

    function: str  # its name in messages
    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    required: tuple[str, ...]
    takes_others: bool  # it has ``**`` keywords, which it passes on or refuses itself


def argument_kinds(function: str, signature: inspect.Signature) -> ArgumentKinds:
    parameters = signature.parameters.values()
    others = any(x.kind is x.VAR_KEYWORD for x in parameters)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = tuple(x.name for x in parameters if x.kind in by_position)
    named = tuple(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
    required = tuple(
        x.name for x in parameters if x.default is x.empty and x.name in {*positional, *named}
    )
    return ArgumentKinds(function, positional, named, required, others)


def check_arguments(kinds: ArgumentKinds, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """TypeError for too many arguments by position, for a missing one, or for one that is given twice."""
    given = kinds.by_position[: len(args)]
    for name in given:
        if name in options and name != "self":  # a text may capture what is called self
            advice = "; capture by another name" if kinds.function in _CAPTURING else ""
            raise TypeError(
                f"{name}: {kinds.function} got this argument by position and by name, expected it once{advice}"
            )
    surplus = len(args) > len(kinds.by_position)
    missing = [name for name in kinds.required if name not in options and name not in given]
    if not surplus and not missing:
        return
    accepted = (*kinds.by_position, *kinds.by_name)
    # An unknown keyword comes first: it may be the caller's name for the missing argument.
    unknown = [name for name in options if name not in accepted]
    if unknown and not kinds.takes_others:
        refuse_unknown(kinds.function, unknown, accepted)
    own = [name for name in kinds.by_position if name not in ("self", "cls")]
    if surplus:
        count = len(args) - len(kinds.by_position) + len(own)
        if not own:
            raise all_by_name(kinds.function, args[-count:])
        raise TypeError(
            f"{kinds.function}: got {count} arguments by position, expected {len(own)}: {', '.join(own)}; "
            f"name the others: {', '.join(kinds.by_name)}"
        )
    names = [name for name in kinds.required if name in kinds.by_name]
    by_name = f", and {', '.join(f'{name}=...' for name in names)}" if names else ""
    raise TypeError(
        f"{missing[0]}: {kinds.function} got none, expected {', '.join(own)}{by_name}{_joined(args, missing[0])}"
    )


def all_by_name(function: str, misplaced: Sequence[Any]) -> TypeError:
    """The error for arguments by position where all must be named."""
    return TypeError(
        f"{function}: got {len(misplaced)} by position, expected all by name{layout_advice(misplaced[-1])}"
    )


def _joined(args: Sequence[Any], missing: str) -> str:
    """Advice for a call that passes several arguments as one; else "".

    That is q, k and v as a tuple or as a packed array, or outs and lses as a list of pairs. missing: the first argument that is
    not given.
    """
    if len(args) != 1:
        return ""
    if missing == "lses":
        listed = isinstance(args[0], (list, tuple)) and len(args[0]) > 0
        pairs = listed and all(
            isinstance(each, (list, tuple)) and len(each) == 2 for each in args[0]
        )
        return "; of a list of pairs (out, lse) write *zip(*parts)" if pairs else ""
    if isinstance(args[0], (list, tuple)) and len(args[0]) == 3:
        return "; of a tuple of three write *qkv"
    shape = tuple(getattr(args[0], "shape", ()))
    if len(shape) > 3 and shape[-3] == 3:
        return (
            "; a packed qkv is taken apart by *np.moveaxis(qkv, -3, 0), in torch by *qkv.unbind(-3)"
        )
    return ""


def checks_arguments(
    function: str, passed_on: Sequence[str] | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorator: the function then refuses misplaced, missing and unknown arguments with the library's own messages.

    function: its name in messages. passed_on: the names that its ``**`` keywords may have; None if it refuses others itself.
    """

    def decorate(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(call)
        kinds = argument_kinds(function, signature)
        if passed_on is not None:
            kinds = kinds._replace(by_name=(*passed_on, *kinds.by_name), takes_others=False)
        accepted = {*kinds.by_position, *kinds.by_name}
        # Read from the code, not the signature: a function whose signature hides its **unknown refuses these itself.
        hands_on = passed_on is None and bool(call.__code__.co_flags & inspect.CO_VARKEYWORDS)

        # The number of required arguments if all of them may come by position, else -1.
        plain = len(kinds.required) if not {*kinds.required} & {*kinds.by_name} else -1

        @functools.wraps(call)
        def checked(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            # The fast path, which most calls take.
            if len(args) == plain and (
                # Not by `isdisjoint`, which torch.compile cannot trace.
                not any(name in options for name in kinds.by_position)
                if hands_on
                else options.keys() <= accepted
            ):
                return call(*args, **options)
            check_arguments(kinds, args, options)
            if not hands_on and not options.keys() <= accepted:
                unknown = [name for name in options if name not in accepted]
                refuse_unknown(function, unknown, (*kinds.by_position, *kinds.by_name))
            return call(*args, **options)

        return checked

    return decorate
