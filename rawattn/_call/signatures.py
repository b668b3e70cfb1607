"""Signatures of the public functions: they take their options as ``**options``, but show each option by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rawattn._call.hints import refuse_unknown
from rawattn._call.options import DEFAULTS, Options

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(kind: type) -> Callable[[Function], Function]:
    """Decorator: the function's signature then shows the keywords of `kind` in place of ``**options``, its last parameter.

    kind: `AttentionOptions` or `ForwardOptions`. The keywords come before the function's first own keyword with a default.
    The function itself is returned, since a wrapper would cost every call time.
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
    """The keywords of `AttentionOptions` or `ForwardOptions` as parameters of a signature."""
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
    """The options of a call of `function`, from its ``**options``. name: what users know the function as.

    TypeError for a keyword that the function does not have, with advice what to write instead.
    """
    if not given.keys() <= kind.__annotations__.keys():
        unknown = [keyword for keyword in given if keyword not in kind.__annotations__]
        refuse_unknown(name, unknown, inspect.signature(function).parameters)
    return Options(**given)
