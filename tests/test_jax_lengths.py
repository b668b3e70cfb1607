"""`rawattn.jax` on the CPU with traced lengths: they are operands of the call, read when the program runs."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp
import numpy as np

import rawattn
from tests import jax_calls
from tests.cases import Case

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("case", jax_calls.LENGTH_CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    jax_calls.verify_traced_lengths(case, "cpu")


@pytest.mark.parametrize("case", jax_calls.LENGTH_CASES[:2], ids=str)
def test_beside_constant_lengths(case: Case) -> None:
    jax_calls.verify_traced_lengths(case, "cpu", host=True)


def test_bad_values_reach_no_other_memory() -> None:
    jax_calls.verify_bad_traced_lengths("cpu")


@pytest.mark.parametrize("positions", [False, True])
def test_vmap(positions: bool) -> None:
    jax_calls.verify_mapped_traced_lengths("cpu", positions=positions)


def test_other_lengths_are_no_other_program() -> None:
    traces = []

    @jax.jit
    def call(q: Any, lengths: Any) -> Any:
        traces.append(lengths)
        seqs = rawattn.SeqLayout(seqlen_k=lengths)
        return rawattn.jax.attention(q, q, q, seqs=seqs)

    (q,) = jax_calls.random_arrays("cpu", 2, 9, 4, 16, count=1)
    one, two = (call(q, jnp.asarray(n)) for n in ([9, 3], [1, 4]))
    assert len(traces) == 1
    assert not bool((one == two).all())
    for n in range(4):
        np.testing.assert_allclose(np.asarray(two[0, n]), np.asarray(q[0, 0]), atol=1e-6)


def test_layouts_from_lengths_and_masks() -> None:
    (x,) = jax_calls.random_arrays("cpu", 12, 4, 16, count=1)
    lengths = np.array([5, 0, 7], np.int32)
    mask = np.arange(6) < np.array([[5], [3]])

    @jax.jit
    def packed(lengths: Any) -> Any:
        return rawattn.jax.attention(x, x, x, seqs=rawattn.SeqLayout.from_lengths(lengths))

    @jax.jit
    def padded(mask: Any) -> Any:
        y = x.reshape(2, 6, 4, 16)
        return rawattn.jax.attention(y, y, y, seqs=rawattn.SeqLayout.from_padding_mask(mask))

    given = np.asarray(x)
    exact = rawattn.attention(*[given] * 3, seqs=rawattn.SeqLayout.from_lengths(lengths))
    np.testing.assert_allclose(packed(lengths), exact, atol=1e-6)
    given = given.reshape(2, 6, 4, 16)
    exact = rawattn.attention(*[given] * 3, seqs=rawattn.SeqLayout.from_padding_mask(mask))
    np.testing.assert_allclose(padded(mask), exact, atol=1e-6)


def test_a_layout_of_traced_lengths_says_so() -> None:
    said: list[str] = []
    jax.jit(lambda x: said.append(repr(rawattn.SeqLayout(seqlen_k=x))))(jnp.ones(3, "int32"))
    assert said == ["SeqLayout(seqlen_k=<3 int32 traced>)"]


@pytest.mark.parametrize(
    ("lengths", "error", "says"),
    [
        (
            np.ones((2, 1), np.int32),
            ValueError,
            r"seqlen_k: got shape \(2, 1\), expected \(batch,\)",
        ),
        (np.ones(2, np.float32), TypeError, "seqlen_k: got float32; accepted are int32 and int64"),
        (np.ones(3, np.int32), ValueError, "seqs: got lengths of 3 sequences, expected 2"),
    ],
    ids=["shape", "dtype", "batch"],
)
def test_mistakes_are_refused(lengths: np.ndarray, error: type[Exception], says: str) -> None:
    (q,) = jax_calls.random_arrays("cpu", 2, 9, 4, 16, count=1)

    @jax.jit
    def call(lengths: Any) -> Any:
        return rawattn.jax.attention(q, q, q, seqs=rawattn.SeqLayout(seqlen_k=lengths))

    with pytest.raises(error, match=says):
        call(lengths)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("seqlen_k", lambda n: rawattn.SeqLayout(seqlen_k=[n, 3])),
        ("lengths_q", lambda n: rawattn.SeqLayout.from_lengths([n, n])),
    ],
)
def test_lists_of_traced_values_are_refused(name: str, layout: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: got a list .*traces; pass jnp\.stack"):
        jax.jit(lambda n: layout(n).batch)(3)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_traced_maximum_is_refused(name: str) -> None:
    says = rf"^{name}: got .*, expected an int >= 0 or None; .* static_argnames='{name}'"
    with pytest.raises(TypeError, match=says):
        jax.jit(lambda n: rawattn.SeqLayout(seqlen_k=[3, 3], **{name: n}).batch)(3)
