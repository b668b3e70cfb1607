"""What the current context changes about which kernel runs, for tests, benches and searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rawattn._kernels.tile_tables import Row

FAMILIES = ("sm90", "decode", "portable")


class Selection(NamedTuple):
    """Part of what decides a launch."""

    family: str | None = None  # the one that calls are kept to
    # Tile tables instead of shipped ones: (kernel, name of the table, rows).
    tables: tuple[tuple[str, str, tuple[Row, ...]], ...] = ()


UNCHANGED = Selection()
_selection: ContextVar[Selection] = ContextVar("rawattn_selection", default=UNCHANGED)
selection = _selection.get


@contextmanager
def only(family: str) -> Iterator[None]:
    """Keeps calls to one family of kernels, so that families can be compared.

    "portable" applies to every call. Where another does not apply, the portable one runs all the same.
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
