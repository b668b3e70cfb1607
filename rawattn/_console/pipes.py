"""Ends a command at once and silently if the reader of its output closes the pipe, as other commands do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

# The exit status that a shell reports for a command ended by SIGPIPE.
READER_GONE = 128 + 13

_T = TypeVar("_T")


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """Raises SystemExit if standard output or standard error can no longer be written.

    The status is READER_GONE if the reader of a pipe has closed it, else 1, after one line that says why. It raises
    SystemExit so that code which handles OSError for its own files does not catch it.
    """
    with contextlib.ExitStack() as stack:
        # sys.stdout and sys.stderr are None if they were closed before the process started.
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(_guarded(sys.stderr)))
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(_guarded(sys.stdout)))
            stack.callback(sys.stdout.flush)
        yield


class _Guarded:
    """Wraps a stream: guards `write` and `flush`, and passes everything else on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._guard(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._guard(self._stream.flush)

    def _guard(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BrokenPipeError:
            self._discard()
            raise SystemExit(READER_GONE) from None
        except OSError as error:
            self._discard()
            if self._stream is not sys.__stderr__:
                print(f"rawattn: output cannot be written: {error}", file=sys.stderr)
            raise SystemExit(1) from None

    def _discard(self) -> None:
        """Redirects the stream to /dev/null. Otherwise the interpreter would flush the buffer at exit, and print an error."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _guarded(stream: TextIO) -> TextIO:
    return cast(TextIO, _Guarded(stream))
