"""Mistakes of users of the command line, and the number of mistakes listed in all modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rawattn import cli
from tests.mistakes import pattern
from tests.test_user_mistakes import ARRAYS, KEYWORDS, OPTIONS
from tests.test_user_mistakes_frameworks import JAX, TORCH
from tests.test_user_mistakes_lengths import LENGTHS

COMMANDS = [
    ("inof", "argument COMMAND: invalid choice: 'inof' ...info"),
    ("info --json", "rawattn info: error: got --json, which it does not take; --help tells"),
    ("cache clear", "rawattn cache: error: got clear, which it does not take; --help tells"),
    ("compile", "rawattn compile: no GPU here, so name one, as by --arch sm_90a: "),
    ("check --backend gpu", "argument --backend: invalid choice: 'gpu' ...cuda...cpu"),
    ("demo --pairs x", "argument --pairs: got x, expected a whole number, at least 1"),
    ("demo --pairs 0", "argument --pairs: got 0, expected a whole number, at least 1"),
    (
        "demo --text no/such",
        "--text no/such: No such file...expected a file of UTF-8 text, or - for",
    ),
    ("compile --jobs two", "argument --jobs: got two, expected a whole number, at least 1"),
    ("compile --arch sm_12", "--arch: got sm_12, expected one of sm_80, ...sm_90a"),
    ("bench --suite fast", "argument --suite: invalid choice: 'fast' ...forward"),
    ("bench --peers FA9", "argument --peers: got FA9; accepted are cuDNN, "),
    ("bench --repeats 1.5", "argument --repeats: got 1.5, expected a whole number, at least 1"),
    ("bench --burst long", "argument --burst: got long, expected seconds, above 0 and up to 10"),
    ("bench --budget none", "argument --budget: got none, expected a number of seconds"),
    ("bench --list --filter zebra", "--filter: no case has the words 'zebra'; --list without it"),
    ("bench --from no/such.json", "--from no/such.json: No such file...that --json has written"),
]


@pytest.mark.parametrize(("command", "says"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands(
    command: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path))
    try:
        status = cli.main(command.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr()
    assert status != 0
    assert shown.out == ""
    message = shown.err.strip().splitlines()[-1]
    if says.startswith("rawattn"):
        assert re.search(pattern(says), message)
        return
    assert re.match(r"rawattn( \w+)?: (error: )?", message)
    assert re.search(pattern(says).removeprefix("^"), message)


def test_there_are_sixty() -> None:
    listed = [*KEYWORDS, *ARRAYS, *OPTIONS, *LENGTHS, *TORCH, *JAX]
    assert len({mistake.code for mistake in listed} | {command for command, _ in COMMANDS}) >= 60
