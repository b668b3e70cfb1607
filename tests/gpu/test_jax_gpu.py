"""`rawattn.jax` on the GPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402


import rawattn.jax
from rawattn._interop.xla import Call
from rawattn._jax import launch
from tests import jax_calls
from tests.cases import Case
from tests.landed import require

pytestmark = pytest.mark.frameworks


def arrays(*shape: int, count: int = 3, dtype: str = "bfloat16") -> list[Any]:
    return jax_calls.random_arrays("gpu", *shape, count=count, dtype=dtype)


@pytest.mark.parametrize("case", jax_calls.CASES_OF_FORWARD, ids=str)
def test_forward(case: Case) -> None:
    jax_calls.verify_forward(case, "gpu")


@pytest.mark.parametrize("case", jax_calls.SCORE_CASES, ids=str)
def test_scores(case: Case) -> None:
    require(case, "cuda")
    jax_calls.verify_scores(case, "gpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", jax_calls.GRADIENT_CASES, ids=str)
def test_gradients(case: Case, deterministic: bool) -> None:
    jax_calls.verify_gradients(case, "gpu", deterministic=deterministic)


def test_in_the_middle_of_a_program() -> None:
    jax_calls.verify_in_the_middle_of_a_program("gpu")


def test_vmap() -> None:
    jax_calls.verify_mapped("gpu")


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("case", jax_calls.LENGTH_CASES[:2], ids=str)
def test_traced_lengths_of_padded_batches(case: Case, host: bool) -> None:
    jax_calls.verify_traced_lengths(case, "gpu", host=host)


@pytest.mark.parametrize("case", jax_calls.LENGTH_CASES[2:], ids=str)
def test_traced_lengths(case: Case) -> None:
    jax_calls.verify_traced_lengths(case, "gpu")


def test_bad_traced_lengths_reach_no_other_memory() -> None:
    jax_calls.verify_bad_traced_lengths("gpu")


def test_vmap_of_traced_lengths() -> None:
    for positions in (False, True):
        jax_calls.verify_mapped_traced_lengths("gpu", positions=positions)


@pytest.mark.parametrize("seqlen", [128, 4096])
def test_same_bits_as_arrays_of_cupy(seqlen: int) -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = arrays(2, seqlen, 4, 128)
    theirs = [cupy.from_dlpack(x) for x in (q, k, v)]
    out, backward = rawattn.attention_vjp(*theirs, causal=True, deterministic=True)
    exact = (out, *backward(out)[:3])

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            return rawattn.jax.attention(q, k, v, causal=True, deterministic=True)

        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(out)

    for a, b in zip(call(q, k, v), exact, strict=True):
        assert np.array_equal(np.asarray(a).view("u2"), b.view("u2").get())


def test_waits_for_nothing() -> None:
    """A whole program is dispatched while the device is still busy with its first operation."""
    (x,) = arrays(1, 64, 2, 64, count=1, dtype="float32")
    (square,) = arrays(8192, 8192, count=1, dtype="float32")

    @jax.jit
    def program(x: Any, square: Any) -> Any:
        busy = jax.lax.fori_loop(0, 40, lambda _, y: y @ square / 100, square)
        q = x + 1e-30 * busy[0, 0]
        return jax.grad(lambda q: jax_calls.causal(q, q, q).sum())(q)

    jax.block_until_ready(program(x, square))
    started = time.perf_counter()
    result = program(x, square)
    dispatched = time.perf_counter()
    jax.block_until_ready(result)
    finished = time.perf_counter()
    assert dispatched - started < 0.5 * (finished - started)


def test_memory_does_not_grow() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = arrays(2, 512, 8, 64)
    packed = rawattn.SeqLayout(seqstart_q=[0, 100, 512])
    step = jax.jit(
        lambda q, k, v: (
            jax.grad(lambda q: jax_calls.causal(q, k, v).astype("float32").sum())(q),
            rawattn.jax.attention(q[0], k[0], v[0], seqs=packed),
        )
    )
    device = q.devices().pop()

    def held() -> tuple[int, int, int]:
        with cupy.cuda.Device(device.local_hardware_id):
            pool = cupy.get_default_memory_pool()
            return device.memory_stats()["bytes_in_use"], pool.used_bytes(), pool.total_bytes()

    for _ in range(3):
        jax.block_until_ready(step(q, k, v))
    before = held()
    for _ in range(200):
        jax.block_until_ready(step(q, k, v))
    assert held() == before


def test_memory_of_a_backward_is_from_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    allocate = Call.allocate

    def counted(call: Call, nbytes: int) -> int:
        taken.append(nbytes)
        return allocate(call, nbytes)

    monkeypatch.setattr(Call, "allocate", counted)
    q, k, v = arrays(1, 300, 2, 64)
    jax.block_until_ready(jax.grad(lambda q: jax_calls.causal(q, k, v).astype("f4").sum())(q))
    assert sum(taken) >= 4 * q.size, "the float32 sums of dq"


def test_errors_of_a_run_reach_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(1, 65, 2, 64)
    program = jax.jit(jax_calls.causal)
    exact = np.asarray(program(q, k, v))

    def fail(*_: Any) -> None:
        raise ValueError("too many tiles")

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launcher, "launch", fail)
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="rawattn: ValueError: too many tiles"
        ):
            jax.block_until_ready(program(q, k, v))
    assert np.array_equal(np.asarray(program(q, k, v)), exact)


def test_threads_run_at_once() -> None:
    q, k, v = arrays(2, 300, 4, 64)
    exact = [
        np.asarray(rawattn.jax.attention(q, k, v, window=(n, 0))).astype(np.float32)
        for n in range(4)
    ]
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(n: int) -> None:
        start.wait()
        run = jax.jit(lambda q, k, v: rawattn.jax.attention(q, k, v, window=(n, 0)))
        for _ in range(50):
            if not np.array_equal(np.asarray(run(q, k, v)).astype(np.float32), exact[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_device_runs_its_own_calls() -> None:
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("one GPU alone")
    q, k, v = arrays(2, 300, 4, 64)
    program = jax.jit(jax.value_and_grad(lambda *x: jax_calls.causal(*x).astype("f4").sum()))
    exact = [np.asarray(x).astype(np.float32) for x in program(q, k, v)]
    for device in devices:
        moved = [jax.device_put(x, device) for x in (q, k, v)]
        for _ in range(3):
            results = program(*moved)
            assert all(x.devices() == {device} for x in results)
            for a, b in zip(results, exact, strict=True):
                np.testing.assert_allclose(
                    np.asarray(a).astype(np.float32), b, rtol=2e-2, atol=2e-2
                )


def test_sharded_over_devices() -> None:
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("one GPU alone")
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:2])
    q, k, v = arrays(4, 300, 4, 64)
    spec = PartitionSpec("x")
    sharded = jax.jit(
        jax.shard_map(jax_calls.causal, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    )
    exact = jax_calls.causal(q, k, v)
    shards = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
    assert np.array_equal(np.asarray(sharded(*shards)), np.asarray(exact))


def test_gradients_of_some_captured_arrays() -> None:
    jax_calls.verify_gradients_of_some("gpu")


@pytest.mark.parametrize("which", jax_calls.INTEGERS_OF_THE_HOST)
def test_integers_of_the_host(which: str) -> None:
    jax_calls.verify_integers_of_the_host("gpu", which)


@pytest.mark.parametrize("traced", [False, True])
def test_lengths_that_lie_on_the_gpu(traced: bool) -> None:
    """Lengths that are GPU arrays with values, not traced, are operands too."""
    q, k, v = arrays(3, 70, 4, 64)
    lengths = np.array([70, 0, 33], np.int32)
    on_device = jax.device_put(lengths, q.devices().pop())
    seqs = rawattn.SeqLayout(seqlen_k=on_device)
    exact = rawattn.jax.attention(q, k, v, seqs=rawattn.SeqLayout(seqlen_k=lengths))

    def call(q: Any, k: Any, v: Any) -> Any:
        return rawattn.jax.attention(q, k, v, seqs=seqs)

    out = (jax.jit(call) if traced else call)(q, k, v)
    assert np.array_equal(np.asarray(out).view("u2"), np.asarray(exact).view("u2"))
