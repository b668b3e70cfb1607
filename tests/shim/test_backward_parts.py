"""Key tiles that several blocks share, each with a part of the query tiles: whole backward calls on the simulator."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, ScoreMod, SeqLayout
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import backward_parts
from tests import exhaustive
from tests.memory import CANARY
from tests.shim.device import MakeDevice
from tests.shim.score_calls import BFLOAT16, arrays, normal
from tests.shim.test_mask_calls import blocky
from tests.shim.whole import logical_rows, run_backward, small_tiles, verify_backward

PARTS = "rawattn_backward_parts"
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
TILES = (32, 32, 2, 1, 2, 1, 1, False)


@pytest.fixture
def thrice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key tile has three blocks, and two waves share each row."""
    monkeypatch.setattr(backward_parts, "parts", lambda *_: 3)
    monkeypatch.setattr(portable_backward, "row_waves", lambda *_: 2)


def verify_parts(machine: MakeDevice, wave: int, *inputs: np.ndarray, **options: Any) -> None:
    """Verifies a backward with TILES; asserts that several blocks share a key tile."""
    device = machine(wave)
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", *inputs, **options)
    assert PARTS in device.launched


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
    """Gradients are right, also where a key tile has more blocks than query tiles."""
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(*given["bias"], 45, 72, dtype=dtype)
    given |= {"dlse": normal(2, 4, 45), "deterministic": deterministic}
    verify_parts(machine, wave, *arrays(dtype, rows=(45, 72)), **given)


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize(
    ("rows", "options"),
    [(75, {}), (20, {"causal": True}), (75, {"bias": (2, 4)}), (75, {"bias": (2, 2)})],
    ids=str,
)
def test_one_key_tile(machine: MakeDevice, rows: int, options: dict[str, Any]) -> None:
    """Each of the blocks that share the only key tile writes its own rows of dq."""
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(*given["bias"], rows, 32, dtype=BFLOAT16)
    device = machine()
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", *arrays(rows=(rows, 32)), **given)
    assert PARTS in device.launched
    assert "rawattn_backward_finish" not in device.launched


def masked(*shape: int) -> np.ndarray:
    """A mask that hides whole tiles of TILES, one key tile from all rows, and all keys from some rows."""
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
    given |= {"mask": masked(*shape), "deterministic": deterministic}
    verify_parts(machine, wave, *arrays(dtype, rows=(100, 75)), **given)


@pytest.mark.usefixtures("thrice")
def test_a_mask_that_hides_all(machine: MakeDevice) -> None:
    device = machine()
    with small_tiles(portable_backward=TILES):
        mask = np.zeros((1, 1, 1, 75), bool)
        got = verify_backward(device, "portable", *arrays(), mask=mask)
    assert PARTS in device.launched
    assert not any(np.any(x.astype(np.float32)) for x in got[:3])


# Sequences without queries, without keys and without either, and padding rows.
PACKED = SeqLayout(
    seqstart_q=[3, 60, 60, 80, 80, 118],
    seqstart_k=[0, 40, 75, 80, 80, 145],
    seqlen_q=[57, 0, 20, 0, 33],
    seqlen_k=[38, 35, 0, 0, 65],
)
PADDED = SeqLayout(seqlen_q=[100, 0, 64, 9], seqlen_k=[33, 70, 0, 72])
RAGGED: list[tuple[int, Any, SeqLayout, bool, dict[str, Any]]] = [
    (32, BFLOAT16, PACKED, False, {"causal": True}),
    (64, BFLOAT16, PACKED, True, {"window": (20, 9)}),
    (32, BFLOAT16, PADDED, False, {"bias": True, "sink_logits": normal(4)}),
    (32, FLOAT32, PACKED, False, {"causal": True, "align": "top-left"}),
    (64, FLOAT16, PADDED, False, {"mask": True, "causal": True}),
    (32, BFLOAT16, PACKED, False, {"mask": True, "dropout_p": 0.3, "seed": 5}),
    (32, BFLOAT16, PADDED, True, {"alibi_slopes": np.abs(normal(4))}),
    (32, BFLOAT16, PACKED, False, {"bias": True, "softcap": 3.0}),
]


def sequences(seqs: SeqLayout, dtype: Any) -> list[np.ndarray]:
    """q, k, v, whose last rows belong to no sequence."""
    if seqs is PACKED:
        return [x[0] for x in arrays(dtype, batch=1, rows=(120, 150))]
    return list(arrays(dtype, batch=4, rows=(100, 75)))


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("wave", "dtype", "seqs", "deterministic", "options"), exhaustive.thin(RAGGED, 5), ids=str
)
def test_ragged_batches(
    machine: MakeDevice,
    wave: int,
    dtype: Any,
    seqs: SeqLayout,
    deterministic: bool,
    options: dict[str, Any],
    on_device: bool,
) -> None:
    given = dict(options)
    batch = 5 if seqs is PACKED else 4
    if "bias" in given:
        given["bias"] = normal(batch, 2, 100, 75, dtype=dtype)
    if "mask" in given:
        given["mask"] = masked(batch, 4, 100, 75)
    given |= {"seqs": seqs, "on_device": on_device, "deterministic": deterministic}
    verify_parts(machine, wave, *sequences(seqs, dtype), **given)


