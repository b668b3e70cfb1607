"""The streams of a plan are kept until its memory waits for them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from rawattn import attention, plan
from rawattn._runtime import plan_streams
from tests.test_plan import aligned
from tests.test_plan_launches import Machine


class Stream:
    pass


class Streams(Machine):
    """Each call has a new stream, which nothing but the plan keeps. ordered: what `order` was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.handle = 8
        self.alive: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.ordered: list[tuple[int, int]] = []
        self.capturing: set[int] = set()
        monkeypatch.setattr(plan_streams.streams, "is_capturing", self.capturing.__contains__)
        monkeypatch.setattr(plan_streams.streams, "order", self._order)

    def _order(self, before: int, after: int, device: int) -> None:
        assert before in self.alive and after in self.alive, "a stream was destroyed"
        self.ordered.append((before, after))

    def stream(self, device: int) -> int:
        return self.handle

    def stream_keeper(self, device: int) -> Any:
        stream = self.alive[self.handle] = Stream()
        return stream


@pytest.mark.parametrize("may_move", [False, True])
def test_streams_are_kept(monkeypatch: pytest.MonkeyPatch, may_move: bool) -> None:
    machine = Streams(monkeypatch)
    machine.may_move = may_move
    given = [aligned((1, 5, 2, 8)) for _ in range(3)]
    made = plan(attention, *given)
    for machine.handle in (16, 24, 16):
        made(*given)
        made(*given)
    machine.handle = 32
    made(*given, out=aligned((1, 5, 2, 8)))
    gc.collect()
    assert {*machine.alive} == {8, 16, 24, 32}
    assert not machine.ordered
    del made
    gc.collect()
    assert machine.ordered == [(8, 8), (16, 8), (24, 8), (32, 8)]
    assert not machine.alive


def test_a_plan_keeps_some_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own stream waits for those that are kept no longer."""
    monkeypatch.setattr(plan_streams, "_MOST", 3)
    machine = Streams(monkeypatch)
    given = [aligned((1, 5, 2, 8)) for _ in range(3)]
    made = plan(attention, *given)
    for machine.handle in (16, 24, 32, 40):
        made(*given)
    assert machine.ordered == [(8, 8), (16, 8)]
    assert {*machine.alive} == {8, 24, 32, 40}
    machine.capturing.add(8)  # it cannot wait for others now
    machine.handle = 48
    made(*given)
    assert {*machine.alive} == {8, 24, 32, 40, 48}
    assert len(machine.ordered) == 2
    machine.capturing.clear()
    del made
    gc.collect()
    assert machine.ordered[2:] == [(n, 8) for n in (24, 32, 40, 48)]
