"""Masks in whole calls on the simulator, against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import reference
from tests import exhaustive
from tests.shim.device import ATTRIBUTES, MakeDevice
from tests.shim.whole import run_backward, run_forward, small_tiles, verify_backward, verify_forward
from tests.tiles import splitting

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS, KEYS = 150, 210
# The first has query tiles smaller than a granule, the second key tiles whose edges do not match granules.
SHAPES = ((32, 16, 2, 2, 1, False), (64, 80, 2, 1, 1, False), (128, 64, 4, 2, 1, True))


def arrays(
    dtype: Any = BFLOAT16, rows: tuple[int, int] = (ROWS, KEYS), batch: int = 2, seed: int = 0
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((batch, rows[0], 4, 16), (batch, rows[1], 2, 16), (batch, rows[1], 2, 24))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def blocky(*shape: int, block: int = 64, seed: int = 3) -> np.ndarray:
    """A mask with empty, full and partial granules, and rows without keys."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, (*shape[:2], *(-(-n // block) for n in shape[2:])))
    whole = np.repeat(np.repeat(kinds, block, 2), block, 3)[:, :, : shape[2], : shape[3]]
    keep = np.where(whole == 1, rng.random(shape) < 0.5, whole == 2)
    keep[:, :, 5::9] = False
    return keep


MASKS = {
    f"{batch}-{heads}-{rows}-{keys}": (batch, heads, rows, keys)
    for batch, heads, rows, keys in itertools.product((1, 2), (1, 2, 4), (1, ROWS), (1, KEYS))
}


@pytest.mark.parametrize("name", exhaustive.thin(MASKS, 10))
def test_every_way_to_broadcast(machine: MakeDevice, name: str) -> None:
    mask = blocky(*MASKS[name], block=16 if MASKS[name][3] == 1 else 64)
    with small_tiles(portable_forward=SHAPES[1]):
        verify_forward(machine(), "portable", *arrays(), mask=mask)


RULES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (70, 9), "sink": 5},
    "negative-scale": {"scale": -0.3, "window": (None, 60)},
    "softcap": {"softcap": 1.5, "causal": True},
    "bias": {"bias": np.random.default_rng(9).standard_normal((1, 2, ROWS, KEYS), np.float32)},
    "sinks": {"sink_logits": np.array([1, -np.inf, 0.5, -3], np.float32)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}