@pytest.fixture
def sinks_thrice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key tile with sink tokens has three blocks."""
    monkeypatch.setattr(backward_parts, "parts", lambda *_: 1)
    monkeypatch.setattr(backward_parts, "parts_of_sinks", lambda *_: 3)


# Sink tokens in one or two of three key tiles, and sequences with fewer keys than that.
SINKS: list[tuple[int, Any, SeqLayout | None, bool, dict[str, Any]]] = [
    (32, BFLOAT16, None, False, {"causal": True, "window": (9, 0), "sink": 4}),
    (64, BFLOAT16, None, True, {"window": (12, 30), "sink": 33}),
    (32, FLOAT32, None, False, {"window": (9, 0), "sink": 64, "bias": True}),
    (32, FLOAT16, PACKED, False, {"window": (9, 5), "sink": 40, "softcap": 3.0}),
    (32, BFLOAT16, PACKED, True, {"causal": True, "window": (20, 0), "sink": 2}),
    (64, BFLOAT16, PADDED, False, {"window": (9, 0), "sink": 36, "dropout_p": 0.3, "seed": 5}),
    (32, BFLOAT16, PADDED, False, {"window": (12, 3), "sink": 4, "mask": True}),
]


@pytest.mark.usefixtures("sinks_thrice")
@pytest.mark.parametrize(
    ("wave", "dtype", "seqs", "deterministic", "options"), exhaustive.thin(SINKS, 4), ids=str
)
def test_sink_tokens(
    machine: MakeDevice,
    wave: int,
    dtype: Any,
    seqs: SeqLayout | None,
    deterministic: bool,
    options: dict[str, Any],
) -> None:
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(2, 4, 100, 75, dtype=dtype)
    if "mask" in given:
        given["mask"] = masked(4, 4, 100, 75)
    if seqs is not None:
        given |= {"seqs": seqs, "on_device": wave == 64}
    inputs = arrays(dtype, rows=(100, 75)) if seqs is None else sequences(seqs, dtype)
    verify_parts(machine, wave, *inputs, deterministic=deterministic, **given)


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize("seqs", [PACKED, PADDED], ids=["packed", "padded"])
def test_padding_of_the_callers_own_stays(machine: MakeDevice, seqs: SeqLayout) -> None:
    """Padding rows of gradients that the caller passes stay as they were, here in arrays whose heads precede their rows."""
    q, k, v = sequences(seqs, BFLOAT16)
    _, keys = logical_rows(q, k, v, {"seqs": seqs})
    own = [np.full(x.swapaxes(-3, -2).shape, CANARY * 257, np.uint16) for x in (q, k, v)]
    into = Gradients(*(x.view(BFLOAT16).swapaxes(-3, -2) for x in own))
    device = machine()
    with small_tiles(portable_backward=TILES):
        got = verify_backward(device, "portable", q, k, v, seqs=seqs, into=into)
    assert PARTS in device.launched
    for gradient in (got.dk, got.dv):
        padding = np.ascontiguousarray(gradient[~keys]).view(np.uint8)
        assert padding.size and np.all(padding == CANARY)


@pytest.mark.usefixtures("thrice")
@pytest.mark.parametrize(
    "wild", [[0, 40, 20, 500, -9, 150], [-(2**31), 2**31 - 1, 0, 75, 75, 75]], ids=["over", "far"]
)
def test_lengths_that_the_host_would_refuse(machine: MakeDevice, wild: list[int]) -> None:
    """No access leaves the arrays; the results are arbitrary."""
    device = machine()
    q, k, v = sequences(PACKED, BFLOAT16)
    lse = np.zeros((4, q.shape[0]), np.float32)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    with small_tiles(portable_backward=TILES), device.telling(start=np.array(wild, np.int32)):
        run_backward(
            device, "portable", out, q, k, v, out, lse, seqs=PACKED, causal=True, on_device=True
        )
    assert PARTS in device.launched


# Rows of a call with one head and few key tiles: so many that launch code lets several blocks share a key tile.
MANY = 16 * 40


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    exhaustive.thin(itertools.product(("mask", "packed", "padded", "gathered"), (False, True)), 3),
)
def test_few_key_tiles_and_many_query_tiles(
    machine: MakeDevice, kind: str, deterministic: bool
) -> None:
    keys = 150 if kind == "gathered" else 30
    q, k, v = arrays(batch=1, rows=(MANY, keys), heads=(2, 1))
    options: dict[str, Any] = {"deterministic": deterministic}
    if kind == "mask":
        options["mask"] = blocky(1, 2, MANY, keys, block=16)
    elif kind == "gathered":
        options["mask"] = rawattn.topk_mask(normal(1, 1, 1, keys), 20)
        options["causal"] = True
    elif kind == "packed":
        q, k, v = q[0], k[0], v[0]
        options["seqs"] = SeqLayout(seqstart_q=[0, MANY - 20, MANY], seqstart_k=[0, 20, keys])
    else:
        options["seqs"] = SeqLayout(seqlen_q=[MANY - 9], seqlen_k=[keys - 3])
    device = machine()
    with small_tiles():
        verify_backward(device, "portable", q, k, v, **options)
    assert PARTS in device.launched
    assert ("rawattn_scatter_keys" in device.launched) == (kind == "gathered")


@pytest.mark.parametrize("rows", [(0, 75), (100, 0)])
@pytest.mark.parametrize("window", [(5, None), (5, 0)])
def test_nothing_to_compute_beside_sink_tokens(
    machine: MakeDevice, rows: tuple[int, int], window: tuple[int, int | None]
) -> None:
    with small_tiles(portable_backward=TILES):
        got = verify_backward(machine(), "portable", *arrays(rows=rows), window=window, sink=4)
    assert not any(np.any(x.astype(np.float32)) for x in (got.dq, got.dk, got.dv))
