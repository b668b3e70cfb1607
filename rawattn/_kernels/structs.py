"""Structs that the host fills and kernels read: their fields by path, their bytes, and their C++ declarations.

The source of each kernel asserts at compile time that each field is where the host puts it.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_WIDTH = 120  # of a generated line
_KINDS = {"int": np.int32, "int64": np.int64, "float": np.float32, "unsigned": np.uint32}


@dataclass(frozen=True, slots=True, eq=False)
class Struct:
    """A struct by its C++ name. about: its comment in C++.

    fields: (C type or struct, names separated by commas, comment). All pointers are addresses of 8 bytes.
    """

    name: str
    about: str
    fields: tuple[tuple[Any, str, str], ...]
    dtype: np.dtype[Any]

    def zeros(self) -> np.ndarray[Any, Any]:
        """An array of one such struct, all zeros, whose fields can be set by name."""
        return np.zeros(1, self.dtype)


def declare(declared: list[Struct], name: str, about: str, *fields: tuple[Any, str, str]) -> Struct:
    """Makes a struct, whose NumPy layout is that of C++, and appends it to `declared`."""
    members: list[Any] = []
    for kind, names, _ in fields:
        for each in names.split(", "):
            base, _, count = each.rstrip("]").partition("[")
            dtype = kind.dtype if isinstance(kind, Struct) else _KINDS.get(kind, np.uint64)
            members.append((base, dtype, (int(count),)) if count else (base, dtype))
    declared.append(Struct(name, about, fields, np.dtype(members, align=True)))
    return declared[-1]


def offset(struct: Struct, path: str) -> int:
    """The offset in bytes of a field given by path, such as "forward.q_side.start.data"."""
    at, dtype = 0, struct.dtype
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, start = dtype.fields[name][:2]
        at += start
    return at


def put(record: Any, path: str, value: Any) -> None:
    """Sets a field of a struct, given by path."""
    *outer, last = path.split(".")
    for name in outer:
        record = record[name]
    record[last] = value


def fill(struct: Struct, values: Mapping[str, Any]) -> bytes:
    """The bytes of a struct with these fields, given by path, and zeros elsewhere."""
    filled = struct.zeros()
    for path, value in values.items():
        put(filled[0], path, value)
    return filled.tobytes()


@functools.cache
def leaves(struct: Struct) -> tuple[str, ...]:
    """The paths of all fields that are not structs themselves."""
    return tuple(path for path, _ in _leaves(struct.dtype))


@functools.cache
def assertions(struct: Struct) -> tuple[str, ...]:
    """Lines of C++ that compile only if the kernel's struct is laid out like this one."""
    reason = "the host lays it out so"
    lines = [
        f'static_assert(OFFSET_OF({struct.name}, {path}) == {at}, "{reason}");'
        for path, at in _leaves(struct.dtype)
    ]
    return (
        *lines,
        f'static_assert(sizeof({struct.name}) == {struct.dtype.itemsize}, "{reason}");',
    )


def _leaves(dtype: np.dtype[Any]) -> Iterator[tuple[str, int]]:
    assert dtype.fields is not None
    for name, (inner, start, *_) in dtype.fields.items():
        if inner.fields is None:
            yield name, start
        else:
            yield from ((f"{name}.{path}", start + at) for path, at in _leaves(inner))


def text(structs: Iterable[Struct], declared_in: str, included: str) -> str:
    """The C++ header that declares the structs, in their order. included: the header that has what they use."""
    parts = [
        f"// What the host tells a kernel. Generated from {declared_in}: change it there.\n"
        f'#pragma once\n\n#include "{included}"\n'
    ]
    for struct in structs:
        about = _comment(struct.about, "") if struct.about else []
        lines = [*about, f"struct {struct.name} {{"]
        for kind, names, meaning in struct.fields:
            lines += _comment(meaning, "  ") if meaning else []
            name = kind.name if isinstance(kind, Struct) else kind
            lines.append(f"  {name} {names};")
        parts.append("\n".join([*lines, "};", ""]))
    return "\n".join(parts)


def _comment(words: str, indent: str) -> list[str]:
    start = f"{indent}// "
    return textwrap.wrap(words, _WIDTH, initial_indent=start, subsequent_indent=start)
