"""Key tiles that several blocks share, each with a part of the query tiles, in whole calls on the CPU machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod
from rawattn._call.problem import Problem, describe
from rawattn._call.scores import ArrayForm
from rawattn._kernels import gathered
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.target import without_device
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.test_mask_calls import blocky
from tests.shim.test_scores import BFLOAT16, arrays, normal
from tests.shim.whole import small_tiles, verify_backward

PARTS = "rawattn_backward_parts"
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
TILES = (32, 32, 2, 1, 2, 1, 1, False)


@pytest.fixture
def thrice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key tile has three blocks."""
    monkeypatch.setattr(portable_backward, "parts", lambda *_: 3)


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize(
    ("wave", "dtype", "deterministic", "options"),
    [
        (32, BFLOAT16, False, {"causal": True, "bias": (2, 4)}),
        (32, BFLOAT16, True, {"causal": True}),
        (64, BFLOAT16, False, {"window": (9, 40), "bias": (2, 2)}),
        (32, FLOAT32, False, {"bias": (1, 1)}),
        (32, BFLOAT16, False, {"causal": True, "bias": (1, 4), "softcap": 3.0}),
    ],
    ids=str,
)
def test_parts(
    machine: MakeDevice,
    wave: int,
    dtype: Any,
    deterministic: bool,
    options: dict[str, Any],
) -> None:
    """More of them than query tiles too."""
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(*given["bias"], 45, 72, dtype=dtype)
    device = machine(wave)
    with small_tiles(portable_backward=TILES):
        verify_backward(
            device,
            "portable",
            *arrays(dtype, rows=(45, 72)),
            dlse=normal(2, 4, 45),
            deterministic=deterministic,
            **given,
        )
    assert PARTS in device.launched


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize(
    ("rows", "options"),
    [(75, {}), (20, {"causal": True}), (75, {"bias": (2, 4)}), (75, {"bias": (2, 2)})],
    ids=str,
)
def test_lone_keys(machine: MakeDevice, rows: int, options: dict[str, Any]) -> None:
    """Each part writes the rows of dq that are its own."""
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(*given["bias"], rows, 32, dtype=BFLOAT16)
    device = machine()
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", *arrays(rows=(rows, 32)), **given)
    assert PARTS in device.launched
    assert "rawattn_backward_finish" not in device.launched


def masked(*shape: int) -> np.ndarray:
    """Dead tiles of TILES, a key tile that no row sees, and rows that see no key."""
    mask = blocky(*shape, block=32)
    mask[..., 32:64] = False
    return mask


MASKED: list[tuple[int, Any, tuple[int, ...], bool, dict[str, Any]]] = [
    (32, BFLOAT16, (2, 4, 100, 75), False, {"causal": True}),
    (64, BFLOAT16, (1, 2, 100, 75), True, {"window": (40, 9), "sink": 5}),
    (32, FLOAT32, (2, 1, 1, 75), False, {}),
    (32, FLOAT16, (1, 4, 100, 75), False, {"bias": True, "sink_logits": normal(4)}),
    (32, BFLOAT16, (2, 4, 100, 75), False, {"dropout_p": 0.3, "seed": 5, "softcap": 3.0}),
    (64, BFLOAT16, (1, 1, 100, 75), False, {"alibi_slopes": np.abs(normal(4)), "causal": True}),
    (32, BFLOAT16, (2, 2, 100, 75), False, {"score_mod": True}),
]


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize(
    ("wave", "dtype", "shape", "deterministic", "options"), exhaustive.thin(MASKED, 4), ids=str
)
def test_masks(
    machine: MakeDevice,
    wave: int,
    dtype: Any,
    shape: tuple[int, ...],
    deterministic: bool,
    options: dict[str, Any],
) -> None:
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(2, 4, 100, 75, dtype=dtype)
    if "score_mod" in given:
        text = "score * 1.5 - slope[head] * kv_idx"
        given["score_mod"] = ScoreMod(text, wrt="slope", slope=normal(4))
    device = machine(wave)
    with small_tiles(portable_backward=TILES):
        verify_backward(
            device,
            "portable",
            *arrays(dtype, rows=(100, 75)),
            mask=masked(*shape),
            deterministic=deterministic,
            **given,
        )
    assert PARTS in device.launched


