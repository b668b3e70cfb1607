"""The contenders of `rawattn bench`, as far as they can be tested without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types

import pytest

import rawattn
from rawattn import reference
from rawattn._bench import contender, grids, measure, memory, ours, suites
from tests.bench_fakes import small


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ours_computes_the_gradients_of_the_case(packed, deterministic):
    case, inputs = small(packed)
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
    for suite in ("decode", "prefill"):
        assert names[suite][-5:] == ["cuDNN", "FA2", "FA4", "FA4 paged", "FlashInfer"]
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
    """A fake torch tensor with the methods that a contender calls. It records the calls."""

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
    """Fake modules with the names that contenders import; `log` holds the calls of attention and of grad."""
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
    case, _ = small(packed)
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


@pytest.mark.parametrize("causal", [True, False])
def test_peers_are_told_what_a_case_hides(pretend_torch, causal):
    peers = {c.name: c for c in suites.contenders("backward")}

    def asked(name, packed=False, **more):
        case = dataclasses.replace(small(packed)[0], backward=False, causal=causal, **more)
        inputs = contender.Inputs(("q", "k", "v"), seqstart="starts", max_seqlen=6)
        pretend_torch.clear()
        with peers[name].scope():
            peers[name].prepare(case, inputs)()
        ((_, args, options, _),) = pretend_torch
        return args[3:], {key: getattr(x, "name", x) for key, x in options.items()}

    for name in ("cuDNN", "FA2"):
        assert asked(name) == ([], {"is_causal": causal, "enable_gqa": True})
        assert not asked(name, nheads_kv=4)[1]["enable_gqa"]
    assert asked("FA2", packed=True)[0][-2:] == [causal, False]
    told = {"causal": causal, "window_size": (9, None)}
    assert asked("FA4", window_left=9) == ([], told)
    lengths = {"cu_seqlens_q": "starts", "cu_seqlens_k": "starts"}
    lengths |= {"max_seqlen_q": 6, "max_seqlen_k": 6}
    assert asked("FA4", packed=True, window_left=9) == ([], told | lengths)


def test_cudnn_takes_no_packed_sequences_and_jax_no_backward(pretend_torch):
    case, inputs = small(packed=True)
    everybody = {c.name: c for c in suites.contenders("forward")}
    for name in ("cuDNN", "JAX cuDNN"):
        with everybody[name].scope(), pytest.raises(NotImplementedError):
            everybody[name].prepare(case, inputs)


def test_memory_beyond_gradients_is_what_a_new_pool_owns(monkeypatch):
    owned, calls = [0], []

    class Pool:
        def malloc(self, nbytes):
            owned[0] = max(owned[0], nbytes)  # the second call reuses the first one's memory

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
