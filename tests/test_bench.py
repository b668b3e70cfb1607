"""The whole command `rawattn bench`, with fakes for everything that needs a GPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rawattn import cli
from rawattn._bench import contender, grids, machine, measure, suites
from rawattn._bench.report import Figure, Report
from rawattn._runtime import devices
from tests.bench_fakes import Fake, FakeClock


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Replace the contenders, clocks and sensors of the command by fakes."""
    fakes = {
        "forward": [
            Fake("rawattn", 0.001),
            Fake("FA2", 0.002),
            Fake("FA4", error=ImportError("absent")),
        ],
        "backward": [
            Fake("rawattn", 0.001),
            Fake("deterministic", 0.00125),
            Fake("cuDNN", value=0.5),
            Fake("FA2", 0.002),
        ],
    }
    sensors = types.SimpleNamespace(read=lambda: None)
    facts = {"device": "Pretended GPU", "driver": "1.2", "l2_bytes": 1}
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: None)
    monkeypatch.setattr(suites, "contenders", fakes.__getitem__)
    monkeypatch.setattr(measure, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "Sensors", lambda: sensors)
    monkeypatch.setattr(machine, "facts", lambda sensors: facts)
    monkeypatch.setattr(machine, "matmul_flops", lambda dtype, clock: 1e15)
    monkeypatch.setattr(measure, "make_inputs", lambda *args: [contender.Inputs(())])
    return fakes["forward"]


