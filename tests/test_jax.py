"""`rawattn.jax` on the CPU."""

from __future__ import annotations

import doctest
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
from rawattn._cpu import forward as cpu_forward
from rawattn._jax import record
from rawattn._runtime.verbs import FORWARD, with_arrays
from rawattn._verbs.backward import of_options
from tests import jax_calls
from tests.autograd import PAGE
from tests.bad_calls import BAD_CALLS, Bad, check_refused
from tests.cases import Case
from tests.frameworks import Jax
from tests.landed import require
from tests.score_cases import few
from tests.verify import layout

pytestmark = pytest.mark.frameworks
# Arguments that rawattn.jax.attention does not have.
REFUSED = [
    bad
    for bad in BAD_CALLS
    if not bad.change.keys() & {"out", "backend"} and bad.name != "float64"  # JAX makes it float32
]


def arrays(*shape: int, count: int = 3, dtype: str = "float32") -> list[Any]:
    return jax_calls.random_arrays("cpu", *shape, count=count, dtype=dtype)


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


@pytest.mark.parametrize("case", jax_calls.CASES_OF_FORWARD, ids=str)
def test_forward(case: Case) -> None:
    jax_calls.verify_forward(case, "cpu")


@pytest.mark.parametrize("case", jax_calls.GRADIENT_CASES, ids=str)
def test_gradients(case: Case) -> None:
    jax_calls.verify_gradients(case, "cpu")


@pytest.mark.parametrize("case", few(jax_calls.SCORE_CASES), ids=str)
def test_scores(case: Case) -> None:
    require(case, "cpu")
    jax_calls.verify_scores(case, "cpu")


def test_in_the_middle_of_a_program() -> None:
    jax_calls.verify_in_the_middle_of_a_program("cpu")


def test_gradient_of_lse_alone() -> None:
    """With respect to q, it is the mean of the keys, as probable as they are."""
    q, k, v = arrays(1, 9, 2, 16)

    def lse(q: Any) -> Any:
        return rawattn.jax.attention(q, k, v, scale=1.0, return_lse=True)[1].sum()

    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    exact = jnp.einsum("bhqk,bkhd->bqhd", p, k)
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(lse))(q)), np.asarray(exact), atol=1e-5)


def test_the_program_calls_the_handler_and_nothing_on_the_host() -> None:
    q = arrays(1, 9, 2, 16)[0]
    program = jax.jit(jax.grad(lambda q: jax_calls.causal(q, q, q).sum())).lower(q).as_text()
    targets = set(re.findall(r"custom_call @(\w+)", program))
    assert targets == {"rawattn_attention", "rawattn_attention_backward"}
    assert "callback" not in program


