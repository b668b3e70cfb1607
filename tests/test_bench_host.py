"""`rawattn bench --suite host`, with NumPy instead of CuPy and frameworks on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import cli
from rawattn._bench import grids, host_calls, host_suite, machine, measure, render, suites
from rawattn._bench.host_calls import Absent, HostCall, Setup
from rawattn._bench.report import HostRow, Report

SHAPE, LENGTHS = (1, 12, 2, 8), (2, 5, 1, 4)
CALLS = {call.name: call for call in host_calls.calls()}
OURS = [call for call in CALLS.values() if call.bound is not None]
LIBRARY = {"torch": "torch", "rawattn.torch": "torch", "JAX": "jax"}


def setup() -> Setup:
    return Setup(np, "cpu", "float32", SHAPE, LENGTHS)


# The calls


def test_every_figure_has_its_bound() -> None:
    bounds = {call.name: call.bound for call in OURS}
    new = {f"{where}, new layout, {which}" for where in (
        "CuPy, ragged, host lengths", "CuPy, ragged, device lengths",
        "torch, ragged, host lengths", "torch, ragged, device lengths",
    ) for which in ("equal", "other")}  # fmt: skip
    assert bounds == {
        "CuPy": 0.40,
        "CuPy, out=": 0.45,
        "CuPy, lse": 0.45,
        "CuPy backward": 0.9,
        "torch": 0.65,
        "torch, lse": 0.75,
        "torch backward": 1.2,
        "JAX": 2.0,
        "JAX, jitted": 1.5,
        "CuPy, ragged, host lengths, kept layout": 0.6,
        "CuPy, ragged, device lengths, kept layout": 0.6,
        "torch, ragged, host lengths, kept layout": 0.9,
        "torch, ragged, device lengths, kept layout": 0.9,
        **dict.fromkeys(new, 1.3),
        "Plan": 0.2,
        "rawattn.torch forward": 1.0,
        "rawattn.torch forward + backward": 1.3,
    }
    assert all(call.over in CALLS for call in OURS)
    assert CALLS["rawattn.torch forward + backward"].over == "torch SDPA forward + backward"
    assert {call.over for call in OURS} == {"torch SDPA", "torch SDPA forward + backward"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.frameworks if name.split()[0].strip(",") in LIBRARY else ()
        )
        for name in CALLS
    ],
)
def test_every_call_is_the_one_that_it_says(name: str) -> None:
    library = LIBRARY.get(name.split(maxsplit=1)[0].strip(","))
    if library is not None:
        pytest.importorskip(library)
    own = setup()
    try:
        call = CALLS[name].make(own)
        results = [call() for _ in range(3)]
    except Absent as error:
        pytest.skip(str(error))
    first = results[0]
    several = "lse" in name or "backward" in name
    out = first[0] if several else first
    total, nheads, headdim = 12, 2, 8
    shape = (total, nheads, headdim) if "ragged" in name else SHAPE
    if name.startswith("torch SDPA"):
        shape = (1, nheads, total, headdim)
    assert tuple(out.shape) == shape
    kind = {"torch": "torch", "jax": "jaxlib"}.get(library or "", "numpy")
    assert type(out).__module__.split(".")[0] == kind
    if "backward" in name:
        assert [tuple(one.shape) for one in first[:3]] == [shape] * 3
    if name == "CuPy, out=":
        assert results[0] is results[1] is results[2]


def test_floors_are_told_and_have_no_bound() -> None:
    floors = [call for name, call in CALLS.items() if name.startswith("floor of ")]
    assert len(floors) == 11
    assert {call.bound for call in floors} == {None}
    assert {call.over for call in floors} == {"torch SDPA", "torch SDPA forward + backward"}
    for call in floors:
        with pytest.raises(Absent, match="CPU"):
            call.make(setup())


@pytest.mark.parametrize("where", ["host", "device"])
def test_layouts_are_kept_or_new_with_equal_or_other_lengths(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(rawattn, "attention", lambda *qkv, seqs: seen.append(seqs))
    made: list[dict[str, Any]] = []

    class Layout:
        def __init__(self, **lengths: Any) -> None:
            made.append(lengths)

    monkeypatch.setattr(rawattn, "SeqLayout", Layout)
    counts = {}
    for which in ("kept layout", "new layout, equal", "new layout, other"):
        seen.clear()
        made.clear()
        call = CALLS[f"CuPy, ragged, {where} lengths, {which}"].make(setup())
        for _ in range(8):
            call()
        counts[which] = (
            len({id(one) for one in seen}),
            len({tuple(lengths["seqstart_q"].tolist()) for lengths in made}),
        )
        # Lengths on the device are never read back, so the call passes their maximum.
        told = {"max_seqlen_q": 5, "max_seqlen_k": 5} if where == "device" else {}
        assert all({**lengths, "seqstart_q": 0} == {"seqstart_q": 0, **told} for lengths in made)
    assert counts["kept layout"] == (1, 1)
    assert counts["new layout, equal"][1] == 1
    assert counts["new layout, other"][1] == 8
    assert len(made) == 8


def test_what_is_missing_is_absent_and_what_is_broken_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Absent, match="no module torch"):
        CALLS["torch"].make(setup())
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(Absent, match="no module jax"):
        CALLS["JAX"].make(setup())
    (tmp_path / "broken_library.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        host_calls._imported("broken_library")
    monkeypatch.delattr(rawattn, "plan", raising=False)
    with pytest.raises(Absent, match=r"no rawattn\.plan"):
        CALLS["Plan"].make(setup())


def test_frameworks_without_a_gpu_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with pytest.raises(Absent, match="torch has no GPU"):
        Setup(np).torch()
    monkeypatch.setattr(
        host_calls.peers, "import_jax", lambda: types.SimpleNamespace(default_backend=lambda: "cpu")
    )
    with pytest.raises(Absent, match="JAX has no GPU"):
        Setup(np).jax()


# The measurement


class World:
    """A fake clock that calls advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(host_suite.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(host_suite.time, "monotonic", lambda: self.now)

    def call(self, name: str, seconds: float, lives: float = float("inf")) -> HostCall:
        def make(setup: Setup) -> Any:
            left = [lives]

            def call() -> None:
                self.now += seconds
                self.log.append(name)
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("no more\nof this")

            return call

        return HostCall(name, make, 0.5, "base" if name != "base" else "")

    def wait(self) -> None:
        self.now += 1.0
        self.log.append("wait")


def test_calls_take_turns_and_their_waiting_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    chosen = [world.call("base", 40e-6), world.call("ours", 16e-6)]
    rows, taken = host_suite.measure_calls(chosen, setup(), world.wait, turns=3)
    assert taken == 3
    assert [row.seconds for row in rows] == pytest.approx([40e-6, 16e-6])
    names = [name for name in world.log if name != "wait"]
    turns = [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]
    assert turns == ["base", "ours"] * 4  # the first turn warms up
    queued = [len(list(calls)) for name, calls in itertools.groupby(world.log) if name != "wait"]
    assert set(queued) == {host_suite.BATCH}  # a launch queue holds many more
    report = make_report(rows)
    assert report.host_ratio(rows[1], rows[1].over) == pytest.approx(0.4)


def test_a_call_that_raises_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    def absent(setup: Setup) -> Any:
        raise Absent("no module torch")

    chosen = [
        world.call("base", 40e-6),
        world.call("dies at once", 1e-6, lives=3),
        world.call("dies midway", 1e-6, lives=100),
        HostCall("absent", absent, 1.0, "base"),
        world.call("ours", 16e-6),
    ]
    heard: list[str] = []
    rows, _ = host_suite.measure_calls(chosen, setup(), world.wait, turns=2, step=heard.append)
    found = {row.name: (row.seconds, row.reason) for row in rows}
    assert found["dies at once"] == found["dies midway"] == (None, "failed: RuntimeError: no more")
    assert found["absent"] == (None, "left out: no module torch")
    assert found["ours"] == (pytest.approx(16e-6), "")
    assert [text.split(": ")[0] for text in heard] == list(found)
    assert "dies at once: failed: RuntimeError: no more" in heard


def test_time_that_is_spent_ends_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    base = world.call("base", 0.1)
    _, taken = host_suite.measure_calls([base], setup(), world.wait, turns=99, seconds=1.0)
    batches = world.log.count("base") / host_suite.BATCH
    assert taken == 3
    assert batches == 1 + 3 * host_suite._BATCHES


# The report


def make_report(rows: list[HostRow]) -> Report:
    return Report(
        suite="host",
        dtype="bfloat16",
        date="2026-01-02T03:04:05+00:00",
        repeats=12,
        machine={"device": "GPU", "driver": "1"},
        versions={"rawattn": "0.1"},
        matmul_flops=0.0,
        ours=["rawattn"],
        peers=[],
        host=rows,
    )


def some_rows() -> list[HostRow]:
    return [
        HostRow("torch SDPA", seconds=40e-6),
        HostRow("torch SDPA backward", seconds=80e-6),
        HostRow("CuPy", 0.40, "torch SDPA", seconds=16e-6),
        HostRow("torch backward", 1.2, "torch SDPA", "torch SDPA backward", seconds=60e-6),
        HostRow("JAX", 2.0, "torch SDPA", reason="left out: no module jax"),
        HostRow("JAX, jitted", 1.5, "torch SDPA", reason="left out: no module jax"),
        HostRow("Plan", 0.2, "torch SDPA", reason="failed: TypeError: no"),
    ]


def test_the_table_says_who_is_within_its_bound(tmp_path: Path) -> None:
    report = make_report(some_rows())
    lines = {" ".join(line.split()) for line in render.text(report).splitlines()}
    assert {
        "call over us ratio bound",
        "torch SDPA 40.0",
        "CuPy torch SDPA 16.0 0.40x 0.40x within",
        "torch backward torch SDPA 60.0 1.50x 1.20x above",
        "Plan torch SDPA 0.20x n/a",
        "JAX; JAX, jitted: left out: no module jax",
        "Plan: failed: TypeError: no",
        "torch backward / torch SDPA backward: 0.75x",
        "within their bounds: 1 of 5 calls",
    } <= lines
    assert "TFLOP/s" not in render.text(report)
    assert "| CuPy | torch SDPA | 16.0 | 0.40x | 0.40x | within |" in render.markdown(report)
    report.save(tmp_path / "a.json")
    loaded = Report.load(tmp_path / "a.json")
    assert loaded == report
    assert render.text(loaded) == render.text(report)


def test_without_torch_there_are_times_and_no_ratios() -> None:
    rows = [HostRow("torch SDPA", reason="left out: no module torch"), *some_rows()[2:3]]
    text = render.text(make_report(rows))
    assert "CuPy torch SDPA 16.0 0.40x" in {" ".join(line.split()) for line in text.splitlines()}
    assert "torch SDPA: left out: no module torch" in text
    assert "within their bounds: 0 of 1 calls" in text


# The command


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.SimpleNamespace(deviceSynchronize=lambda: None)
    cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("rawattn._runtime.dispatch.gpu_available", lambda: False)
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: None)
    monkeypatch.setattr(machine, "Sensors", lambda: None)
    monkeypatch.setattr(
        machine, "facts", lambda sensors: {"device": "Pretended GPU", "driver": "1"}
    )
    monkeypatch.setattr(host_suite, "Setup", lambda xp, dtype: setup())


