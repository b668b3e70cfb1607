"""Programs with calls of `rawattn.jax` on the CPU: shared, exported, sharded, traced by many threads; records of calls."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp

import rawattn.jax
from rawattn import reference
from rawattn._call.options import Options
from rawattn._call.problem import describe
from rawattn._jax import record
from rawattn._jax.attention import _function
from rawattn._runtime.option_arrays import named_gradients, with_arrays
from rawattn._runtime.verbs import FORWARD
from tests import exhaustive, jax_calls
from tests.cases import Case
from tests.verify import layout

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")


def fresh_process(code: str, *arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).resolve().parents[1],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "last",
    exhaustive.thin(["kept = program(x); 1 / 0", "program(x)", "kept = program(x)"], 3),
)
def test_python_ends_while_a_program_runs(last: str) -> None:
    """Its results are not waited for, or even dropped."""
    code = f"""
import jax, jax.numpy as jnp, rawattn.jax
x = jnp.ones((1, 256, 8, 64))
program = jax.jit(jax.grad(lambda x: rawattn.jax.attention(x, x, x).sum()))
{last}
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == int("1 / 0" in last), result.stderr


def test_the_program_calls_the_handler_and_nothing_on_the_host() -> None:
    q = arrays(1, 9, 2, 16)[0]
    program = jax.jit(jax.grad(lambda q: jax_calls.causal(q, q, q).sum())).lower(q).as_text()
    targets = set(re.findall(r"custom_call @(\w+)", program))
    assert targets == {"rawattn_attention", "rawattn_attention_backward"}
    assert "callback" not in program


def test_gradients_do_not_depend_on_which_others_were_taken() -> None:
    """The gradients of a call do not depend on which ones an earlier call, or another layer of the program, has taken."""
    q, k, v = arrays(2, 5, 4, 16)
    options = jnp.ones((4, 5, 5)), jnp.zeros(4)

    def layer(q: Any, bias: Any, logits: Any) -> Any:
        return rawattn.jax.attention(q, k, v, bias=bias, sink_logits=logits)

    def loss(q: Any, bias: Any, logits: Any) -> Any:
        return jnp.sin(layer(q, bias, logits)).sum()

    first = jax.grad(loss, (0, 1, 2))(q, *options)
    jax.grad(loss)(q, *options)
    again = jax.grad(loss, (0, 1, 2))(q, *options)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    def trained_then_frozen(bias: Any, logits: Any) -> Any:
        return loss(layer(q, bias, logits), *options)

    for wrap in (lambda f: f, jax.jit):
        for gradient in wrap(jax.grad(trained_then_frozen, (0, 1)))(*options):
            assert np.abs(np.asarray(gradient)).max() > 1e-4


