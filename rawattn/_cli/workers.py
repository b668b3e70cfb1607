"""Runs jobs in parallel processes that end at once on an interrupt.

`concurrent.futures` would wait for jobs that have begun, and a running compiler does not react to Python's signals.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

Function = Callable[..., str]
Job = tuple[Any, ...]

# spawn, since forking a process that has used CUDA or runs threads is not safe.
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job. text: what the function returned or, if it `failed`, the reason.

    said: what it wrote to standard error.
    """

    job: Job
    text: str
    failed: bool
    said: str


def outcomes(
    function: Function, jobs: Sequence[Job], processes: int
) -> Generator[Outcome, None, None]:
    """Calls function(*job) for each job in other processes; yields outcomes as jobs end.

    To end the processes before the iterator is exhausted, `close` it, as `contextlib.closing` does.
    """
    waiting = deque(jobs)
    started: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, Job] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                idle = next((one for one in started if one not in busy), None)
                if idle is None:
                    idle, process = _start(function)
                    started[idle] = process
                busy[idle] = waiting.popleft()
                idle.send(busy[idle])
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                job = busy.pop(ready)
                try:
                    yield Outcome(job, *ready.recv())
                except (EOFError, OSError):
                    process = started.pop(ready)
                    process.join()
                    ended = f"its process ended with status {process.exitcode}"
                    yield Outcome(job, ended, failed=True, said="")
    finally:
        for process in started.values():
            process.kill()
        for process in started.values():
            process.join()


def _start(function: Function) -> tuple[Connection, SpawnProcess]:
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(function, there), daemon=True)
    resource_tracker.ensure_running()  # starting it unblocks SIGINT, so it must not start below
    # Ctrl-C reaches every process of a terminal. Workers inherit a mask that blocks it; only this process reacts and ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()  # so that the parent receives EOFError once the process has ended
    return here, process


def _serve(function: Function, connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the parent is gone
            return
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                text, failed = function(*job), False
            except (RuntimeError, OSError) as error:
                text, failed = str(error), True
            except Exception:
                text, failed = traceback.format_exc(), True
        connection.send((text, failed, said.getvalue()))
