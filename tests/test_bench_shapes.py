"""bench/shapes.py: what the scripts that time random shapes refuse."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from bench import random_models, random_shapes, shapes, tile_choices


@pytest.mark.parametrize("script", [random_models, random_shapes, tile_choices])
def test_what_is_refused_before_anything_is_timed(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "measure", lambda *_: pytest.fail("the work began"))
    assert script.main(["--json", str(tmp_path)]) == 1
    assert "--json" in (said := capsys.readouterr().err) and "is a directory" in said
    monkeypatch.setattr(shapes, "why_no_gpu", lambda: "no NVIDIA driver")
    assert script.main([]) == 1
    said = capsys.readouterr().err
    assert said.endswith("there is no usable GPU: no NVIDIA driver\n") and said.count("\n") == 1
