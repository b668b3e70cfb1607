"""An extension of Griffe: the API reference shows what `help` shows."""

from __future__ import annotations

import re
from typing import Any

import griffe

from rawattn._call.options import AttentionOptions, ForwardOptions
from rawattn._call.signatures import parameters_of

_KINDS = {f"Unpack[{kind.__name__}]": kind for kind in (AttentionOptions, ForwardOptions)}
_OF_ITEMS = ("Parameters", "Attributes", "Returns", "Raises")


class AsHelp(griffe.Extension):
    """Signatures with documented options and without arguments that are refused; remarks that are no items of a section."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Shows what ``**options`` takes, and leaves out the ``**unknown`` that a function takes only to refuse it."""
        last = func.parameters[len(func.parameters) - 1] if len(func.parameters) else None
        if last is None:
            return
        if "NoOthers" in str(last.annotation):
            del func.parameters[last.name]
        elif (kind := _KINDS.get(str(last.annotation))) is not None:
            del func.parameters[last.name]
            _add_options(func.parameters, kind)
            if func.docstring is not None:
                func.docstring.value = naming_options(func.docstring.value, kind)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Makes what follows the items of a section, and is none, a section of its own."""
        if obj.docstring is not None:
            obj.docstring.value = with_remarks(obj.docstring.value)


def _add_options(parameters: griffe.Parameters, kind: type) -> None:
    """Before the first one by name alone that has a default, as `rawattn._call.signatures` has them."""
    by_name = griffe.ParameterKind.keyword_only
    behind = [x for x in parameters if x.kind is by_name and x.default is not None]
    for x in behind:
        del parameters[x.name]
    for x in parameters_of(kind):
        option = griffe.Parameter(
            x.name, annotation=x.annotation, kind=by_name, default=repr(x.default)
        )
        parameters.add(option)
    for x in behind:
        parameters.add(x)


def naming_options(docstring: str, kind: type) -> str:
    """A docstring with the names of all options that it does not tell one by one instead of ``**options``."""
    items = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)(?: : .*)?$", docstring, re.MULTILINE)
    told = {name for item in items for name in item.split(", ")}
    others = ", ".join(x.name for x in parameters_of(kind) if x.name not in told)
    return re.sub(r"^\*\*options$", others, docstring, flags=re.MULTILINE)


def with_remarks(docstring: str) -> str:
    """A docstring in which paragraphs behind the items of a section have a heading: to Griffe they would be items, too."""
    parts, among_items = [], False
    for paragraph in docstring.split("\n\n"):
        first, *rest = paragraph.split("\n", 2)
        if rest and rest[0] and not rest[0].strip("-"):
            among_items = first in _OF_ITEMS
        elif among_items and not first.startswith(" ") and not (rest and rest[0].startswith(" ")):
            among_items = False
            parts.append("Remarks\n-------\n" + paragraph)
            continue
        parts.append(paragraph)
    return "\n\n".join(parts)
