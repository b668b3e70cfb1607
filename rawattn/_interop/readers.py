"""Functions that read the arrays of a call by their attributes, made as text for as many arrays as there are.

A cached call reads its arrays again each time, which is most of what it costs in Python. A loop over them, which collects in
lists, takes half as long again as the same attributes asked for one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Reader = Callable[..., Any]

_TEXT = """\
def read({arguments}):
    try:
        if not ({now} and {plain}):
            return None
        {addresses}
        return [{listed}], ({form}, ({together}) & 15), {tracked}
    except RuntimeError:  # of tensors without strides or without memory: sparse and functional ones
        return None
"""


@dataclass(frozen=True, slots=True)
class Attributes:
    """How arrays of a framework are read: expressions of an array `x`, with `names` for what else is in them.

    plain: whether x is what the others are right for; it may bind `x_`. address: of its first element.
    form: what tells arrays of different forms apart, hashable. Of one in C order the shape tells the strides.
    tracked: whether it requires a gradient; `differentiated`: whether any of them may have a derivative otherwise, asked once.
    now: whether arrays have values at all, asked once.
    """

    plain: str
    address: str
    form: str
    tracked: str
    names: Mapping[str, Any]
    now: str = "True"
    differentiated: str = "False"

    def reader(self, given: tuple[bool, ...]) -> Reader:
        """Of that many arrays, None for those that are not given: what `native.Read` says, or None.

        Its form ends with where the addresses lie within 16 bytes, the widest access there is, all of them together.
        """
        arrays = [f"x{n}" for n, one in enumerate(given) if one]

        def each(expression: str) -> list[str]:
            # No expression has a name with an x in it but those of the array.
            return [expression.replace("{x}", x) for x in arrays]

        text = _TEXT.format(
            arguments=", ".join(f"x{n}" for n in range(len(given))),
            now=self.now,
            plain=" and ".join(each(self.plain)),
            addresses="; ".join(
                f"{x}p = {one}" for x, one in zip(arrays, each(self.address), strict=True)
            ),
            listed=", ".join(f"x{n}p" if one else "0" for n, one in enumerate(given)),
            form=", ".join(
                self.form.replace("{x}", f"x{n}") if one else "None" for n, one in enumerate(given)
            ),
            together=" | ".join(f"{x}p" for x in arrays),
            tracked=" or ".join((*each(self.tracked), self.differentiated)),
        )
        found: dict[str, Any] = dict(self.names)
        exec(text, found)  # of the text above alone
        reader: Reader = found["read"]
        return reader
