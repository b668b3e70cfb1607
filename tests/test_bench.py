"""`rawattn bench` without a GPU: counters, timing, isolated peers, reports; and a run with one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rawattn
from rawattn import cli, reference
from rawattn._bench import (
    cases,
    child,
    compile_time,
    contender,
    counters,
    dtypes,
    grids,
    host_time,
    machine,
    measure,
    memory,
    ours,
    peers,
    render,
    suites,
    timing,
)
from rawattn._bench.report import Figure, Report, Result, Row

_bound = st.none() | st.integers(0, 12)


# Counters


@given(
    len_q=st.integers(0, 12),
    len_k=st.integers(0, 12),
    causal=st.booleans(),
    window=st.none() | st.tuples(_bound, _bound),
    sink=st.integers(0, 5),
    align=st.sampled_from(["bottom-right", "top-left"]),
)
def test_visible_against_the_rule_spelled_out(len_q, len_k, causal, window, sink, align):
    left, right = window or (None, None)
    right = 0 if causal else right
    off = len_k - len_q if align == "bottom-right" else 0
    mask = np.zeros((len_q, len_k), bool)
    for i, j in itertools.product(range(len_q), range(len_k)):
        below = right is None or j <= i + off + right
        near = left is None or j >= i + off - left or j < sink
        mask[i, j] = below and near
    expected = counters.Visible(mask.sum(), mask.any(1).sum(), mask.any(0).sum())
    got = counters.visible(len_q, len_k, causal=causal, window=window, sink=sink, align=align)
    assert got == expected


def test_flops_and_bytes_of_a_case():
    case = cases.Case("dense", "", (4, 4), nheads_q=6, nheads_kv=2, headdim=8, causal=True)
    assert case.flops == 2 * (4 * 5 // 2) * 6 * 4 * 8  # 10 pairs a sequence, 4 D operations each
    q_and_out, k_and_v = 2 * 8 * 6 * 8, 2 * 8 * 2 * 8
    assert case.nbytes(2) == 2 * (q_and_out + k_and_v)


def test_a_window_that_drops_rows_and_keys_reads_less():
    seen = counters.visible(10, 4, window=(0, 0), align="top-left")
    assert seen == counters.Visible(pairs=4, rows=4, keys=4)
    assert counters.forward_bytes(seen, 10, 1, 1, 8, 8, 2) == 2 * 8 * (4 + 4 + 4 + 10)


@given(
    len_q=st.integers(1, 6),
    len_k=st.integers(1, 6),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    headdims=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_flops_and_bytes_of_a_backward_against_products_done_one_by_one(
    len_q, len_k, causal, heads, headdims
):
    nheads_q, nheads_kv = heads
    headdim, headdim_v = headdims
    operations, read, written = 0, set(), set()
    for head, i, j in itertools.product(range(nheads_q), range(len_q), range(len_k)):
        if causal and j > i + len_k - len_q:
            continue
        shared = head // (nheads_q // nheads_kv)
        read |= {("q", head, i, d) for d in range(headdim)}
        read |= {("k", shared, j, d) for d in range(headdim)}
        read |= {(name, head, i, d) for name in ("out", "dout") for d in range(headdim_v)}
        read |= {("v", shared, j, d) for d in range(headdim_v)}
        read |= {("lse", head, i, half) for half in range(2)}  # two elements of 16 bits
        for over in (headdim, headdim_v, headdim_v, headdim, headdim):  # S, dP, dV, dQ, dK
            operations += 2 * over
    for head, i, d in itertools.product(range(nheads_q), range(len_q), range(headdim)):
        written.add(("dq", head, i, d))
    for head, j in itertools.product(range(nheads_kv), range(len_k)):
        written |= {("dk", head, j, d) for d in range(headdim)}
        written |= {("dv", head, j, d) for d in range(headdim_v)}
    seen = counters.visible(len_q, len_k, causal=causal)
    assert counters.backward_flops(seen.pairs, nheads_q, *headdims) == operations
    nbytes = counters.backward_bytes(seen, len_q, len_k, *heads, *headdims, 2)
    assert nbytes == 2 * (len(read) + len(written))


def test_a_case_counts_what_it_is():
    case = cases.Case("ragged", "", (3, 1, 5), 6, 2, 8, causal=True, packed=True, backward=True)
    forward = dataclasses.replace(case, backward=False)
    assert case.flops == 2.5 * forward.flops == 10 * (6 + 1 + 15) * 6 * 8
    of_q, of_k = 9 * 6 * 8, 9 * 2 * 8
    assert case.nbytes(2) == 2 * (4 * of_q + 4 * of_k) + 4 * 9 * 6  # q, out, dout, dq; k, v, dk, dv


# Cases


def test_forward_cases_are_the_promised_shapes():
    suite = grids.forward()
    names = [case.name for case in suite]
    assert len(set(names)) == len(names)
    assert all(case.over is None or case.over in names for case in suite)
    assert all(len(set(case.seqlens)) == 1 or case.packed for case in suite)
    dense = [case for case in suite if case.kind == "dense"]
    assert len(dense) == 24
    assert {(case.tokens, case.nheads_q * case.headdim) for case in dense} == {(16384, 2048)}
    for case in suite:
        if case.kind == "ragged":
            assert min(case.seqlens) >= 64
            assert max(case.seqlens) <= 4096
            assert abs(case.tokens - 16 * 2048) < 500
    assert {case.name for case in grids.forward(quick=True)} < set(names)


def test_select_takes_whole_words_and_brings_what_a_case_is_divided_by():
    suite = grids.forward()
    names = [case.name for case in cases.select(suite, "dense D64 causal")]
    assert names == [f"dense D64 S{s} causal" for s in (1024, 2048, 4096, 16384)]
    names = [case.name for case in cases.select(suite, "straggler")]
    assert names == ["straggler D128 1x16384+512x32 causal", "straggler-ref D128 1x16384 causal"]
    assert cases.select(suite, "") == suite
    assert cases.select(suite, "D6") == []


def test_backward_cases_are_the_promised_shapes():
    suite = grids.backward()
    by_name = {case.name: case for case in suite}
    assert len(by_name) == len(suite)
    assert all(case.backward for case in suite)
    assert all(case.over is None or case.over in by_name for case in suite)
    forward = {case.name: case for case in grids.forward()}
    for case in suite:
        assert case.seqlens == forward[case.name].seqlens
        assert case.flops == 2.5 * forward[case.name].flops
    dense = [case for case in suite if case.kind == "dense"]
    assert len(dense) == 12
    assert all(case.deterministic and {"cuDNN", "FA2", "FA4"} == set(case.peers) for case in dense)
    assert {case.label for case in dense} == {"S4096", "S16384"}
    for causal, heads in itertools.product(("causal", "full"), ("H16/16", "H32/8")):
        ragged = by_name[f"ragged D128 {heads} {causal}"]
        assert ragged.deterministic
        assert {"FA2", "FA4"} == set(ragged.peers)
        assert set(by_name[ragged.over].seqlens) == {2048}
    assert "JAX cuDNN" not in {peer for case in suite for peer in case.peers}
    quick = {case.name for case in grids.backward(quick=True)}
    assert quick < set(by_name)
    assert "ragged D128 H16/16 full" in quick


# Timing


class FakeClock:
    """A call returns its seconds; remembers who ran and how often."""

    def __init__(self):
        self.log = []

    def burst(self, call, calls, during=None):
        seconds = [call() for _ in range(calls)]
        if during is not None:
            during()
        self.log.append((round(seconds[0], 6), calls))
        return sum(seconds) / calls

    def first(self, call):
        return 1.5, call()


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
    assert seen == [1]  # sensors are read in the last burst alone


def test_host_clock_waits_for_the_last_result(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def call():
        nonlocal now
        now += 0.001  # enqueueing
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


# Host time


def test_host_time_drains_the_queue_before_each_batch_and_keeps_its_waiting_out(monkeypatch):
    now, queued, deepest = 0.0, 0, 0
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: now)
    batches = []

    def call():
        nonlocal now, queued, deepest
        # The first batches are slow, and one straggler among the others must not matter.
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


# The contenders themselves, as far as they go without a GPU


def _small(packed=False, **more):
    """A backward of two sequences, and its inputs as NumPy arrays."""
    case = cases.Case(
        "dense", "", (6, 6), 4, 2, 8, causal=True, packed=packed, backward=True, **more
    )
    rng = np.random.default_rng(0)
    leading = (12,) if packed else (2, 6)
    q, k, v, dout = (
        rng.standard_normal((*leading, heads, 8), dtype=np.float32) for heads in (4, 2, 2, 4)
    )
    starts = np.array([0, 6, 12], np.int32) if packed else None
    return case, contender.Inputs((q, k, v), dout=dout, seqstart=starts, max_seqlen=6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ours_computes_the_gradients_of_the_case(packed, deterministic):
    case, inputs = _small(packed)
    seqs = rawattn.SeqLayout(seqstart_q=inputs.seqstart) if packed else None
    out, lse = reference.attention(*inputs.qkv, seqs=seqs, causal=True, return_lse=True)
    expected = reference.attention_backward(
        inputs.dout, *inputs.qkv, out, lse, seqs=seqs, causal=True
    )
    side = ours.Ours("rawattn", deterministic=deterministic)
    call = side.prepare(case, inputs)
    assert call.keywords["deterministic"] is deterministic
    got = side.read(case, call())
    assert not measure.disagreement(got, ("reference", expected[:3]))
    forward = dataclasses.replace(case, backward=False)
    assert not measure.disagreement(
        side.read(forward, side.prepare(forward, inputs)()), ("reference", (out,))
    )


def test_who_is_asked_for_which_suite():
    names = {suite: [c.name for c in suites.contenders(suite)] for suite in suites.SUITES}
    assert names["forward"][-4:] == ["cuDNN", "FA2", "FA4", "JAX cuDNN"]
    assert names["backward"][-4:] == ["deterministic", "cuDNN", "FA2", "FA4"]
    for suite in suites.SUITES:
        everybody = suites.contenders(suite)
        assert everybody[0].name == "rawattn"
        assert everybody[0].ours
        assert {c.name for c in everybody if not c.ours} <= set(grids.PEERS)
    case = grids.backward()[0]
    asked = [c.name for c in suites.contenders("backward") if c.takes(case)]
    assert asked[-4:] == ["deterministic", "cuDNN", "FA2", "FA4"]
    base = next(case for case in grids.backward() if case.kind == "ragged-ref")
    assert not ours.Ours("deterministic", deterministic=True).takes(base)


class Tensor:
    """As much of a torch tensor as a contender touches; remembers what was done to it."""

    def __init__(self, name):
        self.name, self.requires_grad = name, False

    def requires_grad_(self):
        self.requires_grad = True
        return self

    def transpose(self, a, b):
        view = Tensor(f"{self.name}^T")
        view.requires_grad = self.requires_grad
        return view


@pytest.fixture
def pretend_torch(monkeypatch):
    """Modules with the names that contenders call; `log` holds the calls of attention and of grad."""
    log, enabled = [], []

    @contextlib.contextmanager
    def switched(on):
        enabled.append(on)
        yield
        enabled.pop()

    def attention(name, returned):
        def call(*args, **options):
            tensors = [x for x in args if isinstance(x, Tensor)]
            recorded = enabled[-1] and all(x.requires_grad for x in tensors[:3])
            log.append((name, [getattr(x, "name", x) for x in args], options, recorded))
            return returned

        return call

    def grad(out, leaves, dout, retain_graph):
        log.append(("grad", out.name, [x.name for x in leaves], dout.name, retain_graph))
        return tuple(Tensor(f"d{leaf.name}") for leaf in leaves)

    out = Tensor("out")
    torch = types.ModuleType("torch")
    torch.no_grad, torch.enable_grad = lambda: switched(False), lambda: switched(True)
    torch.from_dlpack = Tensor
    torch.cuda = types.SimpleNamespace(current_stream=lambda: types.SimpleNamespace(cuda_stream=0))
    torch.autograd = types.SimpleNamespace(grad=grad)
    functional = types.SimpleNamespace(scaled_dot_product_attention=attention("sdpa", out))
    torch.nn = types.ModuleType("torch.nn")
    torch.nn.functional = functional
    torch.nn.attention = types.SimpleNamespace(
        SDPBackend=types.SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn"),
        sdpa_kernel=lambda kernels: switched(False),
    )
    varlen = attention("varlen", (out, "lse", "rng", "unused", "mask"))
    torch.ops = types.SimpleNamespace(aten=types.SimpleNamespace(_flash_attention_forward=varlen))
    stream = types.SimpleNamespace(ptr=0)
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(get_current_stream=lambda: stream),
        from_dlpack=lambda tensor: f"cupy {tensor.name}",
    )
    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func = attention("fa4", (out, "lse"))
    interface.flash_attn_varlen_func = attention("fa4 varlen", (out, "lse"))
    for module in (torch, torch.nn, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return log


@pytest.mark.parametrize(
    ("peer", "packed", "attention", "args", "options", "out"),
    [
        (
            *("cuDNN", False, "sdpa", ["q^T", "k^T", "v^T"]),
            *({"is_causal": True, "enable_gqa": True}, "out^T"),
        ),
        (
            *("FA2", False, "sdpa", ["q^T", "k^T", "v^T"]),
            *({"is_causal": True, "enable_gqa": True}, "out^T"),
        ),
        (
            *("FA2", True, "varlen"),
            *(["q", "k", "v", "starts", "starts", 6, 6, 0.0, True, False], {}, "out"),
        ),
        (
            *("FA4", False, "fa4", ["q", "k", "v"]),
            *({"causal": True, "window_size": (None, None)}, "out"),
        ),
        ("FA4", True, "fa4 varlen", ["q", "k", "v"], None, "out"),
    ],
)
def test_a_peer_makes_its_forward_once_and_then_its_backward_alone(
    pretend_torch, peer, packed, attention, args, options, out
):
    case, _ = _small(packed)
    inputs = contender.Inputs(("q", "k", "v"), dout="dout", seqstart="starts", max_seqlen=6)
    side = next(c for c in suites.contenders("backward") if c.name == peer)
    with side.scope():
        call = side.prepare(case, inputs)
        results = [call(), call()]
    forward, *backwards = pretend_torch
    assert (forward[0], forward[1]) == (attention, args)
    assert options is None or forward[2] == options
    assert forward[3], "the forward must be recorded by autograd"
    assert backwards == [("grad", out, ["q", "k", "v"], "dout", True)] * 2
    assert side.read(case, results[0]) == ("cupy dq", "cupy dk", "cupy dv")

    pretend_torch.clear()
    with side.scope():
        forward = dataclasses.replace(case, backward=False)
        call = side.prepare(forward, inputs)
        assert not pretend_torch
        assert side.read(forward, call()) == (f"cupy {out}",)
    assert not pretend_torch[0][3], "no graph in a forward that is timed"


def test_cudnn_takes_no_packed_sequences_and_jax_no_backward(pretend_torch):
    case, inputs = _small(packed=True)
    everybody = {c.name: c for c in suites.contenders("forward")}
    for name in ("cuDNN", "JAX cuDNN"):
        with everybody[name].scope(), pytest.raises(NotImplementedError):
            everybody[name].prepare(case, inputs)


def test_memory_beyond_gradients_is_what_a_new_pool_owns(monkeypatch):
    owned, calls = [0], []

    class Pool:
        def malloc(self, nbytes):
            owned[0] = max(owned[0], nbytes)  # the second call finds what the first has freed

        def total_bytes(self):
            return owned[0]

    allocator = [lambda nbytes: None]

    @contextlib.contextmanager
    def using_allocator(malloc):
        allocator.append(malloc)
        yield
        allocator.pop()

    runtime = types.SimpleNamespace(deviceSynchronize=lambda: calls.append("wait"))
    cuda = types.SimpleNamespace(MemoryPool=Pool, using_allocator=using_allocator, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))

    def call(into):
        calls.append(into)
        allocator[-1](1000)

    into = tuple("qkv")
    assert memory.beyond(call, into) == 1000
    gradients = rawattn.Gradients(*into)
    assert calls == [gradients, "wait", gradients, "wait"]
    case = next(c for c in grids.backward() if c.name == "dense D128 S4096 causal")
    assert memory.allowed(case) == 16384 * 16 * (4 * 128 + 8)
    assert set(memory._CASES) <= {case.name for case in grids.backward()}


# A run, with contenders that only pretend


class Fake(contender.Contender):
    def __init__(self, name, seconds=0.001, value=1.0, error=None):
        super().__init__(name)
        self.ours = name in ("rawattn", "deterministic")
        self.seconds, self.value, self.error, self.prepared = seconds, value, error, 0

    def takes(self, case):
        wanted = case.deterministic if self.name == "deterministic" else self.ours
        return wanted or super().takes(case)

    @contextlib.contextmanager
    def scope(self):
        self.inside = True
        yield
        self.inside = False

    def prepare(self, case, inputs):
        assert self.inside
        self.prepared += 1
        self.calls = 0
        if self.error is not None:
            raise self.error

        def call():
            assert self.inside
            self.calls += 1
            return self.seconds

        return call

    def read(self, case, result):
        arrays = [np.full(4, 1.0, np.float32) for _ in range(3 if case.backward else 1)]
        arrays[-1][:] = self.value
        return tuple(arrays)


def _run_case(*fakes, absent=None, backward=False):
    case = (grids.backward if backward else grids.forward)()[0]
    reading = machine.Reading(1980.0, 650.0, 60.0)
    return measure.measure_case(
        case,
        fakes,
        [contender.Inputs(())] * 2,
        FakeClock(),
        lambda: reading,
        {} if absent is None else absent,
        repeats=3,
    )


def test_a_case_measures_everybody():
    results = _run_case(Fake("rawattn", 0.001), Fake("FA2", 0.002))
    assert results["rawattn"].seconds == pytest.approx(0.001)
    assert results["FA2"].seconds == pytest.approx(0.002)
    assert results["rawattn"].first_seconds == 1.5
    assert (results["FA2"].sm_mhz, results["FA2"].watts, results["FA2"].celsius) == (1980, 650, 60)
    assert len(results["FA2"].samples) == 3
    assert not results["FA2"].reason


def test_a_peer_that_fails_leaves_its_reason_and_an_absent_one_is_not_tried_again():
    absent = {}
    broken, missing = (
        Fake("FA2", error=RuntimeError("no kernel\nfor this")),
        Fake("FA4", error=ImportError("no flash_attn")),
    )
    for _ in range(2):
        results = _run_case(Fake("rawattn"), broken, missing, absent=absent)
        assert results["FA2"].reason == "RuntimeError: no kernel"
        assert results["FA4"].reason == "ImportError: no flash_attn"
        assert results["rawattn"].seconds
    assert (broken.prepared, missing.prepared) == (2, 1)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("value", [1.1, 0.0, np.nan])
def test_who_computes_something_else_is_not_timed(value, backward):
    wrong = Fake("cuDNN", value=value)
    results = _run_case(Fake("rawattn"), wrong, Fake("FA2", value=1.001), backward=backward)
    assert results["cuDNN"].reason.startswith("not timed: differs from rawattn by ")
    assert results["cuDNN"].seconds is None
    assert wrong.calls == 1
    assert results["FA2"].seconds
    assert not results["FA2"].reason


def test_the_first_is_not_timed_when_its_result_is_no_number():
    results = _run_case(Fake("rawattn", value=np.nan), Fake("FA2"), Fake("FA4", value=2.0))
    assert results["rawattn"].reason == "not timed: differs from itself by nan of its RMS"
    assert results["FA2"].seconds
    assert results["FA4"].reason.startswith("not timed: differs from FA2")


# float16 over bfloat16


def _kind(x):
    if x.dtype == ml_dtypes.bfloat16:
        return "bfloat16"
    assert x.dtype == np.float16
    shorter = np.array_equal(x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32), x)
    return "float16 of bfloat16 values" if shorter else "float16"


class ByKind(Fake):
    """Takes its seconds from the kind of its inputs, raises what stands there instead; remembers the kinds."""

    def __init__(self, name, seconds):
        super().__init__(name)
        self.by_kind, self.kinds = seconds, []

    def prepare(self, case, inputs):
        arrays = [*inputs.qkv, inputs.dout] if case.backward else inputs.qkv
        (kind,) = set(map(_kind, arrays))
        self.kinds.append(kind)
        seconds = self.by_kind[kind]
        if isinstance(seconds, Exception):
            raise seconds
        call = super().prepare(case, inputs)
        return lambda: (call(), seconds)[1]


@pytest.fixture
def race_dtypes(monkeypatch):
    """The figures of these contenders, with NumPy arrays of one row."""

    def random_array(shape, dtype):
        values = np.random.default_rng(0).standard_normal(shape[-1], np.float32)
        return values.astype(np.dtype(dtype))

    def figures(verb, names, our, *others):
        monkeypatch.setattr(ours, "ours", lambda verb: [our, Fake("portable")])
        monkeypatch.setattr(peers, "peers", lambda verb: others)
        return {f.name: (f.value, f.unit) for f in dtypes.figures(verb, "bfloat16", names)}

    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setattr(dtypes, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "random_array", random_array)
    monkeypatch.setattr(machine, "Sensors", lambda: None)
    monkeypatch.setattr(machine, "facts", lambda sensors: {"l2_bytes": 50 << 20})
    return figures


_SECONDS = {"bfloat16": 0.0019, "float16": 0.002, "float16 of bfloat16 values": 0.00195}


def test_float16_over_bfloat16_is_one_race_of_all_kinds(race_dtypes, monkeypatch):
    raced = []

    def race(entrants):
        raced.append(list(entrants))
        return timing.race(entrants)

    monkeypatch.setattr(dtypes, "race", race)
    our, peer = ByKind("rawattn", _SECONDS), ByKind("FA4", {"bfloat16": 0.003, "float16": 0.004})
    asked, unasked = ("FA4", "cuDNN", "FA2"), ByKind("FA2", {})
    found = race_dtypes("forward", asked, our, peer, unasked)

    names = [case.name for case in dtypes.cases("forward")]
    assert names == [f"dense D{d} S4096 {m}" for d in (64, 128, 256) for m in ("causal", "full")]
    mine = [f"rawattn, {kind}" for kind in _SECONDS]
    assert raced == [[*mine, "FA4, bfloat16", "FA4, float16"]] * len(names)
    assert not unasked.kinds
    expected = {}
    for case in names:
        ratios = {
            f"rawattn, FLOP/s: float16 / bfloat16, {case}": 0.95,
            f"rawattn, FLOP/s: float16 of bfloat16 values / bfloat16, {case}": 1.9 / 1.95,
            f"FA4, FLOP/s: float16 / bfloat16, {case}": 0.75,
        }
        expected |= {name: (pytest.approx(ratio), "x") for name, ratio in ratios.items()}
    assert found == expected


def test_float16_over_bfloat16_of_a_backward(race_dtypes):
    our, peer = ByKind("rawattn", _SECONDS), ByKind("FA2", _SECONDS)
    found = race_dtypes("backward", ("FA2", "FA4"), our, peer, ByKind("FA4", {}))
    names = [f"dense D{d} S4096 {m}" for d in (64, 128) for m in ("causal", "full")]
    ratios = [
        *("rawattn, FLOP/s: float16 / bfloat16", "FA2, FLOP/s: float16 / bfloat16"),
        "rawattn, FLOP/s: float16 of bfloat16 values / bfloat16",
    ]
    assert set(found) == {f"{ratio}, {case}" for ratio in ratios for case in names}
    assert peer.kinds == ["bfloat16", "float16"] * len(names)
    assert set(race_dtypes("backward", (), our, peer)) == {n for n in found if "FA2" not in n}


@pytest.mark.parametrize("broken", ["bfloat16", "float16"])
def test_a_peer_without_both_dtypes_is_left_out_and_ours_must_have_them(race_dtypes, broken):
    missing = ByKind("FA4", {**_SECONDS, broken: ImportError("no flash_attn")})
    found = race_dtypes("forward", ("FA4",), ByKind("rawattn", _SECONDS), missing)
    assert len(found) == 12
    assert all(name.startswith("rawattn, ") for name in found)
    with pytest.raises(RuntimeError, match="no kernel"):
        race_dtypes(
            "forward", (), ByKind("rawattn", {**_SECONDS, broken: RuntimeError("no kernel")})
        )


def test_who_raises_in_the_race_of_dtypes(race_dtypes):
    class Mortal(ByKind):
        def prepare(self, case, inputs):
            call, lives = super().prepare(case, inputs), iter(range(20))
            return lambda: (next(lives), call())[1]

    found = race_dtypes("backward", ("FA2",), ByKind("rawattn", _SECONDS), Mortal("FA2", _SECONDS))
    assert len(found) == 8
    with pytest.raises(StopIteration):
        race_dtypes("backward", (), Mortal("rawattn", _SECONDS))


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The whole command, with fakes where a GPU would be asked."""
    fakes = {
        "forward": [
            Fake("rawattn", 0.001),
            Fake("FA2", 0.002),
            Fake("FA4", error=ImportError("absent")),
        ],
        "backward": [
            Fake("rawattn", 0.001),
            Fake("deterministic", 0.00125),
            Fake("cuDNN", value=0.5),
            Fake("FA2", 0.002),
        ],
    }
    sensors = types.SimpleNamespace(read=lambda: None)
    facts = {"device": "Pretended GPU", "driver": "1.2", "l2_bytes": 1}
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: None)
    monkeypatch.setattr(suites, "contenders", fakes.__getitem__)
    monkeypatch.setattr(measure, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "Sensors", lambda: sensors)
    monkeypatch.setattr(machine, "facts", lambda sensors: facts)
    monkeypatch.setattr(machine, "matmul_flops", lambda dtype, clock: 1e15)
    monkeypatch.setattr(measure, "make_inputs", lambda *args: [contender.Inputs(())])
    return fakes["forward"]


