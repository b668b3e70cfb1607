"""The options in the signatures of public functions, which take them as ``**options``: people see each by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rawattn._call.hints import refuse_unknown
from rawattn._call.options import DEFAULTS, Options

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(kind: type) -> Callable[[Function], Function]:
    """Gives the last parameter of a function, its ``**options``, the keywords of `kind` in the signature that is shown.

    kind: `AttentionOptions` or `ForwardOptions`. The keywords come before the first one of the function's own that has a
    default. The function itself is returned: a wrapper would cost every call more.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        index = next(
            (n for n, x in enumerate(own) if x.kind is x.KEYWORD_ONLY and x.default is not x.empty),
            len(own),
        )
        own[index:index] = parameters_of(kind)
        vars(function)["__signature__"] = signature.replace(parameters=own)
        return function

    return decorate


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """The keywords of `AttentionOptions` or `ForwardOptions`."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(DEFAULTS, name),
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in kind.__annotations__.items()
    ]


def options_of(
    given: Mapping[str, Any], kind: type, name: str, function: Callable[..., Any]
) -> Options:
    """What a call of `function`, which users know by `name`, was given as its ``**options``.

    TypeError for a keyword that is none of its arguments, with what to write instead.
    """
    if not given.keys() <= kind.__annotations__.keys():
        unknown = [keyword for keyword in given if keyword not in kind.__annotations__]
        refuse_unknown(name, unknown, inspect.signature(function).parameters)
    return Options(**given)
