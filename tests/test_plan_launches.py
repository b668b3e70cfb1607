"""Plans on the GPU, whose stand-in only records launches: which arrays they are given, and which calls are short."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, attention, attention_backward, plan
from rawattn._interop.native import View
from rawattn._runtime import plan_fast_path, planned
from rawattn._runtime.launches import BoundLaunch
from rawattn._verbs import plan as verbs_plan
from tests.test_plan import OPTIONS_WITH_GRADIENTS, aligned, arrays


class Machine:
    """Records the GPU that a plan is made on and the addresses that it launches with. NumPy arrays stand for CuPy's."""

    may_move = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int = 0) -> None:
        self.device, self.current = device, [0]
        self.planned_on: list[int] = []
        self.launched: list[list[int]] = []
        cupy = SimpleNamespace(cuda=SimpleNamespace(Device=self._switched))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(verbs_plan, "native_of", lambda framework: self)
        monkeypatch.setattr(planned.on_gpu, "prepare_checked", self._find)
        monkeypatch.setattr(planned.streams, "wait", lambda stream, device: None)
        # Graphs of plans: test_plan_graphs.py
        monkeypatch.setattr(planned, "is_short", lambda verb, problem: False)

    @contextlib.contextmanager
    def _switched(self, device: int) -> Iterator[None]:
        self.current.append(device)
        yield
        self.current.pop()

    def _find(self, verb: Any, own: Any, read: Any, inputs: Any, *_: Any) -> Any:
        self.planned_on.append(self.current[-1])
        results = tuple(
            (inputs[verb.lead_index].shape, inputs[verb.lead_index].dtype) for _ in verb.outputs
        )
        memory = SimpleNamespace(
            run=self._run,
            tail=[],
            bound_launches=self._bound_launches,
        )
        prepared = SimpleNamespace(steps=(), plan_memory=lambda *_: memory)
        call = SimpleNamespace(copies=None, results=results, prepared=prepared, problem=None)
        return call, None

    def _run(self, addresses: list[int], stream: int, integers: Any, theirs: Any) -> None:
        self.launched.append(addresses)

    def _bound_launches(self, theirs: Any = ()) -> list[Any]:
        written: list[list[int]] = []
        enqueue = lambda blocks, stream, arguments: self.launched.append(arguments[-1])  # noqa: E731
        return [BoundLaunch(written.append, enqueue, 1, written)]  # type: ignore[arg-type]

    def current_device(self) -> int:
        return self.current[-1]

    def read(self, arrays: Any, required: int) -> Any:
        form = [None if x is None else (x.shape, x.strides, x.dtype, self.device) for x in arrays]
        addresses = [self.address(x) for x in arrays]
        flat = tuple(y for x in form for y in ((None,) if x is None else x))
        return addresses, (*flat, int(np.bitwise_or.reduce(addresses)) % 16), False

    def reader(self, count: int) -> Any:
        return lambda *arrays: self.read(arrays, count)

    def view(self, x: Any) -> View:
        return View(self.address(x), x.shape, x.strides, x.dtype, self.device)

    def address(self, x: Any) -> int:
        return 0 if x is None else int(x.ctypes.data)

    def empty(self, shape: Any, dtype: Any, beside: Any) -> Any:
        return np.empty(shape, dtype)

    def stream(self, device: int) -> int:
        return 0

    def stream_keeper(self, device: int) -> Any:
        return None


