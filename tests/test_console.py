"""What all commands share: progress, tables that fit, and output files that may be missing."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rawattn import cli
from rawattn._call import outputs
from rawattn._console import pipes, table, terminal
from rawattn._console.progress import Progress

ROOT = Path(cli.__file__).resolve().parents[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows at the end."""
    lines, column = [""], 0
    for mark in re.findall(r"\r|\n|\x1b\[K|.", written):
        if mark == "\n":
            lines.append("")
        elif mark == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif mark != "\r":
            lines[-1] = lines[-1][:column] + mark + lines[-1][column + 1 :]
            column += 1
        if mark in ("\r", "\n"):
            column = 0
    return lines


# Progress


def test_progress_in_a_file() -> None:
    stream = io.StringIO()
    with Progress(2, stream) as progress:
        progress.step("first")
        assert stream.getvalue() == "[1/2] first\n"
        progress.step("second")
    assert stream.getvalue() == "[1/2] first\n[2/2] second\n"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with Progress(2, stream) as progress:
        progress.step("first")
        progress.step("second " + "x" * 100)
    start, *drawn = stream.getvalue().split("\r")
    assert start == ""
    assert [line.count("#") for line in drawn] == [0, 12, 24]
    assert "1/2" in drawn[1]
    assert "first" in drawn[1]
    assert all(len(line.partition("\x1b")[0]) < 60 for line in drawn)
    assert drawn[-1].endswith("\n")


def test_progress_of_nothing() -> None:
    with Progress(0, Terminal()):
        pass


def test_lines_to_standard_error_do_not_mix_with_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(2) as progress:
        print(
            "a line that somebody prints, and longer than the bar that stands there now",
            file=sys.stderr,
        )
        progress.step("first")
        sys.stderr.write("in ")
        sys.stderr.write("two pieces\nand no end")
        progress.step("second")
    assert sys.stderr is stream
    shown = screen(stream.getvalue())
    for line in (
        "a line that somebody prints, and longer than the bar that stands there now",
        "in two pieces",
        "and no end",
    ):
        assert line in shown
    bars = [line for line in shown if line.startswith("[")]
    assert len(bars) == 1
    assert "2/2" in bars[0]
    assert bars[0].endswith("second")


def test_a_note_in_a_file_is_a_line() -> None:
    stream = io.StringIO()
    with Progress(1, stream) as progress:
        progress.note("said")
        progress.step("done")
    assert stream.getvalue() == "said\n[1/1] done\n"


# Tables


def test_table() -> None:
    text = table.render(("name", "n"), [("a", "1"), ("longer", "100")])
    assert text == "name      n\na         1\nlonger  100"
    assert table.render(("name", "n"), []) == "name  n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert table.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-2, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (2e6, "23 d")]
)
def test_age(seconds: float, text: str) -> None:
    assert table.age(seconds) == text


HEADER = ("kernel", "arch", "compiled in", "directory")
ROWS = [
    ("portable forward bfloat16 D=64 128x64", "sm_90a", "1.25 s", "0123456789abcdef"),
    ("sm90 forward", "sm_90a", "12.50 s", "fedcba9876543210"),
]


