"""Checks of `rawattn.jax` that hold on every device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rawattn.jax
from rawattn import Gradients
from tests.autograd import CASES, dlse_of, verify
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import Jax
from tests.gradients import backward_of, verify_others
from tests.score_cases import curated_scores
from tests.tolerance import check, check_lse
from tests.verify import expected, layout, options_of

GRADIENT_CASES = [
    *CASES,
    dense("jax-d128", 1, 65, 130, nheads_q=6, nheads_kv=1, headdim=128, dtype="float16"),
    dense("jax-no-keys", 2, 9, 0, headdim=16),
    padded("jax-padded-k", (70, 70), (90, 17), 70, 95, by_q="room", by_k="cu_seqlen", headdim=32),
]
CASES_OF_FORWARD = [
    *GRADIENT_CASES,
    dense("jax-odd", 2, 33, 41, headdim=7, headdim_v=66, dtype="float16"),
    dense("jax-no-queries", 2, 0, 9),
    dense("jax-no-batch", 0, 5, 9),
    dense("jax-top-left", 1, 40, 70, align="top-left", causal=True, scale=-0.3),
    ragged("jax-starts", (30, 0, 64), (90, 20, 5), causal=True, dtype="float16"),
]


def arrays_of(case: Case, platform: str) -> list[Any]:
    inputs = backward_of(case).inputs
    return [Jax(platform).array(x) for x in (inputs.q, inputs.k, inputs.v)]


def verify_forward(case: Case, platform: str, **given: Any) -> None:
    """Check values, padding and lse, jitted and eager, and that return_lse does not change out."""
    inputs, exact = backward_of(case).inputs, expected(case)
    options = {"seqs": layout(inputs), **inputs.options, **given}

    def call(q: Any, k: Any, v: Any) -> Any:
        return rawattn.jax.attention(q, k, v, return_lse=True, **options)

    arrays, rows = arrays_of(case, platform), inputs.rows
    for run in (jax.jit(call), call):
        out, lse = (Jax(platform).host(x) for x in run(*arrays))
        assert out.dtype == inputs.q.buffer.dtype and lse.dtype == np.float32
        log = lse.swapaxes(-1, -2)
        check(out[rows], exact.out, exact.low_out, what="out")
        check_lse(log[rows], exact.lse, exact.low_lse)
        assert not np.any(out[~rows].astype(np.float32) != 0), "padding rows of out are not 0"
        assert np.all(log[~rows] == -np.inf), "padding rows of lse are not -inf"
    alone = Jax(platform).host(rawattn.jax.attention(*arrays, **options))
    assert np.array_equal(alone, out)


def verify_gradients(case: Case, platform: str, **given: Any) -> None:
    """Check the gradients of out and lse, jitted and eager."""
    call, framework = backward_of(case), Jax(platform)
    options = {"seqs": layout(call.inputs), **call.inputs.options, **given}
    arrays = arrays_of(case, platform)
    incoming = framework.array(call.dout), framework.array(dlse_of(call))

    def gradients(arrays: Any, incoming: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            return rawattn.jax.attention(q, k, v, return_lse=True, **options)

        return jax.vjp(attention, *arrays)[1](incoming)

    verify(call, framework, jax.jit(gradients)(arrays, incoming))
    verify(call, framework, gradients(arrays, incoming))


_NAMES = ("softcap", "score-mod", "bias", "alibi-slopes", "mask", "sink-logits", "dropout-p")
_WANTED = {
    *(f"{name}-{kind}-bfloat16" for name in _NAMES for kind in ("packed", "padded")),
    *(f"{name}-{dtype}" for name in _NAMES for dtype in ("float16", "float32")),
    "every-option-bfloat16", "every-option-packed-bfloat16", "seed-int32-0-bfloat16", "seed-int32-1-bfloat16",
    "bias-axes-1kv1k-bfloat16", "bias-axes-bqr1-bfloat16", "bias-of-keys-once-bfloat16", "bias-no-keys-bfloat16",
    "mask-empty-batch-bfloat16", "score-table-float32", "slopes-1-bfloat16",
}  # fmt: skip
SCORE_CASES = [case for case in curated_scores() if str(case) in _WANTED]
assert len(SCORE_CASES) == len(_WANTED), _WANTED - {str(case) for case in SCORE_CASES}


def verify_scores(case: Case, platform: str) -> None:
    """Check values and gradients with the arrays of options traced, and with constant arrays."""
    call, framework, exact = backward_of(case), Jax(platform), expected(case)
    inputs, seqs = call.inputs, layout(call.inputs)
    arrays, incoming = (
        arrays_of(case, platform),
        (framework.array(call.dout), framework.array(dlse_of(call))),
    )
    given = options_of(inputs, framework)
    mod = given.pop("score_mod", None)
    of_options = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    constants = {name: x for name, x in given.items() if name not in of_options}
    differentiated = {
        name: of_options.pop(name) for name in ("bias", "sink_logits") if name in of_options
    }
    captured = {} if mod is None else dict(mod.arrays)
    # Captured arrays without a gradient are traced too.
    wanted = () if mod is None else mod.text.wrt
    fixed = {name: x for name, x in captured.items() if name not in wanted}
    captured = {name: x for name, x in captured.items() if name in wanted}

    def run(arrays: Any, differentiated: Any, captured: Any, of_options: Any, fixed: Any) -> Any:
        options = {**constants, **of_options}

        def attention(arrays: Any, differentiated: Any, captured: Any) -> Any:
            more = {}
            if mod is not None:
                given = {**captured, **fixed}
                more["score_mod"] = rawattn.ScoreMod(mod.text.forward, wrt=mod.text.wrt, **given)
            return rawattn.jax.attention(
                *arrays, seqs=seqs, return_lse=True, **options, **differentiated, **more
            )

        results, pull = jax.vjp(attention, arrays, differentiated, captured)
        return results, pull(incoming)

    for traced in (True, False):
        program = jax.jit(run) if traced else run
        results, (of_qkv, *found) = program(arrays, differentiated, captured, of_options, fixed)
        out, lse = map(framework.host, results)
        check(out[inputs.rows], exact.out, exact.low_out, what="out")
        check_lse(lse.swapaxes(-1, -2)[inputs.rows], exact.lse, exact.low_lse)
        of_captured = {name: x for name, x in found[1].items() if name in call.names}
        of_options_too = [found[0].get(name) for name in ("bias", "sink_logits")]
        gradients = Gradients(*of_qkv, *of_options_too, of_captured or None)
        verify(call, framework, gradients)
        verify_others(call, framework, gradients, None)


LENGTH_CASES = [
    padded("jax-traced-padded", (30, 0, 64), (90, 17, 0), 70, 95, causal=True),
    padded("jax-traced-cumulative", (30, 5), (9, 17), 40, 20, by_q="cu_seqlen", by_k="cu_seqlen"),
    padded("jax-traced-bound", (30, 5), (9, 17), 40, 20, max_seqlen=True, dtype="float32"),
    ragged("jax-traced-starts", (30, 0, 64), (30, 0, 64), share_starts=True, causal=True),
    ragged(
        "jax-traced-slots", (30, 5, 64), (90, 0, 5), room_q=(33, 9, 70), room_k=(99, 7, 5),
        by_q="seqlen", by_k="cu_seqlen", lead=3, tail=9, window=(20, 3), dtype="float16",
    ),
    padded("jax-traced-positions", (30, 5), (9, 17), 40, 20, positions_q=(40, 3), positions_k=(1, 0), causal=True),
]  # fmt: skip


def verify_traced_lengths(case: Case, platform: str, *, host: bool = False) -> None:
    """Check values, gradients and padding for lengths that the program computes.

    host: the lengths of k are constants instead.
    """
    call, exact, framework = backward_of(case), expected(case), Jax(platform)
    inputs, rows = call.inputs, call.inputs.rows
    constants = {x: inputs.integers[x] for x in inputs.integers if host and x.endswith("_k")}
    computed = {
        name: framework.integers(x) - 1
        for name, x in inputs.integers.items()
        if name not in constants
    }
    assert computed

    def gradients(arrays: Any, incoming: Any, computed: Any) -> Any:
        given = {name: x + 1 for name, x in computed.items()}
        seqs = rawattn.SeqLayout(**given, **constants, **inputs.maxima)

        def attention(q: Any, k: Any, v: Any) -> Any:
            return rawattn.jax.attention(q, k, v, seqs=seqs, return_lse=True, **inputs.options)

        results, pull = jax.vjp(attention, *arrays)
        return results, pull(incoming)

    incoming = framework.array(call.dout), framework.array(dlse_of(call))
    results, slopes = jax.jit(gradients)(arrays_of(case, platform), incoming, computed)
    out, lse = map(framework.host, results)
    check(out[rows], exact.out, exact.low_out, what="out")
    check_lse(lse.swapaxes(-1, -2)[rows], exact.lse, exact.low_lse)
    assert not np.any(out[~rows].astype(np.float32) != 0), "padding rows of out are not 0"
    verify(call, framework, slopes)


def _of_lengths(lengths_q: Any) -> Any:
    return lambda lengths: {"seqs": rawattn.SeqLayout(seqlen_q=lengths_q, seqlen_k=lengths)}


def _of_captured(dtype: Any) -> dict[str, Any]:
    doc, table = np.repeat(np.arange(3), [2, 3, 2]).astype(dtype), np.arange(4, dtype=np.float32)
    text = "where(doc[q_idx] == doc[kv_idx], score + t[head], -inf)"
    return {"score_mod": rawattn.ScoreMod(text, t=table, wrt="t", doc=doc)}


def _of_seed(seed: Any) -> dict[str, Any]:
    return {"dropout_p": 0.3, "seed": seed}


# Options that hold NumPy integers or lists, beside lengths that may be traced, and the equivalent plain options.
INTEGERS_OF_THE_HOST = {
    "lengths of a list": (_of_lengths([5, 2]), _of_lengths([5, 2])([3, 6])),
    "lengths of int64": (_of_lengths(np.array([5, 2])), _of_lengths([5, 2])([3, 6])),
    "lengths of int32": (_of_lengths(np.array([5, 2], "int32")), _of_lengths([5, 2])([3, 6])),
    "captured": (lambda _: _of_captured(np.int64), _of_captured(np.int32)),
    "seed of one axis": (lambda _: _of_seed(np.array([-7])), _of_seed(-7)),
    "seed of no axis": (lambda _: _of_seed(np.array(7)), _of_seed(7)),
}


def verify_integers_of_the_host(platform: str, which: str) -> None:
    """Check options of INTEGERS_OF_THE_HOST eager and jitted, with gradients."""
    made, plain = INTEGERS_OF_THE_HOST[which]
    q, k, v = random_arrays(platform, 2, 7, 4, 16)
    lengths = jax.device_put(jnp.asarray([3, 6], "int32"), jax.devices(platform)[0])

    def loss(q: Any, options: dict[str, Any]) -> Any:
        out = rawattn.jax.attention(q, k, v, causal=True, **options)
        return jnp.sin(out).sum(), out

    slope = jax.value_and_grad(loss, has_aux=True)
    exact = jax.tree.leaves(slope(q, plain))
    alone = rawattn.attention(*map(np.asarray, (q, k, v)), causal=True, **plain)
    np.testing.assert_allclose(np.asarray(exact[1]), alone, atol=2e-3)

    def run(lengths: Any) -> Any:
        return slope(q, made(lengths))

    for program in (run, jax.jit(run)):
        for got, wanted in zip(jax.tree.leaves(program(lengths)), exact, strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-3, atol=2e-3)


def verify_bad_traced_lengths(platform: str) -> None:
    """Check that invalid traced lengths are not refused and read no memory outside the arrays."""
    q, k, v = random_arrays(platform, 40, 2, 16)

    @jax.jit
    def call(starts: Any, lengths: Any) -> Any:
        seqs = rawattn.SeqLayout(seqstart_q=starts, seqlen_k=lengths)
        return rawattn.jax.attention(q, k, v, seqs=seqs, causal=True, return_lse=True)

    for starts in ([0, 10, 40], [-9, 2**30, 7], [2**31 - 1, -(2**31), 0], [40, 0, 40]):
        for lengths in ([3, 3], [2**31 - 1, -5]):
            out, lse = call(jnp.asarray(starts, "int32"), jnp.asarray(lengths, "int32"))
            assert np.isfinite(np.asarray(out)).all() and not np.isnan(np.asarray(lse)).any()


def verify_mapped_traced_lengths(platform: str, *, positions: bool = False) -> None:
    """Check jax.vmap with lengths that are mapped too, and with lengths common to the batch.

    positions: the sequences begin at positions, which are as the lengths are.
    """
    q, k, v = random_arrays(platform, 3, 2, 9, 4, 16)
    lengths = jnp.asarray([[5, 9], [0, 3], [9, 1]], "int32")
    offsets = jnp.asarray([[0, 3, 9], [2, 2, 7], [1, 5, 14]], "int32")

    def call(q: Any, k: Any, v: Any, lengths: Any, offsets: Any) -> Any:
        at = {"position_q": lengths, "position_k": [0, 4]} if positions else {}
        seqs = rawattn.SeqLayout(seqlen_q=lengths, cu_seqlen_k=offsets, **at)
        return rawattn.jax.attention(q, k, v, seqs=seqs, causal=True, return_lse=True)

    for axes in ((0, 0), (None, 0), (0, None)):
        given = [x if axis == 0 else x[0] for x, axis in zip((lengths, offsets), axes, strict=True)]
        mapped = jax.jit(jax.vmap(call, in_axes=(0, 0, 0, *axes)))(q, k, v, *given)
        for n in range(3):
            each = [x[n] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
            alone = jax.jit(call)(q[n], k[n], v[n], *each)
            for a, b in zip(mapped, alone, strict=True):
                np.testing.assert_allclose(np.asarray(a[n]), np.asarray(b), atol=1e-6)


def plain(q: Any, k: Any, v: Any) -> Any:
    """Causal attention in plain JAX operations."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(jnp.tri(q.shape[1], dtype=bool), s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def causal(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by rawattn."""
    return rawattn.jax.attention(q, k, v, causal=True)


