"""The suite `host`: host time of cached calls over that of torch's SDPA, all in one process.

Calls take turns, so that other load on the CPU affects all alike. In a turn each call runs some batches in a row, as a loop
would. The first batch warms the CPU's caches and does not count. `host_time` says what the time of a batch includes.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rawattn._bench import host_calls, machine, measure
from rawattn._bench.host_calls import Absent, HostCall, Setup
from rawattn._bench.host_time import BATCH
from rawattn._bench.report import HostRow, Report
from rawattn._bench.timing import Call

TURNS = 12
_BATCHES = 6
_LEAST_TURNS = 3  # these run even if the time is over
_SECONDS = 30.0  # after which no new turn begins


@dataclass(slots=True)
class _Lane:
    asked: HostCall
    call: Call
    samples: list[float] = field(default_factory=list)


def select(words: str) -> list[HostCall]:
    """The calls whose names have all these words, and those named in their `over` and `also`."""
    wanted = set(words.replace(",", " ").split())
    everything = host_calls.calls()
    found = [call for call in everything if wanted <= set(call.name.replace(",", " ").split())]
    bases = {name for call in found for name in (call.over, call.also)}
    return [call for call in everything if call in found or call.name in bases]


def run(chosen: Sequence[HostCall], dtype: str, turns: int, step: Callable[[str], None]) -> Report:
    """Measures calls on the current GPU. step(text) is called for each when it is ready to be timed."""
    import cupy

    setup = Setup(cupy, dtype=dtype)
    synchronize = cupy.cuda.runtime.deviceSynchronize
    rows, taken = measure_calls(chosen, setup, synchronize, turns=turns, step=step)
    return Report(
        suite="host",
        dtype=dtype,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        repeats=taken,
        machine=machine.facts(machine.Sensors()),
        versions=machine.versions(),
        matmul_flops=0.0,
        ours=["rawattn"],
        peers=[],
        host=rows,
    )


def measure_calls(
    chosen: Sequence[HostCall],
    setup: Setup,
    synchronize: Call,
    *,
    turns: int = TURNS,
    step: Callable[[str], None] = lambda text: None,
    seconds: float = _SECONDS,
) -> tuple[list[HostRow], int]:
    """A row for each call, also for those that raise or are `Absent`; and the number of turns for which there was time."""
    rows = {call.name: HostRow(call.name, call.bound, call.over, call.also) for call in chosen}
    lanes = []
    for asked in chosen:
        row = rows[asked.name]
        try:
            call = asked.make(setup)
            for _ in range(BATCH):  # compiles, and fills the memory pools
                result = call()
            _settle(result, synchronize)
            lanes.append(_Lane(asked, call))
            step(f"{asked.name}: ready")
        except Absent as error:
            row.reason = f"left out: {error}"
            step(f"{asked.name}: {row.reason}")
        except Exception as error:  # the other rows are still shown
            row.reason = f"failed: {measure.describe(error)}"
            step(f"{asked.name}: {row.reason}")
    begun, taken = time.monotonic(), 0
    while taken < turns and (taken < _LEAST_TURNS or time.monotonic() - begun <= seconds):
        taken += 1
        for lane in list(lanes):
            try:
                lane.samples += _batches(lane.call, synchronize)
            except Exception as error:
                rows[lane.asked.name].reason = f"failed: {measure.describe(error)}"
                lanes.remove(lane)
    for lane in lanes:
        rows[lane.asked.name].seconds = statistics.median(lane.samples)
    return list(rows.values()), taken


def _batches(call: Call, synchronize: Call) -> list[float]:
    """Host seconds a call in each batch but the first. Each begins with an idle GPU and an empty launch queue."""
    samples = []
    for _ in range(_BATCHES):
        started = time.perf_counter()
        for _ in range(BATCH):
            result = call()
        samples.append((time.perf_counter() - started) / BATCH)
        _settle(result, synchronize)
    return samples[1:]


def _settle(result: Any, synchronize: Call) -> None:
    # JAX returns arrays whose kernels it may not have launched yet.
    if (wait := getattr(result, "block_until_ready", None)) is not None:
        wait()
    synchronize()
