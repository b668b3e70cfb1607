"""Calls whose rows share a list of kept keys, which are gathered first: on the simulator, against the reference and against
the same call without gathering."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import BlockMask, reference
from rawattn._call.gradients import Gradients
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.whole import run_backward, run_forward, small_tiles, verify_backward, verify_forward

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS, KEYS, KEPT = 70, 210, 50
SETUP, SCATTER = "rawattn_kept_setup", "rawattn_scatter_keys"


def arrays(
    dtype: Any = BFLOAT16, rows: int = ROWS, keys: int = KEYS, headdims: tuple[int, int] = (16, 24)
) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, rows, 4, headdims[0]), (2, keys, 2, headdims[0]), (2, keys, 2, headdims[1]))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def shared(batch: int = 2, heads: int = 2, keys: int = KEYS, k: int = KEPT) -> BlockMask:
    """A mask of kept-key lists, of which the last is not full."""
    scores = np.random.default_rng(1).standard_normal((batch, heads, 1, keys), np.float32)
    scores[-1, -1, :, k // 2 :] = -np.inf
    return rawattn.topk_mask(scores, k)


RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (40, 9), "sink": 30},
    "left": {"window": (60, None), "align": "top-left"},
    "negative-scale": {"scale": -0.3, "softcap": 1.5},
    "sinks": {"sink_logits": np.array([1, -np.inf, 0.5, -3], np.float32), "causal": True},
}


@pytest.mark.parametrize(
    "lists", exhaustive.thin([((1, 1),), ((1, 2),), ((2, 1),), ((2, 2),)], 3), ids=str
)
def test_every_way_to_share_lists(machine: MakeDevice, lists: tuple[int, int]) -> None:
    device = machine()
    with small_tiles():
        verify_forward(device, "portable", *arrays(), mask=shared(*lists))
    assert device.launched == [SETUP, "rawattn_forward"]


@pytest.mark.parametrize(
    ("rule", "wave", "dtype"),
    exhaustive.thin(itertools.product(RULES, (32, 64), (np.float16, np.float32)), 5),
)
def test_with_other_rules(machine: MakeDevice, rule: str, wave: int, dtype: Any) -> None:
    device = machine(wave)
    with small_tiles():
        verify_forward(device, "portable", *arrays(dtype), mask=shared(), **RULES[rule])
    assert device.launched == [SETUP, "rawattn_forward"]


@pytest.mark.parametrize("rule", exhaustive.thin(RULES, 3))
def test_hopper(machine: MakeDevice, rule: str) -> None:
    device = machine(arch="sm_90a")
    given = arrays(rows=200, keys=400, headdims=(64, 64))
    verify_forward(device, "sm90", *given, mask=shared(1, 2, 400, 150), **RULES[rule])
    assert device.launched == [SETUP, "rawattn_sm90_forward"]


@pytest.mark.parametrize("headdims", [(7, 1), (34, 36)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_at_any_alignment(machine: MakeDevice, arch: str, headdims: tuple[int, int]) -> None:
    """Keys and values are gathered right from rows that allow only narrow accesses, in arrays whose heads precede rows."""
    q, k, v = arrays(headdims=headdims)
    k = np.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
    v = np.concatenate([v, v[..., :1]], axis=-1)[..., :-1]
    device = machine(arch=arch)
    with small_tiles():
        verify_forward(device, "sm90", q, k, v, mask=shared(), causal=True)
    assert device.launched[0] == SETUP


@pytest.mark.parametrize("k", exhaustive.thin([17, 1, 16], 3))
def test_few_kept_keys(machine: MakeDevice, k: int) -> None:
    device = machine()
    with small_tiles():
        for rule in ({}, {"causal": True}):
            verify_forward(device, "portable", *arrays(), mask=shared(k=k), **rule)
    assert device.launched.count(SETUP) == 2


@pytest.mark.parametrize("family", ["portable", "sm90"])
def test_keys_that_are_not_kept_may_hold_anything(machine: MakeDevice, family: str) -> None:
    q, k, v = arrays()
    mask = shared()
    exact, exact_lse = reference.attention(q, k, v, mask=mask, causal=True, return_lse=True)
    hidden = ~mask.to_bool()[:, :, 0].swapaxes(1, 2)
    k[hidden], v[hidden] = np.nan, np.inf
    device = machine(arch="sm_90a" if family == "sm90" else "sm_80")
    with small_tiles():
        out, lse = run_forward(device, family, q, k, v, mask=mask, causal=True)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=0.02)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-3)


def test_nothing_is_kept(machine: MakeDevice) -> None:
    mask = rawattn.topk_mask(np.full((1, 1, 1, KEYS), -np.inf), KEPT)
    device = machine()
    with small_tiles():
        out, lse = run_forward(device, "portable", *arrays(), mask=mask)
    assert device.launched[0] == SETUP
    assert not out.any() and np.all(lse == -np.inf)


@pytest.mark.parametrize("entry", exhaustive.thin([-2, KEYS, 2**31 - 1, -(2**31)], 4))
def test_an_entry_that_is_no_key_counts_for_nothing(machine: MakeDevice, entry: int) -> None:
    """List entries that are no key, which a plan does not check, count as empty; no access leaves the arrays."""
    mask, device = shared(), machine()
    q, k, v = arrays()
    exact = reference.attention(q, k, v, mask=mask)
    filled = mask.kept == -1
    mask.kept[filled] = entry
    with small_tiles():
        out, lse = run_forward(device, "portable", q, k, v, mask=mask)
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=0.02)
        got = run_backward(device, "portable", out, q, k, v, out, lse, mask=mask)
    assert SCATTER in device.launched
    assert np.isfinite(got.dk.astype(np.float32)).all()


# Value: ((sequences, rows, query heads), (batch, heads) of the lists, options). Each row sees its whole list.
DECODED: dict[str, tuple[tuple[int, int, int], tuple[int, int], dict[str, Any]]] = {
    "one-row": ((1, 1, 2), (1, 1), {}),
    "causal": ((2, 1, 4), (2, 1), {"causal": True}),
    "heads": ((2, 1, 4), (2, 2), {"causal": True, "softcap": 2.0}),
    "batch-shares": ((2, 1, 6), (1, 2), {"num_splits": 3}),
    "rows": ((1, 3, 4), (1, 2), {}),
    "wide-window": ((1, 3, 4), (1, 1), {"window": (KEYS, KEYS)}),
    "sinks": ((2, 2, 4), (2, 1), {"sink_logits": np.array([1, -np.inf, 0.5, -3], np.float32)}),
}


@pytest.mark.parametrize(
    ("case", "arch"), exhaustive.thin(itertools.product(DECODED, ("sm_80", "sm_90a")), 3)
)
def test_decoding_sees_lists_as_sequences(machine: MakeDevice, case: str, arch: str) -> None:
    """Decoding treats each list as a sequence: shorter if the list is not full, without keys if it is empty."""
    (batch, rows, heads), lists, options = DECODED[case]
    q, k, v = arrays(headdims=(16, 24))
    q = np.random.default_rng(3).standard_normal((batch, rows, heads, 16)).astype(BFLOAT16)
    scores = np.random.default_rng(1).standard_normal((*lists, 1, KEYS), np.float32)
    scores[-1, -1, :, KEPT // 2 :] = -np.inf
    if len(scores) > 1:
        scores[0, 0] = np.nan
    mask = rawattn.topk_mask(scores, KEPT)
    hidden = np.broadcast_to(~mask.to_bool()[:, :, 0].swapaxes(1, 2), k.shape[:-1])
    exact = reference.attention(q, k[:batch], v[:batch], mask=mask, return_lse=True, **options)
    k[hidden], v[hidden] = np.nan, np.inf
    device = machine(arch=arch)
    with small_tiles():
        out, lse = run_forward(device, "decode", q, k[:batch], v[:batch], mask=mask, **options)
    kernel = "rawattn_sm90_decode" if arch == "sm_90a" else "rawattn_decode"
    assert device.launched == [SETUP, kernel]
    np.testing.assert_allclose(out.astype(np.float64), exact[0], atol=0.02)
    np.testing.assert_allclose(lse, exact[1], atol=1e-3)


MASKED: dict[str, tuple[tuple[int, int, int], tuple[int, int], dict[str, Any]]] = {
    "causal": ((2, 2, 4), (1, 1), {"causal": True}),
    "top-left": ((2, 1, 4), (1, 1), {"causal": True, "align": "top-left"}),
    "window": ((2, 1, 4), (1, 1), {"window": (100, None)}),
    "strided-heads": ((2, 2, 4), (2, 2), {}),
    "sinks-of-heads": ((2, 1, 4), (2, 2), {"sink_logits": np.array([1, -1, 0.5, -3], np.float32)}),
}


@pytest.mark.parametrize("case", MASKED)
def test_few_rows_that_need_a_mask(machine: MakeDevice, case: str) -> None:
    (batch, rows, heads), lists, options = MASKED[case]
    _, k, v = arrays()
    q = np.random.default_rng(3).standard_normal((batch, rows, heads, 16)).astype(BFLOAT16)
    device = machine()
    with small_tiles():
        verify_forward(device, "decode", q, k[:batch], v[:batch], mask=shared(*lists), **options)
    assert device.launched == [SETUP, "rawattn_forward"]


NOT_GATHERED: dict[str, dict[str, Any]] = {
    "bias": {"bias": np.random.default_rng(9).standard_normal((1, 1, ROWS, KEYS), np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.05], np.float32)},
    "score_mod": {"score_mod": rawattn.ScoreMod("score + 0.01 * kv_idx")},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "lengths": {"seqs": rawattn.SeqLayout(seqlen_q=[70, 30], seqlen_k=[99, 210])},
}


@pytest.mark.parametrize("option", exhaustive.thin(NOT_GATHERED, 4))
def test_what_needs_the_positions_of_keys_is_not_gathered(machine: MakeDevice, option: str) -> None:
    device = machine()
    with small_tiles():
        verify_forward(device, "portable", *arrays(), mask=shared(), **NOT_GATHERED[option])
    assert SETUP not in device.launched


@pytest.mark.parametrize("mask", [shared(1, 4), shared(k=KEYS // 2 + 1)], ids=["heads", "most"])
def test_masks_that_are_not_gathered(machine: MakeDevice, mask: BlockMask) -> None:
    device = machine()
    with small_tiles():
        verify_forward(device, "portable", *arrays(), mask=mask)
    assert SETUP not in device.launched


def test_one_key_for_all_is_no_list(machine: MakeDevice) -> None:
    device = machine()
    with small_tiles():
        verify_forward(
            device, "portable", *arrays(), mask=rawattn.topk_mask(np.ones((1, 1, 1, 1)), 1)
        )
    assert SETUP not in device.launched


@pytest.mark.parametrize(
    ("rule", "lists", "deterministic"),
    exhaustive.thin(itertools.product(RULES, ((1, 1), (2, 2)), (False, True)), 7),
    ids=str,
)
def test_gradients(
    machine: MakeDevice, rule: str, lists: tuple[int, int], deterministic: bool
) -> None:
    n = list(RULES).index(rule)
    device = machine((32, 64)[n % 2])
    given = arrays((np.float16, BFLOAT16, np.float32)[n % 3])
    with small_tiles():
        verify_backward(
            device, "portable", *given, mask=shared(*lists), deterministic=deterministic, **RULES[rule]
        )  # fmt: skip
    assert device.launched[0] == SETUP
    assert device.launched[-1] == SCATTER
    assert "rawattn_mask_tiles" not in device.launched


def test_gradients_of_the_callers_own(machine: MakeDevice) -> None:
    """Gradients in the caller's arrays are right for other strides, and every row of them is written."""
    given = arrays(headdims=(7, 9))
    dq, dk, dv = (np.zeros(x.swapaxes(1, 2).shape, x.dtype).swapaxes(1, 2) for x in given)
    with small_tiles():
        verify_backward(
            machine(), "portable", *given, mask=shared(), causal=True, into=Gradients(dq, dk, dv)
        )


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_it_equals_the_ordinary_way(machine: MakeDevice, options: dict[str, Any]) -> None:
    """Gathered and ordinary calls agree in float32, in which they differ only in the order of sums."""
    given, mask = arrays(np.float32), shared()
    plain = rawattn.block_mask(mask.to_bool())
    found = []
    for each in (mask, plain):
        device = machine()
        with small_tiles():
            out, lse = run_forward(device, "portable", *given, mask=each, **options)
            grads = run_backward(device, "portable", out, *given, out, lse, mask=each, **options)
        assert (SETUP in device.launched) == (each is mask)
        found.append((out, lse, grads.dq, grads.dk, grads.dv))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