def test_the_command_measures_shows_and_writes(pretend_gpu, capsys, tmp_path):
    path = tmp_path / "new" / "forward.json"
    words = "dense D128 S4096"
    assert cli.main(["bench", "--filter", words, "--repeats", "2", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    case = next(case for case in grids.forward() if case.name == f"{words} causal")
    rate = f"{case.flops / 0.001 / 1e12:.0f}"
    line = next(line for line in shown.out.splitlines() if line.startswith(case.name))
    assert line.split()[4:6] == [rate, "0.0%"]
    assert "(2.00x)" in line
    assert "FA4 n/a (2 cases): ImportError: absent" in shown.out
    assert "geometric mean, rawattn over FA2: 2.000x (2 cases; least 2.00x, dense" in shown.out
    assert "[2/2] dense D128 S4096" in shown.err

    data = json.loads(path.read_text())
    assert data["rows"][0]["results"]["FA2"]["samples"] == pytest.approx([0.002, 0.002])
    markdown = tmp_path / "forward.md"
    assert cli.main(["bench", "--from", str(path), "--markdown", str(markdown)]) == 0
    assert capsys.readouterr().out == shown.out
    assert f"| {case.name} | {rate} |" in markdown.read_text()


def test_bursts_as_long_as_asked_for(pretend_gpu, capsys, tmp_path, monkeypatch):
    clock, path = FakeClock(), tmp_path / "forward.json"
    monkeypatch.setattr(measure, "EventClock", lambda: clock)
    arguments = ["bench", "--filter", "window", "--repeats", "1", "--peers", "FA4"]
    assert cli.main([*arguments, "--burst", "0.3", "--json", str(path)]) == 0
    assert clock.log[-1] == (0.001, 300)
    assert "median of 1 bursts of 0.3 s" in capsys.readouterr().out
    assert Report.load(path).burst_seconds == 0.3


def test_a_spent_budget_drops_peers_and_says_so(pretend_gpu, capsys):
    arguments = ["bench", "--filter", "dense D64", "--budget", "-1", "--repeats", "1"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "FA2 n/a (8 cases): not run: the budget of -1 s was spent" in out
    assert not pretend_gpu[1].prepared
    assert pretend_gpu[0].prepared == 8


def test_peers_can_be_chosen(pretend_gpu, capsys):
    arguments = ["bench", "--filter", "window", "--repeats", "1", "--peers"]
    assert cli.main([*arguments, "none"]) == 0
    assert pretend_gpu[2].prepared == 0
    assert cli.main([*arguments, "FA2, FA4"]) == 0
    assert pretend_gpu[2].prepared == 1
    with pytest.raises(SystemExit):
        cli.main([*arguments, "FA9"])
    assert "got FA9; accepted are cuDNN" in capsys.readouterr().err


def test_a_figure_alone_and_one_that_fails(pretend_gpu, capsys, monkeypatch):
    fake = {
        "host": lambda dtype, names: [Figure(f"{dtype} host", 12.34, "us")],
        "compile": lambda dtype, names: 1 / 0,
    }
    suite = dataclasses.replace(suites.SUITES["forward"], figures=fake)
    monkeypatch.setitem(suites.SUITES, "forward", suite)
    assert cli.main(["bench", "--filter", "host"]) == 0
    assert "bfloat16 host  12.3 us" in capsys.readouterr().out
    assert cli.main(["bench", "--filter", "compile"]) == 0
    assert "compile n/a: ZeroDivisionError" in capsys.readouterr().out


def test_the_backward_suite_measures_shows_and_writes(pretend_gpu, capsys, tmp_path, monkeypatch):
    figures = {"memory": lambda dtype, names: [Figure("memory beyond", 130.0, "MiB")]}
    suite = dataclasses.replace(suites.SUITES["backward"], figures=figures)
    monkeypatch.setitem(suites.SUITES, "backward", suite)
    path = tmp_path / "backward.json"
    arguments = ["bench", "--suite", "backward", "--repeats", "1"]
    assert cli.main([*arguments, "--filter", "H16/16 causal", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    ragged = next(line for line in out.splitlines() if line.startswith("ragged D128 H16/16 causal"))
    rate = grids.backward()[12].flops / 0.001 / 1e12
    # Ours with spread and share, deterministic likewise, FA2; cuDNN was not asked.
    assert ragged.split()[4:] == [
        *(f"{rate:.0f}", "0.0%", f"{rate / 10:.0f}%"),
        *(f"{rate / 1.25:.0f}", "0.0%", f"{rate / 12.5:.0f}%"),
        *(f"{rate / 2:.0f}", "(2.00x)"),
    ]
    base = next(line for line in out.splitlines() if line.startswith("ragged-ref"))
    assert base.split()[-3] == "n/a"  # cuDNN, refused
    assert "cuDNN n/a (ragged-ref D128 H16/16 B16 S2048 causal): not timed: differs from" in out
    assert "rawattn, FLOP/s: ragged D128 H16/16 causal / ragged-ref D128 H16/16 B16 S2048" in out
    assert "deterministic / rawattn, time: ragged D128 H16/16 causal" in out
    assert "1.25 x" in out
    assert "the backward alone" in out
    assert "JAX" not in out

    report = Report.load(path)
    assert (report.suite, report.ours) == ("backward", ["rawattn", "deterministic"])
    assert report.rows[0].flops == grids.backward()[12].flops
    assert cli.main([*arguments, "--filter", "memory"]) == 0
    assert "memory beyond  130 MiB" in capsys.readouterr().out


def test_a_backward_with_a_spent_budget_is_ours_alone(pretend_gpu, capsys, monkeypatch):
    asked = []
    figures = {"host": lambda dtype, names: asked.append(list(names)) or []}
    suite = dataclasses.replace(suites.SUITES["backward"], figures=figures)
    monkeypatch.setitem(suites.SUITES, "backward", suite)
    arguments = ["bench", "--suite", "backward", "--budget", "-1", "--repeats", "1"]
    assert cli.main([*arguments, "--filter", "D64 S4096"]) == 0
    out = capsys.readouterr().out
    assert "FA2 n/a (2 cases): not run: the budget of -1 s was spent" in out
    assert "deterministic / rawattn, time: dense D64 S4096 full" in out
    assert cli.main([*arguments, "--filter", "host"]) == 0
    assert asked == [[]]
    assert "host: without peers, as the budget was spent" in capsys.readouterr().out


# Reports


def _report():
    def row(name, kind, seconds, over=None, by_time=False):
        results = {"rawattn": Result(seconds, 0.01, (seconds,), 2.5, 1900.0, 690.0, 61.0)}
        results["FA2"] = Result(2 * seconds, 0.01, (2 * seconds,))
        results["FA4"] = Result(reason="ImportError: no module")
        return Row(name, kind, 128, 10**12, 10**9, results, over, by_time)

    return Report(
        suite="forward",
        dtype="bfloat16",
        date="2026-01-02T03:04:05+00:00",
        repeats=9,
        machine={"device": "GPU", "driver": "1"},
        versions={"rawattn": "0.1"},
        matmul_flops=8e14,
        ours=["rawattn"],
        peers=["FA2", "FA4"],
        rows=[
            row("dense D128 S4096 causal", "dense", 0.002),
            row("ragged D128 H16/16 causal", "ragged", 0.004, over="dense D128 S4096 causal"),
            row("straggler D128 a causal", "straggler", 0.005, "straggler-ref", by_time=True),
            row("straggler-ref", "straggler-ref", 0.004),
        ],
        figures=[Figure("host", 18.0, "us")],
        notes=["compile n/a: reason"],
    )


def test_report_survives_json(tmp_path):
    report = _report()
    report.save(tmp_path / "a.json")
    loaded = Report.load(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert render.text(loaded) == render.text(report)


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"rows": [1], "figures": []}'])
def test_a_file_that_is_no_report_is_named(tmp_path, capsys, content):
    (tmp_path / "x.json").write_text(content)
    assert cli.main(["bench", "--from", str(tmp_path / "x.json")]) == 1
    assert "x.json: not a report of `rawattn bench`" in capsys.readouterr().err
    assert cli.main(["bench", "--from", str(tmp_path / "absent.json")]) == 1


def test_the_best_peer_of_each_case():
    report = _report()
    assert report.over_best() == {row.name: 2.0 for row in report.rows}
    report.rows[0].results["FA4"] = Result(0.001)
    assert report.over_best()[report.rows[0].name] == 0.5
    assert (
        "geometric mean, rawattn over each case's best peer: 1.414x (4 cases; least 0.50x, dense"
        in (render.text(report))
    )


def test_what_a_variant_costs():
    report = _report()
    report.ours.append("deterministic")
    report.rows[0].results["deterministic"] = Result(0.0025)
    (cost,) = report.cost("deterministic")
    assert (cost.name, cost.value) == (
        "deterministic / rawattn, time: dense D128 S4096 causal",
        pytest.approx(1.25),
    )
    cells = next(line for line in render.text(report).splitlines() if line.startswith("ragged"))
    assert cells.split()[4:8] == ["250", "1.0%", "31%", "125"]  # nothing under deterministic


def test_ratios_to_other_cases():
    ragged, straggler = _report().divided()
    assert (ragged.value, straggler.value) == (pytest.approx(0.5), pytest.approx(1.25))
    assert ragged.name == ("rawattn, FLOP/s: ragged D128 H16/16 causal / dense D128 S4096 causal")
    assert straggler.name.startswith("rawattn, time: straggler")


def test_markdown_table_is_rectangular():
    lines = [line for line in render.markdown(_report()).splitlines() if line.startswith("|")]
    table, figure_table = lines[:6], lines[6:]
    assert {line.count("|") for line in table} == {10}
    assert {line.count("|") for line in figure_table} == {3}
    assert "| dense D128 S4096 causal | 500 | 1.0% | 62% | 250 (2.00x) | n/a | 1900 |" in table[2]


def test_a_report_with_float16_rows_still_shows_them(tmp_path):
    report = _report()
    base = report.rows[0]
    name = "float16 D128 S4096 causal"
    report.rows.append(dataclasses.replace(base, name=name, kind="float16", over=base.name))
    report.save(tmp_path / "a.json")
    text = render.text(Report.load(tmp_path / "a.json"))
    assert f"rawattn, FLOP/s: {name} / {base.name}  " in text


def test_legend_tells_reasons_and_compile_seconds():
    text = render.text(_report())
    assert "FA4 n/a (4 cases): ImportError: no module" in text
    assert "slowest first call, with what it compiles: rawattn 2.5 s" in text
    assert "compile n/a: reason" in text


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    render.plot(_report(), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    _report().save(tmp_path / "a.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["bench", "--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert "rawattn[bench]" in shown.err
    assert "dense D128 S4096 causal" in shown.out


# The command line


def test_without_a_gpu_the_command_says_so(capsys):
    if machine_has_gpu():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "--quick"]) == 1
    assert "bench measures GPU kernels" in capsys.readouterr().err


def test_listing_and_unknown_words(capsys):
    assert cli.main(["bench", "--list", "--quick"]) == 0
    names = capsys.readouterr().out.split("\n")
    assert "dense D64 S4096 causal" in names
    assert "host" in names
    assert not {"compile", "dtypes"} & set(names)
    assert cli.main(["bench", "--list", "--filter", "dtypes", "--suite", "backward"]) == 0
    assert capsys.readouterr().out == "dtypes\n"
    assert cli.main(["bench", "--filter", "nonsense"]) == 1
    assert "no case has the words 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repeats", "0"])
    with pytest.raises(SystemExit):
        cli.main(["bench", "--burst", "0"])


def test_nothing_heavy_is_imported_to_list():
    code = (
        "import sys; from rawattn import cli; cli.main(['bench', '--list']); "
        "sys.exit(bool({'cupy', 'torch', 'jax', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    child = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, capture_output=True)
    assert child.returncode == 0, child.stderr.decode()


def machine_has_gpu():
    from tests import gpu_report

    return not gpu_report.why_no_gpu()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_quick_run_on_a_gpu(capsys, tmp_path):
    path = tmp_path / "a.json"
    arguments = ["bench", "--filter", "D64 S4096", "--peers", "none", "--repeats", "3"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    report = Report.load(path)
    assert [row.name for row in report.rows] == ["dense D64 S4096 causal", "dense D64 S4096 full"]
    for row in report.rows:
        rate = row.rate("rawattn")
        assert rate is not None, row.results["rawattn"].reason
        # Faster than its own matrix products would be a timer that does not wait.
        assert 0.01 < rate / report.matmul_flops < 1
        assert row.results["rawattn"].watts


@pytest.mark.gpu
@pytest.mark.slow
def test_compile_and_load_times_on_a_gpu():
    cold, another, loaded, _, rebuilt = (f.value for f in compile_time.figures("float16", ()))
    assert min(cold, another) > loaded / 1e3 > 0
    assert rebuilt == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_a_backward_run_on_a_gpu(tmp_path):
    path = tmp_path / "a.json"
    arguments = ["bench", "--suite", "backward", "--filter", "D64 S4096", "--peers", "none"]
    assert cli.main([*arguments, "--repeats", "3", "--json", str(path)]) == 0
    report = Report.load(path)
    assert [row.name for row in report.rows] == ["dense D64 S4096 causal", "dense D64 S4096 full"]
    for row in report.rows:
        for name in ("rawattn", "deterministic"):
            rate = row.rate(name)
            assert rate is not None, row.results[name].reason
            assert 0.01 < rate / report.matmul_flops < 1


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_of_a_backward_on_a_gpu():
    slack = 4 / 1024  # 4 KiB: a ragged batch's schedule, and rounding
    found = [figure.value for figure in memory.figures("bfloat16", ())]
    for default, deterministic, allowed in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert 0 < deterministic < default <= allowed + slack


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_host_times_on_a_gpu(verb):
    for figure in host_time.figures(verb, "bfloat16", ()):
        assert 1 < figure.value < 1000
