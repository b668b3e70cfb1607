"""Plain-text tables and quantities, fitted to the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from rawattn._console import terminal


def render(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, columns: int | None = None
) -> str:
    """Align columns under a header: the first `left` columns to the left, the others to the right.

    No line is longer than `columns`, by default the width of the terminal of standard output; lines to a file or a pipe
    are not limited. If the room is too small, headers and the first `left` columns are broken between words. If that does
    not suffice, each row becomes a paragraph with a line for each cell.
    """
    columns = terminal.columns(sys.stdout) if columns is None else columns
    lines = (header, *rows)
    natural = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gaps = len(natural) - 1
    if columns is None or sum(natural) + 2 * gaps <= columns:
        return _aligned(lines, natural, left, "  ")
    widths = _narrowed(natural, _least(header, rows, left), columns - gaps)
    if widths is not None:
        return _aligned(lines, widths, left, " ")
    paragraphs = (_paragraph(header, row, columns) for row in rows)
    return "\n\n".join(paragraphs) if rows else wrap(", ".join(header), columns)


def _aligned(lines: Sequence[Sequence[str]], widths: Sequence[int], left: int, gap: str) -> str:
    return "\n".join(
        gap.join(
            part.ljust(width) if column < left else part.rjust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        ).rstrip()
        for line in lines
        for parts in zip_longest(*map(_broken, line, widths), fillvalue="")
    )


def _broken(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def _least(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[int]:
    """The least width of each column: that of its longest word, or longest number."""
    found = []
    for column, (title, *cells) in enumerate(zip(header, *rows, strict=True)):
        words = [
            word for text in (title, *(cells if column < left else ())) for word in text.split()
        ]
        found.append(max(map(len, (*words, *(cells if column >= left else ()))), default=0))
    return found


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths that fit `room`, made by narrowing the widest columns first; None if that is impossible."""
    widths = list(widths)
    while sum(widths) > room:
        able = [column for column, width in enumerate(widths) if width > least[column]]
        if not able:
            return None
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _paragraph(header: Sequence[str], row: Sequence[str], columns: int) -> str:
    facts = (f"{name}: {cell}" if name else cell for name, cell in zip(header, row, strict=True))
    return wrap("\n".join(facts), columns)


def wrap(text: str, columns: int | None = None) -> str:
    """The text wrapped to `columns`, by default the terminal's width; not wrapped for a file or a pipe."""
    columns = terminal.columns(sys.stdout) if columns is None else columns
    if columns is None:
        return text
    indent = "  " if columns > 2 else ""
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent) if len(line) > columns else line
        for line in text.split("\n")
    )


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def age(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"
