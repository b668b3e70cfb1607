"""A line of progress for long work."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from types import TracebackType
from typing import TextIO

from rawattn._console import terminal

_BAR = 24
_ERASE = "\r\x1b[K"


class Progress:
    """A bar that is redrawn on a terminal; elsewhere (a log file) one line per finished step.

    While the bar is shown, whole lines written to `sys.stderr` (warnings, logging, `print`) appear above it.

    Examples
    --------
    >>> with Progress(2, stream=sys.stdout) as progress:
    ...     progress.step("first")
    ...     progress.step("second")
    [1/2] first
    [2/2] second
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._done = 0
        self._label = ""
        self._stream = sys.stderr if stream is None else stream
        self._started = time.perf_counter()
        self._live = self._stream.isatty()
        self._above = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        if self._live:
            above = _Above(self, self._stream)
            self._above.callback(above.end)
            self._above.enter_context(contextlib.redirect_stderr(above))
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._above.close()
        if self._live:
            self._stream.write("\n")

    def step(self, label: str) -> None:
        """Count one more step as done."""
        self._done += 1
        self._label = label
        if self._live:
            self._draw()
        else:
            print(f"[{self._done}/{self._total}] {label}", file=self._stream, flush=True)

    def note(self, lines: str) -> None:
        """Write whole lines, above the bar if it is shown."""
        lines = lines if lines.endswith("\n") else f"{lines}\n"
        if self._live:
            self._stream.write(_ERASE + lines)
            self._draw()
        else:
            self._stream.write(lines)

    def _draw(self) -> None:
        filled = _BAR * self._done // max(self._total, 1)
        seconds = time.perf_counter() - self._started
        bar = "#" * filled + "." * (_BAR - filled)
        line = f"[{bar}] {self._done}/{self._total} {seconds:4.0f} s  {self._label}"
        # The line is cut, since one that wraps cannot be redrawn. The escape sequence erases the rest of a longer old line.
        if (columns := terminal.columns(self._stream)) is not None:
            line = line[: columns - 1]
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()


class _Above(io.TextIOBase):
    """Replaces sys.stderr while a bar is drawn there, and passes whole lines on to it."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress, self._stream, self._line = progress, stream, ""

    def write(self, text: str) -> int:
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._progress.note(lines + newline)
        return len(text)

    def end(self) -> None:
        """Pass on the last line if it has no end yet."""
        if self._line:
            self.write("\n")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
