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
    """Signatures as `help` shows them, an item for each parameter, and a section for remarks that are no items of one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Names the options of ``**options``, gives each parameter an item, and what follows items, and is none, a section.

        Griffe calls this before `on_function`.
        """
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, griffe.Function) and (kind := _options_of(obj)) is not None:
            text = naming_options(text, kind)
        obj.docstring.value = one_by_one(with_remarks(text))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Shows what ``**options`` takes, and what a caller gets; leaves out the ``**unknown`` that is taken to be refused."""
        if (
            isinstance(func.returns, griffe.ExprSubscript)
            and str(func.returns.left) == "CallRequest"
        ):
            # As `rawattn._verbs.fast_path.with_signature_of` has it.
            func.returns = func.returns.slice
        last = _last_parameter(func)
        if last is None:
            return
        if "NoOthers" in str(last.annotation):
            del func.parameters[last.name]
        elif (kind := _options_of(func)) is not None:
            del func.parameters[last.name]
            _add_options(func.parameters, kind)


def _last_parameter(func: griffe.Function) -> griffe.Parameter | None:
    return func.parameters[len(func.parameters) - 1] if len(func.parameters) else None


def _options_of(func: griffe.Function) -> type | None:
    """The options that the ``**options`` of a function are, None if it has none."""
    last = _last_parameter(func)
    return None if last is None else _KINDS.get(str(last.annotation))


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


def one_by_one(docstring: str) -> str:
    """A docstring with an item for each parameter: where names share one, Griffe shows the type and default of the first."""
    sections = re.split(r"^(?=.+\n-+$)", docstring, flags=re.MULTILINE)
    return "".join(_split_items(x) if x.startswith("Parameters\n") else x for x in sections)


def _split_items(section: str) -> str:
    """A section in which every name of an item has an item of its own, with the same description."""
    body = section.rstrip("\n")
    items = []
    for item in re.split(r"\n(?=\S)", body):
        first, *description = item.split("\n")
        names, *kind = first.split(" : ", 1)
        items += ["\n".join([" : ".join([x, *kind]), *description]) for x in names.split(", ")]
    return "\n".join(items) + section[len(body) :]