@pytest.mark.usefixtures("thrice")
def test_a_mask_that_hides_all(machine: MakeDevice) -> None:
    device = machine()
    with small_tiles(portable_backward=TILES):
        mask = np.zeros((1, 1, 1, 75), bool)
        got = verify_backward(device, "portable", *arrays(), mask=mask)
    assert PARTS in device.launched
    assert not any(np.any(x.astype(np.float32)) for x in got[:3])


# Of one head, few key tiles and many query tiles: several blocks share a key tile of their own accord.
MANY = 16 * 40


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["mask", "gathered"])
def test_few_key_tiles_and_many_query_tiles(
    machine: MakeDevice, kind: str, deterministic: bool
) -> None:
    keys = 150 if kind == "gathered" else 30
    q, k, v = arrays(batch=1, rows=(MANY, keys), heads=(2, 1))
    options: dict[str, Any] = {"deterministic": deterministic}
    if kind == "mask":
        options["mask"] = blocky(1, 2, MANY, keys, block=16)
    else:
        options["mask"] = rawattn.topk_mask(normal(1, 1, 1, keys), 20)
        options["causal"] = True
    device = machine()
    with small_tiles():
        verify_backward(device, "portable", q, k, v, **options)
    assert PARTS in device.launched
    assert ("rawattn_scatter_keys" in device.launched) == (kind == "gathered")


H200 = replace(without_device("sm_90a"), multiprocessors=132)


def count(problem: Problem) -> int:
    """Blocks of a key tile."""
    config = portable_backward.choose(problem, H200, Operands())
    return portable_backward.parts(problem, H200, config)


def dense(
    batch: int,
    heads: tuple[int, int],
    rows: tuple[int, int],
    *,
    kept: int | None = None,
    mask: bool = False,
    **options: Any,
) -> Problem:
    """kept: of a list of keys that all rows share."""
    q, k = (
        np.broadcast_to(np.float16(0), (batch, n, nheads, 64))
        for n, nheads in zip(rows, heads, strict=True)
    )
    problem, _ = describe(q, k, k, **options)
    if kept is not None:
        shape = (1, 1, 1, rows[1])
        problem = replace(problem, mask=ArrayForm("bits", shape, shape)._replace(kept=kept))
        return gathered.gathered(problem, Operands()).problem
    shape = (1, 1, *rows)
    return replace(problem, mask=ArrayForm("bits", shape, shape)) if mask else problem


def test_few_key_tiles_are_shared() -> None:
    assert count(dense(1, (2, 1), (4096, 4096), causal=True)) > 4
    assert count(dense(1, (2, 1), (16384, 16384), causal=True)) > 1
    assert count(dense(1, (1, 1), (4096, 4096))) > 1


def test_many_key_tiles_are_not() -> None:
    assert count(dense(4, (32, 32), (4096, 4096), causal=True)) == 1
    assert count(dense(1, (1, 1), (128 * 132, 128 * 132))) == 1
    # There is little to share.
    assert count(dense(1, (1, 1), (256, 256), causal=True)) == 1


def test_a_mask_counts_for_nothing() -> None:
    assert count(dense(1, (2, 1), (4096, 4096), mask=True, causal=True)) > 4
    assert count(dense(4, (16, 16), (4096, 4096), mask=True)) == 1


@pytest.mark.parametrize("seqlen", [8192, 32768])
def test_gathered_keys_are_shared_by_as_many_blocks_as_there_are(seqlen: int) -> None:
    """8 key tiles on 132 multiprocessors."""
    assert count(dense(1, (2, 1), (seqlen, seqlen), kept=1024, causal=True)) == 16
