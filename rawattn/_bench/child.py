"""Measurements that need a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SECONDS = 120


def run(code: str, *arguments: str, **environment: str) -> Any:
    """The last line that this Python code prints, read as JSON. RuntimeError, with the last line of its errors, if it fails."""
    # If rawattn runs from a checkout without an installation, the child must find the same package.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if child.returncode:
        raise RuntimeError(f"a new process failed: {child.stderr.strip().rpartition(chr(10))[2]}")
    return json.loads(child.stdout.strip().rpartition("\n")[2])