@pytest.mark.parametrize("columns", [*range(8, 80, 3), 80])
def test_a_table_fits_and_loses_nothing(columns: int) -> None:
    text = table.render(HEADER, ROWS, left=2, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    squeezed = "".join(text.split())
    for row in ROWS:
        for word in " ".join(row).split():
            assert word in squeezed


def test_a_table_breaks_words_of_text_before_it_becomes_paragraphs() -> None:
    full = table.render(HEADER, ROWS, left=2)
    assert max(map(len, full.splitlines())) == 76
    assert full == table.render(HEADER, ROWS, left=2, columns=76)
    assert table.render(HEADER, ROWS, left=2, columns=44) == (
        "kernel    arch     compiled        directory\n"
        "                         in\n"
        "portable  sm_90a     1.25 s 0123456789abcdef\n"
        "forward\n"
        "bfloat16\n"
        "D=64\n"
        "128x64\n"
        "sm90      sm_90a    12.50 s fedcba9876543210\n"
        "forward"
    )
    assert table.render(HEADER, ROWS[1:], left=2, columns=30) == (
        "kernel: sm90 forward\narch: sm_90a\ncompiled in: 12.50 s\ndirectory: fedcba9876543210"
    )


def test_text_fits() -> None:
    line = "a line of some words and " + "x" * 30
    assert table.wrap(line) == line  # as for output into a file
    assert table.wrap(f"short\n{line}", 20) == (
        "short\na line of some words\n  and xxxxxxxxxxxxxx\n  xxxxxxxxxxxxxxxx"
    )


def test_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.columns(io.StringIO()) is None
    assert terminal.columns(Terminal()) == 80  # the fake terminal does not report its width
    monkeypatch.setenv("COLUMNS", "33")
    assert terminal.columns(io.StringIO()) == 33
    for nonsense in ("0", "-3", "many"):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert terminal.columns(io.StringIO()) is None


def test_width_of_a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 57, 0, 0))
    with os.fdopen(follower, "w") as stream:
        assert terminal.columns(stream) == 57
    os.close(leader)


# Outputs


def command(*argv: str, **options: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *argv], env=environment, stderr=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("argv", [["cache", "--path"], ["--help"], ["cache", "--help"]])
def test_a_reader_that_goes_away_ends_the_command_without_a_word(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with command("-m", "rawattn", *argv, stdout=writer) as process:
        os.close(writer)
        assert process.communicate()[1] == b""
    assert process.returncode == pipes.READER_GONE == 141


def test_a_reader_that_goes_away_is_no_error_of_a_file() -> None:
    """A reader that closes the pipe is not handled like an error of the command's own files."""
    code = """
from rawattn._console.pipes import ends_quietly
with ends_quietly():
    try:
        for _ in range(10000):
            print("more than any buffer holds")
    except OSError:
        raise SystemExit("taken for an error")
"""
    reader, writer = os.pipe()
    os.close(reader)
    with command("-c", code, stdout=writer) as process:
        os.close(writer)
        assert process.communicate()[1] == b""
    assert process.returncode == pipes.READER_GONE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_an_output_that_is_full_is_told_in_one_line() -> None:
    with (
        open("/dev/full", "wb") as full,
        command("-m", "rawattn", "cache", "--path", stdout=full.fileno()) as process,
    ):
        said = process.communicate()[1].decode()
    assert process.returncode == 1
    assert said.startswith("rawattn: output cannot be written: ")
    assert said.count("\n") == 1


def test_files_that_could_not_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outputs.check("--plot", tmp_path / "file")
    outputs.check("--plot", tmp_path / "new" / "newer" / "plot.png")
    with pytest.raises(IsADirectoryError, match=r"--plot .*: is a directory"):
        outputs.check("--plot", tmp_path)
    with pytest.raises(NotADirectoryError, match=r"--plot .*file is no directory"):
        outputs.check("--plot", tmp_path / "file" / "plot.png")
    outputs.check_ending("--plot", Path("a.PNG"), (".png", ".svg"))
    with pytest.raises(ValueError, match=r"--plot a\.docx: got \.docx, expected \.png, \.svg"):
        outputs.check_ending("--plot", Path("a.docx"), (".png", ".svg"))
    with pytest.raises(ValueError, match="got no ending"):
        outputs.check_ending("--plot", Path("a"), (".png",))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Patches os.access, since root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"--json .* cannot be written"):
        outputs.check("--json", tmp_path / "a.json")


# Imports between packages


@pytest.mark.parametrize("package", ["_bench", "_console"])
def test_what_commands_share_knows_no_command(package: str) -> None:
    paths = sorted((ROOT / "rawattn" / package).glob("*.py"))
    assert paths
    assert not [path.name for path in paths if "rawattn._cli" in path.read_text("utf-8")]
