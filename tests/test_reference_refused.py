"""What the reference refuses: arrays to write, and pages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference


def test_neither_inputs_nor_integers_are_written() -> None:
    q = np.ones((1, 3, 2, 4))
    out, lse = reference.attention(q, q, q, return_lse=True)
    calls: list[Callable[..., Any]] = [
        functools.partial(reference.attention, q, q, q),
        functools.partial(reference.paged_attention, q, q, q, [[0]], seqlen_k=[3]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^out: shares memory with q"):
            call(out=q)
        with pytest.raises(TypeError, match=r"^out: got int64, expected a floating-point dtype"):
            call(out=np.zeros(q.shape, np.int64))
    with pytest.raises(ValueError, match=r"^into\.dk: shares memory with dout"):
        reference.attention_backward(q, q, q, q, out, lse, into=rawattn.Gradients(dk=q))


K, POOL, TABLE = np.ones((2, 3, 2, 8)), np.zeros((6, 4, 2, 8)), [[0, 1], [2, 3]]
ANGLES = np.ones((9, 4))
APPENDS: list[tuple[dict[str, Any], str]] = [
    ({"seqlen_k": [2, 5]}, "seqlen_k: got 2 keys for sequence 0, expected at least 3"),
    ({"block_table": [[99, -7], [2, 3]]}, "block_table: got page id 99"),
    ({"block_table": [[0, 1], [0, 3]]}, "block_table: got page 0 for new rows of sequences 0 and 1"),
    ({"rotary": (ANGLES[:1], ANGLES[:1])}, "rotary: got angles of 1 positions, expected at least 3"),
    ({"rotary": (ANGLES, ANGLES[:, :3])}, "rotary: got sin float64"),
    ({"k": K[:, :, :1], "v": K[:, :, :1]}, "k_pages: got shape (6, 4, 2, 8)"),
    ({"v": K[:, :2]}, "v: got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), APPENDS, ids=[says[:40] for _, says in APPENDS])
def test_appends_that_are_refused(change: dict[str, Any], says: str) -> None:
    given = {"k": K, "v": K, "k_pages": POOL, "v_pages": POOL, "block_table": TABLE}
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        reference.append_kv(**{**given, "seqlen_k": [3, 3], **change})


def test_arguments_are_those_of_the_library() -> None:
    """A call of the reference takes what a call of the library takes; of unknown arguments both say the same."""
    given = {"k": K, "v": K, "k_pages": POOL, "v_pages": POOL, "block_table": TABLE}
    given |= {"seqlen_k": [3, 3]}
    angles = {"q": K, "rotary": (ANGLES, ANGLES)}
    target = np.zeros(K.shape)
    found = reference.append_kv(**given, **angles, out=target, validate=True, backend="cpu")
    assert found[2] is target
    np.testing.assert_array_equal(target, reference.append_kv(**given, **angles)[2])
    for change, says in (
        ({"q": K}, "q: got queries without rotary"),
        ({"interleaved": True}, "interleaved: got True without rotary"),
        ({"out": target}, "out: got an array without q"),
        ({"slots": K}, "slots: rawattn.reference.append_kv has no such argument"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(says)}"):
            reference.append_kv(**given, **change)
    queries = K.copy()
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        reference.append_kv(**{**given, **angles, "q": queries}, out=queries)
    outs, lses = [K, K], [K[..., 0].swapaxes(1, 2)] * 2
    target = np.zeros(K.shape)
    assert reference.combine(outs, lses, out=target, dtype="float16")[0] is target
    np.testing.assert_array_equal(target, reference.combine(outs, lses)[0])
    with pytest.raises(TypeError, match=r"^dtype: got 'int8'"):
        reference.combine(outs, lses, dtype="int8")
    with pytest.raises(TypeError, match=r"^axis: rawattn\.reference\.combine has no such argument"):
        reference.combine(outs, lses, axis=0)
    with pytest.raises(ValueError, match=r"^out: shares memory with outs\[0\]"):
        reference.combine(outs, lses, out=K)


def test_pages_are_named() -> None:
    with pytest.raises(ValueError, match=r"^k_pages: got D = 8"):
        reference.paged_attention(K[..., :4], POOL, POOL, TABLE, seqlen_k=[3, 3])
