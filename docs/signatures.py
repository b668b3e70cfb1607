"""An extension of Griffe: the API reference shows what `help` shows."""

from __future__ import annotations

from typing import Any

import griffe

_OF_ITEMS = ("Parameters", "Attributes", "Returns", "Raises")


class AsHelp(griffe.Extension):
    """Signatures without the arguments that are refused, and remarks that are no items of a section."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Leaves out the ``**unknown`` that a function takes only to refuse it with a better message."""
        last = func.parameters[len(func.parameters) - 1] if len(func.parameters) else None
        if last is not None and "NoOthers" in str(last.annotation):
            del func.parameters[last.name]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Makes what follows the items of a section, and is none, a section of its own."""
        if obj.docstring is not None:
            obj.docstring.value = with_remarks(obj.docstring.value)


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
