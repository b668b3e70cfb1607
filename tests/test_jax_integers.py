"""Integers in the calls of `rawattn.jax` on the CPU: 64 bits on the host, 32 in JAX unless its 64-bit mode is on."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp

import rawattn.jax
from rawattn._call.problem import describe
from rawattn._jax.arrays import as_jax
from rawattn._jax.record import Operand, Record, with_operands
from tests import jax_calls

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")


@pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
@pytest.mark.parametrize("which", jax_calls.INTEGERS_OF_THE_HOST)
def test_integers_of_the_host(which: str, wide: bool) -> None:
    with jax.enable_x64(wide):
        jax_calls.verify_integers_of_the_host("cpu", which)


def test_lengths_of_another_library_are_narrowed_with_their_record() -> None:
    """Lengths in arrays of another library become int32 operands: torch's here, as CuPy's on a GPU."""
    torch = pytest.importorskip("torch")
    operand = as_jax(torch.tensor([5, 2]))
    assert operand.dtype == np.int32 and operand.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("seed", {"dropout_p": 0.3, "seed": np.array([2**40 + 7])}),
        ("seed", {"dropout_p": 0.3, "seed": np.array(-(2**31) - 1)}),
        ("table", {"score_mod": rawattn.ScoreMod("score + table[head]", table=np.array([2**31]))}),
    ],
    ids=["seed", "negative-seed", "captured"],
)
def test_values_that_jax_would_cut_are_refused(name: str, options: dict[str, Any]) -> None:
    q = arrays(1, 9, 2, 16)[0]
    for run in (lambda f: f(q), lambda f: jax.jit(f)(q)):
        with pytest.raises(
            ValueError, match=rf"^{name}: got -?\d+ in an array, .* to 2\*\*31 - 1.*jax_enable_x64"
        ):
            run(lambda q: rawattn.jax.attention(q, q, q, **options))


def test_offsets_that_jax_would_cut_are_refused() -> None:
    q = arrays(2, 9, 2, 16)[0]
    offsets = np.array([2**40, 2**40 + 3, 2**40 + 6])

    @jax.jit
    def call(lengths: Any) -> Any:
        seqs = rawattn.SeqLayout(cu_seqlen_q=offsets, seqlen_k=lengths)
        return rawattn.jax.attention(q, q, q, seqs=seqs)

    with pytest.raises(ValueError, match=r"^seqs: got 1099511627782 .*jax_enable_x64"):
        call(jnp.array([3, 6]))


def test_wide_seeds_are_whole_in_the_64_bit_mode() -> None:
    q = arrays(1, 9, 2, 16)[0]

    def call(seed: Any) -> Any:
        return np.asarray(rawattn.jax.attention(q, q, q, dropout_p=0.5, seed=seed))

    with jax.enable_x64(True):
        wide = call(np.array([2**40 + 7]))
        of_jax = jnp.array([7])
    np.testing.assert_array_equal(wide, call(2**40 + 7))
    assert not np.array_equal(wide, call(7))
    with pytest.raises(TypeError, match=r"^seed: got a JAX array of int64.*astype\('int32'\)"):
        call(of_jax)


def forged(dtype: str, rows: int) -> Record:
    """A record that claims this number of rows of k and this dtype of the lengths."""
    q = np.ones((2, 9, 2, 16), np.float32)
    k = np.ones((2, rows, 2, 16), np.float32)
    problem, lengths = describe(q, k, k, seqs=rawattn.SeqLayout(seqlen_k=[3, 6]))
    told, _ = with_operands(lengths)
    told = replace(told, k=replace(told.k, length=Operand(0, (2,), dtype)))
    return Record(problem, told, lse=False, deterministic=False)


@pytest.mark.parametrize(
    ("dtype", "rows", "says"),
    [
        ("int64", 9, r"array 3 of a call: got int32 of shape \(2,\), expected int64"),
        ("int32", 99, r"array 1 of a call: got float32 of shape \(2, 9, 2, 16\), expected .* 99,"),
    ],
)
def test_a_record_that_is_not_the_programs_is_refused(dtype: str, rows: int, says: str) -> None:
    """A record that does not fit its program is refused before anything is read."""
    q, lengths = arrays(2, 9, 2, 16)[0], jnp.array([3, 6], "int32")
    call = jax.ffi.ffi_call("rawattn_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    exact = rawattn.jax.attention(q, q, q, seqs=rawattn.SeqLayout(seqlen_k=[3, 6]))
    out = call(q, q, q, lengths, record=forged("int32", 9).text)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(exact))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=says):
        jax.block_until_ready(call(q, q, q, lengths, record=forged(dtype, rows).text))
