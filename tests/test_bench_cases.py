"""The cases of `rawattn bench`, and the operations and bytes that it counts for them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rawattn._bench import cases, counters, grids

_bound = st.none() | st.integers(0, 12)


@given(
    len_q=st.integers(0, 12),
    len_k=st.integers(0, 12),
    causal=st.booleans(),
    window=st.none() | st.tuples(_bound, _bound),
    sink=st.integers(0, 5),
    align=st.sampled_from(["bottom-right", "top-left"]),
)
def test_visible_against_the_rule_spelled_out(len_q, len_k, causal, window, sink, align):
    left, right = window or (None, None)
    right = 0 if causal else right
    off = len_k - len_q if align == "bottom-right" else 0
    mask = np.zeros((len_q, len_k), bool)
    for i, j in itertools.product(range(len_q), range(len_k)):
        below = right is None or j <= i + off + right
        near = left is None or j >= i + off - left or j < sink
        mask[i, j] = below and near
    expected = counters.Visible(mask.sum(), mask.any(1).sum(), mask.any(0).sum())
    got = counters.visible(len_q, len_k, causal=causal, window=window, sink=sink, align=align)
    assert got == expected


def test_flops_and_bytes_of_a_case():
    case = cases.Case("dense", "", (4, 4), nheads_q=6, nheads_kv=2, headdim=8, causal=True)
    assert case.flops == 2 * (4 * 5 // 2) * 6 * 4 * 8  # 10 pairs a sequence, 4 D operations each
    q_and_out, k_and_v = 2 * 8 * 6 * 8, 2 * 8 * 2 * 8
    assert case.nbytes(2) == 2 * (q_and_out + k_and_v)


def test_a_window_that_drops_rows_and_keys_reads_less():
    seen = counters.visible(10, 4, window=(0, 0), align="top-left")
    assert seen == counters.Visible(pairs=4, rows=4, keys=4)
    assert counters.forward_bytes(seen, 10, 1, 1, 8, 8, 2) == 2 * 8 * (4 + 4 + 4 + 10)


@given(
    len_q=st.integers(1, 6),
    len_k=st.integers(1, 6),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    headdims=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_flops_and_bytes_of_a_backward_against_products_done_one_by_one(
    len_q, len_k, causal, heads, headdims
):
    nheads_q, nheads_kv = heads
    headdim, headdim_v = headdims
    operations, read, written = 0, set(), set()
    for head, i, j in itertools.product(range(nheads_q), range(len_q), range(len_k)):
        if causal and j > i + len_k - len_q:
            continue
        shared = head // (nheads_q // nheads_kv)
        read |= {("q", head, i, d) for d in range(headdim)}
        read |= {("k", shared, j, d) for d in range(headdim)}
        read |= {(name, head, i, d) for name in ("out", "dout") for d in range(headdim_v)}
        read |= {("v", shared, j, d) for d in range(headdim_v)}
        read |= {("lse", head, i, half) for half in range(2)}  # a float32 is two 16-bit elements
        for over in (headdim, headdim_v, headdim_v, headdim, headdim):  # S, dP, dV, dQ, dK
            operations += 2 * over
    for head, i, d in itertools.product(range(nheads_q), range(len_q), range(headdim)):
        written.add(("dq", head, i, d))
    for head, j in itertools.product(range(nheads_kv), range(len_k)):
        written |= {("dk", head, j, d) for d in range(headdim)}
        written |= {("dv", head, j, d) for d in range(headdim_v)}
    seen = counters.visible(len_q, len_k, causal=causal)
    assert counters.backward_flops(seen.pairs, nheads_q, *headdims) == operations
    nbytes = counters.backward_bytes(seen, len_q, len_k, *heads, *headdims, 2)
    assert nbytes == 2 * (len(read) + len(written))


def test_a_case_counts_what_it_is():
    case = cases.Case("ragged", "", (3, 1, 5), 6, 2, 8, causal=True, packed=True, backward=True)
    forward = dataclasses.replace(case, backward=False)
    assert case.flops == 2.5 * forward.flops == 10 * (6 + 1 + 15) * 6 * 8
    of_q, of_k = 9 * 6 * 8, 9 * 2 * 8
    assert case.nbytes(2) == 2 * (4 * of_q + 4 * of_k) + 4 * 9 * 6  # q, out, dout, dq; k, v, dk, dv


def test_forward_cases_are_the_promised_shapes():
    suite = grids.forward()
    names = [case.name for case in suite]
    assert len(set(names)) == len(names)
    assert all(case.over is None or case.over in names for case in suite)
    assert all(len(set(case.seqlens)) == 1 or case.packed for case in suite)
    dense = [case for case in suite if case.kind == "dense"]
    assert len(dense) == 24
    assert {(case.tokens, case.nheads_q * case.headdim) for case in dense} == {(16384, 2048)}
    for case in suite:
        if case.kind == "ragged":
            assert min(case.seqlens) >= 64
            assert max(case.seqlens) <= 4096
            assert abs(case.tokens - 16 * 2048) < 500
    assert {case.name for case in grids.forward(quick=True)} < set(names)


def test_select_takes_whole_words_and_brings_what_a_case_is_divided_by():
    suite = grids.forward()
    names = [case.name for case in cases.select(suite, "dense D64 causal")]
    assert names == [f"dense D64 S{s} causal" for s in (1024, 2048, 4096, 16384)]
    names = [case.name for case in cases.select(suite, "straggler")]
    assert names == ["straggler D128 1x16384+512x32 causal", "straggler-ref D128 1x16384 causal"]
    assert cases.select(suite, "") == suite
    assert cases.select(suite, "D6") == []


def test_backward_cases_are_the_promised_shapes():
    suite = grids.backward()
    by_name = {case.name: case for case in suite}
    assert len(by_name) == len(suite)
    assert all(case.backward for case in suite)
    assert all(case.over is None or case.over in by_name for case in suite)
    forward = {case.name: case for case in grids.forward()}
    for case in suite:
        assert case.seqlens == forward[case.name].seqlens
        assert case.flops == 2.5 * forward[case.name].flops
    dense = [case for case in suite if case.kind == "dense"]
    assert len(dense) == 12
    assert all(case.deterministic and {"cuDNN", "FA2", "FA4"} == set(case.peers) for case in dense)
    assert {case.label for case in dense} == {"S4096", "S16384"}
    for causal, heads in itertools.product(("causal", "full"), ("H16/16", "H32/8")):
        ragged = by_name[f"ragged D128 {heads} {causal}"]
        assert ragged.deterministic
        assert {"FA2", "FA4"} == set(ragged.peers)
        assert set(by_name[ragged.over].seqlens) == {2048}
    assert "JAX cuDNN" not in {peer for case in suite for peer in case.peers}
    quick = {case.name for case in grids.backward(quick=True)}
    assert quick < set(by_name)
    assert "ragged D128 H16/16 full" in quick
