"""`rawattn bench` on a GPU."""

from __future__ import annotations

import pytest

from rawattn import cli
from rawattn._bench import compile_time, host_calls, host_suite, host_time, memory
from rawattn._bench.report import Report

# FLOP/s of 16-bit attention. Other processes may leave a hundredth of the GPU to this one, and may come and go between two
# measurements, so rates are not compared with each other. A timer that does not wait would find tens of PFLOP/s.
LEAST, MOST = 1e12, 3e15


def is_possible(rate: float) -> bool:
    return LEAST < rate < MOST


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
        assert is_possible(rate)
        assert row.results["rawattn"].watts


@pytest.mark.gpu
@pytest.mark.slow
def test_compile_and_load_times_on_a_gpu():
    cold, another, loaded, _, rebuilt = (f.value for f in compile_time.figures("float16", ()))
    assert min(cold, another) > loaded / 1e3 > 0
    assert rebuilt == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_a_backward_run_on_a_gpu(tmp_path):
    path = tmp_path / "a.json"
    arguments = ["bench", "--suite", "backward", "--filter", "D64 S4096", "--peers", "none"]
    assert cli.main([*arguments, "--repeats", "3", "--json", str(path)]) == 0
    report = Report.load(path)
    assert [row.name for row in report.rows] == ["dense D64 S4096 causal", "dense D64 S4096 full"]
    for row in report.rows:
        for name in ("rawattn", "deterministic"):
            rate = row.rate(name)
            assert rate is not None, row.results[name].reason
            assert is_possible(rate)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_of_score_options_on_a_gpu(tmp_path):
    path = tmp_path / "a.json"
    arguments = ["bench", "--suite", "scores", "--filter", "B2 S8192 causal", "--peers", "none"]
    assert cli.main([*arguments, "--repeats", "3", "--json", str(path)]) == 0
    report = Report.load(path)
    kinds = [row.kind for row in report.rows]
    assert kinds == ["alibi", "causal", "scoremod", "softcap"] * 2
    for row in report.rows:
        rate = row.rate("rawattn")
        assert rate is not None, row.results["rawattn"].reason
        assert is_possible(rate)
    measured = [figure for figure in report.bounded() if "over our" in figure.name]
    assert len(measured) == 2
    assert all(figure.value > 0 for figure in measured)


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_of_a_backward_on_a_gpu():
    slack = 4 / 1024  # 4 KiB for a ragged batch's schedule, and for rounding
    found = [figure.value for figure in memory.figures("bfloat16", ())]
    for default, deterministic, allowed in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert 0 < deterministic < default <= allowed + slack


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_host_times_on_a_gpu(verb):
    for figure in host_time.figures(verb, "bfloat16", ()):
        assert 1 < figure.value < 1000


@pytest.mark.gpu
@pytest.mark.slow
def test_floors_of_host_time_on_a_gpu():
    rows, _ = host_suite.measure_calls(
        host_suite.select("floor"),
        host_calls.Setup(cupy := pytest.importorskip("cupy")),
        cupy.cuda.runtime.deviceSynchronize,
        turns=3,
    )
    floors = {row.name: row for row in rows if row.name.startswith("floor of ")}
    assert len(floors) == 11
    assert not [row.reason for row in floors.values() if row.reason.startswith("failed")]
    plain = floors["floor of any call: a launch"].seconds
    assert 0 < plain < floors["floor of CuPy backward: three launches, four arrays"].seconds < 1e-3