@pytest.mark.parametrize("bad", REFUSED, ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_mistakes_are_refused(bad: Bad, traced: bool) -> None:
    """As by `rawattn.attention`, while the call is traced."""

    def call(*, q: Any, k: Any, v: Any, **options: Any) -> Any:
        bound = functools.partial(rawattn.jax.attention, **options)
        return (jax.jit(bound) if traced else bound)(q, k, v)

    if traced and isinstance(bad.change.get("q"), (str, list)):
        pytest.skip("jax.jit refuses it")
    check_refused(bad, Jax("cpu"), call)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"return_lse": 1}, TypeError, "return_lse: got int"),
        ({"deterministic": None}, TypeError, "deterministic: got NoneType"),
        ({"num_splits": 257}, ValueError, "num_splits: got 257"),
        ({"softcap": -3.0}, ValueError, "softcap: got -3.0"),
        ({"dropout_p": 0.1, "seed": True}, TypeError, "seed: got True"),
        ({"out": None}, TypeError, "out"),
        ({"backend": "cpu"}, TypeError, "backend"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_options_that_are_refused(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    q = arrays(1, 9, 2, 16)[0]
    for run in (lambda f: f(q), lambda f: jax.jit(f)(q), lambda f: jax.jit(jax.grad(f))(q)):
        with pytest.raises(error, match=says):
            run(lambda q: rawattn.jax.attention(q, q, q, **options).sum())


@pytest.mark.parametrize("name", ["bias", "mask", "alibi_slopes", "sink_logits"])
def test_traced_options_of_a_wrong_shape_are_refused_by_name(name: str) -> None:
    q = arrays(1, 9, 2, 16)[0]

    @jax.jit
    def call(q: Any, option: Any) -> Any:
        return rawattn.jax.attention(q, q, q, **{name: option})

    with pytest.raises(ValueError, match=rf"^{name}: got shape \(3,\), expected "):
        call(q, jnp.ones(3, bool if name == "mask" else "float32"))


def test_an_option_that_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^bias: got torch\.Tensor; accepted are JAX and NumPy"):
        rawattn.jax.attention(q, q, q, bias=torch.zeros(9, 9))


def test_a_block_mask() -> None:
    q, k, v = arrays(2, 200, 4, 16)
    keep = np.random.default_rng(0).random((1, 4, 200, 200)) < 0.3
    packed = rawattn.block_mask(keep)

    def loss(mask: Any, q: Any) -> Any:
        return (rawattn.jax.attention(q, k, v, mask=mask, causal=True) ** 2).sum()

    for run in (lambda f: f, jax.jit):
        got = run(jax.value_and_grad(functools.partial(loss, packed)))(q)
        exact = run(jax.value_and_grad(functools.partial(loss, keep)))(q)
        for a, b in zip(got, exact, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"^mask: jax\.vmap .*jax\.lax\.map"):
        jax.vmap(functools.partial(loss, packed))(q[None])


def test_a_block_mask_with_lists_of_keys() -> None:
    q, k, v = arrays(2, 200, 4, 16)
    mask = rawattn.topk_mask(np.random.default_rng(0).random((2, 4, 1, 200)), 30)
    keep = mask.to_bool()
    ours, theirs = (
        jax.jit(jax.grad(lambda q, x=x: (rawattn.jax.attention(q, k, v, mask=x) ** 2).sum()))(q)
        for x in (mask, keep)
    )
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def test_a_traced_seed_draws_anew() -> None:
    q, k, v = arrays(2, 33, 4, 16)

    @jax.jit
    def call(key: Any) -> Any:
        seed = jax.random.randint(key, (), 0, 2**31 - 1)
        return rawattn.jax.attention(q, k, v, dropout_p=0.5, seed=seed)

    keys = jax.random.split(jax.random.key(0), 2)
    first, second = call(keys[0]), call(keys[1])
    assert not bool((first == second).all())
    assert bool((call(keys[0]) == first).all())
    exact = rawattn.jax.attention(
        q, k, v, dropout_p=0.5, seed=int(jax.random.randint(keys[0], (), 0, 2**31 - 1))
    )
    assert bool((first == exact).all())
    with pytest.raises(TypeError, match=r"^seed: got dtype uint32, expected int32 or int64"):
        rawattn.jax.attention(q, k, v, dropout_p=0.5, seed=jnp.uint32(3))


def test_what_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    with pytest.raises(TypeError, match=r"k: got builtins\.list; accepted are JAX arrays"):
        rawattn.jax.attention(q, [[1.0]], q)


def test_numpy_arrays_are_accepted() -> None:
    q = np.ones((1, 9, 2, 16), np.float32)
    out = rawattn.jax.attention(q, q, q)
    assert isinstance(out, jax.Array) and bool((out == 1).all())


def test_derivatives_that_do_not_exist_are_refused() -> None:
    q, k, v = arrays(1, 9, 2, 16)

    def slope(q: Any) -> Any:
        return jax.grad(lambda q: jax_calls.causal(q, k, v).sum())(q).sum()

    with pytest.raises(ValueError, match=r"rawattn_attention.*cannot be differentiated"):
        jax.grad(slope)(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: jax_calls.causal(q, k, v), (q,), (q,))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("no compiler"), "INTERNAL: rawattn: RuntimeError: no compiler"),
        (ValueError("too many tiles"), "INVALID_ARGUMENT: rawattn: ValueError: too many tiles"),
        (MemoryError("ünzulänglich"), "RESOURCE_EXHAUSTED: rawattn: MemoryError: ünzulänglich"),
        (NotImplementedError("not here"), "UNIMPLEMENTED: rawattn: NotImplementedError: not here"),
        (KeyboardInterrupt(), "CANCELLED: rawattn: KeyboardInterrupt"),
        (SystemExit(3), "INTERNAL: rawattn: SystemExit: 3"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_errors_of_a_run_reach_the_user(
    error: BaseException, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = arrays(1, 9, 2, 16)[0]
    program = jax.jit(lambda q: jax_calls.causal(q, q, q))
    exact = program(q)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cpu_forward, "forward", fail)
        # A ValueError where JAX runs the program before the call returns.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=re.escape(code)):
            jax.block_until_ready(program(q))
    assert bool((program(q) == exact).all()), "the call after a failed one is wrong"


def test_vmap() -> None:
    jax_calls.verify_mapped("cpu")


@pytest.mark.parametrize(
    "lengths",
    [
        {"seqlen_q": [5, 9], "seqlen_k": [7, 3]},
        {"cu_seqlen_k": [4, 11, 12]},
        {"max_seqlen_q": 9},
    ],
    ids=str,
)
def test_vmap_of_padded_batches(lengths: dict[str, Any]) -> None:
    """Constant lengths are those of each call."""
    q, k, v = arrays(3, 2, 9, 4, 16)
    seqs = rawattn.SeqLayout(**lengths)

    def call(q: Any, k: Any, v: Any) -> Any:
        return rawattn.jax.attention(q, k, v, seqs=seqs, causal=True, return_lse=True)

    mapped = jax.jit(jax.vmap(call))(q, k, v)
    for n in range(3):
        for a, b in zip(mapped, call(q[n], k[n], v[n]), strict=True):
            np.testing.assert_allclose(np.asarray(a[n]), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None)], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        {"bias": (1, 4, 9, 9), "mask": (9, 9), "alibi_slopes": (4,)},
        {"bias": (2, 1, 1, 9), "mask": (2, 1, 9, 9), "alibi_slopes": (2, 4)},
        {"bias": (4, 9, 1), "mask": (2, 4, 1, 9), "alibi_slopes": (4,)},
    ],
    ids=str,
)
def test_vmap_of_options(shapes: dict[str, Any], axes: tuple[Any, ...]) -> None:
    """What one call after another gives, with gradients of the bias for each call."""
    q, k, v = arrays(3, 2, 9, 4, 16)
    rng = np.random.default_rng(3)
    given = {
        name: jnp.asarray(rng.standard_normal((3, *shape)) > 0 if name == "mask" else rng.standard_normal((3, *shape)),
                          bool if name == "mask" else "float32")
        for name, shape in shapes.items()
    }  # fmt: skip
    names = tuple(given)
    mapped_axes = dict(zip(names, axes, strict=True))

    def loss(q: Any, options: Any) -> Any:
        return (rawattn.jax.attention(q, k[0], v[0], **options) ** 2).sum()

    def each(n: int) -> Any:
        options = {x: given[x][n if mapped_axes[x] == 0 else 0] for x in names}
        return jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)(q[n], options)

    options = {x: given[x] if mapped_axes[x] == 0 else given[x][0] for x in names}
    run = jax.vmap(
        jax.value_and_grad(loss, argnums=(0, 1), allow_int=True), in_axes=(0, mapped_axes)
    )
    values, (of_q, of_options) = jax.jit(run)(q, options)
    for n in range(3):
        value, (slope_q, slope_options) = each(n)
        np.testing.assert_allclose(np.asarray(values[n]), np.asarray(value), rtol=2e-5)
        np.testing.assert_allclose(np.asarray(of_q[n]), np.asarray(slope_q), rtol=2e-5, atol=2e-5)
        got, exact = np.asarray(of_options["bias"][n]), np.asarray(slope_options["bias"])
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout_p", {"dropout_p": 0.5, "seed": 3}),
        ("score_mod", {"score_mod": rawattn.ScoreMod("score + batch")}),
    ],
)
def test_vmap_of_what_depends_on_the_batch_is_refused(name: str, options: Any) -> None:
    q = arrays(3, 2, 9, 4, 16)[0]
    with pytest.raises(NotImplementedError, match=rf"^{name}: jax\.vmap .*; use jax\.lax\.map"):
        jax.vmap(lambda q: rawattn.jax.attention(q, q, q, **options))(q)


