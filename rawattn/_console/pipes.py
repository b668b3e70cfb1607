"""A command whose output nobody reads any more ends at once and without a word, as others do in a pipeline."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

# What a shell reports of a command that SIGPIPE ended.
READER_GONE = 128 + 13

_T = TypeVar("_T")


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """Raises SystemExit where standard output or standard error cannot be written any more.

    The status is READER_GONE when the reader of a pipe has gone, else 1 after one line that says why. SystemExit is no
    OSError: what handles the errors of its files does not take this for one of them.
    """
    with contextlib.ExitStack() as stack:
        # A stream that was closed before the start is None.
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(_guarded(sys.stderr)))
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(_guarded(sys.stdout)))
            stack.callback(sys.stdout.flush)
        yield


class _Guarded:
    """A stream; of its own only what `print` and `flush` need."""

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
        """What is still in the buffer goes nowhere; else the interpreter would try once more, and complain."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _guarded(stream: TextIO) -> TextIO:
    return cast(TextIO, _Guarded(stream))
