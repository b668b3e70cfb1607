"""Mistakes in calls of `rawattn.jax` on the CPU, traced or not, and errors while a program runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp
import numpy as np

import rawattn.jax
from rawattn import SeqLayout, reference
from rawattn._cpu import forward as cpu_forward
from tests import jax_calls
from tests.bad_calls import BAD_CALLS, Bad, check_refused
from tests.frameworks import Jax

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")

# Arguments that rawattn.jax.attention does not have.
REFUSED = [
    bad
    for bad in BAD_CALLS
    if not bad.change.keys() & {"out", "backend"} and bad.name != "float64"  # JAX makes it float32
]


@pytest.mark.parametrize("bad", REFUSED, ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_mistakes_are_refused(bad: Bad, traced: bool) -> None:
    """Mistakes are refused as by `rawattn.attention`, while the call is traced."""

    def call(*, q: Any, k: Any, v: Any, **options: Any) -> Any:
        bound = functools.partial(rawattn.jax.attention, **options)
        return (jax.jit(bound) if traced else bound)(q, k, v)

    if traced and isinstance(bad.change.get("q"), (str, list)):
        pytest.skip("jax.jit refuses it")
    check_refused(bad, Jax("cpu"), call)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"return_lse": 1}, TypeError, "return_lse: got 1 \\(int\\), expected a bool"),
        (
            {"deterministic": None},
            TypeError,
            "deterministic: got None \\(NoneType\\), expected a bool",
        ),
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


def of_traced_lengths(n: Any) -> dict[str, Callable[[], Any]]:
    """Calls that need the value of the traced n, by the argument that it is in."""
    q = np.ones((2, 4, 2, 16), np.float32)
    out, lse = rawattn.attention(q, q, q, return_lse=True)
    seqs, packed = SeqLayout(seqlen_k=n), SeqLayout.from_lengths(n)
    of_mask = SeqLayout.from_padding_mask(jnp.arange(4) < n[:, None])
    pages = np.ones((3, 4, 2, 16), np.float32), np.ones((3, 4, 2, 16), np.float32)
    table = np.array([[0], [1]], np.int32)
    rows = q.reshape(8, 2, 16)
    paged: dict[str, Any] = {"seqlen_k": [4, 4], "seqs": SeqLayout(seqlen_q=n)}
    return {
        "seqlen_k of attention": lambda: rawattn.attention(q, q, q, seqs=seqs),
        "seqlen_q of a mask": lambda: rawattn.attention(q, q, q, seqs=of_mask),
        "seqstart_q of lengths": lambda: rawattn.attention(rows, rows, rows, seqs=packed),
        "seqlen_k of a vjp": lambda: rawattn.attention_vjp(q, q, q, seqs=seqs),
        "seqlen_k of a backward": lambda: rawattn.attention_backward(
            out, q, q, q, out, lse, seqs=seqs
        ),
        "seqlen_k of a plan": lambda: rawattn.plan(rawattn.attention, q, q, q, seqs=seqs),
        "seqlen_k of pages": lambda: rawattn.paged_attention(q, *pages, table, seqlen_k=n),
        "seqlen_k to be checked": lambda: rawattn.paged_attention(
            q, *pages, table, seqlen_k=n, validate=True
        ),
        "seqlen_q of pages": lambda: rawattn.paged_attention(q, *pages, table, **paged),
        "seqlen_k of new rows": lambda: rawattn.append_kv(q, q, *pages, table, seqlen_k=n),
        "seqlen_k of the reference": lambda: reference.attention(q, q, q, seqs=seqs),
        "seqlen_k of its backward": lambda: reference.attention_backward(
            out, q, q, q, out, lse, seqs=seqs
        ),
        "seqlen_k of its pages": lambda: reference.paged_attention(q, *pages, table, seqlen_k=n),
        "seqlen_k of its new rows": lambda: reference.append_kv(q, q, *pages, table, seqlen_k=n),
    }


@pytest.mark.parametrize("which", of_traced_lengths(np.array([3, 4])))
def test_traced_lengths_are_for_rawattn_jax(which: str) -> None:
    traced = jax.jit(lambda n: of_traced_lengths(n)[which]())
    with pytest.raises(
        TypeError, match=rf"^{which.split(maxsplit=1)[0]}: got a JAX tracer.*rawattn\.jax"
    ):
        traced(jnp.array([3, 4], jnp.int32))


def test_a_traced_number_of_a_score_function_is_an_array_of_one_element() -> None:
    def call(a: Any) -> Any:
        return rawattn.ScoreMod("score * a", a=a)

    with pytest.raises(
        ValueError, match=r"^a: got shape \(\).*jnp.reshape\(a, 1\) and write a\[0\]"
    ):
        jax.jit(call)(1.0)


def test_flags_are_those_of_numpy_too() -> None:
    q = arrays(1, 9, 2, 16)[0]
    given = {"return_lse": np.True_, "deterministic": np.False_}
    assert rawattn.jax.attention(q, q, q, **given)[1].shape == (1, 2, 9)


def test_an_option_that_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^bias: got torch\.Tensor; accepted are JAX and NumPy"):
        rawattn.jax.attention(q, q, q, bias=torch.zeros(9, 9))


def test_what_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    with pytest.raises(TypeError, match=r"k: got builtins\.list; accepted are JAX arrays"):
        rawattn.jax.attention(q, [[1.0]], q)


def test_another_order_of_bytes_is_refused_after_an_equal_call() -> None:
    q = arrays(1, 9, 2, 16)[0]

    def call(table: Any) -> Any:
        mod = rawattn.ScoreMod("score + table[head]", table=table)
        return rawattn.jax.attention(q, q, q, score_mod=mod)

    call(np.ones(2, np.float32))
    with pytest.raises(TypeError, match=r"^table: got dtype >f4, .*newbyteorder\('='\)"):
        call(np.ones(2, ">f4"))


@pytest.mark.parametrize("name", ["q", "v", "bias", "table"])
def test_masked_arrays_are_refused_by_name(name: str) -> None:
    q = arrays(1, 9, 2, 16)[0]
    given: dict[str, Any] = {"q": q, "k": q, "v": q}
    masked = np.ma.masked_array(np.ones(2 if name == "table" else q.shape, np.float32))
    if name == "table":
        given["score_mod"] = rawattn.ScoreMod("score + table[head]", table=masked)
    else:
        given[name] = masked
    with pytest.raises(TypeError, match=rf"^{name}: got a masked array.*{name}\.filled\(0\)"):
        rawattn.jax.attention(**given)


def test_a_captured_array_that_is_none_of_jax_is_refused_by_its_name() -> None:
    q = arrays(1, 9, 2, 16)[0]
    torch = pytest.importorskip("torch")
    mod = rawattn.ScoreMod("score + table[head]", table=torch.zeros(2))
    with pytest.raises(TypeError, match=r"^table: got torch\.Tensor; accepted are JAX and NumPy"):
        rawattn.jax.attention(q, q, q, score_mod=mod)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("q", "b, 9, 2, 16"), ("q", "1, s, 2, 16"), ("q", "1, 9, h, 16"), ("bias", "b, 2, 9, 9")],
)
def test_symbolic_shapes_are_refused_by_name(name: str, shape: str) -> None:
    export = pytest.importorskip("jax.export")
    q = arrays(1, 9, 2, 16)[0]

    def call(x: Any) -> Any:
        return rawattn.jax.attention(
            *([x] * 3 if name == "q" else [q] * 3), **{name: x} if name == "bias" else {}
        )

    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    with pytest.raises(ValueError, match=rf"^{name}: got the symbolic shape .* of constants"):
        export.export(jax.jit(call))(symbolic)


def test_derivatives_that_do_not_exist_are_refused() -> None:
    q, k, v = arrays(1, 9, 2, 16)

    def slope(q: Any) -> Any:
        return jax.grad(lambda q: jax_calls.causal(q, k, v).sum())(q).sum()

    for second in (jax.grad(slope), jax.jacfwd(slope), jax.grad(jax.jit(slope))):
        with pytest.raises(
            TypeError, match=r"^rawattn\.jax\.attention has first derivatives alone"
        ):
            second(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: jax_calls.causal(q, k, v), (q,), (q,))


@pytest.mark.parametrize(
    ("name", "align", "fix"),
    [
        ("alibi_slopes", "bottom-right", r"abs\(q_idx \+ seqlen_k - seqlen_q - kv_idx\).*wrt="),
        ("alibi_slopes", "top-left", r"abs\(q_idx - kv_idx\)"),
        ("score_mod: captured t", "top-left", r"name it in wrt=\('t',\)"),
    ],
)
def test_gradients_that_would_be_zero_are_refused(name: str, align: str, fix: str) -> None:
    """The gradient of an array that an option holds as a constant is refused. Gradients of other inputs of the call work."""
    q, x = arrays(1, 9, 2, 16)[0], jnp.ones(2)

    def loss(x: Any, q: Any) -> Any:
        score_mod = rawattn.ScoreMod("score * t[head]", t=x)
        given = {"alibi_slopes": x} if name == "alibi_slopes" else {"score_mod": score_mod}
        return rawattn.jax.attention(q, q, q, align=align, **given).sum()

    of_x, of_q = jax.grad(loss), jax.grad(loss, 1)
    for run in (of_x, jax.jit(of_x), jax.grad(jax.jit(loss)), jax.checkpoint(of_x)):
        with pytest.raises(TypeError, match=rf"^{name}: got .*jax\.lax\.stop_gradient\(.*{fix}"):
            run(x, q)
    exact = of_q(x, q)
    for run in (jax.jit(of_q), jax.grad(jax.jit(loss), 1), jax.grad(jax.checkpoint(loss), 1)):
        np.testing.assert_allclose(run(x, q), exact, atol=1e-6)
    assert np.any(jax.grad(lambda x: loss(jax.lax.stop_gradient(x), q * x[0]))(x))


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
        # JAX raises a ValueError if it runs the program before the call returns.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=re.escape(code)):
            jax.block_until_ready(program(q))
    assert bool((program(q) == exact).all()), "the call after a failed one is wrong"
