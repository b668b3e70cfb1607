"""`rawattn bench` without a GPU: counters, timing, isolated peers, reports; and a run with one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import cli
from rawattn._bench import cases, contenders, counters, figures, machine, measure, render, timing
from rawattn._bench.report import Figure, Report, Result, Row

_bound = st.none() | st.integers(0, 12)


# Counters


@given(
    len_q=st.integers(0, 12),
    len_k=st.integers(0, 12),
    causal=st.booleans(),
    window=st.none() | st.tuples(_bound, _bound),
    sink=st.integers(0, 5),
    align=st.sampled_from(["bottom-right", "top-left"]),
)
def test_visible_against_the_rule_spelled_out(len_q, len_k, causal, window, sink, align):
    left, right = window or (None, None)
    right = 0 if causal else right
    off = len_k - len_q if align == "bottom-right" else 0
    mask = np.zeros((len_q, len_k), bool)
    for i, j in itertools.product(range(len_q), range(len_k)):
        below = right is None or j <= i + off + right
        near = left is None or j >= i + off - left or j < sink
        mask[i, j] = below and near
    expected = counters.Visible(mask.sum(), mask.any(1).sum(), mask.any(0).sum())
    got = counters.visible(len_q, len_k, causal=causal, window=window, sink=sink, align=align)
    assert got == expected


def test_flops_and_bytes_of_a_case():
    case = cases.Case("dense", "", (4, 4), nheads_q=6, nheads_kv=2, headdim=8, causal=True)
    assert case.flops == 2 * (4 * 5 // 2) * 6 * 4 * 8  # 10 pairs a sequence, 4 D operations each
    q_and_out, k_and_v = 2 * 8 * 6 * 8, 2 * 8 * 2 * 8
    assert case.nbytes(2) == 2 * (q_and_out + k_and_v)


def test_a_window_that_drops_rows_and_keys_reads_less():
    seen = counters.visible(10, 4, window=(0, 0), align="top-left")
    assert seen == counters.Visible(pairs=4, rows=4, keys=4)
    assert counters.forward_bytes(seen, 10, 1, 1, 8, 8, 2) == 2 * 8 * (4 + 4 + 4 + 10)


# Cases


def test_forward_cases_are_the_promised_shapes():
    suite = cases.forward()
    names = [case.name for case in suite]
    assert len(set(names)) == len(names)
    assert all(case.over is None or case.over in names for case in suite)
    assert all(len(set(case.seqlens)) == 1 or case.packed for case in suite)
    dense = [case for case in suite if case.kind == "dense"]
    assert len(dense) == 24
    assert {(case.tokens, case.nheads_q * case.headdim) for case in dense} == {(16384, 2048)}
    for case in suite:
        if case.kind == "ragged":
            assert min(case.seqlens) >= 64
            assert max(case.seqlens) <= 4096
            assert abs(case.tokens - 16 * 2048) < 500
    assert {case.name for case in cases.forward(quick=True)} < set(names)


def test_select_takes_whole_words_and_brings_what_a_case_is_divided_by():
    suite = cases.forward()
    names = [case.name for case in cases.select(suite, "dense D64 causal")]
    assert names == [f"dense D64 S{s} causal" for s in (1024, 2048, 4096, 16384)]
    names = [case.name for case in cases.select(suite, "straggler")]
    assert names == ["straggler D128 1x16384+512x32 causal", "straggler-ref D128 1x16384 causal"]
    assert cases.select(suite, "") == suite
    assert cases.select(suite, "D6") == []


# Timing


class FakeClock:
    """A call returns its seconds; remembers who ran and how often."""

    def __init__(self):
        self.log = []

    def burst(self, call, calls, during=None):
        seconds = [call() for _ in range(calls)]
        if during is not None:
            during()
        self.log.append((round(seconds[0], 6), calls))
        return sum(seconds) / calls

    def first(self, call):
        return 1.5, call()


def test_race_sizes_bursts_and_alternates():
    clock = FakeClock()
    entrants = {
        "slow": timing.Entrant(lambda: 0.004, clock, burst_seconds=0.01),
        "fast": timing.Entrant(lambda: 0.001, clock, burst_seconds=0.01),
    }
    results = timing.race(entrants, repeats=3)
    slow, fast = (0.004, 2), (0.001, 10)
    warm_up, measured = clock.log[:4], clock.log[4:]
    assert warm_up == [(0.004, 3), slow, (0.001, 3), fast]
    assert measured == [slow, fast, fast, slow, slow, fast]
    assert results["slow"].seconds == pytest.approx(0.004)
    assert results["fast"].spread == 0.0


def test_race_reports_median_and_interquartile_range():
    outcome = timing.Timing((4.0, 1.0, 2.0, 3.0, 100.0))
    assert outcome.seconds == 3.0
    assert outcome.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.Timing((2.0,)).spread == 0.0


def test_a_call_too_short_to_see_is_still_bounded():
    clock = FakeClock()
    timing.race({"": timing.Entrant(lambda: 0.0, clock)}, repeats=1)
    assert clock.log[-1][1] == 200


def test_who_raises_midway_is_out_and_the_others_finish():
    clock = FakeClock()
    lives = iter([0.01] * 6)
    seen = []
    entrants = {
        "mortal": timing.Entrant(lambda: next(lives), clock),
        "steady": timing.Entrant(lambda: 0.01, clock, during=lambda: seen.append(1)),
    }
    results = timing.race(entrants, repeats=5)
    assert isinstance(results["mortal"], Exception)
    assert len(results["steady"].samples) == 5
    assert seen == [1]  # sensors are read in the last burst alone


def test_host_clock_waits_for_the_last_result(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def call():
        nonlocal now
        now += 0.001  # enqueueing
        return 7

    def wait(result):
        nonlocal now
        assert result == 7
        now += 0.1

    assert timing.HostClock(wait).burst(call, 10) == pytest.approx((10 * 0.001 + 0.1) / 10)
    assert timing.HostClock(wait).first(call) == (pytest.approx(0.101), 7)


def test_event_clock_flushes_before_it_starts_and_waits_for_its_end(monkeypatch):
    log = []

    class Event:
        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

    array = types.SimpleNamespace(
        nbytes=64, data=types.SimpleNamespace(memset_async=lambda *args: log.append("flush"))
    )
    cuda = types.SimpleNamespace(
        Event=Event,
        get_elapsed_time=lambda start, stop: 30.0,
        runtime=types.SimpleNamespace(deviceSynchronize=lambda: log.append("synchronize")),
    )
    fake = types.SimpleNamespace(empty=lambda *args: array, uint8=np.uint8, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    clock = timing.EventClock()
    seconds = clock.burst(lambda: log.append("call"), 2, lambda: log.append("during"))
    assert seconds == pytest.approx(0.015)
    assert log == ["flush", "record", "call", "call", "record", "during", "wait"]
    log.clear()
    assert clock.first(lambda: log.append("call"))[0] >= 0
    assert log == ["call", "synchronize"]


def test_rotate_takes_turns():
    call = timing.rotate([lambda: 1, lambda: 2])
    assert [call(), call(), call()] == [1, 2, 1]


def test_host_time_leaves_the_first_series_out():
    calls = []
    seconds = figures.host_time(lambda: calls.append(1), lambda: None)
    assert 0 < seconds < 1e-3
    assert len(calls) == 21 * 100


def test_a_child_that_fails_leaves_the_last_line_of_its_error(monkeypatch):
    monkeypatch.setattr(figures, "_FIRST_CALLS", "raise OSError('no such luck')")
    with pytest.raises(RuntimeError, match=r"new process failed: OSError: no such luck$"):
        figures.compile_times("float16", ())


# A run, with contenders that only pretend


class Fake(contenders.Contender):
    def __init__(self, name, seconds=0.001, out=1.0, error=None):
        super().__init__(name)
        self.seconds, self.out, self.error, self.prepared = seconds, out, error, 0

    @contextlib.contextmanager
    def scope(self):
        self.inside = True
        yield
        self.inside = False

    def prepare(self, case, inputs):
        self.prepared += 1
        if self.error is not None:
            raise self.error

        def call():
            assert self.inside
            return self.seconds

        return call

    def read(self, result):
        return np.full(4, self.out, np.float32)


def _run_case(*peers, absent=None):
    case = cases.forward()[0]
    reading = machine.Reading(1980.0, 650.0, 60.0)
    return measure.measure_case(
        case,
        peers,
        [contenders.Inputs(())] * 2,
        FakeClock(),
        lambda: reading,
        {} if absent is None else absent,
        repeats=3,
    )


def test_a_case_measures_everybody():
    results = _run_case(Fake("rawattn", 0.001), Fake("FA2", 0.002))
    assert results["rawattn"].seconds == pytest.approx(0.001)
    assert results["FA2"].seconds == pytest.approx(0.002)
    assert results["rawattn"].first_seconds == 1.5
    assert (results["FA2"].sm_mhz, results["FA2"].watts, results["FA2"].celsius) == (1980, 650, 60)
    assert len(results["FA2"].samples) == 3
    assert not results["FA2"].warning


def test_a_peer_that_fails_leaves_its_reason_and_an_absent_one_is_not_tried_again():
    absent = {}
    broken, missing = (
        Fake("FA2", error=RuntimeError("no kernel\nfor this")),
        Fake("FA4", error=ImportError("no flash_attn")),
    )
    for _ in range(2):
        results = _run_case(Fake("rawattn"), broken, missing, absent=absent)
        assert results["FA2"].reason == "RuntimeError: no kernel"
        assert results["FA4"].reason == "ImportError: no flash_attn"
        assert results["rawattn"].seconds
    assert (broken.prepared, missing.prepared) == (2, 1)


@pytest.mark.parametrize("out", [1.1, np.nan])
def test_a_peer_that_computes_something_else_is_marked(out):
    results = _run_case(Fake("rawattn"), Fake("cuDNN", out=out), Fake("FA2", out=1.001))
    assert "differs from rawattn" in results["cuDNN"].warning
    assert not results["FA2"].warning
    assert results["cuDNN"].seconds


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The whole command, with fakes where a GPU would be asked."""
    fakes = [Fake("rawattn", 0.001), Fake("FA2", 0.002), Fake("FA4", error=ImportError("absent"))]
    sensors = types.SimpleNamespace(read=lambda: None)
    facts = {"device": "Pretended GPU", "driver": "1.2", "l2_bytes": 1}
    monkeypatch.setattr("rawattn._cli.bench._require_gpu", lambda: None)
    monkeypatch.setattr(contenders, "contenders", lambda: fakes)
    monkeypatch.setattr(contenders, "families", lambda: {"rawattn": contextlib.nullcontext})
    monkeypatch.setattr(measure, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "Sensors", lambda: sensors)
    monkeypatch.setattr(machine, "facts", lambda sensors: facts)
    monkeypatch.setattr(machine, "matmul_flops", lambda dtype, clock: 1e15)
    monkeypatch.setattr(measure, "make_inputs", lambda *args: [contenders.Inputs(())])
    return fakes


