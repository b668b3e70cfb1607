"""Processes that do jobs side by side, and are gone at once when somebody interrupts.

`concurrent.futures` waits for what its processes have begun, and a compiler does not listen to Python's signals.
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

# spawn: a fork of a process that has used CUDA, or runs threads, is not safe.
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: the text that the function returned or, when it `failed`, why.

    said: what it wrote to standard error meanwhile.
    """

    job: Job
    text: str
    failed: bool
    said: str


def outcomes(
    function: Function, jobs: Sequence[Job], processes: int
) -> Generator[Outcome, None, None]:
    """Calls function(*job) for each job in other processes; yields as they are done.

    `close` the iterator, as `contextlib.closing` does, to end the processes before it is exhausted.
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
    resource_tracker.ensure_running()  # which unblocks the signal when it starts: not below
    # Ctrl-C reaches every process of a terminal. This one alone answers, and ends the others: they inherit the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()  # so that the end of the process is the end of what can be received
    return here, process


def _serve(function: Function, connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:  # whoever asked is gone
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
