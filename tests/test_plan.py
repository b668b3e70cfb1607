"""Plans on the CPU: a planned call is an ordinary call with the options of planning time."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, SeqLayout, attention, attention_backward, plan
from rawattn._interop.native import View
from rawattn._runtime import plan_fast_path, planned
from rawattn._verbs import plan as verbs_plan

RNG = np.random.default_rng(0)


def arrays(*shape: int) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def aligned(shape: tuple[int, ...], past: int = 0) -> np.ndarray:
    """Zeros that begin `past` bytes behind a multiple of 16."""
    room = np.zeros(int(np.prod(shape)) * 4 + 32, np.uint8)
    begin = -room.ctypes.data % 16 + past
    return room[begin : begin + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


def test_a_plan_is_the_call_with_its_options() -> None:
    q, k, v = arrays(2, 7, 4, 16)
    made = plan(attention, q, k, v, causal=True, window=(3, 0), scale=0.3, backend="cpu")
    assert isinstance(made, rawattn.Plan)
    options: dict[str, Any] = {"causal": True, "window": (3, 0), "scale": 0.3, "backend": "cpu"}
    for given in ((q, k, v), tuple(arrays(2, 7, 4, 16))):
        assert np.array_equal(made(*given), attention(*given, **options))
    assert np.array_equal(made(), attention(q, k, v, **options))
    assert np.array_equal(made(q, v=q, k=v), attention(q, v, q, **options))


def test_results_go_where_the_caller_wants_them() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    made = plan(attention, q, k, v, return_lse=True, backend="cpu")
    own = np.empty_like(q)
    out, lse = made(q, k, v, out=own)
    assert out is own
    assert np.array_equal(own, attention(q, k, v, backend="cpu"))
    assert lse.shape == (1, 2, 5)
    with pytest.raises(TypeError, match=r"^into: this plan writes its results to out="):
        made(q, k, v, into=Gradients())


def test_the_backward() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    seqs = SeqLayout(seqlen_q=[4], seqlen_k=[3])
    out, lse = attention(q, k, v, seqs=seqs, return_lse=True, backend="cpu")
    given = (np.ones_like(out), q, k, v, out, lse)
    exact = attention_backward(*given, seqs=seqs, backend="cpu")
    made = plan(attention_backward, *given, seqs=seqs, backend="cpu")
    into = Gradients(dq=np.full_like(q, 7))
    for gradients in (made(*given), made(*given, into=into)):
        assert isinstance(gradients, Gradients)
        for name in ("dk", "dv"):
            assert np.array_equal(getattr(gradients, name), getattr(exact, name))
    assert gradients.dq is into.dq
    assert into.dq is not None and np.array_equal(into.dq[:, :4], exact.dq[:, :4])
    assert np.all(into.dq[:, 4:] == 7), "padding of the caller's own changed"


OPTIONS_WITH_GRADIENTS: dict[str, Any] = {
    "bias": aligned((1, 1, 5, 5)),
    "sink_logits": aligned((2,)),
    "score_mod": rawattn.ScoreMod(
        "score * slope[head] + n[head]", wrt=("slope",), n=aligned((2,)), slope=np.ones(2, "f4")
    ),
}


def test_the_backward_writes_gradients_of_options() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    options = {**OPTIONS_WITH_GRADIENTS, "backend": "cpu"}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = (out, q, k, v, out, lse)
    exact = attention_backward(*given, **options)
    made = plan(attention_backward, *given, **options)
    slope = np.full(2, 7, np.float32)
    into = Gradients(
        dbias=aligned((1, 1, 5, 5)), dsink_logits=aligned((2,)), captured={"slope": slope}
    )
    found = made(*given, into=into)
    assert found.dbias is into.dbias and np.array_equal(found.dbias, exact.dbias)
    assert found.dsink_logits is into.dsink_logits
    assert np.array_equal(found.dsink_logits, exact.dsink_logits)
    assert found.captured["slope"] is slope and np.array_equal(slope, exact.captured["slope"])


def test_arrays_for_gradients_that_a_plan_does_not_have_are_refused() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    given = (out, q, k, v, out, lse)
    for options, says in (
        ({"dbias": lse}, r"^into\.dbias: got an array, but the call has no such gradient"),
        ({"dsink_logits": lse}, r"^into\.dsink_logits: got an array, but the call has no such"),
        ({"captured": {"slope": lse}}, r"^into\.captured: got an array for 'slope', .*: none$"),
    ):
        made = plan(attention_backward, *given, backend="cpu")
        with pytest.raises(ValueError, match=says):
            made(*given, into=Gradients(**options))
    made = plan(attention_backward, *given, **OPTIONS_WITH_GRADIENTS, backend="cpu")
    with pytest.raises(ValueError, match=r"^into\.captured: got an array for 'n', .*: slope$"):
        made(*given, into=Gradients(captured={"n": lse}))


def test_arrays_are_like_those_of_planning_time() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    made = plan(attention, q, k, v, backend="cpu")
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 4, 2, 8\), .*the plan is for .*5"):
        made(q[:, :4], k, v)
    with pytest.raises(ValueError, match=r"^v: got .*float16; the plan is for .*float32"):
        made(q, k, v.astype(np.float16))
    with pytest.raises(TypeError, match=r"^plan: got 4 arrays, expected q, k, v, in this order"):
        made(q, k, v, v)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    backward = plan(attention_backward, out, q, k, v, out, lse, backend="cpu")
    with pytest.raises(ValueError, match=r"^dlse: given now or when"):
        backward(out, q, k, v, out, lse, dlse=lse)
    combined = plan(rawattn.combine, [out, out], [lse, lse])
    with pytest.raises(ValueError, match=r"^outs: got a list of 1, expected a list of 2"):
        combined([out], [lse])
    with pytest.raises(ValueError, match=r"^lses\[1\]: got shape"):
        combined([out, out], [lse, lse[:, :1]])


def test_all_arrays_are_given_by_their_names() -> None:
    """All arrays can be given by name: those of a score function by the names in it, and the forward's out as `out` of the
    backward, which reads it."""
    q, k, v = arrays(1, 5, 2, 8)
    slopes = rawattn.ScoreMod("score + slope[head] * kv_idx", slope=np.ones(2, np.float32))
    mask = rawattn.block_mask(np.tri(5, dtype=bool))
    made = plan(attention, q, k, v, score_mod=slopes, mask=mask, return_lse=True, backend="cpu")
    flat = rawattn.ScoreMod("score + slope[head] * kv_idx", slope=np.zeros(2, np.float32))
    other = rawattn.block_mask(np.tri(5, k=1, dtype=bool))
    out, lse = made(q, k, v, slope=flat.arrays["slope"], mask=other)
    assert np.array_equal(out, attention(q, k, v, score_mod=flat, mask=other, backend="cpu"))
    with pytest.raises(ValueError, match=r"^mask: got a BlockMask .*1, 6, .*expected a BlockMask"):
        made(q, k, v, mask=rawattn.block_mask(np.ones((6, 5), bool)))
    with pytest.raises(TypeError, match=r"^foo: this plan takes q, k, v, mask, slope once each"):
        made(q, k, v, foo=slopes)
    backward = plan(attention_backward, out, q, k, v, out, lse, backend="cpu")
    expected = attention_backward(out, q, k, v, out, lse, backend="cpu")
    given = backward(dout=out, q=q, k=k, v=v, out=out, lse=lse)
    assert np.array_equal(given.dq, expected.dq)


@pytest.mark.parametrize("pair", [False, True])
def test_integers_of_the_host_may_be_given_again(pair: bool) -> None:
    q, pages, _ = arrays(2, 3, 2, 8)
    table: Any = np.array([[1, 0], [0, -1]], np.int32)
    if pair:
        table = (np.array([0, 2, 3]), np.array([1, 0, 0], np.int32))
    given: dict[str, Any] = {"seqlen_k": [5, 2], "seqs": SeqLayout(seqlen_q=[3, 1])}
    made = plan(rawattn.paged_attention, q, pages, pages, table, **given, backend="cpu")
    expected = rawattn.paged_attention(q, pages, pages, table, **given, backend="cpu")
    assert np.array_equal(made(q, pages, pages, table, seqlen_k=[5, 2], seqlen_q=[3, 1]), expected)
    assert np.array_equal(made(q, pages, pages, block_table=table), expected)
    with pytest.raises(ValueError, match=r"^seqlen_k: got other values than .* planning time"):
        made(q, pages, pages, table, seqlen_k=[5, 3])
    with pytest.raises(ValueError, match=r"^cu_seqlen_q: the call was not planned with"):
        made(q, pages, pages, table, cu_seqlen_q=[0, 3, 4])
    if not pair:
        assert np.array_equal(made(q, pages, pages, table.tolist()), expected)
        with pytest.raises(ValueError, match=r"^block_table: got a pair, expected a table of two"):
            made(q, pages, pages, ([0, 2, 3], [1, 0, 0]))
    else:
        with pytest.raises(ValueError, match=r"^block_table's indptr: got other values than when"):
            made(q, pages, pages, ([0, 1, 3], [1, 0, 0]))
    for far in (2**32, -(2**32)):  # int32 would wrap both to page 0
        listed: Any = ([0, 2, 3], [1, far, 0]) if pair else [[1, far], [0, -1]]
        with pytest.raises(
            ValueError, match=rf"^block_table: got page id {far}, expected .* int32"
        ):
            made(q, pages, pages, listed)


def test_plans_are_shown_by_their_function_and_arrays() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    bias, mask = aligned((5, 5)), rawattn.block_mask(np.tri(5, dtype=bool))
    shown = "q float32[1, 5, 2, 8], k float32[1, 5, 2, 8], v float32[1, 5, 2, 8]"
    made = plan(attention, q, k, v, bias=bias, mask=mask, backend="cpu")
    assert repr(made) == f"<rawattn.Plan of attention: {shown}, bias float32[5, 5], mask BlockMask>"
    made = plan(attention, q, k, v, mask=np.ones((5, 5), bool), backend="cpu")
    assert repr(made) == f"<rawattn.Plan of attention: {shown}, mask bool[5, 5]>"
    lse = np.zeros((1, 2, 5), np.float32)
    for count in (2, 70):  # so many are no plan of the GPU
        made = plan(rawattn.combine, [q] * count, np.stack([lse] * count))
        assert repr(made) == (
            f"<rawattn.Plan of combine: outs {count} x float32[1, 5, 2, 8], lses float32[{count}, 1, 2, 5]>"
        )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_plans_are_not_copied(copied: Any) -> None:
    q, k, v = arrays(1, 5, 2, 8)
    with pytest.raises(
        TypeError, match=r"^Plan: got a copy or a pickle .*call rawattn\.plan again"
    ):
        copied(plan(attention, q, k, v, backend="cpu"))


class Machine:
    """Records the GPU that a plan is made on and the addresses that it launches with. NumPy arrays stand for CuPy's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int = 0) -> None:
        self.device, self.current = device, [0]
        self.planned_on: list[int] = []
        self.launched: list[list[int]] = []
        cupy = SimpleNamespace(cuda=SimpleNamespace(Device=self._switched))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(verbs_plan, "native_of", lambda framework: self)
        monkeypatch.setattr(planned.on_gpu, "prepare_checked", self._find)
        monkeypatch.setattr(planned.streams, "wait", lambda stream, device: None)

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
        launches = [(self._launch, 1)]
        memory = SimpleNamespace(
            run=self._run, tail=[], launches=launches, launches_leaving_padding=lambda _: launches
        )
        prepared = SimpleNamespace(steps=(), plan_memory=lambda *_: memory)
        return SimpleNamespace(copies=None, results=results, prepared=prepared), None

    def _run(self, addresses: list[int], stream: int, integers: Any, theirs: Any) -> None:
        self.launched.append(addresses)

    def _launch(self, addresses: list[int], blocks: int, stream: int) -> None:
        self.launched.append(addresses)

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


def test_arrays_of_options_that_are_left_out_cost_nothing(
    long_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    bias, sinks = aligned((1, 1, 5, 5)), aligned((2,))
    made = plan(attention, q, k, v, bias=bias, sink_logits=sinks, dropout_p=0.5, seed=7)
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
    q, k, v = (aligned((1, 5, 2, 8)) for _ in range(3))
    bias, sinks = aligned((1, 1, 5, 5)), aligned((2,))
    made = plan(attention, q, k, v, bias=bias, sink_logits=sinks, dropout_p=0.5, seed=7)
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
