"""`rawattn bench`: reports, tables and plots."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from rawattn import cli
from rawattn._bench import figure_plot, render
from rawattn._bench.report import Figure, Report, Result, Row


def _report():
    def row(name, kind, seconds, over=None, by_time=False):
        results = {"rawattn": Result(seconds, 0.01, (seconds,), 2.5, 1900.0, 690.0, 61.0)}
        results["FA2"] = Result(2 * seconds, 0.01, (2 * seconds,))
        results["FA4"] = Result(reason="ImportError: no module")
        return Row(name, kind, 128, 10**12, 10**9, results, over, by_time)

    return Report(
        suite="forward",
        dtype="bfloat16",
        date="2026-01-02T03:04:05+00:00",
        repeats=9,
        machine={"device": "GPU", "driver": "1"},
        versions={"rawattn": "0.1"},
        matmul_flops=8e14,
        ours=["rawattn"],
        peers=["FA2", "FA4"],
        rows=[
            row("dense D128 S4096 causal", "dense", 0.002),
            row("ragged D128 H16/16 causal", "ragged", 0.004, over="dense D128 S4096 causal"),
            row("straggler D128 a causal", "straggler", 0.005, "straggler-ref", by_time=True),
            row("straggler-ref", "straggler-ref", 0.004),
        ],
        figures=[Figure("host", 18.0, "us")],
        notes=["compile n/a: reason"],
    )


def test_report_survives_json(tmp_path):
    report = _report()
    report.save(tmp_path / "a.json")
    loaded = Report.load(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert render.text(loaded) == render.text(report)


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"rows": [1], "figures": []}'])
def test_a_file_that_is_no_report_is_named(tmp_path, capsys, content):
    (tmp_path / "x.json").write_text(content)
    assert cli.main(["bench", "--from", str(tmp_path / "x.json")]) == 1
    assert "x.json: not a report of `rawattn bench`" in capsys.readouterr().err
    assert cli.main(["bench", "--from", str(tmp_path / "absent.json")]) == 1


def test_what_a_file_lacks_is_told(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    for name, why in (("x.json", "(it has no 'rows')"), ("x.png", "can't decode byte 0x89")):
        assert cli.main(["bench", "--from", str(tmp_path / name)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("rawattn bench: --from ") and why in said
        assert said.endswith("; expected a file that --json has written\n")


def test_the_best_peer_of_each_case():
    report = _report()
    assert report.over_best() == {row.name: 2.0 for row in report.rows}
    report.rows[0].results["FA4"] = Result(0.001)
    assert report.over_best()[report.rows[0].name] == 0.5
    assert (
        "geometric mean, rawattn over each case's best peer: 1.414x (4 cases; least 0.50x, dense"
        in (render.text(report))
    )


def test_what_a_variant_costs():
    report = _report()
    report.ours.append("deterministic")
    report.rows[0].results["deterministic"] = Result(0.0025)
    (cost,) = report.cost("deterministic")
    assert (cost.name, cost.value) == (
        "deterministic / rawattn, time: dense D128 S4096 causal",
        pytest.approx(1.25),
    )
    cells = next(line for line in render.text(report).splitlines() if line.startswith("ragged"))
    assert cells.split()[4:8] == ["250", "1.0%", "31%", "125"]  # nothing under deterministic


def test_ratios_to_other_cases():
    ragged, straggler = _report().divided()
    assert (ragged.value, straggler.value) == (pytest.approx(0.5), pytest.approx(1.25))
    assert ragged.name == ("rawattn, FLOP/s: ragged D128 H16/16 causal / dense D128 S4096 causal")
    assert straggler.name.startswith("rawattn, time: straggler")


def test_markdown_table_is_rectangular():
    lines = [line for line in render.markdown(_report()).splitlines() if line.startswith("|")]
    table, figure_table = lines[:6], lines[6:]
    assert {line.count("|") for line in table} == {10}
    assert {line.count("|") for line in figure_table} == {3}
    assert "| dense D128 S4096 causal | 500 | 1.0% | 62% | 250 (2.00x) | n/a | 1900 |" in table[2]


def test_a_report_with_float16_rows_still_shows_them(tmp_path):
    report = _report()
    base = report.rows[0]
    name = "float16 D128 S4096 causal"
    report.rows.append(dataclasses.replace(base, name=name, kind="float16", over=base.name))
    report.save(tmp_path / "a.json")
    text = render.text(Report.load(tmp_path / "a.json"))
    assert f"rawattn, FLOP/s: {name} / {base.name}  " in text


def test_legend_tells_reasons_and_compile_seconds():
    text = render.text(_report())
    assert "FA4 n/a (4 cases): ImportError: no module" in text
    assert "slowest first call, with what it compiles: rawattn 2.5 s" in text
    assert "compile n/a: reason" in text


def test_bounds_are_short_and_never_seem_kept_where_they_are_not():
    report = _report()
    report.rows = []
    report.figures = [
        Figure("a", 0.9, "x", 1 / 1.08, at_most=True),
        Figure("b", 1.0041, "x", 1.0, at_most=True),
        Figure("c", 1.0, "x", 1.0, at_most=True),
        Figure("d", None, "us", 3.44964, at_most=True, of="no memory"),
    ]
    lines = [line for line in render.markdown(report).splitlines() if "at most" in line]
    assert lines == [
        "| a | 0.9 x | at most 0.926 x | ok |  |",
        "| b | 1.0041 x | at most 1 x | above |  |",
        "| c | 1 x | at most 1 x | ok |  |",
        "| d | n/a | at most 3.45 us | not available | no memory |",
    ]


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    render.plot(_report(), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_of_figures_alone_has_a_bar_and_a_bound_for_each(tmp_path):
    pytest.importorskip("matplotlib")
    report = _report()
    report.rows = []
    report.figures = [
        Figure("64 x 8192: share of the read bandwidth", 0.96, "", 0.95),
        Figure("1 x 131072: share of the read bandwidth", 0.92, "", 0.95),
        Figure("1 x 2048: over the fastest peer", 1.03, "x", 1.0, at_most=True),
        Figure("1 x 8192: over the fastest peer", None, "x", 1.0, at_most=True, of="no memory"),
        Figure("median", 0.9, "x", 1.0, at_most=True),
        Figure("read bandwidth", 4.6, "TB/s"),
    ]
    report.figures.append(Figure("just above", 1.0041, "x", 1.0, at_most=True))
    shares, others = figure_plot.draw(report, "#1b3a6b").axes
    assert [text.get_text() for text in others.texts] == ["1.03", "0.9", "1.0041"]
    assert shares.get_title("left") == "share of the read bandwidth (higher is better)"
    assert [label.get_text() for label in shares.get_yticklabels()] == ["64 x 8192", "1 x 131072"]
    kept, missed = shares.patches
    assert (kept.get_width(), missed.get_width()) == (0.96, 0.92)
    assert kept.get_facecolor() != missed.get_facecolor()
    (marks,) = shares.collections
    assert [segment[0, 0] for segment in marks.get_segments()] == [0.95, 0.95]
    assert others.get_title("left") == "others (x, lower is better)"
    assert [bar.get_width() for bar in others.patches] == [1.03, 0.9, 1.0041]
    render.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    report.figures = []  # all failed
    render.plot(report, tmp_path / "nothing.png")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    _report().save(tmp_path / "a.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["bench", "--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert "rawattn[bench]" in shown.err
    assert "dense D128 S4096 causal" in shown.out
