"""Bounds of `rawattn bench --suite scores`: held or not, in its tables, its files and its plot."""

from __future__ import annotations

import dataclasses
import types

import pytest

from rawattn import cli
from rawattn._bench import contender, grids, machine, measure, render, score_cases, suites
from rawattn._bench.report import Bound, Figure, Report, Result, Row
from tests.bench_fakes import Fake, FakeClock


def _row(name, seconds, bounds=(), over=None, **others):
    results = {who: Result(s, samples=(s,)) for who, s in others.items()}
    results["rawattn"] = Result(seconds, reason="" if seconds else "NotImplementedError: softcap")
    return Row(name, "kind", 128, 10**12, 1, results, over, True, bounds)


def _report(*rows, figures=()):
    return Report(
        *("scores", "bfloat16", "2026-01-02T03:04:05+00:00", 9),
        *({"device": "GPU", "driver": "1"}, {}, 8e14, ["rawattn"], ["FA2", "FA4"]),
        rows=list(rows),
        figures=list(figures),
    )


@pytest.mark.parametrize(
    ("bound", "others", "value", "verdict"),
    [
        (Bound("speed", 1.3, peers=("FA2",)), {"FA2": 0.003}, 1.5, "ok"),
        (Bound("speed", 1.6, peers=("FA2",)), {"FA2": 0.003}, 1.5, "below"),
        (Bound("speed", 1.3, peers=("FA2", "FA4")), {"FA2": 0.003, "FA4": 0.002}, 1.0, "below"),
        (Bound("speed", 1.3, peers=("FA2", "FA4")), {"FA2": 0.003}, 1.5, "ok"),
        (Bound("speed", 1.3, peers=("FA4",)), {"FA2": 0.003}, None, "not available"),
        (Bound("time", 0.5, True), {}, 0.4, "ok"),
        (Bound("time", 0.3, True), {}, 0.4, "above"),
        (Bound("speed", 2.5), {}, 2.5, "ok"),
    ],
)
def test_a_bound_is_held_or_not(bound, others, value, verdict):
    report = _report(_row("a", 0.002, (bound,), "base", **others), _row("base", 0.005))
    (figure,) = report.bounded()
    assert figure.value == (None if value is None else pytest.approx(value))
    assert figure.verdict == verdict
    line = next(line for line in render.text(report).splitlines() if "a: " in line)
    assert verdict in line
    assert "at most" in line if bound.at_most else "at least" in line
    assert ("rawattn, time: a / base" in render.text(report)) is bool(bound.peers)
    kept = int(verdict == "ok")
    assert f"within their bounds: {kept} of 1 figures" in render.text(report)


def test_a_bound_over_a_case_that_did_not_run():
    report = _report(_row("a", 0.002, (Bound("time", 0.5, True),), "base"))
    (figure,) = report.bounded()
    assert (figure.verdict, figure.of) == ("not available", "without base")


def test_a_missing_option_is_not_available_with_its_reason():
    report = _report(_row("a", None, (Bound("speed", 1.3, peers=("FA2",)),), FA2=0.001))
    (figure,) = report.bounded()
    assert (figure.verdict, figure.of) == ("not available", "NotImplementedError: softcap")
    assert "0 of 1 figures, 1 not available" in render.text(report)
    assert "rawattn n/a (a): NotImplementedError: softcap" in render.text(report)
    assert "| a: speed | n/a | at least 1.3 x | not available |" in render.markdown(report)


def test_bounds_and_figures_survive_json(tmp_path):
    bound = Bound("speed", 1.3, peers=("FA2", "FA4"))
    figures = [
        Figure("with", 1.0, "s", 1.5, True, "of"),
        Figure("without", None, "ms", of="no GPU"),
    ]
    report = _report(_row("a", 0.002, (bound,), FA2=0.003), figures=figures)
    report.save(tmp_path / "a.json")
    loaded = Report.load(tmp_path / "a.json")
    assert loaded.rows[0].bounds == (bound,)
    assert loaded.figures == figures
    assert render.text(loaded) == render.text(report)
    assert "without n/a: no GPU" in render.text(report)
    assert "| without | n/a |" in render.markdown(report)


def test_a_library_has_one_colour_in_every_plot():
    names = ["rawattn", "portable", "deterministic", *grids.PEERS]
    assert len({render.colour(name) for name in names}) == len(names)
    assert render.colour("some other") not in map(render.colour, names)


def test_the_plot_takes_the_colour_of_the_library(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    seen = []
    bar = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda *args, **more: seen.append(more["color"]) or bar(*args, **more)
    )
    for order in (["FA2", "FA4"], ["FA4", "FA2"]):
        seen.clear()
        report = _report(_row("a", 0.002, FA2=0.003, FA4=0.004))
        report.peers = order
        render.plot(report, tmp_path / "a.png")
        assert seen == [[render.colour(name) for name in ("rawattn", *order)]]


def test_the_plot_has_panels_of_the_suite_without_bases_and_sweeps(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    titles, ticks = [], []
    monkeypatch.setattr(Axes, "set_title", lambda axis, title, **more: titles.append(title))
    monkeypatch.setattr(Axes, "set_xticks", lambda axis, at, names, **more: ticks.extend(names))
    rows = [
        dataclasses.replace(
            _row(case.name, 0.002, over=case.over), kind=case.kind, panel=case.panel
        )
        for case in score_cases.cases()
    ]
    render.plot(_report(*rows), tmp_path / "a.png")
    panels = ("bias", "masks", "score functions")
    assert titles == [f"{panel}, {verb}" for verb in ("forward", "backward") for panel in panels]
    assert ticks[0] == "bias D64\nB1 H2/1\nS4096 heads1\ncausal"
    assert not any("ref" in tick or "sweep" in tick for tick in ticks)


def test_the_command_lists_measures_and_shows_the_suite(monkeypatch, capsys, tmp_path):
    assert cli.main(["bench", "--suite", "scores", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[-4:] == ["accuracy", "compile", "masks", "before"]
    assert len(listed) == len(score_cases.cases()) + 4

    missing = Fake("rawattn", error=NotImplementedError("softcap: no kernel has it"))
    sides = [missing, Fake("FlexAttention", 0.002), Fake("FA4", 0.001)]
    sensors = types.SimpleNamespace(read=lambda: None)
    facts = {"device": "Pretended GPU", "driver": "1.2", "l2_bytes": 1}
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: None)
    monkeypatch.setattr(suites, "contenders", lambda suite: sides)
    monkeypatch.setattr(measure, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "Sensors", lambda: sensors)
    monkeypatch.setattr(machine, "facts", lambda sensors: facts)
    monkeypatch.setattr(machine, "matmul_flops", lambda dtype, clock: 1e15)
    monkeypatch.setattr(measure, "make_inputs", lambda *args: [contender.Inputs(())])
    words = ["--filter", "softcap forward", "--repeats", "1"]
    path = tmp_path / "a.json"
    assert cli.main(["bench", "--suite", "scores", *words, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("not available  NotImplementedError: softcap: no kernel has it") == 2

    missing.error = None
    assert cli.main(["bench", "--suite", "scores", *words, "--json", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "at least" in line]
    assert len(lines) == 2
    assert all("below" in line for line in lines)
    assert Report.load(path).bounded()[0].value == pytest.approx(1.0)
    assert Report.load(path).bounded()[1].value == pytest.approx(2.0)
