"""The tile tables: data files in `tiles/`, one for each kernel, read when a call first chooses from them.

A table's rows are in the order of `headdim`, the largest padded head dim that a row serves. Among rows of one head dim the
fastest comes first. `measured` says where a row was found to be the fastest; it is null where no figure was kept. bench/tune.py
measures candidates and writes rows.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rawattn._kernels.selection import selection

DIRECTORY = Path(__file__).with_name("tiles")
LARGEST = 256  # the head dim that a table must serve, unless its schema says otherwise


class Schema(NamedTuple):
    """What the file of a kernel must hold: tables of these names, whose rows have these fields.

    largest: the head dims that tables serve which do not serve all.
    """

    tables: tuple[str, ...]
    fields: Mapping[str, type]
    largest: Mapping[str, int] = MappingProxyType({})


SCHEMAS = {
    "sm90_forward": Schema(
        (
            *("any", "long", "left", "masked", "paged", "paged_rows", "paged_8bit"),
            *("narrow_values", "bias", "alibi", "alibi_long", "dropout", "held", "few"),
        ),
        {
            "tile_k": int,
            "consumers": int,
            "stages": int,
            "cluster": int,
            "ping_pong": bool,
            "late_scaling": bool,
            "consumer_registers": int,
            "tensor_stores": bool,
        },
    ),
    "sm90_decode": Schema(
        (
            *("any", "long", "short", "many", "wide", "many_wide"),
            *("8bit", "short_8bit", "many_8bit", "wide_8bit", "many_wide_8bit"),
        ),
        {"tile_k": int, "waves": int, "stages": int, "blocks_per_sm": int},
        {"many": 64, "many_wide": 64, "many_8bit": 128, "many_wide_8bit": 128},
    ),
    "portable_forward": Schema(
        ("16bit", "32bit"),
        {
            "tile_q": int,
            "tile_k": int,
            "waves": int,
            "stages": int,
            "blocks_per_sm": int,
            "query_in_registers": bool,
        },
    ),
    "portable_decode": Schema(
        ("16bit", "many", "32bit", "many_32bit", "8bit", "many_8bit", "wide_8bit"),
        {"tile_k": int, "waves": int, "stages": int, "blocks_per_sm": int},
        {"many_32bit": 128, "many_8bit": 128},
    ),
    "portable_backward": Schema(
        ("16bit", "short", "scored", "32bit"),
        {
            "tile_q": int,
            "tile_k": int,
            "key_waves": int,
            "column_waves": int,
            "stages": int,
            "blocks_per_sm": int,
            "dq_row_waves": int,
            "late_copies": bool,
        },
    ),
    "portable_backward_dq": Schema(
        ("16bit", "32bit"),
        {"tile_q": int, "tile_k": int, "waves": int, "stages": int, "blocks_per_sm": int},
    ),
    "portable_backward_bias": Schema(
        ("16bit", "32bit"),
        {"tile_q": int, "tile_k": int, "waves": int, "column_waves": int, "blocks_per_sm": int},
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a tile table. headdim: the largest that it serves. shape: the fields of the schema, in its order."""

    headdim: int
    shape: tuple[tuple[str, int], ...]
    measured: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a configuration that the row decides."""
        return dict(self.shape)


def table(kernel: str, name: str) -> tuple[Row, ...]:
    """The rows to choose from: the file's, or those by which `selection.using_tiles` replaced them."""
    for replaced_kernel, replaced_name, rows in selection().tables:
        if (replaced_kernel, replaced_name) == (kernel, name):
            return rows
    return _shipped(kernel)[name]


def serves(kernel: str, name: str) -> int:
    """The largest padded head dim that a table serves."""
    return SCHEMAS[kernel].largest.get(name, LARGEST)


def read(kernel: str, path: Path) -> dict[str, tuple[Row, ...]]:
    """The tables of a file by name. ValueError, with the file and the row, where they do not follow the schema."""
    schema = SCHEMAS[kernel]
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        names = tuple(tables)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no tile tables ({type(error).__name__}: {error})") from error
    if names != schema.tables:
        raise ValueError(
            f"{path}: has the tables {', '.join(names)}; expected {', '.join(schema.tables)}"
        )
    return {
        name: _rows(f"{path}: {name}", tables[name], schema, serves(kernel, name)) for name in names
    }


@functools.cache
def _shipped(kernel: str) -> dict[str, tuple[Row, ...]]:
    return read(kernel, DIRECTORY / f"{kernel}.json")


def forget() -> None:
    """Makes the next choice read the files again. Call it when a file was written."""
    _shipped.cache_clear()


def _rows(where: str, entries: Any, schema: Schema, largest: int) -> tuple[Row, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: got no list of rows")
    rows = tuple(_row(f"{where}[{n}]", entry, schema) for n, entry in enumerate(entries))
    for n, (row, after) in enumerate(itertools.pairwise(rows), start=1):
        if row.headdim > after.headdim:
            raise ValueError(
                f"{where}[{n}]: headdim {after.headdim} follows {row.headdim}; rows stand in its order"
            )
    if rows[-1].headdim != largest:
        raise ValueError(
            f"{where}[{len(rows) - 1}]: headdim {rows[-1].headdim}; the last row must serve {largest}"
        )
    return rows


def _row(where: str, entry: Any, schema: Schema) -> Row:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: got {type(entry).__name__}, expected an object")
    expected: dict[str, type] = {"headdim": int, **schema.fields}
    if missing := [name for name in (*expected, "measured") if name not in entry]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    if unknown := sorted(set(entry) - {*expected, "measured"}):
        raise ValueError(f"{where}: {', '.join(unknown)} unknown; fields are {', '.join(expected)}")
    for name, kind in expected.items():
        value = entry[name]
        # True is an int too, but would become a constant of another type in the source.
        if type(value) is not kind or (kind is int and entry[name] <= 0):
            wanted = "a positive int" if kind is int else "true or false"
            raise ValueError(f"{where}: {name} is {value!r}, expected {wanted}")
    if not isinstance(measured := entry["measured"], str | None):
        raise ValueError(f"{where}: measured is {measured!r}, expected text or null")
    return Row(entry["headdim"], tuple((name, entry[name]) for name in schema.fields), measured)