def test_the_command_measures_shows_and_writes(pretend_gpu, capsys, tmp_path):
    path = tmp_path / "new" / "forward.json"
    words = "dense D128 S4096"
    assert cli.main(["bench", "--filter", words, "--repeats", "2", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    case = next(case for case in cases.forward() if case.name == f"{words} causal")
    rate = f"{case.flops / 0.001 / 1e12:.0f}"
    line = next(line for line in shown.out.splitlines() if line.startswith(case.name))
    assert line.split()[4:6] == [rate, "0.0%"]
    assert "(2.00x)" in line
    assert "FA4 n/a (2 cases): ImportError: absent" in shown.out
    assert "geometric mean, rawattn over FA2: 2.000x (2 cases)" in shown.out
    assert "[2/2] dense D128 S4096" in shown.err

    data = json.loads(path.read_text())
    assert data["rows"][0]["results"]["FA2"]["samples"] == pytest.approx([0.002, 0.002])
    markdown = tmp_path / "forward.md"
    assert cli.main(["bench", "--from", str(path), "--markdown", str(markdown)]) == 0
    assert capsys.readouterr().out == shown.out
    assert f"| {case.name} | {rate} |" in markdown.read_text()


def test_a_spent_budget_drops_peers_and_says_so(pretend_gpu, capsys):
    arguments = ["bench", "--filter", "dense D64", "--budget", "-1", "--repeats", "1"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "FA2 n/a (8 cases): not run: the budget of -1 s was spent" in out
    assert not pretend_gpu[1].prepared
    assert pretend_gpu[0].prepared == 8


def test_peers_can_be_chosen(pretend_gpu, capsys):
    arguments = ["bench", "--filter", "window", "--repeats", "1", "--peers"]
    assert cli.main([*arguments, "none"]) == 0
    assert pretend_gpu[2].prepared == 0
    assert cli.main([*arguments, "FA2, FA4"]) == 0
    assert pretend_gpu[2].prepared == 1
    with pytest.raises(SystemExit):
        cli.main([*arguments, "FA9"])
    assert "got FA9; accepted are cuDNN" in capsys.readouterr().err


def test_a_figure_alone_and_one_that_fails(pretend_gpu, capsys, monkeypatch):
    fake = {
        "host": lambda dtype, peers: [Figure(f"{dtype} host", 12.34, "us")],
        "compile": lambda dtype, peers: 1 / 0,
    }
    suite = dataclasses.replace(_suite(), figures=fake)
    monkeypatch.setitem(_suites(), "forward", suite)
    assert cli.main(["bench", "--filter", "host"]) == 0
    assert "bfloat16 host  12.3 us" in capsys.readouterr().out
    assert cli.main(["bench", "--filter", "compile"]) == 0
    assert "compile n/a: ZeroDivisionError" in capsys.readouterr().out


def _suites():
    from rawattn._bench import suites

    return suites.SUITES


def _suite():
    return _suites()["forward"]


# Reports


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


def test_legend_tells_reasons_and_compile_seconds():
    text = render.text(_report())
    assert "FA4 n/a (4 cases): ImportError: no module" in text
    assert "slowest first call, with what it compiles: rawattn 2.5 s" in text
    assert "compile n/a: reason" in text


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    render.plot(_report(), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    _report().save(tmp_path / "a.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["bench", "--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert "rawattn[bench]" in shown.err
    assert "dense D128 S4096 causal" in shown.out


# The command line


def test_without_a_gpu_the_command_says_so(capsys):
    if machine_has_gpu():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "--quick"]) == 1
    assert "bench measures GPU kernels" in capsys.readouterr().err


def test_listing_and_unknown_words(capsys):
    assert cli.main(["bench", "--list", "--quick"]) == 0
    names = capsys.readouterr().out.split("\n")
    assert "dense D64 S4096 causal" in names
    assert "host" in names
    assert "compile" not in names
    assert cli.main(["bench", "--filter", "nonsense"]) == 1
    assert "no case has the words 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repeats", "0"])


def test_nothing_heavy_is_imported_to_list():
    code = (
        "import sys; from rawattn import cli; cli.main(['bench', '--list']); "
        "sys.exit(bool({'cupy', 'torch', 'jax', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    child = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, capture_output=True)
    assert child.returncode == 0, child.stderr.decode()


def machine_has_gpu():
    from tests import gpu_report

    return not gpu_report.why_no_gpu()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_quick_run_on_a_gpu(capsys, tmp_path):
    path = tmp_path / "a.json"
    arguments = ["bench", "--filter", "D64 S4096", "--peers", "none", "--repeats", "3"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    report = Report.load(path)
    assert [row.name for row in report.rows] == ["dense D64 S4096 causal", "dense D64 S4096 full"]
    for row in report.rows:
        rate = row.rate("rawattn")
        assert rate is not None, row.results["rawattn"].reason
        # Faster than its own matrix products would be a timer that does not wait.
        assert 0.01 < rate / report.matmul_flops < 1
        assert row.results["rawattn"].watts


@pytest.mark.gpu
@pytest.mark.slow
def test_compile_and_load_times_on_a_gpu():
    cold, another, loaded, _, rebuilt = (f.value for f in figures.compile_times("float16", ()))
    assert cold > another > loaded / 1e3 > 0
    assert rebuilt == 0
