"""`rawattn check` passes where results are right, and reports where they are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import pytest

from rawattn import cli
from rawattn._cli import check
from rawattn._cpu import forward as cpu_forward

_CELLS = len(check._MODES) + len(check._IN_PAGES) + 2
_FORWARDS = _CELLS - 2  # all but append_kv and combine


@pytest.fixture(autouse=True)
def _few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_HEADDIMS", (64,))
    monkeypatch.setattr(check, "_DTYPES", {"bfloat16": ml_dtypes.bfloat16})


def test_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--backend", "cpu"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["backend", "dtype", "headdim", "mode"]
    assert [line.split()[-1] for line in table[1:-1]] == ["ok"] * _CELLS
    assert table[-1] == f"{_CELLS} of {_CELLS} within their bounds"


@pytest.mark.gpu
def test_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--backend", "cuda"]) == 0
    assert re.search(r"GPU 0 portable +bfloat16 +64 +full", capsys.readouterr().out)


@pytest.mark.parametrize("wrong", ["scale", "window_right", "nan"])
def test_wrong_results_are_told(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = cpu_forward.forward

    def broken(problem: Any, lengths: Any, q: Any, k: Any, v: Any, out: Any, *more: Any) -> None:
        changed = {
            "scale": {"scale": problem.scale * 1.0005},
            "window_right": {"window_right": 5},
            "nan": {},
        }[wrong]
        forward(replace(problem, **changed), lengths, q, k, v, out, *more)
        if wrong == "nan":
            out[-1] = float("nan")

    monkeypatch.setattr(cpu_forward, "forward", broken)
    assert cli.main(["check", "--backend", "cpu"]) == 1
    printed = capsys.readouterr().out
    # In a decode step the single row has no key after it, so window_right changes nothing.
    failed = _FORWARDS - (2 if wrong == "window_right" else 0)
    assert f"{_CELLS - failed} of {_CELLS} within their bounds" in printed
    assert printed.count("FAILED") == failed


def test_no_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "gpu_available", lambda: False)
    monkeypatch.setattr(check, "why_no_gpu", lambda: "the driver sees no GPU")
    assert cli.main(["check", "--backend", "cuda"]) == 1
    assert capsys.readouterr().err == "rawattn check: no usable GPU: the driver sees no GPU\n"
