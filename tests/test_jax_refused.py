"""Mistakes in calls of `rawattn.jax` on the CPU, traced or not, and errors while a program runs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp

import rawattn.jax
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


def test_an_option_that_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^bias: got torch\.Tensor; accepted are JAX and NumPy"):
        rawattn.jax.attention(q, q, q, bias=torch.zeros(9, 9))


def test_what_is_no_array_of_jax_is_refused() -> None:
    q = arrays(1, 9, 2, 16)[0]
    with pytest.raises(TypeError, match=r"k: got builtins\.list; accepted are JAX arrays"):
        rawattn.jax.attention(q, [[1.0]], q)


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