def verify_in_the_middle_of_a_program(platform: str) -> None:
    """Check attention between XLA's own operations, on one stream: called twice in each step of a loop."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 64, 4, 32)) / 4, rng.standard_normal((32, 32)) / 6
    device = jax.devices(platform)[0]
    x, w = (jax.device_put(a.astype(np.float32), device) for a in (x, w))

    def loss(x: Any, w: Any, attend: Any) -> Any:
        @jax.checkpoint
        def step(x: Any, _: Any) -> Any:
            h = jnp.tanh(x @ w)
            h = h + attend(h, x, h @ w)
            return h + 0.5 * attend(x, h, jnp.sin(h)), None

        return (jax.lax.scan(step, x, None, length=20)[0] ** 2).mean()

    with jax.default_matmul_precision("highest"):
        slope = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
        got, exact = slope(x, w, causal), slope(x, w, plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        size = float(jnp.abs(b).max())
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5 * size)


def random_arrays(platform: str, *shape: int, count: int = 3, dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(0)
    device = jax.devices(platform)[0]
    return [
        jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), device) for _ in range(count)
    ]


def verify_gradients_of_some(platform: str) -> None:
    """Check gradients where some of the captured arrays named in `wrt` are constants: the larger one or the smaller one."""
    q, k, v = random_arrays(platform, 2, 70, 4, 16)
    of_heads, of_keys = (
        random_arrays(platform, 4, count=1)[0],
        random_arrays(platform, 70, count=1)[0],
    )

    def loss(q: Any, of_heads: Any, of_keys: Any) -> Any:
        mod = rawattn.ScoreMod(
            "score + a[head] * q_idx / 70 + b[kv_idx]", wrt=("b", "a"), a=of_heads, b=of_keys
        )
        return jnp.sin(rawattn.jax.attention(q, k, v, score_mod=mod, causal=True)).sum()

    given = q, of_heads, of_keys
    exact = jax.grad(loss, (0, 1, 2))(*given)
    for which in ((0,), (1,), (2,), (0, 1), (2, 0)):
        slope = jax.grad(loss, which)
        closed = jax.jit(
            jax.grad(
                lambda *some, which=which: loss(
                    *(some[which.index(n)] if n in which else given[n] for n in range(3))
                ),
                tuple(range(len(which))),
            )
        )
        for found in (slope(*given), closed(*(given[n] for n in which))):
            for n, gradient in zip(which, found, strict=True):
                np.testing.assert_allclose(
                    np.asarray(gradient), np.asarray(exact[n]), rtol=1e-3, atol=1e-4
                )


def verify_mapped(platform: str) -> None:
    """Check jax.vmap over any of the arrays, nested twice, with gradients, against separate calls."""
    q, k, v = random_arrays(platform, 3, 2, 9, 4, 16)
    loss = jax.value_and_grad(lambda q, k, v: (causal(q, k, v) ** 2).sum(), argnums=(0, 1, 2))
    for axes in ((0, 0, 0), (0, None, None), (None, 0, None), (2, 0, 1)):
        each = [
            x[0] if axis is None else jnp.moveaxis(x, 0, axis)
            for x, axis in zip((q, k, v), axes, strict=True)
        ]
        mapped = jax.jit(jax.vmap(loss, in_axes=axes))(*each)
        alone = [
            loss(*(x[0] if axis is None else x[n] for x, axis in zip((q, k, v), axes, strict=True)))
            for n in range(3)
        ]
        for a, b in zip(
            jax.tree.leaves(mapped),
            jax.tree.leaves(jax.tree.map(lambda *x: jnp.stack(x), *alone)),
            strict=True,
        ):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
    twice = jax.vmap(jax.vmap(causal, in_axes=(0, None, 0)), in_axes=(None, 0, None))(q, k, v)
    for i in range(3):
        for j in range(3):
            exact = causal(q[j], k[i], v[j])
            np.testing.assert_allclose(np.asarray(twice[i, j]), np.asarray(exact), atol=1e-6)
