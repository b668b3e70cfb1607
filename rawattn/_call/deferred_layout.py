"""Layouts that are made while torch.compile traces: nothing can be read or checked before the program runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from rawattn._call.given import ARRAYS, ONE_EACH
from rawattn._interop import dynamo


class Deferred:
    """A layout that may have been made under torch.compile; `SeqLayout` is its only heir.

    Such a layout keeps its arguments and has no private attributes. The program's attention gets the arguments. Where
    it is used outside of the program, the constructor runs again at the first use.
    """

    _deferred_arguments: ClassVar[dict[str, Any] | None] = None

    def _defer(self, given: dict[str, Any]) -> None:
        """Keeps the arguments of the constructor, by name."""
        batch = None
        for name, x in given.items():
            if x is not None and name in ARRAYS:
                # `len` would make a symbolic length of torch.export a constant.
                count = x.shape[0] if hasattr(x, "shape") else len(x)
                batch = count if name in ONE_EACH else count - 1
        set_attribute = object.__setattr__  # torch.compile cannot trace writes to `__dict__`
        set_attribute(self, "max_seqlen_q", given["max_seqlen_q"])
        set_attribute(self, "max_seqlen_k", given["max_seqlen_k"])
        set_attribute(self, "batch", batch)
        set_attribute(self, "packed", given["seqstart_q"] is not None)
        set_attribute(self, "_deferred_arguments", given)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Completes a layout that was made under torch.compile and is used outside of it.

            Other layouts have all of their attributes.
            """
            given = self._deferred_arguments
            if given is not None and dynamo.is_compiling():
                if name == "_arrays":
                    return given
            elif given is not None and any(x.name == name for x in dataclasses.fields(self)):
                self.__init__(**given)
                return getattr(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
