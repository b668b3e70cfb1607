"""Programs of torch that are kept on disk, run in another process than the one that made them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.frameworks, pytest.mark.exhaustive]

_ROOT = Path(__file__).parents[1]


def _run(verb: str, argument: str, **variables: str) -> None:
    command = [sys.executable, "-m", "tests.torch_processes", verb, argument]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gradients_of_programs_on_disk(tmp_path: Path) -> None:
    """Torch finds a program on disk by its text and the arguments of its operators, so `wrt` in another order must be another
    program."""
    for wrt in ("a,b", "b,a"):
        _run("gradients", wrt, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))


def test_exported_programs_do_not_run_with_another_mask(tmp_path: Path) -> None:
    path = str(tmp_path / "program.pt2")
    _run("save", path)
    _run("load", path)
