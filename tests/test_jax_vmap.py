"""`rawattn.jax` under `jax.vmap` on the CPU gives what separate calls give, or is refused."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp

import rawattn.jax
from tests import exhaustive, jax_calls

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")


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
    """Lengths that are constants apply to each of the mapped calls."""
    q, k, v = arrays(3, 2, 9, 4, 16)
    seqs = rawattn.SeqLayout(**lengths)

    def call(q: Any, k: Any, v: Any) -> Any:
        return rawattn.jax.attention(q, k, v, seqs=seqs, causal=True, return_lse=True)

    mapped = jax.jit(jax.vmap(call))(q, k, v)
    for n in range(3):
        for a, b in zip(mapped, call(q[n], k[n], v[n]), strict=True):
            np.testing.assert_allclose(np.asarray(a[n]), np.asarray(b), atol=1e-6)


_SHAPES = (
    {"bias": (1, 4, 9, 9), "mask": (9, 9), "alibi_slopes": (4,)},
    {"bias": (2, 1, 1, 9), "mask": (2, 1, 9, 9), "alibi_slopes": (2, 4)},
    {"bias": (4, 9, 1), "mask": (2, 4, 1, 9), "alibi_slopes": (4,)},
)
_AXES = ((0, 0, 0), (0, None, None), (None, 0, None))


# Curated are the shapes, each with other axes.
@pytest.mark.parametrize(
    ("shapes", "axes"), exhaustive.thin(itertools.product(_SHAPES, _AXES), 4), ids=str
)
def test_vmap_of_options(shapes: dict[str, Any], axes: tuple[Any, ...]) -> None:
    """Mapped options give what separate calls give, with a gradient of the bias for each call."""
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
        slopes = jax.lax.stop_gradient(options["alibi_slopes"])
        given = {**options, "alibi_slopes": slopes}
        return (rawattn.jax.attention(q, k[0], v[0], **given) ** 2).sum()

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


@pytest.mark.parametrize("name", ["sink_logits", "bias", "score_mod"])
def test_vmap_of_gradients_beside_constants(name: str) -> None:
    """Gradients can be mapped beside constants, which are neither mapped nor differentiated."""
    q, k, v = arrays(3, 2, 9, 4, 16)
    given: Any = {
        "sink_logits": np.arange(4, dtype=np.float32),
        "bias": jnp.arange(36.0).reshape(4, 9, 1),
        "score_mod": rawattn.ScoreMod("score * t[head]", t=jnp.arange(4.0), wrt="t"),
    }

    def loss(q: Any) -> Any:
        return jnp.sin(rawattn.jax.attention(q, k[0], v[0], **{name: given[name]})).sum()

    slope = jax.grad(loss)
    for run in (jax.vmap(slope), jax.jit(jax.vmap(slope))):
        mapped = run(q)
        for n in range(3):
            np.testing.assert_allclose(np.asarray(mapped[n]), np.asarray(slope(q[n])), atol=1e-5)


def test_gradients_of_some_captured_arrays() -> None:
    jax_calls.verify_gradients_of_some("cpu")


def test_constants_have_no_gradients_in_a_program() -> None:
    """A program computes the gradient of an option's array only if that array is differentiated."""
    q, k, v = arrays(2, 9, 4, 16)
    bias, logits = jnp.ones((4, 9, 9)), jnp.ones(4)

    def loss(q: Any, bias: Any, logits: Any) -> Any:
        return rawattn.jax.attention(q, k, v, bias=bias, sink_logits=logits).sum()

    def names(slope: Any, *given: Any) -> set[str]:
        return set(re.findall(r"d(?:bias|sink_logits)", jax.jit(slope).lower(*given).as_text()))

    assert names(jax.grad(lambda q: loss(q, bias, logits)), q) == set()
    assert names(jax.grad(lambda q, bias: loss(q, bias, logits), (0, 1)), q, bias) == {"dbias"}
    of_all = jax.grad(loss, (0, 1, 2))
    assert names(of_all, q, bias, logits) == {"dbias", "dsink_logits"}
    assert all(np.abs(np.asarray(x)).max() > 1e-4 for x in of_all(q, bias, logits))


def test_vmap_of_a_packed_batch_is_refused() -> None:
    q = arrays(3, 9, 4, 16)[0]
    seqs = rawattn.SeqLayout(seqstart_q=[0, 4, 9])
    with pytest.raises(NotImplementedError, match=r"jax.vmap: a packed batch .* jax.lax.map"):
        jax.vmap(lambda q: rawattn.jax.attention(q, q, q, seqs=seqs))(q)
    out = jax.lax.map(lambda q: rawattn.jax.attention(q, q, q, seqs=seqs), q)
    exact = rawattn.jax.attention(q[2], q[2], q[2], seqs=seqs)
    assert bool((out[2] == exact).all())
