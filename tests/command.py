"""`rawattn` run in a test's own process."""

from __future__ import annotations

import pytest

from rawattn import cli


class Output:
    """Runs the `rawattn` command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str, status: int = 0) -> str:
        assert cli.main(argv) == status
        out, self.err = self._capsys.readouterr()
        return out