# Each rule with one of both dtypes and one of both wave sizes.
FORWARDS = [
    (rule, (32, 64)[n % 2 ^ second], (np.float16, np.float32)[n // 2 % 2 ^ second])
    for n, rule in enumerate(RULES)
    for second in range(2)
]


@pytest.mark.parametrize(("rule", "wave", "dtype"), exhaustive.thin(FORWARDS, 6))
def test_with_other_rules(machine: MakeDevice, rule: str, wave: int, dtype: Any) -> None:
    shape = SHAPES[(list(RULES).index(rule) + wave // 32) % 3]
    with small_tiles(portable_forward=shape):
        mask = blocky(2, 4, ROWS, KEYS, block=40)
        verify_forward(machine(wave), "portable", *arrays(dtype), mask=mask, **RULES[rule])


RAGGED = rawattn.SeqLayout(seqstart_q=[0, 70, 70, 130, 150], seqstart_k=[0, 33, 60, 190, 210])
PADDED = rawattn.SeqLayout(seqlen_q=[150, 30], seqlen_k=[99, 210])


@pytest.mark.parametrize(
    ("options", "heads", "on_device"),
    exhaustive.thin(
        itertools.product(({}, {"causal": True}, {"window": (40, 9)}), (1, 4), (False, True)), 10
    ),
)
def test_ragged_batches(machine: MakeDevice, options: Any, heads: int, on_device: bool) -> None:
    q, k, v = (x[0] for x in arrays(batch=1))
    mask = blocky(4 if heads > 1 else 1, heads, 80, 133, block=32)
    with small_tiles():
        verify_forward(
            machine(), "portable", q, k, v, seqs=RAGGED, mask=mask, on_device=on_device, **options
        )


@pytest.mark.parametrize("on_device", exhaustive.thin((True, False), 4))
@pytest.mark.parametrize("shape", [(2, 2, ROWS, KEYS), (1, 1, 1, KEYS)], ids=str)
def test_padded_batches(machine: MakeDevice, shape: Any, on_device: bool) -> None:
    with small_tiles():
        verify_forward(
            machine(), "portable", *arrays(), seqs=PADDED, mask=blocky(*shape), causal=True,
            on_device=on_device,
        )  # fmt: skip


def test_strides_of_the_callers_own(machine: MakeDevice) -> None:
    mask = np.asfortranarray(blocky(2, 4, ROWS, KEYS))[:, ::-1]
    with small_tiles():
        verify_forward(machine(), "portable", *arrays(), mask=mask[0, 0, ::-1])
        verify_forward(machine(), "portable", *arrays(), mask=mask)


def test_nothing_is_seen(machine: MakeDevice) -> None:
    with small_tiles():
        mask = np.zeros((1, 1, 1, KEYS), bool)
        out, lse = run_forward(machine(), "portable", *arrays(), mask=mask)
    assert not out.any() and np.all(lse == -np.inf)


@pytest.mark.parametrize("family", ["portable", "sm90"])
@pytest.mark.parametrize("keys", [(0, 17), (40, 210), (100, 101)], ids=str)
def test_a_key_that_nobody_sees_may_hold_anything(
    machine: MakeDevice, keys: Any, family: str
) -> None:
    q, k, v = arrays()
    mask = blocky(2, 2, ROWS, KEYS)
    mask[..., slice(*keys)] = False
    exact, exact_lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    k[:, slice(*keys)], v[:, slice(*keys)] = np.nan, np.inf
    with small_tiles(portable_forward=SHAPES[1]):
        device = machine(arch="sm_90a" if family == "sm90" else "sm_80")
        out, lse = run_forward(device, family, q, k, v, mask=mask)
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=0.02)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-3)


@pytest.mark.parametrize("name", exhaustive.thin(list(MASKS)[::5], 8))
def test_masks_that_come_packed(machine: MakeDevice, name: str) -> None:
    mask = rawattn.block_mask(blocky(*MASKS[name]))
    device = machine()
    with small_tiles():
        verify_forward(device, "portable", *arrays(), mask=mask, causal=True)
    assert device.launched == ["rawattn_mask_tiles", "rawattn_forward"]


def test_a_packed_mask_that_is_longer_than_any_sequence(machine: MakeDevice) -> None:
    q, k, v = (x[0] for x in arrays(batch=1))
    mask = rawattn.block_mask(blocky(4, 2, 100, 300))
    with small_tiles():
        verify_forward(machine(), "portable", q, k, v, seqs=RAGGED, mask=mask)


HOPPER: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "sinks-of-windows": {"window": (100, 20), "sink": 7, "align": "top-left"},
    "bias": {"bias": np.random.default_rng(9).standard_normal((1, 4, 200, 330), np.float32)},
    "softcap": {"softcap": 1.5, "dropout_p": 0.2, "seed": 3},
}


@pytest.mark.parametrize(
    ("rule", "heads"), exhaustive.thin(itertools.product(HOPPER, (1, 2, 4)), 8)
)
def test_hopper(machine: MakeDevice, rule: str, heads: int) -> None:
    device = machine(arch="sm_90a")
    q, k, v = arrays(rows=(200, 330))
    for mask in (blocky(2, heads, 200, 330, block=128), blocky(1, heads, 1, 330)):
        verify_forward(device, "sm90", q, k, v, mask=mask, **HOPPER[rule])
    assert device.launched.count("rawattn_sm90_forward") == 2


@pytest.mark.parametrize(
    ("options", "on_device"),
    exhaustive.thin(itertools.product(({"causal": True}, {}), (True, False)), 8),
)
def test_hopper_on_ragged_batches(machine: MakeDevice, options: Any, on_device: bool) -> None:
    device = machine(arch="sm_90a")
    seqs = rawattn.SeqLayout(seqstart_q=[0, 170, 170, 330], seqstart_k=[0, 33, 60, 410])
    q, k, v = (x[0] for x in arrays(rows=(330, 410), batch=1))
    mask = blocky(3, 2, 180, 360, block=64)
    verify_forward(device, "sm90", q, k, v, seqs=seqs, mask=mask, on_device=on_device, **options)
    assert "rawattn_sm90_forward" in device.launched


@pytest.mark.parametrize("multiprocessors", exhaustive.thin((7, 3, 40), 3))
@pytest.mark.parametrize("rule", ["dense", "causal", "sinks-of-windows", "bias"])
def test_hopper_shares_lists_out(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, rule: str, multiprocessors: int
) -> None:
    """Split keys are right under masks: every tile has the same number of pieces, of which some are empty, as are lists."""
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", multiprocessors)
    q, k, v = arrays(rows=(200, 330))
    with splitting():
        for heads, tile in (
            (1, (16, 2, 2, 1, True, True, 232, False)),
            (4, (64, 1, 2, 1, False, False, 256, False)),
        ):
            device = machine(arch="sm_90a")
            mask = blocky(2, heads, 200, 330, block=40)
            mask[1, -1, 100:] = False
            with small_tiles(sm90_forward=tile):
                verify_forward(device, "sm90", q, k, v, mask=mask, **HOPPER[rule])
            assert any("stream_k" in each for each in device.summaries)


@pytest.mark.parametrize("on_device", [True, False])
def test_hopper_shares_lists_of_ragged_batches_out(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", 11)
    device = machine(arch="sm_90a")
    seqs = rawattn.SeqLayout(seqstart_q=[0, 170, 170, 330], seqstart_k=[0, 333, 360, 410])
    q, k, v = (x[0] for x in arrays(rows=(330, 410), batch=1))
    mask = blocky(3, 2, 180, 360, block=64)
    with splitting(), small_tiles(sm90_forward=(16, 2, 2, 1, True, True, 232, False)):
        verify_forward(device, "sm90", q, k, v, seqs=seqs, mask=mask, on_device=on_device)
    assert any("stream_k" in each for each in device.summaries)


def test_hopper_on_sequences_that_lie_over_each_other(machine: MakeDevice) -> None:
    """No access leaves the arrays where starts on the device make sequences overlap; the results are arbitrary."""
    device = machine(arch="sm_90a")
    good = rawattn.SeqLayout(seqstart_q=[0, 300, 500, 700], seqstart_k=[0, 0, 0, 600])
    q, k, v = (x[0] for x in arrays(rows=(700, 600), batch=1))
    # In the third sequence, which has all rows, the last tile comes fourth in the order by list length.
    mask = np.ones((1, 4, 700, 600), bool)
    mask[:, :, 384:640, 128:] = mask[:, :, 640:, 512:] = False
    with small_tiles(), device.telling("q", start=np.array([640, 700, 0, 700], np.int32)):
        run_forward(device, "sm90", q, k, v, seqs=good, mask=mask, on_device=True)


# As `SHAPES`, for the backward: tiles of 16 x 32, 32 x 64 and 64 x 128 rows and keys, with and without waves that divide the
# columns.
BACKWARD_SHAPES = (
    (16, 32, 2, 1, 2, 1, 1, False),
    (32, 64, 2, 2, 1, 1, 2, False),
    (64, 128, 4, 1, 1, 1, 4, True),
)


def backward_tiles(n: int) -> Any:
    return small_tiles(portable_backward=BACKWARD_SHAPES[n], portable_backward_dq=SHAPES[n][:5])


@pytest.mark.parametrize(
    ("name", "deterministic"),
    exhaustive.thin(((name, n % 2 == 1) for n, name in enumerate(MASKS)), 14),
)
def test_gradients_of_every_way_to_broadcast(
    machine: MakeDevice, name: str, deterministic: bool
) -> None:
    mask = blocky(*MASKS[name], block=16 if MASKS[name][3] == 1 else 64)
    with backward_tiles(1):
        verify_backward(machine(), "portable", *arrays(), mask=mask, deterministic=deterministic)


BACKWARDS = [
    (rule, (32, 64)[n % 2 ^ second], bool(n // 2 % 2 ^ second))
    for n, rule in enumerate(RULES)
    for second in range(2)
]


@pytest.mark.parametrize(("rule", "wave", "deterministic"), exhaustive.thin(BACKWARDS, 10))
def test_gradients_with_other_rules(
    machine: MakeDevice, rule: str, wave: int, deterministic: bool
) -> None:
    n = list(RULES).index(rule) + wave // 32
    dtype = (np.float16, BFLOAT16, np.float32)[n % 3]
    with backward_tiles((n + deterministic) % 3):
        mask = blocky(2, 4, ROWS, KEYS, block=40)
        options = {**RULES[rule], "mask": mask, "deterministic": deterministic}
        verify_backward(machine(wave), "portable", *arrays(dtype), **options)


@pytest.mark.parametrize(
    ("heads", "on_device", "deterministic"),
    exhaustive.thin(itertools.product((1, 4), (False, True), (False, True)), 10),
)
def test_gradients_of_ragged_batches(
    machine: MakeDevice, heads: int, on_device: bool, deterministic: bool
) -> None:
    q, k, v = (x[0] for x in arrays(batch=1))
    mask = blocky(4 if heads > 1 else 1, heads, 80, 133, block=32)
    with backward_tiles(0):
        verify_backward(
            machine(), "portable", q, k, v, seqs=RAGGED, mask=mask, on_device=on_device,
            causal=True, deterministic=deterministic,
        )  # fmt: skip


@pytest.mark.parametrize("deterministic", exhaustive.thin((False, True), 4))
def test_gradients_of_a_packed_mask(machine: MakeDevice, deterministic: bool) -> None:
    mask = rawattn.block_mask(blocky(2, 4, ROWS, KEYS))
    with backward_tiles(2):
        verify_backward(
            machine(), "portable", *arrays(), seqs=PADDED, mask=mask, deterministic=deterministic
        )


def test_gradients_where_nothing_is_seen(machine: MakeDevice) -> None:
    with backward_tiles(0):
        mask = np.zeros((1, 1, 1, KEYS), bool)
        verify_backward(machine(), "portable", *arrays(), mask=mask)


def poisoned_bias(mask: np.ndarray) -> np.ndarray:
    """A bias that is NaN or infinite where the mask hides keys."""
    bias = np.random.default_rng(9).standard_normal(mask.shape, np.float32)
    bias[~mask] = np.nan
    bias[..., ::7, :] = np.where(mask[..., ::7, :], bias[..., ::7, :], np.inf)
    return bias


@pytest.mark.parametrize("family", ["portable", "sm90"])
def test_a_hidden_key_may_have_any_bias(machine: MakeDevice, family: str) -> None:
    mask = blocky(2, 4, ROWS, KEYS)
    device = machine(arch="sm_90a" if family == "sm90" else "sm_80")
    for bias in (poisoned_bias(mask), poisoned_bias(mask).astype(BFLOAT16)):
        q, k, v = arrays()
        clean = np.where(mask, bias, 0).astype(bias.dtype)
        exact, exact_lse = reference.attention(q, k, v, mask=mask, bias=clean, return_lse=True)
        with small_tiles():
            out, lse = run_forward(device, family, q, k, v, mask=mask, bias=bias)
        np.testing.assert_allclose(out.astype(np.float64), exact, atol=0.03)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_hidden_key_adds_nothing_to_gradients(machine: MakeDevice, deterministic: bool) -> None:
    """A hidden key adds nothing to gradients, whatever its bias and value, and its key if no row of a tile sees it."""
    mask = blocky(2, 4, ROWS, KEYS)
    mask[..., 30:70] = False
    bias = poisoned_bias(mask)
    q, k, v = arrays()
    out, lse = reference.attention(
        q, k, v, mask=mask, bias=np.where(mask, bias, 0), return_lse=True
    )
    out, lse = out.astype(q.dtype), lse.astype(np.float32)
    dout = np.random.default_rng(4).standard_normal(out.shape).astype(q.dtype)
    exact = reference.attention_backward(
        dout, q, k, v, out, lse, mask=mask, bias=np.where(mask, bias, 0)
    )
    k[:, 30:70], v[:, 30:70] = np.nan, np.inf
    with backward_tiles(1):
        got = run_backward(
            machine(), "portable", dout, q, k, v, out, lse, mask=mask, bias=bias,
            deterministic=deterministic,
        )  # fmt: skip
    for name in ("dq", "dk", "dv", "dbias"):
        wanted = getattr(exact, name)
        np.testing.assert_allclose(
            getattr(got, name).astype(np.float64), wanted, atol=0.06, err_msg=name
        )
