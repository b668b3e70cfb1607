"""Tile tables as data, and bench/tune.py, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench.tuning import candidates, command, compiling, halving, racing, record, searching, tables
from bench.tuning.kernels import KERNELS
from rawattn._bench.cases import Case
from rawattn._bench.contender import Inputs
from rawattn._kernels import tile_tables as _tiles
from rawattn._kernels.selection import selection
from rawattn._kernels.target import SHARED_LIMIT
from rawattn._kernels.variants import common_variants
from tests import exhaustive

ARCH = "sm_90a"
ROOT = Path(__file__).resolve().parents[1]


def searched_row(kernel: str, headdim: int = 64, arch: str = ARCH, table: str | None = None):
    described = KERNELS[kernel]
    table = table or described.tables("bfloat16")[0]
    return searching.searched_row(described, table, headdim, arch, "bfloat16")


# Candidates


@pytest.mark.parametrize("headdim", exhaustive.thin([80, 64, 256, 128], 4))
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_fit_and_the_present_choice_is_first(kernel: str, headdim: int):
    where = searched_row(kernel, headdim)
    rows, refused = candidates.generate(where, {})
    assert rows[0].fields == where.present().fields
    assert len({row.shape for row in rows}) == len(rows) > 10
    assert refused.total()
    for row in rows:
        assert candidates.misfit(where, row) == ""
        assert where.config(row).shared_bytes <= SHARED_LIMIT[ARCH]
        assert where.kernel.possible(row.fields)
        # The search runs the kernel that a caller gets once the row is in the table.
        racing.contender(where, "", row)


def test_filters_say_why():
    where = searched_row("portable_forward", 128)
    fields = where.present().fields
    more = where.row({**fields, "tile_k": 128, "blocks_per_sm": 3})
    assert candidates.misfit(where, more) == candidates.SHARED_MEMORY
    more = where.row({**fields, "tile_k": 96, "query_in_registers": True, "stages": 1})
    assert candidates.misfit(where, more) == candidates.REGISTERS
    smaller = searched_row("portable_forward", 128, "sm_89")
    assert smaller.present() == _tiles.table("portable_forward", "16bit")[2]


def test_clusters_are_for_long_queries():
    for table, taken in (("any", {1}), ("long", {1, 2}), ("left", {1, 2})):
        where = searched_row("sm90_forward", 256, table=table)
        rows, refused = candidates.generate(where, {"tile_k": 64, "stages": 2})
        assert {row.fields["cluster"] for row in rows} == taken
        assert bool(refused[candidates.NOT_TAKEN]) == (taken == {1})


def test_tensor_stores_where_there_is_room():
    for headdim, taken in ((128, {False, True}), (256, {False})):
        where = searched_row("sm90_forward", headdim)
        rows, _ = candidates.generate(where, {"tile_k": 64, "stages": 2})
        assert {row.fields["tensor_stores"] for row in rows} == taken


def test_registers_are_split():
    possible = KERNELS["sm90_forward"].possible
    assert possible({"consumers": 2, "consumer_registers": 240, "tile_k": 64})
    assert possible({"consumers": 3, "consumer_registers": 160, "tile_k": 64})
    assert not possible({"consumers": 3, "consumer_registers": 232, "tile_k": 64})
    assert not possible({"consumers": 2, "consumer_registers": 160, "tile_k": 64})
    for row in _tiles.table("sm90_forward", "any"):
        config = searched_row("sm90_forward").config(row)
        pool = 65536 // config.threads // 8 * 8 * (1 + config.consumers)
        assert config.producer_registers + config.consumers * config.consumer_registers == pool


def test_only_narrows_and_names():
    where = searched_row("sm90_forward", 128)
    rows, _ = candidates.generate(where, {"tile_k": 80, "stages": 3})
    assert all(row.fields["tile_k"] == 80 for row in rows[1:])
    near = candidates.nearest(rows, {"tile_k": 80})
    assert near.fields == {**rows[0].fields, "tile_k": 80}
    with pytest.raises(ValueError, match="no candidate has tile_k=7"):
        candidates.nearest(rows, {"tile_k": 7})


def test_a_row_replaces_the_present_one_or_stands_before_it():
    where = searched_row("sm90_forward", 128)
    shipped = _tiles.table("sm90_forward", "any")
    new = where.row({**where.present().fields, "tile_k": 96}, "here")
    assert where.with_row(new) == (*shipped[:2], new, *shipped[3:])
    between = searched_row("sm90_forward", 80)
    new = between.row(between.present().fields)
    assert between.with_row(new) == (shipped[0], new, *shipped[1:])
    # GPUs with less shared memory keep the rows that fit them.
    where = searched_row("portable_forward", 256, "sm_89")
    shipped = _tiles.table("portable_forward", "16bit")
    assert where.present() == shipped[-1]
    where = searched_row("portable_forward", 128)
    larger = where.row({**where.present().fields, "tile_k": 96, "blocks_per_sm": 1})
    at = shipped.index(where.present())
    assert where.with_row(larger) == (*shipped[:at], larger, *shipped[at:])


# Rounds


def speeds(true: dict[str, float], seen: list[tuple[int, int]]) -> halving.Measure:
    def measure(names: Any, repeats: int) -> dict[str, float]:
        seen.append((len(names), repeats))
        return {name: true[name] for name in names if true[name] > 0}

    return measure


def test_halving_keeps_the_present_choice_and_finds_the_fastest():
    true = {f"c{n}": 0.5 + n / 40 for n in range(24)}
    seen: list[tuple[int, int]] = []
    rounds = halving.search(list(true), "c2", speeds(true, seen), lambda: False)
    assert [count for count, _ in seen] == [24, 13, 8, 5, 4]
    assert seen[-1][1] == halving.FINAL_REPEATS
    assert all("c2" in one.scores for one in rounds)
    assert halving.winner(rounds, "c2") == "c23"


def test_halving_leaves_near_ones_in_and_ends_all_the_same():
    true = {f"c{n}": 1 + n / 10000 for n in range(20)}
    seen: list[tuple[int, int]] = []
    rounds = halving.search(list(true), "c0", speeds(true, seen), lambda: False)
    assert [count for count, _ in seen] == [20, 4]
    assert halving.winner(rounds, "c0") == "c0"  # nothing is clearly faster


def test_halving_drops_what_failed_and_stops_when_the_budget_is_spent():
    true = {"a": 1.0, "b": 0.0, "c": 1.2, "d": 1.1, "e": 0.7, "f": 0.6}
    rounds = halving.search(list(true), "a", speeds(true, []), lambda: True)
    assert len(rounds) == 1
    assert "b" not in rounds[0].scores
    assert halving.winner(rounds, "a") == "c"
    rounds = halving.search(["a", "b"], "b", speeds(true, []), lambda: False)
    assert len(rounds) == 1  # the present choice failed, so there is nothing to compare with


# The compiler's verdicts


def test_compile_only_lists_two_candidates(capsys: pytest.CaptureFixture[str]):
    words = ["portable_backward_dq", "--headdim", "64", "--filter", "S4096 full", "--jobs", "1"]
    only = "tile_q=64,tile_k=16,waves=4,stages=1,blocks_per_sm=1"
    status = command.main([*words, "--only", only, "--compile-only", "--arch", "sm_80"])
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "portable_backward_dq 16bit, head dim 64, bfloat16, sm_80"
    listed = {line.split()[0]: line.split()[1:] for line in lines[2:4]}
    assert set(listed) == {"tile_q=128,tile_k=64,waves=4,stages=2,blocks_per_sm=2", only}
    verdict, registers, _, shared = listed[only]
    assert verdict == "ok"
    assert 32 < int(registers) <= 255
    assert int(shared) == 2 * (64 + 16) * 2 * (64 + 8)
    assert lines[4].startswith("refused: 0")


def test_spilling_and_broken_candidates_are_refused():
    where = searched_row("portable_forward", 128)
    source = where.config(where.present()).source()
    broken = replace(source, text=source.text.replace("kTileK = 48", "kTileK = 40"))
    verdict = compiling.judge(compiling.Job("", (source, broken), ARCH, (-1, None)))
    assert verdict.kind == compiling.SPILLS  # more than -1 bytes
    assert verdict.reason.endswith("right")
    verdict = compiling.judge(compiling.Job("", (broken,), ARCH, (None,)))
    assert verdict.kind == compiling.NOT_COMPILED
    assert "static assertion" in verdict.reason


# A whole search, with the CPU instead of the GPU


class FakeClock:
    """A candidate of 96 keys a tile is 10% faster than the others."""

    def burst(self, call: Any, calls: int, during: Any = None) -> float:
        (_, _, rows), *_ = selection().tables
        row = next(row for row in rows if row.headdim >= 64)
        return 1e-3 if row.fields["tile_k"] == 96 else 1.1e-3

    def first(self, call: Any) -> tuple[float, Any]:
        result = call()
        (_, _, rows), *_ = selection().tables
        if rows[0].fields["tile_k"] == 80:  # this candidate gives a wrong result
            result = result + 1
        return 0.0, result


@pytest.fixture(
    params=[72, pytest.param(1, marks=pytest.mark.exhaustive)],
    ids=["some-variants", "all-variants"],
)
def search(
    request: pytest.FixtureRequest,
    tile_tables: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Path:
    """The file of a search for Hopper's forward at head dim 64.

    The compiler checks a winner with every n-th of the variants that it changes; n is the parameter.
    """
    judge_all, step = tables.judge_all, request.param
    monkeypatch.setattr(tables, "judge_all", lambda work, *how: judge_all(work[::step], *how))
    shape = {"nheads_q": 1, "nheads_kv": 1, "headdim": 64}
    small = [Case("dense", "S16", (16,), **shape, causal=causal) for causal in (True, False)]
    small.append(Case("ragged", "S16", (16,), **shape, causal=True, packed=True))
    rng = np.random.default_rng(0)

    def inputs(case: Case, dtype: str, l2_bytes: int) -> list[Inputs]:
        rows = (16,) if case.packed else (1, 16)
        arrays = (rng.standard_normal((*rows, 1, 64)).astype(ml_dtypes.bfloat16) for _ in "qkv")
        seqstart = np.array([0, 16], np.int32) if case.packed else None
        return [Inputs(tuple(arrays), seqstart=seqstart, max_seqlen=16)]

    monkeypatch.setattr(searching, "cases", lambda *args: small)
    monkeypatch.setattr(racing, "make_inputs", inputs)
    monkeypatch.setattr(racing, "EventClock", FakeClock)
    monkeypatch.setattr(racing.machine, "Sensors", lambda: SimpleNamespace(read=lambda: None))
    monkeypatch.setattr(racing.machine, "facts", lambda s: {"device": "Fake", "l2_bytes": 1})
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    path = tmp_path / "search.json"
    words = ["sm90_forward", "--headdim", "64", "--tables", "any", "--peers", "none"]
    few = "consumers=3,stages=2,cluster=1,ping_pong=1,late_scaling=1,consumer_registers=160,tensor_stores=0"
    assert command.main([*words, "--only", few, "--jobs", "1", "--json", str(path)]) == 0
    return path


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_search_writes_its_winner_and_its_losers(
    search: Path,
    tile_tables: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (found,) = record.load(search)
    fields = "consumers=3,stages=2,cluster=1,ping_pong=1,late_scaling=1,consumer_registers=160,tensor_stores=0"
    assert found.winner == f"tile_k=96,{fields}"
    assert found.present == candidates.label(_tiles.table("sm90_forward", "any")[0].fields)
    assert found.figure(found.winner).speed == pytest.approx(1.1)
    wrong = found.figure(found.winner.replace("96", "80"))
    assert "differs from" in wrong.reason
    assert wrong not in found.timed()
    capsys.readouterr()

    notes = tile_tables / "notes"
    notes.mkdir()
    monkeypatch.setattr(command, "_NOTES", notes)
    before = set(common_variants(ARCH))
    options = ["--from", str(search), "--note", "--write"]
    assert command.main([*options, "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"winner: {found.winner}, 1.100x" in shown
    page = (notes / "hopper-forward.md").read_text(encoding="utf-8")
    assert page.count("| tile_k=") == len(found.timed()) > 3
    assert f"| {found.winner} (winner) | 1.100 |" in page

    path = tile_tables / "sm90_forward.json"
    row = _tiles.read("sm90_forward", path)["any"][0]
    assert row.fields == found.figure(found.winner).fields
    assert row.measured == f"Fake, {found.date[:10]}, bench/tune.py"
    changed = [source.text for source in common_variants(ARCH) if source not in before]
    assert changed
    assert all("kTileK = 96" in text for text in changed)
    # The search belongs to the table as it was then.
    assert command.main(options) == 1
    assert "search again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_winner_that_fails_in_another_variant_is_not_written(search: Path, tile_tables: Path):
    text = (tile_tables / "sm90_forward.json").read_text(encoding="utf-8")
    (found,) = record.load(search)
    spilling = {"tile_k": 128, "consumers": 4, "consumer_registers": 112}
    found.figure(found.winner).fields.update(spilling)
    where = searched_row("sm90_forward")
    with pytest.raises(ValueError, match=r"not written, as of .* variants .* fail: spills"):
        tables.write(found, where, 1)
    assert (tile_tables / "sm90_forward.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a kernel"),
        (["sm90_forward", "--compile-only", "--only", "tile=3"], "--only: got tile"),
        (["sm90_forward", "--compile-only", "--arch", "sm_80"], "is for sm_90a"),
        (["portable_forward", "--compile-only", "--tables", "left"], "--tables: got left"),
        (["portable_forward", "--compile-only", "--filter", "x"], "no case has the words"),
        (["--from", "nowhere.json"], "--from nowhere.json: No such file or directory; expected a"),
        (
            ["--from", str(ROOT / "bench/results/host-h200.json")],
            "(it has no 'searches'); expected",
        ),
        (["sm90_forward", "--json", str(ROOT)], f"--json {ROOT}: is a directory"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(words) == 1
    assert message in capsys.readouterr().err


def test_the_script_runs_from_anywhere(tmp_path: Path):
    script = [sys.executable, str(ROOT / "bench" / "tune.py"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "ncu -k regex:rawattn" in done.stdout