def test_threads_trace_and_run_at_once() -> None:
    """Threads with different options may trace, compile and run at the same time."""
    q, k, v = arrays(2, 33, 4, 16)
    wrong: list[str] = []
    start = threading.Barrier(6)

    def work(n: int) -> None:
        def loss(q: Any) -> Any:
            return (rawattn.jax.attention(q, k, v, window=(n, 0)) ** 2).sum()

        exact = reference.attention(*map(np.asarray, (q, k, v)), window=(n, 0))
        start.wait()
        run = jax.jit(jax.value_and_grad(loss))
        for _ in range(20):
            value, slope = run(q)
            if not np.allclose(value, (exact**2).sum(), rtol=1e-4) or np.isnan(slope).any():
                wrong.append(f"thread {n}: {value}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_equal_layouts_share_a_program() -> None:
    q = arrays(9, 4, 16)[0]

    def call(lengths: list[int]) -> Any:
        return rawattn.jax.attention(q, q, q, seqs=rawattn.SeqLayout(seqstart_q=lengths))

    call([0, 4, 9])
    functions = _function.cache_info().currsize
    for _ in range(3):
        call([0, 4, 9])
    assert _function.cache_info().currsize == functions
    call([0, 5, 9])
    assert _function.cache_info().currsize == functions + 1


@pytest.mark.parametrize("case", [*jax_calls.CASES_OF_FORWARD, *jax_calls.SCORE_CASES], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_a_record_is_what_its_text_says(case: Case, traced: bool) -> None:
    inputs = jax_calls.backward_of(case).inputs
    qkv = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    options = Options(seqs=layout(inputs), **inputs.options)
    gradients, _ = named_gradients(rawattn.Gradients(), options, None)
    verb, given, values, options = with_arrays(FORWARD, options)
    named = dict(zip(verb.extra_inputs, given, strict=True))
    problem, lengths = describe(*qkv, options, arrays=named)
    if traced:
        lengths, _ = record.with_operands(lengths)
    for backward in (False, True):
        more = verb.extra_inputs, gradients, *values
        written = record.Record(problem, lengths, True, backward, backward, *more)
        read = record.read(written.text)
        assert read.text == written.text
        assert read.problem == problem
        assert (read.options, read.gradients, (read.seed,)) == (
            verb.extra_inputs,
            gradients,
            values or (None,),
        )
        assert (read.inputs, read.outputs) == (written.inputs, written.outputs)
        assert read.lse and read.deterministic is backward is read.backward
        assert read.operands == written.operands


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    """An exported program needs nothing from the process that traced it."""
    pytest.importorskip("flatbuffers")
    q, k, v = arrays(2, 33, 4, 16)
    program = jax.jit(lambda q, k, v: rawattn.jax.attention(q, k, v, window=(3, 1)))
    check = jax.export.DisabledSafetyCheck.custom_call("rawattn_attention")
    (tmp_path / "program").write_bytes(
        jax.export.export(program, platforms=["cpu"], disabled_checks=[check])(q, k, v).serialize()
    )
    np.save(tmp_path / "given.npy", np.stack([q, k, v]))
    code = """
import sys, pathlib, numpy as np, jax, rawattn.jax
there = pathlib.Path(sys.argv[1])
rawattn.jax.attention(*np.ones((3, 1, 2, 1, 8), "f4"))  # another call comes first
program = jax.export.deserialize((there / "program").read_bytes())
np.save(there / "out.npy", program.call(*np.load(there / "given.npy")))
"""
    fresh_process(code, str(tmp_path))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), program(q, k, v), atol=1e-6)


def test_shard_map_calls_for_each_shard() -> None:
    code = """
import jax, numpy as np, rawattn.jax
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 9, 4, 16))
def loss(q, k, v):
    slopes = jax.lax.stop_gradient(q[0, 0, :, 0])
    out = rawattn.jax.attention(q, k, v, causal=True, alibi_slopes=slopes)
    return (out**2).sum(keepdims=True, axis=(1, 2, 3))
for specs, (k, v) in (((P("x"), P("x"), P("x")), (k, v)), ((P("x"), P(), P()), (k[:2], v[:2]))):
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P("x"))
    def alone(q, k, v):
        half = [(q[:2], q[2:]), (k[:2], k[-2:]), (v[:2], v[-2:])]
        return sum(loss(*x).sum() for x in zip(*half))
    got = jax.jit(jax.value_and_grad(lambda *x: sharded(*x).sum(), argnums=(0, 1, 2)))(q, k, v)
    exact = jax.value_and_grad(alone, argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
"""
    fresh_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_what_is_on_several_devices_is_refused_by_attention_itself() -> None:
    code = """
import jax, pytest, rawattn
from jax.sharding import NamedSharding, PartitionSpec as P
x = jax.numpy.ones((2, 9, 4, 16))
mesh = jax.make_mesh((2,), ("x",))
halves = jax.device_put(x, NamedSharding(mesh, P("x")))
with pytest.raises(TypeError, match=r"^k: .*pass jax.device_put.k, device.*jax.shard_map"):
    rawattn.attention(x, halves, x)
"""
    fresh_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.exhaustive
