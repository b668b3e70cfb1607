"""`rawattn bench` checks that its output files can be written before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from rawattn import cli


@pytest.mark.parametrize("suite", ["forward", "host"])
@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--plot", "plot.docx", "got .docx, expected .png, .svg, .pdf"),
        ("--plot", "", "is a directory"),
        ("--json", "file/a.json", "is no directory"),
        ("--markdown", "file/a.md", "is no directory"),
    ],
)
def test_outputs_are_checked_before_the_work(
    suite: str,
    option: str,
    name: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: pytest.fail("the work began"))
    (tmp_path / "file").touch()
    if (suite, name) == ("host", "plot.docx"):
        says = "the suite host has no plot"
    assert cli.main(["bench", "--suite", suite, option, str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"rawattn bench: {option}")
    assert says in said


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: pytest.fail("the work began"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", str(tmp_path / "a.png")]) == 1
    assert 'pip install "rawattn[bench]"' in capsys.readouterr().err


def test_an_earlier_report_of_host_times_has_no_plot_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path(__file__).resolve().parents[1] / "bench" / "results" / "host-h200.json"
    plot = tmp_path / "a.png"
    assert cli.main(["bench", "--from", str(report), "--plot", str(plot)]) == 1
    assert "--plot: the suite host has no plot" in capsys.readouterr().err
    assert not plot.exists()
