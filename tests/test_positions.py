"""Sequences that are parts of longer ones: `position_q` and `position_k` of a layout."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, SeqLayout

ROWS, HEADS, DIM = 24, 4, 16
# Options that depend on where rows and keys stand.
OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (7, 2), "sink": 3},
    {"window": (9, None), "sink": 11},
    {"alibi_slopes": np.array([0.5, 0.25, 0.1, 1], np.float32)},
    {"score_mod": ScoreMod("score + sin(q_idx - 2 * kv_idx)"), "causal": True},
    {"window": (5, 0), "sink_logits": np.array([0, -1, 2, 0.5], np.float32)},
]
BOUNDS = (0, 5, 6, 17, ROWS)


def whole(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    heads = (HEADS, 2, 2)
    return tuple(rng.standard_normal((2, ROWS, n, DIM), np.float32) for n in heads)


def parts() -> list[slice]:
    return [slice(a, b) for a, b in pairwise(BOUNDS)]


def at(q: slice, k: slice) -> SeqLayout:
    return SeqLayout(position_q=[q.start] * 2, position_k=np.full(2, k.start, np.int32))


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_parts_make_the_whole(options: dict[str, Any]) -> None:
    """Calls on parts of the queries and of the keys, merged, give what one call on all of them gives; gradients add up."""
    q, k, v = whole()
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    sinks = options.get("sink_logits")
    plain = {name: x for name, x in options.items() if name != "sink_logits"}
    expected, lse = rawattn.attention(q, k, v, return_lse=True, **options)
    gradients = rawattn.attention_backward(dout, q, k, v, expected, lse, **options)
    found = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for rows in parts():
        some = q[:, rows]
        partials = [
            rawattn.attention(
                *(some, k[:, keys], v[:, keys]), seqs=at(rows, keys), return_lse=True, **plain
            )
            for keys in parts()
        ]
        if sinks is not None:  # a key without a value
            empty, row_lse = np.zeros_like(some), np.empty(partials[0][1].shape, np.float32)
            row_lse[:] = sinks[:, None]
            partials.append((empty, row_lse))
        out, own_lse = rawattn.combine(*zip(*partials, strict=True))
        np.testing.assert_allclose(out, expected[:, rows], atol=2e-6)
        np.testing.assert_allclose(own_lse, lse[:, :, rows], atol=2e-6)
        for keys in parts():
            given = dout[:, rows], some, k[:, keys], v[:, keys], out, own_lse
            each = rawattn.attention_backward(*given, seqs=at(rows, keys), **plain)
            found[0][:, rows] += each.dq
            found[1][:, keys] += each.dk
            found[2][:, keys] += each.dv
    for got, name in zip(found, ("dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(got, getattr(gradients, name), atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_the_reference(options: dict[str, Any]) -> None:
    """The reference's parts are rows of its whole, where a part has all keys."""
    q, k, v = whole()
    expected = rawattn.reference.attention(q, k, v, **options)
    for rows in parts():
        got = rawattn.reference.attention(
            q[:, rows], k, v, seqs=SeqLayout(position_q=[rows.start] * 2), **options
        )
        np.testing.assert_allclose(got, expected[:, rows], atol=1e-12)


def test_sequences_have_positions_of_their_own() -> None:
    """Packed and padded sequences of one length, each with a position of its own."""
    q, k, v = whole()
    first, second = slice(3, 8), slice(19, 24)
    expected = rawattn.attention(q, k, v, causal=True)
    rows = np.concatenate([q[0, first], q[1, second]])
    packed = SeqLayout(
        seqstart_q=[0, 5, 10], seqstart_k=[0, ROWS, 2 * ROWS], position_q=[3, 19], position_k=[0, 0]
    )
    got = rawattn.attention(rows, np.concatenate(k), np.concatenate(v), seqs=packed, causal=True)
    np.testing.assert_allclose(got[:5], expected[0, first], atol=2e-6)
    np.testing.assert_allclose(got[5:], expected[1, second], atol=2e-6)
    padded = SeqLayout(position_q=[3, 19], seqlen_q=[5, 4])
    both = np.stack([q[0, first], q[1, second]])
    got = rawattn.attention(both, k, v, seqs=padded, causal=True)
    np.testing.assert_allclose(got[0], expected[0, first], atol=2e-6)
    np.testing.assert_allclose(got[1, :4], expected[1, slice(19, 23)], atol=2e-6)
    assert not got[1, 4].any()


def test_align_does_not_count() -> None:
    q, k, v = whole()
    seqs = SeqLayout(position_q=[9, 0])
    one, two = (
        rawattn.attention(q, k, v, seqs=seqs, causal=True, align=align)
        for align in ("bottom-right", "top-left")
    )
    np.testing.assert_array_equal(one, two)


def test_a_plan_with_positions() -> None:
    q, k, v = whole()
    seqs = SeqLayout(position_q=[9, 0])
    plan = rawattn.plan(rawattn.attention, q, k, v, seqs=seqs, causal=True)
    np.testing.assert_array_equal(plan(q, k, v), rawattn.attention(q, k, v, seqs=seqs, causal=True))


def test_the_layout() -> None:
    seqs = SeqLayout(position_q=[9, 0], position_k=np.array([1, 2], np.int64))
    assert repr(seqs) == "SeqLayout(position_q=[9, 0], position_k=[1, 2])"
    assert seqs.batch == 2
    assert not seqs.packed
    copy = pickle.loads(pickle.dumps(seqs))
    np.testing.assert_array_equal(copy.position_k, [1, 2])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"position_q": [3, -1]}, ValueError, r"position_q: got -1 for sequence 1, expected .* 0 to"),
        ({"position_k": [2**30 + 1]}, ValueError, r"position_k: got 1073741825 for sequence 0"),
        ({"position_q": [1.5]}, TypeError, r"position_q: got .*int"),
        ({"position_q": 7}, TypeError, r"position_q: got the int 7, expected a position for each"),
        ({"position_q": [[1]]}, ValueError, r"position_q: got shape \(1, 1\), expected \(batch,\)"),
        (
            {"position_q": [1, 2], "seqlen_k": [3]},
            ValueError,
            r"position_q: got 2 entries, expected 1: seqlen_k is that of 1 sequences",
        ),
        (
            {"seqstart_q": [0, 3], "position_k": [1, 2]},
            ValueError,
            r"position_k: got 2 entries, expected 1",
        ),
    ],
)  # fmt: skip
def test_refused_layouts(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SeqLayout(**given)


def test_refused_calls() -> None:
    q, k, v = whole()
    seqs = SeqLayout(position_q=[1, 2])
    for call in (rawattn.attention, rawattn.reference.attention):
        with pytest.raises(NotImplementedError, match=r"dropout_p: .*position_q"):
            call(q, k, v, seqs=seqs, dropout_p=0.5, seed=1)
    with pytest.raises(ValueError, match=r"seqs: got lengths of 3 sequences, expected 2"):
        rawattn.attention(q, k, v, seqs=SeqLayout(position_q=[1, 2, 3]))
    pages = np.zeros((4, 16, 2, DIM), np.float32)
    table = np.zeros((2, 2), np.int32)
    with pytest.raises(NotImplementedError, match=r"position_q: .* pages"):
        rawattn.paged_attention(q, pages, pages, table, seqlen_k=[24, 30], seqs=seqs)
