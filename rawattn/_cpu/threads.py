"""Runs the tasks of a call on threads: as many as its work is worth, up to a maximum.

The maximum is `RAWATTN_NUM_THREADS`, an int >= 1, read once. By default it is the number of CPUs that the
process may use, which may be fewer than the host has: `os.process_cpu_count()`, before Python 3.13 the size
of the affinity mask. Matrix products are so small that the BLAS computes each on the calling thread: the
BLAS's own threads stay idle.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NamedTuple

# The least work for which a thread is started, in multiplications: 1 to 3 milliseconds, many times what
# starting a thread takes.
WORK_OF_A_THREAD = 1 << 25


class Task(NamedTuple):
    """A part of a call that depends on no other part."""

    work: int  # multiplications
    compute: Callable[[], Any]


def run(tasks: Sequence[Task]) -> None:
    """Compute all tasks, on the calling thread and as many more as are worth it.

    If a task raises, its exception is raised here, and other tasks may not run.
    """
    available = available_threads()
    threads = threads_for([task.work for task in tasks], available) if len(tasks) > 1 else 1
    if threads == 1:
        for task in tasks:
            task.compute()
        return

    largest_first = sorted(tasks, key=lambda task: task.work, reverse=True)
    remaining, errors = deque(largest_first), list[BaseException]()
    helpers = [Thread(target=_help, args=(remaining, errors)) for _ in range(threads - 1)]
    try:
        # None can be started while Python ends (since 3.12), or if the process has as many as it may.
        with contextlib.suppress(RuntimeError):
            for helper in helpers:
                helper.start()
        _compute(remaining)
    finally:
        remaining.clear()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        # Tracebacks have the frames that have `errors`, so exceptions in it would keep themselves and the arrays alive.
        first = errors[0] if errors else None
        errors.clear()
    if first is not None:
        try:
            raise first
        finally:
            del first


def _compute(remaining: deque[Task]) -> None:
    while True:
        try:
            task = remaining.popleft()
        except IndexError:
            return
        task.compute()


def _help(remaining: deque[Task], errors: list[BaseException]) -> None:
    try:
        _compute(remaining)
    except BaseException as error:
        remaining.clear()
        errors.append(error)


def threads_for(work: Sequence[int], available: int) -> int:
    """The number of threads for tasks of these numbers of multiplications."""
    return max(1, min(available, len(work), sum(work) // WORK_OF_A_THREAD))


@functools.cache
def available_threads() -> int:
    """The most threads of a call.

    Raises ValueError if `RAWATTN_NUM_THREADS` is not an int >= 1.
    """
    cpus = _cpus()
    given = os.environ.get("RAWATTN_NUM_THREADS", "").strip()
    if not given:
        return cpus
    threads = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if threads < 1:
        raise ValueError(
            f"RAWATTN_NUM_THREADS: got {given!r}, expected an int >= 1, the most threads of a call "
            f"on the CPU; unset it for one for each CPU that the process may use, here {cpus}"
        )
    return threads


def _cpus() -> int:
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
