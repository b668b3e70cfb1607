"""Helpers of the tests of paged kernels: running and checking a call, options, invalid page ids and lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._call.options import Options
from rawattn._call.pages import PagedLayout, split
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import PAGED
from rawattn._verbs.paged import read_pages, scaled
from tests.paged import BFLOAT16, Paged, verify
from tests.shim.device import Device
from tests.shim.whole import run_verb, small_tiles

# Tiles of Hopper's forward:
# (tile_k, consumers, stages, cluster, ping_pong, late_scaling, consumer_registers, tensor_stores).
LATE = (16, 2, 2, 1, True, True, 224, False)
WIDE = (48, 2, 2, 1, False, False, 224, True)


def run(
    device: Device,
    call: Paged,
    *,
    family: str = "portable",
    on_device: bool = False,
    **options: Any,
) -> Any:
    """Returns `out` and `lse`. on_device: page ids and lengths are on the device, and the host does not check them."""
    known = Options(seqs=call.seqs, **options)
    if on_device:
        indptr, table = split(call.block_table)
        known = known._replace(seqs=PagedLayout(call.seqs, call.seqlen_k, indptr))
    else:
        table, known = read_pages(call.named, known)
    verb, factors, numbers = scaled(PAGED, call.q, call.scales)
    given = with_arrays(verb, known)
    given = given._replace(values=numbers + given.values)
    whole = (*call.inputs[:3], table, *factors, *given.arrays)
    return run_verb(device, family, given, whole, (None, None), True, on_device)


def verify_kernel(
    device: Device,
    call: Paged,
    *,
    family: str = "portable",
    on_device: bool = False,
    **options: Any,
) -> None:
    with small_tiles():
        out, lse = run(device, call, family=family, on_device=on_device, **options)
    verify(call, out, lse, **options)


def run_on_device(device: Device, call: Paged, **options: Any) -> Any:
    """Runs a call whose `seqlen_k`, on the device, the host would refuse."""
    good = replace(call, seqlen_k=np.zeros_like(call.seqlen_k))
    with device.telling(length=call.seqlen_k):
        return run(device, good, on_device=True, **options)


def verify_decode(device: Device, call: Paged, **options: Any) -> None:
    verify_kernel(device, call, family="decode", **options)
    assert "rawattn_decode" in device.launched
    assert "rawattn_forward" not in device.launched


def verify_sm90(device: Device, call: Paged, shape: Any = WIDE, **more: Any) -> None:
    """Verifies a call by Hopper's forward with tiles of this shape."""
    with small_tiles(sm90_forward=shape):
        verify_kernel(device, call, family="sm90", **more)
    assert "rawattn_sm90_forward" in device.launched


def finite(call: Paged) -> Paged:
    """The call with 0 instead of NaN where no sequence has a key, so that all of the pools is finite."""
    pools = {name: getattr(call, name).copy() for name in ("k_pages", "v_pages")}
    for pool in pools.values():
        pool[np.isnan(pool)] = 0
    return replace(call, **pools)


def with_any_ids(call: Paged) -> Paged:
    """The call with arbitrary page ids, most of which are out of range."""
    pair = isinstance(call.block_table, tuple)
    indptr, table = call.block_table if pair else (None, call.block_table)
    info = np.iinfo(table.dtype)
    wild = np.random.default_rng(3).choice(
        [info.min, -1, info.max, len(call.k_pages), 0], table.shape
    )
    wild = wild.astype(table.dtype)
    return replace(call, block_table=(indptr, wild) if pair else wild)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Options that the decode kernels handle beside the products: masks, soft cap, sinks.
each_decoded = pytest.mark.parametrize(
    "options",
    [
        {"window": (12, 0)},
        {"window": (40, 3), "sink": 8},
        {"causal": True, "align": "top-left"},
        {"softcap": 1.5, "scale": -1.0},
        {"sink_logits": normal(4), "window": (20, 0)},
    ],
    ids=lambda options: "-".join(options) if isinstance(options, dict) else str(options),
)
OPTIONS = {
    "bias": {"bias": normal(3, 4, 9, 160, dtype=BFLOAT16), "causal": True},
    "bias-by-rows": {"bias": normal(3, 4, 9, 161, dtype=BFLOAT16), "causal": True},
    "mask": {"mask": normal(3, 1, 9, 150) > -0.5},
    "mask-and-window": {"mask": normal(3, 4, 9, 170) > 0, "window": (40, 2), "sink": 3},
    "mask-of-kept-keys": {"mask": rawattn.topk_mask(normal(3, 1, 1, 170), 32)},
    "alibi": {"alibi_slopes": np.abs(normal(3, 4)), "causal": True},
    "softcap": {"softcap": 1.5, "scale": -1.0},
    "sinks": {"sink_logits": normal(4), "window": (20, 0)},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "score_mod": {"score_mod": rawattn.ScoreMod("where(kv_idx % 3 == 1, -inf, score - batch)")},
}