@pytest.mark.parametrize("device", [0, 1])
def test_planning_is_done_on_the_gpu_of_the_arrays(
    device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning switches to the GPU of the arrays, because kernels are loaded and memory is allocated on the current GPU."""
    machine = Machine(monkeypatch, device)
    plan(attention, *arrays(1, 5, 2, 8))
    assert machine.planned_on == [device]
    assert machine.current == [0]


def test_arrays_of_options_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of options, planned or given by name, are launched after q, k and v. The seed comes last, after the results."""
    machine = Machine(monkeypatch)
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    bias, sinks = aligned((1, 1, 5, 5), 4), aligned((2,))
    made = plan(attention, q, k, v, bias=bias, sink_logits=sinks, dropout_p=0.5, seed=7)
    other, results = aligned((1, 1, 5, 5), 4), None
    for given, expected in (({}, bias), ({"bias": other}, other)):
        out = made(q, k, v, **given)
        *inputs, first, second, seed = machine.launched.pop()
        assert inputs == [machine.address(x) for x in (q, k, v, expected, sinks)]
        assert first == machine.address(out)
        assert results in (None, (first, second))
        results = (first, second)
        assert seed == 7
    with pytest.raises(ValueError, match=r"^bias: begins 8 bytes past .* and 4 when"):
        made(q, k, v, bias=aligned((1, 1, 5, 5), 8))
    with pytest.raises(ValueError, match=r"^plan: an array does not begin at a multiple of 16"):
        made(aligned((1, 5, 2, 8), 4), k, v)
    assert not machine.launched


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the calls of plans that do not take the fast path."""
    found: list[Any] = []
    call = planned.GpuPlan.__call__

    def counted(self: Any, args: Any, *more: Any) -> Any:
        found.append(args)
        return call(self, args, *more)

    monkeypatch.setattr(planned.GpuPlan, "__call__", counted)
    return found


def test_calls_with_the_planned_arrays_are_short(
    monkeypatch: pytest.MonkeyPatch, long_ways: list[Any]
) -> None:
    """Such calls launch with their addresses, also without naming them, and behind calls with other arrays."""
    machine = Machine(monkeypatch)
    q, k, v, other = (aligned((1, 5, 2, 8)) for _ in range(4))
    made = plan(attention, q, k, v)
    for given in ((), (q, k, v), (other, k, v), (), (other, k, v), (q, k, v), (q, other, v), ()):
        out = made(*given)
        expected = [machine.address(x) for x in (*(given or (q, k, v)), out)]
        assert [x for x in machine.launched.pop() if x][: len(expected)] == expected
    assert not long_ways
    q.shape = (1, 5, 4, 4)
    for given in ((), (q, k, v)):
        with pytest.raises(ValueError, match=r"^q: got shape \(1, 5, 4, 4\)"):
            made(*given)
    assert not machine.launched


def test_the_planned_arrays_on_other_streams_and_gpus(
    monkeypatch: pytest.MonkeyPatch, long_ways: list[Any]
) -> None:
    """Calls alike are launched on the current stream, and take the slow path where another GPU is current."""
    machine, current, on = Machine(monkeypatch), [0], []
    machine.stream = lambda device: current[0]  # type: ignore[method-assign]
    enqueue = lambda blocks, stream, arguments: on.append(stream)  # noqa: E731
    bound = BoundLaunch(lambda addresses: None, enqueue, 1, None)  # type: ignore[arg-type]
    monkeypatch.setattr(machine, "_bound_launches", lambda theirs=(): [bound, bound])
    monkeypatch.setattr(planned.streams, "order", lambda before, after, device: None)
    given = [aligned((1, 5, 2, 8)) for _ in range(3)]
    made = plan(attention, *given)
    for stream in (8, 8, 16, 16, 8, 16):
        current[0] = stream
        made(*given)
        made()
        assert on == [stream] * 4
        on.clear()
    assert not long_ways
    machine.current.append(1)
    made(*given)
    assert len(long_ways) == 1
    assert not on


def _with_arrays() -> tuple[list[Any], list[Any], Any]:
    """A planned call with arrays among its options: its inputs, those arrays, and the plan."""
    inputs = [aligned((1, 5, 2, 8)) for _ in range(3)]
    bias, sinks = aligned((1, 1, 5, 5)), aligned((2,))
    options = {"bias": bias, "sink_logits": sinks, "dropout_p": 0.5, "seed": 7}
    return inputs, [bias, sinks], plan(attention, *inputs, **options)


def test_arrays_of_options_that_are_left_out_cost_nothing(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    (q, k, v), (bias, sinks), made = _with_arrays()
    other = aligned((1, 1, 5, 5))
    for more, expected in (
        ((), (bias, sinks)),
        ((other,), (other, sinks)),
        ((other, sinks), (other, sinks)),
    ):
        made(q, k, v, *more)
        launched = machine.launched.pop()
        assert launched[:5] == [machine.address(x) for x in (q, k, v, *expected)]
        assert launched[-1] == 7
    assert not long_ways
    with pytest.raises(ValueError, match=r"^bias: begins 8 bytes past"):
        made(q, k, v, aligned((1, 1, 5, 5), 8))


def test_a_planned_backward_with_a_bias_and_without_dlse(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    given = [aligned((1, 5, 2, 8)) for _ in range(5)] + [aligned((1, 2, 5))]
    bias = aligned((1, 1, 5, 5))
    made = plan(attention_backward, *given, bias=bias)
    made(*given)
    assert machine.launched[-1][:8] == [*map(machine.address, given), 0, machine.address(bias)]
    assert not long_ways


def test_a_misaligned_array_beside_a_misaligned_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misaligned q is refused beside a misaligned bias, though all addresses or-ed together align as planned."""
    machine = Machine(monkeypatch)
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    made = plan(attention, q, k, v, bias=aligned((1, 1, 5, 5), 8))
    for given in ({}, {"bias": aligned((1, 1, 5, 5), 8)}, {"bias": aligned((1, 1, 5, 5), 8)}):
        made(q, k, v, **given)
    machine.launched.clear()
    for given in ({}, {"bias": aligned((1, 1, 5, 5), 8)}):
        with pytest.raises(ValueError, match=r"^plan: an array does not begin at a multiple of"):
            made(aligned((1, 5, 2, 8), 8), k, v, **given)
    assert not machine.launched


def test_named_arrays_take_the_short_way(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with named arrays take the fast path from the second call on that names the same arguments."""
    machine = Machine(monkeypatch)
    (q, k, v), (bias, sinks), made = _with_arrays()
    made(q, k, v)
    own = machine.launched.pop()[5:7]
    for n in range(3):
        other, out = aligned((1, 1, 5, 5)), aligned((1, 5, 2, 8))
        assert made(q, k, v, bias=other, out=out) is out
        expected = [*map(machine.address, (q, k, v, other, sinks, out)), own[1], 7]
        assert machine.launched.pop()[:8] == expected
        assert len(long_ways) == 1, n
    assert made(q, v=v, k=k) is not out
    assert made(q, v=k, k=v) is not out
    assert machine.launched.pop()[:3] == [*map(machine.address, (q, v, k))]
    assert len(long_ways) == 2
    for shared in (q, bias):
        room = aligned((2, 5, 2, 8))
        given = {"bias": room[1:].reshape(-1)[:25].reshape(1, 1, 5, 5)}
        given |= {"out": room[:1] if shared is q else room[1:]}
        with pytest.raises(ValueError, match=r"^out: shares memory with (q|bias)"):
            made(room[:1], k, v, **given)
    with pytest.raises(ValueError, match=r"^out: got shape"):
        made(q, k, v, bias=other, out=aligned((1, 5, 2, 16)))


def test_named_gradients_take_the_short_way(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    given = [aligned((1, 5, 2, 8)) for _ in range(5)] + [aligned((1, 2, 5))]
    made = plan(attention_backward, *given)
    made(*given)
    own = machine.launched.pop()[7:10]
    for _ in range(3):
        dq, dv = aligned((1, 5, 2, 8)), aligned((1, 5, 2, 8))
        found = made(*given, into=Gradients(dq=dq, dv=dv))
        assert found.dq is dq and found.dv is dv
        wanted = [machine.address(dq), own[1], machine.address(dv)]
        assert machine.launched.pop()[7:10] == wanted
    assert len(long_ways) == 1
    with pytest.raises(ValueError, match=r"^(into\.)?d[qv]: shares memory with (into\.)?d[qv]"):
        made(*given, into=Gradients(dq=dq, dv=dq))
    made(*given, into=Gradients(dk=dq))
    assert machine.launched.pop()[7:10] == [own[0], machine.address(dq), own[2]]
    for _ in range(2):
        for named in ({"lse": given[5], "out": given[4]}, {"out": given[4], "lse": given[5]}):
            made(*given[:4], **named)  # the forward's out, which the backward reads
            assert machine.launched.pop()[:6] == [*map(machine.address, given)]


def test_gradients_of_options_take_the_short_way(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    given = [aligned((1, 5, 2, 8)) for _ in range(5)] + [aligned((1, 2, 5))]
    made = plan(attention_backward, *given, **OPTIONS_WITH_GRADIENTS)
    made(*given)
    own = machine.launched.pop()
    for _ in range(3):
        slope, sinks = aligned((1, 5, 2, 8)), aligned((1, 5, 2, 8))
        into = Gradients(dsink_logits=sinks, captured={"slope": slope})
        found = made(*given, into=into)
        assert found.captured["slope"] is slope and found.dsink_logits is sinks
        expected = [*own[:-2], machine.address(sinks), machine.address(slope)]
        assert machine.launched.pop() == expected
    assert len(long_ways) == 1
    with pytest.raises(ValueError, match=r"^into\.captured: got an array for 'n'"):
        made(*given, into=Gradients(captured={"n": slope}))


def test_inputs_in_the_memory_of_results_are_refused(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's own result of one call is no input of its next call, which would write it while it reads it."""
    machine = Machine(monkeypatch)
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    made = plan(attention, q, k, v)
    out = made(q, k, v)
    for _ in range(2):
        made(q, v=v, k=k)
    machine.launched.clear()
    for given, named in (
        ((q, out, v), {}),
        ((q,), {"k": out, "v": v}),
        ((q,), {"v": v, "k": out}),
    ):
        with pytest.raises(ValueError, match=r"^k: shares memory with out, which this plan writes"):
            made(*given, **named)
    assert not machine.launched
    for _ in range(2):  # with an array of the caller to write the plan's own is free
        mine = aligned((1, 5, 2, 8))
        assert made(q, out, v, out=mine) is mine
    long_ways.clear()
    assert made(q, k, v) is made(q, aligned((1, 5, 2, 8)), v) is out
    assert not long_ways


def test_inputs_that_lie_beside_results_as_planned(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of one array that interleave with the array to write are told from those that share memory with it."""
    machine = Machine(monkeypatch)
    room, other = aligned((1, 5, 4, 2, 8)), aligned((1, 5, 4, 2, 8))
    q, k, v, out = (room[:, :, n] for n in range(4))
    made = plan(attention, q, k, v, out=out)
    assert made(q, k, v) is made(k, v, q) is out
    assert len(long_ways) == 1  # the second, whose distances are not those of planning time
    assert made(other[:, :, 0], k, other[:, :, 2]) is out
    machine.launched.clear()
    with pytest.raises(ValueError, match=r"^v: shares memory with out"):
        made(q, k, out)
    assert not machine.launched


class Parameter:
    """A tensor that gets other memory, as a parameter of torch does by `module.to()`."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)


def test_arrays_of_planning_time_that_get_other_memory(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that leaves out a parameter reads its present memory, not that of planning time, which is freed."""
    machine = Machine(monkeypatch)
    machine.may_move = True
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    bias = Parameter(aligned((1, 1, 5, 5)))
    made = plan(attention, q, k, v, bias=bias)
    freed = bias.data
    for _ in range(2):
        for given, named in (((q, k, v), {}), ((q, k), {"v": v})):
            made(*given, **named)
            assert machine.launched.pop()[3] == machine.address(bias.data)
    assert len(long_ways) == 1
    bias.data = aligned((1, 1, 5, 5))
    for given, named in (((q, k, v), {}), ((q, k), {"v": v}), ((q,), {"v": v, "k": k})):
        for _ in range(2):
            made(*given, **named)
            assert machine.launched.pop()[3] == machine.address(bias.data) != machine.address(freed)
    bias.data = aligned((1, 1, 5, 5)).view(np.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^bias: got .*int32.* the plan is for .*float32"):
            made(q, k, v)
    assert not machine.launched


def test_lengths_on_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of a call that lie on another GPU than those of planning time reach no kernel."""

    def lengths(device: int) -> Any:
        data = SimpleNamespace(ptr=64, device_id=device)
        return SimpleNamespace(shape=(2,), dtype=np.dtype(np.int32), strides=(4,), data=data)

    made = object.__new__(planned.GpuPlan)
    seqs = SimpleNamespace(seqlen_k=lengths(0), cu_seqlen_k=None)
    made._device, made._options = 0, SimpleNamespace(seqs=seqs)  # type: ignore[assignment]
    integers: dict[int, int] = {}
    with pytest.raises(
        ValueError, match=r"^seqlen_k: got int32 of shape \(2,\) on GPU 1, expected"
    ):
        made._replace(integers, "seqlen_k", lengths(1))
    assert not integers
    made._replace(integers, "seqlen_k", lengths(0))
    assert integers == {3: 64}


def test_what_a_plan_writes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(plan_fast_path, "version_bumper", lambda *x: lambda: told.extend(x))
    for module in (planned, plan_fast_path):
        monkeypatch.setattr(module, "bump_versions", lambda *x: told.extend(x))
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    made = plan(attention, q, k, v)
    out = made(q, k, v)
    assert told[0] is out
    for n in (1, 2):
        made(q, v=v, k=k)
        assert told[2 * n] is out
    for n in (3, 4):
        other = aligned((1, 5, 2, 8))
        made(q, k, v, out=other)
        assert told[2 * n] is other


def test_pages_that_a_plan_writes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(plan_fast_path, "bump_versions", lambda *x: told.extend(x))
    monkeypatch.setattr(planned.on_gpu, "possible_overlaps", lambda *_: ())
    k, k_pages, v_pages = aligned((1, 1, 2, 8)), aligned((2, 4, 2, 8)), aligned((2, 4, 2, 8))
    table = np.zeros((1, 1), np.int32)
    made = plan(rawattn.append_kv, k, k, k_pages, v_pages, table, seqlen_k=[1])
    made(k, k, k_pages, v_pages, table)
    assert [x is y for x, y in zip(told, (k_pages, v_pages), strict=True)] == [True, True]


def test_a_stream_that_is_gone_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a plan waits for all streams that used it, also if CUDA does not know one of them any more."""
    machine, ordered, wrong, current = Machine(monkeypatch), set(), [], [0]
    machine.stream = lambda device: current[0]  # type: ignore[method-assign]

    def order(before: int, after: int, device: int) -> None:
        if before == 8:
            raise RuntimeError("cudaErrorContextIsDestroyed")
        ordered.add(before)

    monkeypatch.setattr(planned.streams, "order", order)
    monkeypatch.setattr(sys, "unraisablehook", wrong.append)
    given = arrays(1, 5, 2, 8)
    made = plan(attention, *given)
    for stream in (8, 16, 24):
        current[0] = stream
        made(*given)
    del made
    gc.collect()
    assert ordered == {0, 16, 24}
    assert not wrong