def test_the_command_measures_shows_and_writes(pretend_gpu, capsys, tmp_path):
    path = tmp_path / "new" / "forward.json"
    words = "dense D128 S4096"
    assert cli.main(["bench", "--filter", words, "--repeats", "2", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    case = next(case for case in grids.forward() if case.name == f"{words} causal")
    rate = f"{case.flops / 0.001 / 1e12:.0f}"
    line = next(line for line in shown.out.splitlines() if line.startswith(case.name))
    assert line.split()[4:6] == [rate, "0.0%"]
    assert "(2.00x)" in line
    assert "FA4 n/a (2 cases): ImportError: absent" in shown.out
    assert "geometric mean, rawattn over FA2: 2.000x (2 cases; least 2.00x, dense" in shown.out
    assert "[2/2] dense D128 S4096" in shown.err

    data = json.loads(path.read_text())
    assert data["rows"][0]["results"]["FA2"]["samples"] == pytest.approx([0.002, 0.002])
    markdown = tmp_path / "forward.md"
    assert cli.main(["bench", "--from", str(path), "--markdown", str(markdown)]) == 0
    assert capsys.readouterr().out == shown.out
    assert f"| {case.name} | {rate} |" in markdown.read_text()


def test_bursts_as_long_as_asked_for(pretend_gpu, capsys, tmp_path, monkeypatch):
    clock, path = FakeClock(), tmp_path / "forward.json"
    monkeypatch.setattr(measure, "EventClock", lambda: clock)
    arguments = ["bench", "--filter", "window", "--repeats", "1", "--peers", "FA4"]
    assert cli.main([*arguments, "--burst", "0.3", "--json", str(path)]) == 0
    assert clock.log[-1] == (0.001, 300)
    assert "median of 1 bursts of 0.3 s" in capsys.readouterr().out
    assert Report.load(path).burst_seconds == 0.3


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
        "host": lambda dtype, names: [Figure(f"{dtype} host", 12.34, "us")],
        "compile": lambda dtype, names: 1 / 0,
    }
    suite = dataclasses.replace(suites.SUITES["forward"], figures=fake)
    monkeypatch.setitem(suites.SUITES, "forward", suite)
    assert cli.main(["bench", "--filter", "host"]) == 0
    assert "bfloat16 host  12.3 us" in capsys.readouterr().out
    assert cli.main(["bench", "--filter", "compile"]) == 0
    assert "compile n/a: ZeroDivisionError" in capsys.readouterr().out


def test_what_is_measured_alone_comes_first_and_is_shown_last(pretend_gpu, capsys, monkeypatch):
    order = []
    fake = {
        name: lambda dtype, names, name=name: order.append(name) or [Figure(name, 1.0, "us")]
        for name in ("before", "memory")
    }
    alone = frozenset({"before"})
    suite = dataclasses.replace(suites.SUITES["backward"], figures=fake, alone=alone)
    monkeypatch.setitem(suites.SUITES, "backward", suite)
    run = measure.run
    monkeypatch.setattr(measure, "run", lambda *given: order.append("cases") or run(*given))
    assert cli.main(["bench", "--suite", "backward", "--repeats", "1", "--quick"]) == 0
    assert order == ["before", "cases", "memory"]
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert shown.index("memory") < shown.index("before")


def test_a_suite_of_figures_alone_says_how_they_were_measured(pretend_gpu, capsys, monkeypatch):
    monkeypatch.setattr(suites, "contenders", lambda name: pretend_gpu)

    def shown(name):
        figures = {"figures": lambda dtype, names, *step: [Figure("1 x 2048", 12.5, "us")]}
        suite = dataclasses.replace(suites.SUITES[name], figures=figures)
        monkeypatch.setitem(suites.SUITES, name, suite)
        assert cli.main(["bench", "--suite", name, "--filter", "figures"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "1 x 2048 12.5 us" in out
        return suite.note in out

    assert shown("decode")
    assert not shown("backward"), "its note is of cases"


def test_a_suite_of_figures_alone_shows_its_progress(pretend_gpu, capsys, monkeypatch):
    monkeypatch.setattr(suites, "contenders", lambda name: pretend_gpu)

    def figures(dtype, names, step):
        assert names == ["FA2"]
        for name in ("a", "b"):
            step(name)
        raise MemoryError("full")

    suite = dataclasses.replace(suites.SUITES["decode"], figures={"figures": figures})
    suite = dataclasses.replace(suite, listed=("a", "b"))
    monkeypatch.setitem(suites.SUITES, "decode", suite)
    assert cli.main(["bench", "--suite", "decode", "--peers", "FA2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "[1/2] a\n[2/2] b\n"
    assert "figures n/a: MemoryError: full" in shown.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--suite decode --repeats 9",
            "--repeats: the suite decode does not take it; leave it out",
        ),
        ("--suite prefill --repeats 9", "--repeats: the suite prefill does not take it"),
        ("--suite models --burst 0.01", "--burst: the suite models does not take it"),
        ("--suite host --peers none", "--peers: the suite host does not take it"),
        ("--suite decode --dtype float32", "got float32, but the suite decode counts elements of"),
        ("--suite forward --peers FlashInfer", "--peers: got FlashInfer, but beside the suite"),
        (
            "--suite prefill --peers efficient",
            "cuDNN, FA2, FA4, FA4 paged, FlashInfer are measured",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(capsys, arguments, says):
    for more in ((), ("--list",)):
        assert cli.main(["bench", *arguments.split(), *more]) == 1
        assert says in capsys.readouterr().err


def test_options_that_change_nothing_are_told(pretend_gpu, capsys, monkeypatch):
    monkeypatch.setattr(suites, "contenders", lambda name: pretend_gpu)
    figures = {"figures": lambda dtype, names, step: []}
    suite = dataclasses.replace(suites.SUITES["decode"], figures=figures)
    monkeypatch.setitem(suites.SUITES, "decode", suite)
    given = ["--quick", "--budget", "9", "--peers", "FA2,efficient"]
    assert cli.main(["bench", "--suite", "decode", *given]) == 0
    shown = capsys.readouterr().out
    assert "--quick changes nothing: the suite is measured as a whole" in shown
    assert "--budget changes nothing" in shown
    assert "--peers: efficient: not measured beside this suite" in shown
    assert cli.main(["bench", "--suite", "decode"]) == 0
    assert "--" not in capsys.readouterr().out.partition("CUDA graphs")[2]


def test_no_name_of_a_peer(capsys):
    for given in ("", "FA2,"):
        with pytest.raises(SystemExit):
            cli.main(["bench", "--peers", given])
        assert f"got {given!r}; accepted are cuDNN" in capsys.readouterr().err


def test_the_help_tells_where_every_peer_comes_from(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, module in grids.MODULES.items():
        assert f"{name} (from {module})" in shown
    names = {n for s in suites.SUITES.values() if not s.listed for n in s.figures}
    assert all(name in shown.split("a figure alone")[1].split(";")[0] for name in names)


def test_the_backward_suite_measures_shows_and_writes(pretend_gpu, capsys, tmp_path, monkeypatch):
    figures = {"memory": lambda dtype, names: [Figure("memory beyond", 130.0, "MiB")]}
    suite = dataclasses.replace(suites.SUITES["backward"], figures=figures)
    monkeypatch.setitem(suites.SUITES, "backward", suite)
    path = tmp_path / "backward.json"
    arguments = ["bench", "--suite", "backward", "--repeats", "1"]
    assert cli.main([*arguments, "--filter", "H16/16 causal", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    ragged = next(line for line in out.splitlines() if line.startswith("ragged D128 H16/16 causal"))
    rate = grids.backward()[12].flops / 0.001 / 1e12
    # rawattn with its spread and share, deterministic with the same, and FA2. cuDNN does not take packed cases.
    assert ragged.split()[4:] == [
        *(f"{rate:.0f}", "0.0%", f"{rate / 10:.0f}%"),
        *(f"{rate / 1.25:.0f}", "0.0%", f"{rate / 12.5:.0f}%"),
        *(f"{rate / 2:.0f}", "(2.00x)"),
    ]
    base = next(line for line in out.splitlines() if line.startswith("ragged-ref"))
    assert base.split()[-3] == "n/a"  # cuDNN, refused
    assert "cuDNN n/a (ragged-ref D128 H16/16 B16 S2048 causal): not timed: differs from" in out
    assert "rawattn, FLOP/s: ragged D128 H16/16 causal / ragged-ref D128 H16/16 B16 S2048" in out
    assert "deterministic / rawattn, time: ragged D128 H16/16 causal" in out
    assert "1.25 x" in out
    assert "the backward alone" in out
    assert "JAX" not in out

    report = Report.load(path)
    assert (report.suite, report.ours) == ("backward", ["rawattn", "deterministic"])
    assert report.rows[0].flops == grids.backward()[12].flops
    assert cli.main([*arguments, "--filter", "memory"]) == 0
    assert "memory beyond  130 MiB" in capsys.readouterr().out


def test_a_backward_with_a_spent_budget_is_ours_alone(pretend_gpu, capsys, monkeypatch):
    asked = []
    figures = {"host": lambda dtype, names: asked.append(list(names)) or []}
    suite = dataclasses.replace(suites.SUITES["backward"], figures=figures)
    monkeypatch.setitem(suites.SUITES, "backward", suite)
    arguments = ["bench", "--suite", "backward", "--budget", "-1", "--repeats", "1"]
    assert cli.main([*arguments, "--filter", "D64 S4096"]) == 0
    out = capsys.readouterr().out
    assert "FA2 n/a (2 cases): not run: the budget of -1 s was spent" in out
    assert "deterministic / rawattn, time: dense D64 S4096 full" in out
    assert cli.main([*arguments, "--filter", "host"]) == 0
    assert asked == [[]]
    assert "host: without peers, as the budget was spent" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(capsys):
    if machine_has_gpu():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "--quick"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "rawattn bench: bench measures GPU kernels, and there is no usable GPU: "
    )
    assert str(devices.why_no_gpu()) in said


def test_listing_and_unknown_words(capsys):
    assert cli.main(["bench", "--list", "--quick"]) == 0
    names = capsys.readouterr().out.split("\n")
    assert "dense D64 S4096 causal" in names
    assert "host" in names
    assert not {"compile", "dtypes"} & set(names)
    assert cli.main(["bench", "--list", "--filter", "dtypes", "--suite", "backward"]) == 0
    assert capsys.readouterr().out == "dtypes\n"
    assert cli.main(["bench", "--filter", "nonsense"]) == 1
    assert "no case has the words 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repeats", "0"])
    with pytest.raises(SystemExit):
        cli.main(["bench", "--burst", "0"])


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("decode", "64 x 8192 32/8"),
        ("prefill", "8 x 256 rows on 8448 32/8"),
        ("models", "vision 64 x 197 12/12 D64 full"),
    ],
)
def test_suites_of_figures_list_what_they_measure(suite, name, capsys):
    assert cli.main(["bench", "--suite", suite, "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert name in names and len(set(names)) == len(names)
    assert cli.main(["bench", "--suite", suite, "--filter", name]) == 1
    told = f"--filter: got {name!r}, but the suite {suite} is measured as a whole; leave it out"
    assert told in capsys.readouterr().err


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
