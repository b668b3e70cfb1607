"""How the current context overrides the choice of kernels and tiles, for tests, benchmarks and searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rawattn._kernels.tile_tables import Row

FAMILIES = ("sm90", "decode", "portable")


class Selection(NamedTuple):
    """The overrides. They are part of the key of a prepared call."""

    family: str | None = None  # the only family that calls use
    # Tile tables that replace shipped ones: (kernel, name of the table, rows).
    tables: tuple[tuple[str, str, tuple[Row, ...]], ...] = ()


UNCHANGED = Selection()
_selection: ContextVar[Selection] = ContextVar("rawattn_selection", default=UNCHANGED)
selection = _selection.get


@contextmanager
def only(family: str) -> Iterator[None]:
    """Restricts calls to one family of kernels, so that families can be compared.

    "portable" supports every call. Where another family does not support a call, the portable one runs it.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: got {family!r}; accepted are {', '.join(FAMILIES)}")
    token = _selection.set(selection()._replace(family=family))
    try:
        yield
    finally:
        _selection.reset(token)


@contextmanager
def using_tiles(kernel: str, table: str, rows: Iterable[Row]) -> Iterator[None]:
    """Uses rows instead of a shipped tile table, so that candidates can be compared as calls would run them."""
    others = tuple(each for each in selection().tables if each[:2] != (kernel, table))
    tables = (*others, (kernel, table, tuple(rows)))
    token = _selection.set(selection()._replace(tables=tables))
    try:
        yield
    finally:
        _selection.reset(token)
