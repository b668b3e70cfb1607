"""Mistakes of users in the lengths of sequences."""

from __future__ import annotations

import pytest

from tests.mistakes import Mistake, check, names

LENGTHS = [
    Mistake(
        "SeqLayout.from_lengths([2**62, 2**62])",
        ValueError,
        "lengths_q: got lengths whose sum is 2**62 or more, expected fewer rows",
    ),
    Mistake(
        "SeqLayout.from_lengths(n for n in (3, 2))",
        TypeError,
        "lengths_q: got generator; accepted are int32 and int64 arrays and lists of int; pass a list, list(lengths_q)",
    ),
    Mistake(
        "SeqLayout.from_lengths(None)",
        TypeError,
        "lengths_q: got NoneType; accepted are int32 and int64 arrays and lists of int",
    ),
    Mistake(
        "SeqLayout(seqlen_k='3 7')",
        TypeError,
        "seqlen_k: got str; accepted are int32 and int64 arrays and lists of int",
    ),
    Mistake(
        "SeqLayout(seqlen_k=7.0)",
        TypeError,
        "seqlen_k: got float; accepted are int32 and int64 arrays and lists of int",
    ),
    Mistake(
        "SeqLayout(seqlen_q=map(int, '32'))",
        TypeError,
        "seqlen_q: got map; accepted are int32 and int64 arrays and lists of int; pass a list, list(",
    ),
    Mistake(
        "attention(q, k, v, seqs=[0, 5, 10])",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=[0, 5, 10]), of lengths "
        "rawattn.SeqLayout.from_lengths(",
    ),
    Mistake(
        "attention(packed, packed, packed, seqs=np.array([0, 5, 10]))",
        TypeError,
        "seqs: got ndarray, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=cu_seqlens), of lengths "
        "rawattn.SeqLayout.from_lengths(",
    ),
    Mistake(
        "attention_vjp(packed, longer, longer, seqs=(np.array([0, 10]), np.array([0, 14])))",
        TypeError,
        "seqs: got tuple, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=..., seqstart_k=...)",
    ),
    Mistake(
        "attention_backward(packed, packed, packed, packed, packed, lse, seqs=list(range(100)))",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=...), of lengths",
    ),
    Mistake(
        "attention(q, k, v, seqs={'seqlen_k': [3, 7]})",
        TypeError,
        "seqs: got dict, expected a SeqLayout or None; write rawattn.SeqLayout(**seqs)",
    ),
    Mistake(
        "plan(attention, q, k, v, seqs=np.ones((2, 7), bool))",
        TypeError,
        "seqs: got ndarray, expected a SeqLayout...rawattn.SeqLayout.from_padding_mask(mask)",
    ),
    Mistake(
        "attention(q, k, v, seqs=7)",
        TypeError,
        "seqs: got int, expected a SeqLayout or None; dense sequences of equal lengths need none",
    ),
    Mistake(
        "rawattn.reference.attention(packed, packed, packed, seqs=[0, 5, 10])",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=[0, 5, 10])",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqstart_q=[0, 5, 10]))",
        ValueError,
        "seqs: got seqstart_q, which is for a packed q...expected lengths alone: seqlen_*",
    ),
    Mistake(
        "attention(packed, longer, longer, seqs=SeqLayout(seqstart_q=[0, 5, 10]))",
        ValueError,
        "seqstart_k: got None...q has 10 rows and k has 14; pass seqstart_k",
    ),
    Mistake(
        "attention(packed, packed, packed, seqs=SeqLayout(seqstart_q=[0, 5, 11]))",
        ValueError,
        "seqstart_q: got an end of 11, expected at most 10, the rows of q",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqlen_k=[7, 7, 7]))",
        ValueError,
        "seqs: got lengths of 3 sequences, expected 2, the batch of q",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqlen_k=[7, 8]))",
        ValueError,
        "seqlen_k: got length 8 for sequence 1, expected at most 7, the rows of k",
    ),
    Mistake(
        "SeqLayout(cu_seqlens_q=[0, 5, 10])",
        TypeError,
        "cu_seqlens_q: SeqLayout has no such argument; write seqstart_q=",
    ),
    Mistake(
        "SeqLayout(lengths=[5, 5])",
        TypeError,
        "lengths: SeqLayout has no such argument; write seqlen_q= and seqlen_k=, or SeqLayout.from_lengths(",
    ),
    Mistake(
        "SeqLayout(seqlens_kk=[5, 5])",
        TypeError,
        "seqlens_kk: SeqLayout has no such argument; did you mean seqlen_k=",
    ),
    Mistake("SeqLayout(seqlen_k=7)", TypeError, "seqlen_k: got the int 7, expected...[7] * batch"),
    Mistake(
        "SeqLayout(seqstart_q=10)", TypeError, "seqstart_q: got the int 10, expected...[0, 10]"
    ),
    Mistake(
        "SeqLayout(seqlen_q=[5.0, 5.0])",
        TypeError,
        "seqlen_q: got float64; accepted are int32 and int64 arrays and lists of int",
    ),
    Mistake(
        "SeqLayout(seqlen_q=[5, -1])", ValueError, "seqlen_q: got -1 (index 1), expected lengths"
    ),
    Mistake(
        "SeqLayout(seqstart_q=[0, 10, 5])",
        ValueError,
        "seqstart_q: got 5 after 10 (index 2), expected offsets that do not decrease",
    ),
    Mistake(
        "SeqLayout(seqstart_k=[0, 5])",
        ValueError,
        "seqstart_k: got it without seqstart_q, expected both",
    ),
    Mistake(
        "SeqLayout(seqstart_q=[0, 5, 10], max_seqlen_q=4)",
        ValueError,
        "max_seqlen_q: got 4, expected at least 5, the longest",
    ),
    Mistake(
        "SeqLayout.from_lengths(lengths=[5, 5])",
        TypeError,
        "lengths: SeqLayout.from_lengths has no such argument; did you mean lengths_q=",
    ),
    Mistake(
        "SeqLayout.from_padding_mask(mask=np.ones((2, 7), bool))",
        TypeError,
        "mask: SeqLayout.from_padding_mask has no such argument; did you mean mask_q=",
    ),
    Mistake(
        "SeqLayout.from_lengths()",
        TypeError,
        "lengths_q: SeqLayout.from_lengths got none, expected",
    ),
    Mistake(
        "SeqLayout.from_lengths(np.array([5, 5], np.uint8))",
        TypeError,
        "lengths_q: got uint8; accepted are int32 and int64...as by lengths_q.astype(np.int32)",
    ),
    Mistake(
        "SeqLayout.from_padding_mask([[True, True, False]])",
        TypeError,
        "mask_q: got list; expected an array of bool...pass np.asarray(mask_q, bool)",
    ),
    Mistake(
        "SeqLayout.from_padding_mask(np.array([[1, 1, 0]]))",
        TypeError,
        "mask_q: got dtype int64, expected bool...pass mask_q != 0",
    ),
    Mistake(
        "SeqLayout.from_padding_mask(np.array([[False, True]]))",
        ValueError,
        "mask_q: got row 0 with padding at position 0...expected padding after...pad on the right",
    ),
]


@pytest.mark.parametrize("mistake", LENGTHS, ids=str)
def test_calls(mistake: Mistake) -> None:
    check(mistake, names())