def test_vmap_of_sink_logits() -> None:
    q = arrays(3, 2, 9, 4, 16)[0]
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), "float32")

    def call(q: Any, logits: Any) -> Any:
        return rawattn.jax.attention(q, q, q, sink_logits=logits)

    shared = jax.vmap(call, in_axes=(0, None))(q, logits[0])
    for n in range(3):
        np.testing.assert_allclose(
            np.asarray(shared[n]), np.asarray(call(q[n], logits[0])), atol=1e-6
        )
    with pytest.raises(NotImplementedError, match=r"^sink_logits: jax\.vmap"):
        jax.vmap(call)(q, logits)
    slope = jax.grad(lambda q, x: call(q, x).sum(), argnums=1)
    with pytest.raises(NotImplementedError, match=r"^sink_logits: jax\.vmap"):
        jax.vmap(slope, in_axes=(0, None))(q, logits[0])
    found = jax.lax.map(lambda x: slope(*x), (q, logits))
    np.testing.assert_allclose(np.asarray(found[1]), np.asarray(slope(q[1], logits[1])), atol=1e-5)


def test_vmap_of_a_packed_batch_is_refused() -> None:
    q = arrays(3, 9, 4, 16)[0]
    seqs = rawattn.SeqLayout(seqstart_q=[0, 4, 9])
    with pytest.raises(NotImplementedError, match=r"jax.vmap: a packed batch .* jax.lax.map"):
        jax.vmap(lambda q: rawattn.jax.attention(q, q, q, seqs=seqs))(q)
    out = jax.lax.map(lambda q: rawattn.jax.attention(q, q, q, seqs=seqs), q)
    exact = rawattn.jax.attention(q[2], q[2], q[2], seqs=seqs)
    assert bool((out[2] == exact).all())


