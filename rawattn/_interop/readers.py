"""Generates functions that read the arrays of a call by their attributes, unrolled for the number of arrays.

A repeated call reads its arrays each time, which is most of its time in Python. A loop over the arrays that collects lists
takes 1.5 times as long as the unrolled function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Reader = Callable[..., Any]

_TEXT = """\
def read({arguments}):
    try:
        if not ({have_values} and {plain}):
            return None
        {addresses}
        return [{listed}], ({form}, ({together}) & 15), {tracked}
    except RuntimeError:  # of tensors without strides or without memory: sparse and functional ones
        return None
"""


@dataclass(frozen=True, slots=True)
class Attributes:
    """How arrays of a framework are read: Python expressions of an array `{x}`. names: the other names in them.

    plain: whether the other expressions are valid for x; it may bind `{x}_`. address: of the first element.
    form: the hashable form of x; strides are True for C order, in which the shape determines them.
    tracked: whether x requires a gradient. has_tangents: whether an array may have another derivative, asked once a call.
    have_values: whether arrays have values at all, asked once a call.
    """

    plain: str
    address: str
    form: str
    tracked: str
    names: Mapping[str, Any]
    have_values: str = "True"
    has_tangents: str = "False"

    def reader(self, given: tuple[bool, ...]) -> Reader:
        """A function of len(given) arrays, with None for those that are not given. It returns a `native.Read`, or None.

        The form ends with the OR of all addresses modulo 16, the bytes of the widest access.
        """
        arrays = [f"x{n}" for n, one in enumerate(given) if one]

        def each(expression: str) -> list[str]:
            # Each placeholder {x} becomes the array's name.
            return [expression.replace("{x}", x) for x in arrays]

        text = _TEXT.format(
            arguments=", ".join(f"x{n}" for n in range(len(given))),
            have_values=self.have_values,
            plain=" and ".join(each(self.plain)),
            addresses="; ".join(
                f"{x}p = {one}" for x, one in zip(arrays, each(self.address), strict=True)
            ),
            listed=", ".join(f"x{n}p" if one else "0" for n, one in enumerate(given)),
            form=", ".join(
                self.form.replace("{x}", f"x{n}") if one else "None" for n, one in enumerate(given)
            ),
            together=" | ".join(f"{x}p" for x in arrays),
            tracked=" or ".join((*each(self.tracked), self.has_tangents)),
        )
        found: dict[str, Any] = dict(self.names)
        exec(text, found)  # only the text generated above
        reader: Reader = found["read"]
        return reader