def test_gradients_are_sharded_as_what_they_are_of() -> None:
    """Gradients of sharded inputs are right, also where XLA chooses shardings. On an explicit mesh, where a sharding is part of
    a type, they have the types of their inputs."""
    code = """
import jax, jax.numpy as jnp, numpy as np, rawattn.jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
arrays = jax.random.normal(jax.random.key(0), (3, 4, 9, 4, 16))
given = (*arrays, jnp.ones((4, 1, 9, 9)), jnp.zeros(4))
def loss(q, k, v, bias, logits):
    out, lse = rawattn.jax.attention(q, k, v, bias=bias, sink_logits=logits, return_lse=True)
    return jnp.sin(out).sum() + lse.sum()
slope = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))
exact = slope(*given)
batch, heads, none = P("x"), P(None, None, "x"), P()
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    for specs in ([batch] * 4 + [none], [heads, none, batch, none, batch]):
        sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(given, specs)]
        with jax.set_mesh(mesh):
            for got in (slope(*sharded), jax.jit(slope)(*sharded)):
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact)):
                    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
                if kind == AxisType.Explicit:
                    assert [*map(jax.typeof, got[1])] == [*map(jax.typeof, sharded)]
"""
    fresh_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=4")


def test_lengths_alone_vary_between_shards() -> None:
    code = """
import jax, numpy as np, rawattn, rawattn.jax
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, 4, 16))
lengths = np.array([9, 4], np.int32)
def call(q, k, v, lengths):
    return rawattn.jax.attention(q, k, v, seqs=rawattn.SeqLayout(seqlen_k=lengths))
sharded = jax.shard_map(call, mesh=mesh, in_specs=(P(), P(), P(), P("x")), out_specs=P("x"))
got = jax.jit(jax.grad(lambda *x: (sharded(*x, lengths) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)
def alone(*x):
    return sum((call(*x, lengths[n : n + 1]) ** 2).sum() for n in range(2))
for a, b in zip(got, jax.grad(alone, argnums=(0, 1, 2))(q, k, v)):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
"""
    fresh_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.exhaustive
def test_maps_on_explicit_meshes() -> None:
    """jax.vmap where its axis is sharded, or another one, or both: results and gradients have the types of other functions'."""
    code = """
import jax, jax.numpy as jnp, numpy as np, rawattn, rawattn.jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2, 9, 4, 16))
bias, lengths = jnp.ones((4, 9, 9)), np.array([9, 4], np.int32)
def call(q, k, v, bias):
    return rawattn.jax.attention(q, k, v, bias=bias, seqs=rawattn.SeqLayout(seqlen_k=lengths))
def plain(q, k, v, bias):
    hidden = jnp.where(jnp.arange(9) < lengths[:, None], 0.0, -jnp.inf)[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, bias=bias + hidden)
def slope(function, axes):
    mapped = jax.vmap(function, in_axes=axes)
    loss = lambda *x: (jnp.sin(mapped(*x)).sum(), mapped(*x))
    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
x, y, xy, none = P("x"), P(None, "y"), P("x", "y"), P()
for shared, specs in (
    (False, [x, x, x, x]),
    (False, [y, y, y, none]),
    (False, [xy, xy, xy, x]),
    (False, [none, y, none, none]),
    (True, [x, none, none, x]),
    (True, [xy, P("y"), none, x]),
):
    given = [q, k[0], v[0], bias] if shared else [q, k, v, bias]
    axes = (0, None, None, 0) if shared else 0
    exact = slope(plain, axes)(*given)
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs)]
    with jax.set_mesh(mesh):
        for run in (slope(call, axes), jax.jit(slope(call, axes))):
            got = run(*sharded)
            pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
            for a, b in list(pairs)[1:]:  # but for the loss, a sum of thousands
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
            assert [*map(jax.typeof, got[1])] == [*map(jax.typeof, sharded)]
"""
    fresh_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=4")
