"""Write the winner of a search into the tile table that the library reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.tuning.candidates import SearchedRow, label
from bench.tuning.compiling import Job, judge_all
from bench.tuning.record import Search
from rawattn._kernels import tile_tables
from rawattn._kernels.selection import using_tiles
from rawattn._kernels.tile_tables import Row
from rawattn._kernels.variants import common_variants


def dump(source: str, tables: Mapping[str, tuple[Row, ...]]) -> str:
    """Return the text of a table file, with one row a line."""
    blocks = []
    for name, rows in tables.items():
        lines = [
            json.dumps({"headdim": row.headdim, **row.fields, "measured": row.measured})
            for row in rows
        ]
        blocks.append(f"  {json.dumps(name)}: [\n   " + ",\n   ".join(lines) + "\n  ]")
    joined = ",\n".join(blocks)
    return f'{{\n "kernel": {json.dumps(source)},\n "tables": {{\n{joined}\n }}\n}}\n'


def write(
    search: Search,
    searched: SearchedRow,
    jobs: int,
    step: Callable[[str], None] = lambda text: None,
) -> str:
    """Write the winner into its table; return a line about what was done.

    Raises ValueError if the table has changed since the search, or if a kernel variant that the row serves but the search did
    not measure fails to compile or spills where it must not.
    """
    if search.winner in ("", search.present):
        return f"{search.name}: nothing to write"
    if (present := label(searched.present().fields)) != search.present:
        raise ValueError(
            f"{search.name}: the table has {present} now, but the search compared with {search.present}; search again"
        )
    date = search.date[:10]
    row = searched.row(
        search.figure(search.winner).fields, f"{search.device}, {date}, bench/tune.py"
    )
    rows = searched.with_row(row)
    check(searched, rows, jobs, step)
    path = tile_tables.DIRECTORY / f"{searched.kernel.name}.json"
    tables = {**tile_tables.read(searched.kernel.name, path), searched.table: rows}
    source = json.loads(path.read_text(encoding="utf-8"))["kernel"]
    _replace(path, dump(source, tables))
    tile_tables.forget()
    return f"{search.name}: {search.winner} is in {path.name}"


def check(
    searched: SearchedRow,
    rows: tuple[Row, ...],
    jobs: int,
    step: Callable[[str], None] = lambda text: None,
) -> None:
    """Compile every variant that these rows change.

    Raises ValueError if one does not compile, or spills though its kernel must not.
    """
    before = set(common_variants(searched.arch, every=True))
    with using_tiles(searched.kernel.name, searched.table, rows):
        after = common_variants(searched.arch, every=True)
    changed = [source for source in after if source not in before]
    allowed = None if searched.kernel.may_spill else 0
    work = [Job(source.text, (source,), searched.arch, (allowed,)) for source in changed]
    verdicts = judge_all(work, jobs, lambda text: step(searched.kernel.name))
    if bad := [verdict.reason for verdict in verdicts.values() if verdict.kind]:
        raise ValueError(f"not written, as of {len(changed)} variants {len(bad)} fail: {bad[0]}")


def _replace(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
