"""Generates functions that read the arrays of a call by their attributes, unrolled for the number of arrays.

A repeated call reads its arrays each time, which is most of its time in Python. A loop over the arrays that collects lists
takes 1.5 times as long as the unrolled function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Reader = Callable[..., Any]

_TEXT = """\
def read({arguments}):
    try:
        if not ({have_values} and {valid}):
            return None
        {addresses}
        return [{listed}], ({form}), {tracked}
    except RuntimeError:  # of tensors without strides or without memory: sparse, functional and freed ones
        return None
"""


@dataclass(frozen=True, slots=True, eq=False)
class Attributes:
    """How arrays of a framework are read: Python expressions of an array `{x}`. names: the other names in them.

    typed, plain: whether the other expressions are valid for x, by its type and otherwise; plain may bind `{x}_`.
    address: of the first element; RuntimeError if x has elements, but no memory.
    form: the hashable form of x behind its shape; strides are True for C order, in which the shape determines them.
    tracked: whether x requires a gradient. has_tangents: whether an array may have another derivative, asked once a call.
    have_values: whether arrays have values at all, asked once a call.
    stream: the handle of the current stream on `device`; `stream_of` is `Native.stream`.
    block: memory of `nbytes` bytes on the current stream, which has an address `ptr`; with an offset added, the makers of
    `Native.allocator_like` take it in place of memory of their own. Empty if there is no such memory.
    """

    typed: str
    plain: str
    address: str
    form: str
    tracked: str
    names: Mapping[str, Any]
    have_values: str = "True"
    has_tangents: str = "False"
    stream: str = "stream_of(device)"
    block: str = ""

    def reader(self, given: tuple[bool, ...]) -> Reader:
        """A function of len(given) arrays, with None for those that are not given. It returns a `native.Read`, or None."""
        arguments = [f"x{n}" for n in range(len(given))]
        text = _TEXT.format(
            arguments=", ".join(arguments),
            have_values=self.have_values,
            listed=", ".join(f"{x}p" if one else "0" for x, one in zip(arguments, given)),  # noqa: B905
            **self.expressions(arguments, given),
        )
        return self.define(text, "read")

    def expressions(
        self,
        arguments: Sequence[str],
        given: Sequence[bool] | None = None,
        first_is_known: bool = False,
    ) -> dict[str, str]:
        """What generated functions of these arguments consist of. given: whether each is an array, not None; by default all.

        first_is_known: whether the type and the shape of the first array are those of the call that is repeated.

        valid: whether all can be read, if they have values; the others are valid only then.
        addresses: statements that assign the address of an array `x` to `xp`.
        form: the parts of `Read`'s form, separated by commas. tracked: whether an array has a derivative.
        """
        forms = [f"{x}.shape, {self.form.replace('{x}', x)}" for x in arguments]
        if first_is_known:
            forms[0] = self.form.replace("{x}", arguments[0])
        if given is not None:
            forms = [form if one else "None" for form, one in zip(forms, given, strict=True)]
            arguments = [x for x, one in zip(arguments, given, strict=True) if one]

        def each(expression: str) -> list[str]:
            # Each placeholder {x} becomes the array's name.
            return [expression.replace("{x}", x) for x in arguments]

        together = " | ".join(f"{x}p" for x in arguments)
        tests = [*each(self.typed)[first_is_known:], *each(self.plain)]
        derived = [x for x in (*each(self.tracked), self.has_tangents) if x != "False"]
        return {
            "valid": " and ".join(x for x in tests if x != "True") or "True",
            "addresses": "; ".join(f"{x}p = {self.address_of(x)}" for x in arguments),
            "form": ", ".join((*forms, f"({together}) & 15")),
            "tracked": " or ".join(derived) or "False",
        }

    def address_of(self, array: str) -> str:
        return self.address.replace("{x}", array)

    def define(self, text: str, name: str) -> Callable[..., Any]:
        """The function of this name that a generated text defines."""
        found: dict[str, Any] = dict(self.names)
        exec(text, found)  # only texts made of the expressions above
        function: Callable[..., Any] = found[name]
        return function
