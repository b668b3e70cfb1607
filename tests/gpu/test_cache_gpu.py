"""A kernel is compiled once on a computer, however many processes need it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CALL = """
import sys
import numpy as np
import rawattn
from rawattn._compile import compiler

compiled = []
run_nvrtc = compiler._run_nvrtc
compiler._run_nvrtc = lambda request: compiled.append(request.text) or run_nvrtc(request)

starts = np.array([0, 5, 40])
q, k, v = np.random.default_rng(0).standard_normal((3, 40, 2, 72)).astype(np.float16)
seqs = rawattn.SeqLayout(seqstart_q=starts)
out = rawattn.attention(q, k, v, seqs=seqs, causal=True, backend="cuda")
print(len(compiled), out.tobytes().hex())
"""


def _start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "RAWATTN_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _CALL]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    stdout, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    compiled, out = stdout.split()
    return int(compiled), out


def _snapshot(cache: Path) -> dict[str, int]:
    kept = [path for path in cache.rglob("*") if path.suffix in (".cubin", ".cu", ".json")]
    return {str(path): path.stat().st_mtime_ns for path in kept}


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    compiled, first = _finish(_start(tmp_path))
    assert compiled > 0
    before = _snapshot(tmp_path)
    assert len([path for path in before if path.endswith(".cubin")]) == compiled
    assert _finish(_start(tmp_path)) == (0, first)
    assert _snapshot(tmp_path) == before


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    results = [_finish(process) for process in [_start(tmp_path) for _ in range(6)]]
    assert len({out for _, out in results}) == 1
    assert sum(compiled for compiled, _ in results) == sum(
        path.endswith(".cubin") for path in _snapshot(tmp_path)
    )


def test_damaged_cubin_is_rebuilt(tmp_path: Path) -> None:
    compiled, first = _finish(_start(tmp_path))
    for path in tmp_path.rglob("*.cubin"):
        path.write_bytes(path.read_bytes()[:100])
    assert _finish(_start(tmp_path)) == (compiled, first)
