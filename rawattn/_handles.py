"""Numbers for objects, by which the operators of a compiled program find them: those take tensors and numbers alone."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


def handle_of(new: object) -> int:
    """The number of a new object, which nothing else in this process has or gets. It keeps nothing alive."""
    number = next(_numbers)
    _objects[number] = new
    return number


def find(handle: int) -> Any:
    """The object of a number. RuntimeError where it is gone."""
    found = _objects.get(handle)
    if found is None:
        raise RuntimeError(
            "a compiled program was made with a rawattn.ScoreMod or rawattn.BlockMask that is gone; keep it as long as the "
            "program"
        )
    return found