def test_threads_trace_and_run_at_once() -> None:
    """Each with options of its own, on both sides of the compilation."""
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
    functions = rawattn.jax._function.cache_info().currsize
    for _ in range(3):
        call([0, 4, 9])
    assert rawattn.jax._function.cache_info().currsize == functions
    call([0, 5, 9])
    assert rawattn.jax._function.cache_info().currsize == functions + 1


@pytest.mark.parametrize("case", [*jax_calls.CASES_OF_FORWARD, *jax_calls.SCORE_CASES], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_a_record_is_what_its_text_says(case: Case, traced: bool) -> None:
    inputs = jax_calls.backward_of(case).inputs
    qkv = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    options = Options(seqs=layout(inputs), **inputs.options)
    gradients, _ = of_options(rawattn.Gradients(), options, None)
    verb, given, values, options = with_arrays(FORWARD, options)
    named = dict(zip(verb.extras, given, strict=True))
    problem, lengths = rawattn.jax.describe(*qkv, options, arrays=named)
    if traced:
        lengths, _ = record.with_operands(lengths)
    for backward in (False, True):
        more = verb.extras, gradients, *values
        written = record.Record(problem, lengths, True, backward, backward, *more)
        read = record.read(written.text)
        assert read.text == written.text
        assert read.problem == problem
        assert (read.options, read.gradients, (read.seed,)) == (
            verb.extras,
            gradients,
            values or (None,),
        )
        assert (read.inputs, read.outputs) == (written.inputs, written.outputs)
        assert read.lse and read.deterministic is backward is read.backward
        assert read.operands == written.operands


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    """Nothing that a program needs lies in the process that traced it."""
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
    return (rawattn.jax.attention(q, k, v, causal=True) ** 2).sum(keepdims=True, axis=(1, 2, 3))
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


def test_docstrings() -> None:
    results = doctest.testmod(rawattn.jax, verbose=False)
    assert results.attempted > 0
    assert results.failed == 0


def test_page() -> None:
    """The Python of docs/frameworks.md about JAX runs."""
    section = re.search(r"^## JAX$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert section is not None
    blocks = re.findall(r"^```python\n(.*?)^```$", section[1], re.M | re.S)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
