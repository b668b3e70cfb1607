"""`rawattn compile`, and the worker processes that it uses."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rawattn import cli
from rawattn._cli import compile as compile_command
from rawattn._cli.workers import outcomes
from rawattn._compile import cache as _cache
from rawattn._compile import compiler
from rawattn._compile.compiler import Source
from tests import exhaustive
from tests.command import Output

ROOT = Path(cli.__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("kernel_cache")


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")

    def source(name: str) -> Source:
        text = f'extern "C" __global__ void {name}(float* x) {{ *x = 1; }}'
        return Source(name, text, f"variant {name}")

    listed = [source("one"), source("two")]
    monkeypatch.setattr(
        compile_command,
        "_variants",
        lambda arch, purpose, every: [*listed, *([source("rare")] if every else [])],
    )
    return listed


@pytest.mark.usefixtures("variants")
def test_compile_fills_the_cache(rawattn_command: Output, kernel_cache: Path) -> None:
    out = rawattn_command("compile", "--arch", "sm_80", "sm_90a", "--jobs", "1")
    assert out.startswith("4 compiled in ")
    assert (
        f"0 were there, 0 failed: {kernel_cache}\nleft out, so compiled at their first call: "
        in out
    )
    assert "[4/4] " in rawattn_command.err
    assert "variant one: " in rawattn_command.err
    entries = [entry for _, entry in _cache.entries() if entry]
    compiled = {(entry.meta["entry"], entry.meta["arch"]) for entry in entries}
    assert compiled == {(k, arch) for k in ("one", "two") for arch in ("sm_80", "sm_90a")}

    out = rawattn_command("compile", "--arch", "sm_80", "--all-variants")
    assert out.startswith("1 compiled in ")
    assert ", 2 were there, 0 failed" in out


def test_compile_reports_every_failure(rawattn_command: Output, variants: list[Source]) -> None:
    variants.append(Source("bad", "int x = y;", "variant bad"))
    out = rawattn_command("compile", "--arch", "sm_80", status=1)
    assert out.startswith("2 compiled in ")
    assert ", 1 failed" in out
    assert 'identifier "y" is undefined' in rawattn_command.err
    assert "sm_80 variant bad: failed" in rawattn_command.err


@pytest.mark.usefixtures("variants")
def test_compile_into_an_unwritable_directory(rawattn_command: Output, kernel_cache: Path) -> None:
    kernel_cache.write_text("a file where the directory should be")
    assert rawattn_command("compile", "--arch", "sm_80", "--jobs", "1", status=1) == ""
    (said,) = rawattn_command.err.splitlines()
    told = f"rawattn compile: the cache cannot be written ({kernel_cache}: Not a directory); set RAWATTN_CACHE_DIR"
    assert said.startswith(told)


def test_compile_unknown_architecture(rawattn_command: Output) -> None:
    rawattn_command("compile", "--arch", "sm_42", status=1)
    assert "--arch: got sm_42, expected one of sm_80" in rawattn_command.err


@pytest.mark.usefixtures("variants")
def test_compile_for_the_gpus_here(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        if not devices:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(devices)

    devices: list[str] = []
    runtime = types.SimpleNamespace(getDeviceCount=count)
    cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    rawattn_command("compile", status=1)
    assert "--arch sm_90a" in rawattn_command.err
    devices += ["NVIDIA H200", "NVIDIA H200"]
    asked = []
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(compiler, "find", lambda source, arch: asked.append((source.entry, arch)))
    monkeypatch.setattr(compile_command, "_compile_all", lambda *args: None)
    rawattn_command("compile")
    assert asked == [("one", "sm_90a"), ("two", "sm_90a")]


@pytest.mark.usefixtures("variants")
def test_hopper_is_compiled_once_for_what_calls_load(rawattn_command: Output) -> None:
    out = rawattn_command("compile", "--arch", "sm_90", "sm_90a", "sm_90", "--jobs", "1")
    assert out.startswith("2 compiled in ")
    assert rawattn_command.err.count("sm_90: on such a GPU calls load kernels for sm_90a") == 1
    entries = [entry for _, entry in _cache.entries() if entry]
    assert {entry.meta["arch"] for entry in entries} == {"sm_90a"}
    out = rawattn_command("compile", "--arch", "sm_90a")
    assert "2 were there" in out
    assert not rawattn_command.err


def test_what_is_compiled_for_which_purpose(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        compile_command,
        "_variants",
        lambda arch, purpose, every: asked.append((purpose, every)) or [],
    )
    for argv, expected, told, untold in (
        ([], "inference", ["--for training", "--for all"], []),
        (["--for", "inference"], "inference", ["--for training", "--for all"], []),
        (["--for", "training"], "training", ["--for all"], ["gradients"]),
        (["--for", "all"], "all", ["windows"], ["gradients", "float32"]),
    ):
        asked.clear()
        left_out = rawattn_command("compile", "--arch", "sm_80", *argv).partition("left out")[2]
        assert asked == [(expected, False)]
        assert all(word in left_out for word in told)
        assert not any(word in left_out for word in untold)
    asked.clear()
    assert "left out" not in rawattn_command("compile", "--arch", "sm_80", "--all-variants")
    assert asked == [("inference", True)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_purposes_of_the_real_list(arch: str) -> None:
    lists = [set(compile_command._variants(arch, one, False)) for one in compile_command._PURPOSES]
    inference, training, everything = lists
    assert inference < training < everything

    def kinds(sources: set[Source]) -> set[tuple[bool, bool]]:
        """Return (has a gradient, is float32) of each variant."""
        return {("backward" in one.entry, "float" in one.summary.split()) for one in sources}

    assert kinds(inference) == {(False, False)}
    assert kinds(training) == {(False, False), (True, False)}
    assert kinds(everything) == {
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    }


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_compile_jobs(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["compile", "--arch", "sm_80", "--jobs", jobs])
    assert stop.value.code == 2
    assert "--jobs" in capsys.readouterr().err


# Processes


def shout(text: str, how: str) -> str:
    print(f"{how} {text}", file=sys.stderr)
    if how == "mistake":
        raise LookupError(text)
    if how == "error":
        raise OSError(text)
    if how == "death":
        os._exit(7)
    return text.upper()


def test_each_job_has_one_outcome() -> None:
    jobs = [
        ("a", "fine"),
        ("b", "error"),
        ("c", "death"),
        ("d", "mistake"),
        ("e", "fine"),
    ]
    with closing(outcomes(shout, jobs, 2)) as ended:
        found = {outcome.job: outcome for outcome in ended}
    assert set(found) == set(jobs)
    for job in (jobs[0], jobs[4]):
        assert (found[job].text, found[job].failed) == (job[0].upper(), False)
        assert found[job].said == f"fine {job[0]}\n"
    assert (found[jobs[1]].text, found[jobs[1]].failed) == ("b", True)
    assert (found[jobs[2]].text, found[jobs[2]].failed) == (
        "its process ended with status 7",
        True,
    )
    assert "LookupError: c" not in found[jobs[3]].text
    assert "LookupError: d" in found[jobs[3]].text


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_no_worker_hears_of_an_interrupt() -> None:
    """Workers block SIGINT.

    This includes the first worker: Python starts another process beside it, which unblocks the signal again.
    """
    code = (
        "from rawattn._cli.workers import outcomes\n"
        "if __name__ == '__main__':\n"
        "    text = \"str(__import__('signal').pthread_sigmask(0, []))\"\n"
        "    print([x.text for x in outcomes(eval, [(text,)] * 2, 2)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.count("SIGINT") == 2


def interrupt_a_compilation(send: Callable[[int, int], None], kernel_cache: Path) -> float:
    """Return the seconds from the signal until the command and all its processes have ended."""
    # Tests may run where the signal is ignored, such as in the background of a shell.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "rawattn",
        "compile",
        "--arch",
        "sm_90a",
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAWATTN_CACHE_DIR": str(kernel_cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("[1/"), first
        time.sleep(0.3)  # both workers are compiling a kernel now
        workers = children(process.pid)
        begin = time.monotonic()
        send(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=60)
        while not all(map(gone, workers)):
            assert time.monotonic() - begin < 60
            time.sleep(0.01)
        seconds = time.monotonic() - begin
    assert process.returncode == 130
    assert out == ""
    *steps, last = said.splitlines()
    assert last.startswith("rawattn compile: interrupted; ")
    assert all(step.startswith("[") for step in steps), said
    assert len(workers) >= 2
    kept = [entry for _, entry in _cache.entries()]
    assert kept
    assert None not in kept
    return seconds


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are seen in /proc")
@pytest.mark.parametrize(
    "send", exhaustive.thin([os.killpg, os.kill], 2), ids=["to its group", "to the command"]
)
def test_ctrl_c_ends_a_compilation_within_a_second(
    send: Callable[[int, int], None], kernel_cache: Path
) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")
    # Several attempts, since other tests may keep the CPU busy.
    assert any(interrupt_a_compilation(send, kernel_cache) < 1 for _ in range(3))


def test_what_the_processes_say_stands_above_the_bar(
    monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(compile_command, "_compile_one", compiled_aloud)
    done: list[Any] = []
    errors: list[str] = []
    jobs = [
        (Source("one", "", "variant one"), "sm_80"),
        (Source("two", "", "variant two"), "sm_80"),
    ]
    compile_command._compile_all(jobs, 1, done, errors)
    assert (len(done), errors) == (2, [])
    pieces = stream.getvalue().replace("\x1b[K", "").replace("\r", "\n").splitlines()
    assert "compiled one aloud" in pieces
    assert "compiled two aloud" in pieces
    assert sum(piece.startswith("[") for piece in pieces) == len([p for p in pieces if p]) - 2


def compiled_aloud(source: Source, arch: str) -> str:
    print(f"compiled {source.entry} aloud", file=sys.stderr)
    return arch