def test_the_command_measures_shows_and_writes(
    pretend_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, markdown = tmp_path / "new" / "host.json", tmp_path / "host.md"
    arguments = ["bench", "--suite", "host", "--filter", "CuPy lse", "--repeats", "1"]
    assert cli.main([*arguments, "--json", str(path), "--markdown", str(markdown)]) == 0
    shown = capsys.readouterr()
    assert "[2/2] CuPy, lse: ready" in shown.err
    row = next(line for line in shown.out.splitlines() if line.startswith("CuPy, lse"))
    assert "0.45x" in row
    data = json.loads(path.read_text())
    assert [one["name"] for one in data["host"]] == ["torch SDPA", "CuPy, lse"]
    assert data["host"][1]["seconds"] > 0
    assert "| CuPy, lse | torch SDPA |" in markdown.read_text()
    assert cli.main(["bench", "--from", str(path)]) == 0
    assert capsys.readouterr().out == shown.out


def test_calls_are_listed_and_chosen_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--suite", "host", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(CALLS)
    chosen = [call.name for call in host_suite.select("torch backward")]
    assert chosen == [
        "torch SDPA",
        "torch SDPA backward",
        "torch SDPA forward + backward",
        "torch backward",
    ]
    assert [call.name for call in host_suite.select("rawattn.torch backward")] == [
        "torch SDPA forward + backward",
        "rawattn.torch forward + backward",
    ]
    assert cli.main(["bench", "--suite", "host", "--filter", "nonsense"]) == 1
    assert "no case has the words 'nonsense'" in capsys.readouterr().err


# How each contender was called


@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_the_tables_say_how_everybody_was_called(suite: str) -> None:
    contenders = suites.contenders(suite)
    called = {one.name: one.called for one in contenders}
    assert called["rawattn"] == "eager, from CuPy"
    for name in (grids.CUDNN, grids.FA2, grids.FA4):
        assert called[name].startswith("eager, from PyTorch (")
    if suite == "forward":
        assert called[grids.JAX].startswith("jitted, from JAX (")
    assert all(called.values())
    report = make_report([])
    report.called = called
    report.rows = [measure.Row("dense", "dense", 64, 1, 1, {"rawattn": measure.Result(1.0)})]
    report.matmul_flops = 1.0
    how = f"how each was called: {'; '.join(f'{name} {text}' for name, text in called.items())}"
    assert how in render.text(report)
    assert how in render.markdown(report)


@pytest.mark.gpu
@pytest.mark.slow
def test_the_suite_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert cli.main(["bench", "--suite", "host", "--quick", "--json", str(path)]) == 0
    report = Report.load(path)
    assert [row.name for row in report.host] == list(CALLS)
    assert not [row for row in report.host if row.reason.startswith("failed")]
    assert all(row.seconds or row.reason for row in report.host)
