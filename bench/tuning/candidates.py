"""Which tile shapes are worth compiling for a row, and the table that contains a chosen one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tuning.kernels import Fields, Kernel
from rawattn._call.problem import Problem
from rawattn._kernels import tile_tables
from rawattn._kernels.selection import using_tiles
from rawattn._kernels.target import SHARED_LIMIT, shared_limit_of
from rawattn._kernels.tile_tables import Row

SHARED_MEMORY, REGISTERS = "more shared memory than there is", "more registers than a thread has"
# The chooser ignores some fields: clusters where a call may have too few queries, tensor stores where no batch is ragged.
NOT_TAKEN = "not for calls of this table"


def label(fields: Fields) -> str:
    """Format a candidate as --only takes it."""
    return ",".join(f"{name}={int(value)}" for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class SearchedRow:
    """The row to search: its table, head dim and architecture.

    problems: the distinct problems of the cases that the row is judged by, as far as compilation depends on them.
    """

    kernel: Kernel
    table: str
    headdim: int
    problems: tuple[Problem, ...]
    arch: str

    @property
    def shared_limit(self) -> int:
        return SHARED_LIMIT[self.arch]

    def present(self) -> Row:
        """Return the row that calls use at present."""
        for row in tile_tables.table(self.kernel.name, self.table):
            if self.headdim <= row.headdim and self.config(row).shared_bytes <= self.shared_limit:
                return row
        raise ValueError(f"{self.kernel.name}: no row of {self.table} fits {self.arch}")

    def config(self, row: Row, problem: Problem | None = None) -> Any:
        """Return the configuration that this row makes, even if it does not fit in shared memory."""
        alone = Row(tile_tables.LARGEST, row.shape)
        with using_tiles(self.kernel.name, self.table, (alone,)):
            return self.kernel.choose(problem or self.problems[0], self.arch, 1 << 30)

    def row(self, fields: Fields, measured: str | None = None) -> Row:
        order = tile_tables.SCHEMAS[self.kernel.name].fields
        return Row(self.headdim, tuple((name, fields[name]) for name in order), measured)

    def with_row(self, new: Row) -> tuple[Row, ...]:
        """Return the table with `new` for this head dim.

        `new` replaces the present row, unless the present row also serves larger head dims, or GPUs whose shared memory is too
        small for `new`.
        """
        rows = tile_tables.table(self.kernel.name, self.table)
        present = self.present()
        at = rows.index(present)
        if present.headdim != self.headdim:
            at = sum(row.headdim <= self.headdim for row in rows)
            return (*rows[:at], new, *rows[at:])
        behind = at if self._serves_more(present, new) else at + 1
        return (*rows[:at], new, *rows[behind:])

    def _serves_more(self, present: Row, new: Row) -> bool:
        if self.kernel.family == "sm90":  # this family serves one architecture only
            return False
        before, after = (self.config(row).shared_bytes for row in (present, new))
        return any(before <= limit < after for limit in SHARED_LIMIT.values())


def generate(searched: SearchedRow, only: Mapping[str, int]) -> tuple[list[Row], Counter[str]]:
    """Return the candidates that may fit, the present choice first, and the number refused for each reason."""
    kernel, present = searched.kernel, searched.present()
    first = searched.row(present.fields)
    found, refused = [first], Counter[str]()
    for values in itertools.product(*kernel.values.values()):
        fields = dict(zip(kernel.values, values, strict=True))
        if any(fields[name] != value for name, value in only.items()):
            continue
        if not kernel.possible(fields) or (row := searched.row(fields)) == first:
            continue
        if reason := misfit(searched, row):
            refused[reason] += 1
        else:
            found.append(row)
    return found, refused


def untaken(row: Row, configs: Sequence[Any]) -> list[str]:
    """Return the fields whose value no configuration has, because the chooser overrides it."""
    return [
        name
        for name, value in row.fields.items()
        if all(getattr(config, name, value) != value for config in configs)
    ]


def misfit(searched: SearchedRow, row: Row) -> str:
    """Say why a candidate is not worth compiling; empty if it is."""
    configs = [searched.config(row, problem) for problem in searched.problems]
    if untaken(row, configs):
        return NOT_TAKEN
    blocks = row.fields.get("blocks_per_sm", 1)
    shared = max(config.shared_bytes for config in configs)
    if shared > shared_limit_of(blocks, searched.shared_limit):
        return SHARED_MEMORY
    needed, there = searched.kernel.registers(configs[0])
    return REGISTERS if needed > there else ""


def nearest(rows: Sequence[Row], only: Mapping[str, int]) -> Row:
    """Return the candidate that --only names.

    If several match, it is the one that shares most fields with the present choice, which is rows[0].
    """
    fitting = [row for row in rows if all(row.fields[name] == only[name] for name in only)]
    if not fitting:
        raise ValueError(f"no candidate has {label(only)}; --compile-only lists them")
    present = rows[0].fields
    return max(fitting, key=lambda row: sum(present[name] == row.fields[name] for name in present))
