"""Plans on the CPU: a planned call is an ordinary call with the options of planning time."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, SeqLayout, attention, attention_backward, plan

RNG = np.random.default_rng(0)


def arrays(*shape: int) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def aligned(shape: tuple[int, ...], past: int = 0) -> np.ndarray:
    """Zeros that begin `past` bytes behind a multiple of 16."""
    room = np.zeros(int(np.prod(shape)) * 4 + 32, np.uint8)
    begin = -room.ctypes.data % 16 + past
    return room[begin : begin + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


def test_a_plan_is_the_call_with_its_options() -> None:
    q, k, v = arrays(2, 7, 4, 16)
    made = plan(attention, q, k, v, causal=True, window=(3, 0), scale=0.3, backend="cpu")
    assert isinstance(made, rawattn.Plan)
    options: dict[str, Any] = {"causal": True, "window": (3, 0), "scale": 0.3, "backend": "cpu"}
    for given in ((q, k, v), tuple(arrays(2, 7, 4, 16))):
        assert np.array_equal(made(*given), attention(*given, **options))
    assert np.array_equal(made(), attention(q, k, v, **options))
    assert np.array_equal(made(q, v=q, k=v), attention(q, v, q, **options))


def test_results_go_where_the_caller_wants_them() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    made = plan(attention, q, k, v, return_lse=True, backend="cpu")
    own = np.empty_like(q)
    out, lse = made(q, k, v, out=own)
    assert out is own
    assert np.array_equal(own, attention(q, k, v, backend="cpu"))
    assert lse.shape == (1, 2, 5)
    with pytest.raises(TypeError, match=r"^into: this plan writes its results to out="):
        made(q, k, v, into=Gradients())


def test_the_backward() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    seqs = SeqLayout(seqlen_q=[4], seqlen_k=[3])
    out, lse = attention(q, k, v, seqs=seqs, return_lse=True, backend="cpu")
    given = (np.ones_like(out), q, k, v, out, lse)
    exact = attention_backward(*given, seqs=seqs, backend="cpu")
    made = plan(attention_backward, *given, seqs=seqs, backend="cpu")
    into = Gradients(dq=np.full_like(q, 7))
    for gradients in (made(*given), made(*given, into=into)):
        assert isinstance(gradients, Gradients)
        for name in ("dk", "dv"):
            assert np.array_equal(getattr(gradients, name), getattr(exact, name))
    assert gradients.dq is into.dq
    assert into.dq is not None and np.array_equal(into.dq[:, :4], exact.dq[:, :4])
    assert np.all(into.dq[:, 4:] == 7), "padding of the caller's own changed"


OPTIONS_WITH_GRADIENTS: dict[str, Any] = {
    "bias": aligned((1, 1, 5, 5)),
    "sink_logits": aligned((2,)),
    "score_mod": rawattn.ScoreMod(
        "score * slope[head] + n[head]", wrt=("slope",), n=aligned((2,)), slope=np.ones(2, "f4")
    ),
}


def test_the_backward_writes_gradients_of_options() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    options = {**OPTIONS_WITH_GRADIENTS, "backend": "cpu"}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = (out, q, k, v, out, lse)
    exact = attention_backward(*given, **options)
    made = plan(attention_backward, *given, **options)
    slope = np.full(2, 7, np.float32)
    into = Gradients(
        dbias=aligned((1, 1, 5, 5)), dsink_logits=aligned((2,)), captured={"slope": slope}
    )
    found = made(*given, into=into)
    assert found.dbias is into.dbias and np.array_equal(found.dbias, exact.dbias)
    assert found.dsink_logits is into.dsink_logits
    assert np.array_equal(found.dsink_logits, exact.dsink_logits)
    assert found.captured["slope"] is slope and np.array_equal(slope, exact.captured["slope"])


def test_arrays_for_gradients_that_a_plan_does_not_have_are_refused() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    given = (out, q, k, v, out, lse)
    for options, says in (
        ({"dbias": lse}, r"^into\.dbias: got an array, but the call has no such gradient"),
        ({"dsink_logits": lse}, r"^into\.dsink_logits: got an array, but the call has no such"),
        ({"captured": {"slope": lse}}, r"^into\.captured: got an array for 'slope', .*: none$"),
    ):
        made = plan(attention_backward, *given, backend="cpu")
        with pytest.raises(ValueError, match=says):
            made(*given, into=Gradients(**options))
    made = plan(attention_backward, *given, **OPTIONS_WITH_GRADIENTS, backend="cpu")
    with pytest.raises(ValueError, match=r"^into\.captured: got an array for 'n', .*: slope$"):
        made(*given, into=Gradients(captured={"n": lse}))


def test_arrays_are_like_those_of_planning_time() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    made = plan(attention, q, k, v, backend="cpu")
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 4, 2, 8\), .*the plan is for .*5"):
        made(q[:, :4], k, v)
    with pytest.raises(ValueError, match=r"^v: got .*float16; the plan is for .*float32"):
        made(q, k, v.astype(np.float16))
    with pytest.raises(TypeError, match=r"^plan: got 4 arrays, expected q, k, v, in this order"):
        made(q, k, v, v)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    backward = plan(attention_backward, out, q, k, v, out, lse, backend="cpu")
    with pytest.raises(ValueError, match=r"^dlse: given now or when"):
        backward(out, q, k, v, out, lse, dlse=lse)
    combined = plan(rawattn.combine, [out, out], [lse, lse])
    with pytest.raises(ValueError, match=r"^outs: got a list of 1, expected a list of 2"):
        combined([out], [lse])
    with pytest.raises(ValueError, match=r"^lses\[1\]: got shape"):
        combined([out, out], [lse, lse[:, :1]])


def test_all_arrays_are_given_by_their_names() -> None:
    """All arrays can be given by name: those of a score function by the names in it, and the forward's out as `out` of the
    backward, which reads it."""
    q, k, v = arrays(1, 5, 2, 8)
    slopes = rawattn.ScoreMod("score + slope[head] * kv_idx", slope=np.ones(2, np.float32))
    mask = rawattn.block_mask(np.tri(5, dtype=bool))
    made = plan(attention, q, k, v, score_mod=slopes, mask=mask, return_lse=True, backend="cpu")
    flat = rawattn.ScoreMod("score + slope[head] * kv_idx", slope=np.zeros(2, np.float32))
    other = rawattn.block_mask(np.tri(5, k=1, dtype=bool))
    out, lse = made(q, k, v, slope=flat.arrays["slope"], mask=other)
    assert np.array_equal(out, attention(q, k, v, score_mod=flat, mask=other, backend="cpu"))
    with pytest.raises(ValueError, match=r"^mask: got a BlockMask .*1, 6, .*expected a BlockMask"):
        made(q, k, v, mask=rawattn.block_mask(np.ones((6, 5), bool)))
    with pytest.raises(TypeError, match=r"^foo: this plan takes q, k, v, mask, slope once each"):
        made(q, k, v, foo=slopes)
    backward = plan(attention_backward, out, q, k, v, out, lse, backend="cpu")
    expected = attention_backward(out, q, k, v, out, lse, backend="cpu")
    given = backward(dout=out, q=q, k=k, v=v, out=out, lse=lse)
    assert np.array_equal(given.dq, expected.dq)


@pytest.mark.parametrize("pair", [False, True])
def test_integers_of_the_host_may_be_given_again(pair: bool) -> None:
    q, pages, _ = arrays(2, 3, 2, 8)
    table: Any = np.array([[1, 0], [0, -1]], np.int32)
    if pair:
        table = (np.array([0, 2, 3]), np.array([1, 0, 0], np.int32))
    given: dict[str, Any] = {"seqlen_k": [5, 2], "seqs": SeqLayout(seqlen_q=[3, 1])}
    made = plan(rawattn.paged_attention, q, pages, pages, table, **given, backend="cpu")
    expected = rawattn.paged_attention(q, pages, pages, table, **given, backend="cpu")
    assert np.array_equal(made(q, pages, pages, table, seqlen_k=[5, 2], seqlen_q=[3, 1]), expected)
    assert np.array_equal(made(q, pages, pages, block_table=table), expected)
    told = r"^seqlen_k: got other values than .* planning time; .*; in a call on the CPU leave the plan out"
    with pytest.raises(ValueError, match=told):
        made(q, pages, pages, table, seqlen_k=[5, 3])
    with pytest.raises(ValueError, match=r"^cu_seqlen_q: the call was not planned with"):
        made(q, pages, pages, table, cu_seqlen_q=[0, 3, 4])
    if not pair:
        assert np.array_equal(made(q, pages, pages, table.tolist()), expected)
        with pytest.raises(ValueError, match=r"^block_table: got a pair, expected a table of two"):
            made(q, pages, pages, ([0, 2, 3], [1, 0, 0]))
    else:
        with pytest.raises(ValueError, match=r"^block_table's indptr: got other values than when"):
            made(q, pages, pages, ([0, 1, 3], [1, 0, 0]))
    for far in (2**32, -(2**32)):  # int32 would wrap both to page 0
        listed: Any = ([0, 2, 3], [1, far, 0]) if pair else [[1, far], [0, -1]]
        with pytest.raises(
            ValueError, match=rf"^block_table: got page id {far}, expected .* int32"
        ):
            made(q, pages, pages, listed)


def test_plans_are_shown_by_their_function_and_arrays() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    bias, mask = aligned((5, 5)), rawattn.block_mask(np.tri(5, dtype=bool))
    shown = "q float32[1, 5, 2, 8], k float32[1, 5, 2, 8], v float32[1, 5, 2, 8]"
    made = plan(attention, q, k, v, bias=bias, mask=mask, backend="cpu")
    assert repr(made) == f"<rawattn.Plan of attention: {shown}, bias float32[5, 5], mask BlockMask>"
    made = plan(attention, q, k, v, mask=np.ones((5, 5), bool), backend="cpu")
    assert repr(made) == f"<rawattn.Plan of attention: {shown}, mask bool[5, 5]>"
    lse = np.zeros((1, 2, 5), np.float32)
    for count in (2, 70):  # so many are no plan of the GPU
        made = plan(rawattn.combine, [q] * count, np.stack([lse] * count))
        assert repr(made) == (
            f"<rawattn.Plan of combine: outs {count} x float32[1, 5, 2, 8], lses float32[{count}, 1, 2, 5]>"
        )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_plans_are_not_copied(copied: Any) -> None:
    q, k, v = arrays(1, 5, 2, 8)
    with pytest.raises(
        TypeError, match=r"^Plan: got a copy or a pickle .*call rawattn\.plan again"
    ):
        copied(plan(attention, q, k, v, backend="cpu"))
