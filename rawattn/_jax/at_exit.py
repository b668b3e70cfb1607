"""Programs that still run on the CPU when Python ends.

XLA runs a program in threads of its own, and the handler needs Python's interpreter. An interpreter that is being torn down
ends the thread that asks for it, and XLA then waits for this thread for ever. A script whose last line dispatches a program,
without waiting for its results, would never end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# No program runs if in _TIMES looks, _PAUSE seconds apart, no call and no thread of others than Python does.
_TIMES, _PAUSE = 3, 0.01
_MOST = 10.0  # seconds: a library of the user may have threads that always run

# One entry for each call that a handler runs now. Appending to a list is atomic.
_running: list[None] = []


@contextmanager
def running() -> Iterator[None]:
    """Around a call that a handler runs on the CPU."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


@atexit.register  # later than JAX's own functions, so it is called before them
def _wait_for_programs() -> None:
    end, quiet = time.monotonic() + _MOST, 0
    while quiet < _TIMES and (_running or time.monotonic() < end):
        time.sleep(_PAUSE)
        quiet = 0 if _running or _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether a thread of this process that Python did not start runs, or waits for a processor. False where nobody tells."""
    # Python knows threads of others, too, once they have run some of its code.
    others = getattr(threading, "_DummyThread", ())
    own = {each.native_id for each in threading.enumerate() if not isinstance(each, others)}
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            if int(thread) in own:
                continue
            # It may have ended.
            path = f"/proc/self/task/{thread}/stat"
            with suppress(OSError), open(path, encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
    return False
