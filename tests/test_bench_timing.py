"""Clocks, races, isolated peers and host time of `rawattn bench`, without a GPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from rawattn._bench import child, compile_time, host_time, timing
from tests.bench_fakes import FakeClock


def test_race_sizes_bursts_and_takes_turns():
    clock = FakeClock()
    entrants = {
        "slow": timing.Entrant(lambda: 0.004, clock, burst_seconds=0.01),
        "fast": timing.Entrant(lambda: 0.001, clock, burst_seconds=0.01),
    }
    results = timing.race(entrants, repeats=20)
    slow, fast = (0.004, 2), (0.001, 10)
    warm_up, measured = clock.log[:4], clock.log[4:]
    assert warm_up == [(0.004, 3), slow, (0.001, 3), fast]
    turns = list(zip(measured[::2], measured[1::2], strict=True))
    assert len(turns) == 20
    assert set(turns) == {(slow, fast), (fast, slow)}
    assert results["slow"].seconds == pytest.approx(0.004)
    assert results["fast"].spread == 0.0


def test_a_call_that_stands_for_many_is_divided_by_them():
    clock = FakeClock()
    many = timing.Entrant(lambda: 0.004, clock, burst_seconds=0.02, calls_each=16)
    assert timing.race({"": many}, repeats=3)[""].samples == pytest.approx((0.00025,) * 3)
    assert clock.log[-1] == (0.004, 5)  # a burst is as long as any


def test_race_reports_median_and_interquartile_range():
    outcome = timing.Timing((4.0, 1.0, 2.0, 3.0, 100.0))
    assert outcome.seconds == 3.0
    assert outcome.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.Timing((2.0,)).spread == 0.0


def test_a_call_too_short_to_see_is_still_bounded():
    clock = FakeClock()
    timing.race({"": timing.Entrant(lambda: 0.0, clock)}, repeats=1)
    assert clock.log[-1][1] == 200
    timing.race({"": timing.Entrant(lambda: 0.0, clock, burst_seconds=0.1)}, repeats=1)
    assert clock.log[-1][1] == 2000


def test_who_raises_midway_is_out_and_the_others_finish():
    clock = FakeClock()
    lives = iter([0.01] * 6)
    seen = []
    entrants = {
        "mortal": timing.Entrant(lambda: next(lives), clock),
        "steady": timing.Entrant(lambda: 0.01, clock, during=lambda: seen.append(1)),
    }
    results = timing.race(entrants, repeats=5)
    assert isinstance(results["mortal"], Exception)
    assert len(results["steady"].samples) == 5
    assert seen == [1]  # sensors are read only in the last burst


def test_host_clock_waits_for_the_last_result(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def call():
        nonlocal now
        now += 0.001  # the time to enqueue
        return 7

    def wait(result):
        nonlocal now
        assert result == 7
        now += 0.1

    assert timing.HostClock(wait).burst(call, 10) == pytest.approx((10 * 0.001 + 0.1) / 10)
    assert timing.HostClock(wait).first(call) == (pytest.approx(0.101), 7)


def test_event_clock_flushes_before_it_starts_and_waits_for_its_end(monkeypatch):
    log = []

    class Event:
        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

    array = types.SimpleNamespace(
        nbytes=64, data=types.SimpleNamespace(memset_async=lambda *args: log.append("flush"))
    )
    cuda = types.SimpleNamespace(
        Event=Event,
        get_elapsed_time=lambda start, stop: 30.0,
        runtime=types.SimpleNamespace(deviceSynchronize=lambda: log.append("synchronize")),
    )
    fake = types.SimpleNamespace(empty=lambda *args: array, uint8=np.uint8, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    clock = timing.EventClock()
    seconds = clock.burst(lambda: log.append("call"), 2, lambda: log.append("during"))
    assert seconds == pytest.approx(0.015)
    assert log == [*["flush"] * 4, "record", "call", "call", "record", "during", "wait"]
    log.clear()
    assert clock.first(lambda: log.append("call"))[0] >= 0
    assert log == ["call", "synchronize"]


def test_rotate_takes_turns():
    call = timing.rotate([lambda: 1, lambda: 2])
    assert [call(), call(), call()] == [1, 2, 1]


def test_a_child_that_fails_leaves_the_last_line_of_its_error(monkeypatch):
    monkeypatch.setattr(compile_time, "_FIRST_CALLS", "raise OSError('no such luck')")
    with pytest.raises(RuntimeError, match=r"new process failed: OSError: no such luck$"):
        compile_time.figures("float16", ())


def test_a_child_finds_this_package_and_may_print_before_its_result():
    code = """
import json, sys, rawattn
print("noise")
print(json.dumps([rawattn.__file__, sys.argv[1]]))
"""
    found = child.run(code, "word")
    assert [Path(found[0]).parent.name, found[1]] == ["rawattn", "word"]


def test_host_time_drains_the_queue_before_each_batch_and_keeps_its_waiting_out(monkeypatch):
    now, queued, deepest = 0.0, 0, 0
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: now)
    batches = []

    def call():
        nonlocal now, queued, deepest
        # The first batches are slow, and one later batch is a straggler; neither must matter.
        slow = len(batches) <= 10 or len(batches) == 50
        now += 1.0 if slow else 0.001
        queued += 1
        deepest = max(deepest, queued)

    def synchronize():
        nonlocal now, queued
        now += 5.0 * queued
        batches.append(queued)
        queued = 0

    assert host_time.seconds_a_call(call, synchronize) == pytest.approx(0.001)
    assert batches == [0, *[host_time.BATCH] * 110]
    assert deepest == host_time.BATCH < 100  # a launch queue holds about a thousand


def test_host_times_in_a_new_process_and_in_this_one(monkeypatch):
    asked = []

    def run(code, *arguments):
        asked.append(arguments)
        compile(code, "child", "exec")
        return 11e-6

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(host_time, "seconds_a_call", lambda call, synchronize: 20e-6)
    monkeypatch.setattr(host_time.importlib.util, "find_spec", lambda name: object())
    pretended = dict.fromkeys(host_time._CALLS, lambda verb, dtype: (None, None))
    monkeypatch.setattr(host_time, "_CALLS", pretended)
    found = host_time.figures("backward", "float16", ("FA2",))
    assert asked == [("rawattn", "backward", "float16"), ("torch SDPA", "backward", "float16")]
    assert [figure.value for figure in found] == pytest.approx([11, 20, 11, 20])
    assert len({figure.name for figure in found}) == 4
    assert len(host_time.figures("forward", "float16", ("FA4",))) == 2


def test_a_child_prints_its_host_time(monkeypatch, capsys):
    pretended = {"rawattn": lambda verb, dtype: ((verb, dtype), None)}
    monkeypatch.setattr(host_time, "_CALLS", pretended)
    monkeypatch.setattr(host_time, "seconds_a_call", lambda call, wait: call == ("forward", "x"))
    host_time.report("rawattn", "forward", "x")
    assert capsys.readouterr().out == "true\n"
