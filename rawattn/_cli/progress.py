"""One line of progress for work that takes more than a moment."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_BAR = 24


class Progress:
    """A bar that redraws itself on a terminal; elsewhere (a log file) one line per finished step.

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
        self._stream = sys.stderr if stream is None else stream
        self._started = time.perf_counter()
        self._live = self._stream.isatty()

    def __enter__(self) -> Progress:
        if self._live:
            self._draw("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._stream.write("\n")

    def step(self, label: str) -> None:
        """Count one more step as done."""
        self._done += 1
        if self._live:
            self._draw(label)
        else:
            print(f"[{self._done}/{self._total}] {label}", file=self._stream, flush=True)

    def _draw(self, label: str) -> None:
        filled = _BAR * self._done // max(self._total, 1)
        seconds = time.perf_counter() - self._started
        bar = "#" * filled + "." * (_BAR - filled)
        line = f"[{bar}] {self._done}/{self._total} {seconds:4.0f} s  {label}"
        # A line that wraps cannot be redrawn; the sequence after it erases what a longer one left.
        line = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()
