"""NaN reaches only what sees it (attn/row_alone.cuh, portable/gradients_alone.cuh), on the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import pytest

from rawattn import Gradients, ScoreMod, SeqLayout
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import backward_parts
from tests import exhaustive, hidden_nan
from tests.shim.device import Device, MakeDevice
from tests.shim.whole import run_backward, run_forward, small_tiles

ROWS, KEYS = 70, 90
HIDING = hidden_nan.hiding(2, 4, ROWS, KEYS)


def shapes(headdim: int = 16, headdim_v: int = 24) -> tuple[tuple[int, ...], ...]:
    return ((2, ROWS, 4, headdim), (2, KEYS, 2, headdim), (2, KEYS, 2, headdim_v))


@pytest.mark.parametrize(
    ("dtype", "how"),
    exhaustive.thin(itertools.product((hidden_nan.BFLOAT16, np.dtype(np.float32)), HIDING), 3),
    ids=str,
)
def test_portable(machine: MakeDevice, how: str, dtype: Any) -> None:
    given = hidden_nan.inputs(shapes(), dtype)
    with small_tiles(portable_forward=(64, 32, 2, 2, 1, False)):
        out, lse = run_forward(machine(), "portable", *given, **HIDING[how])
    hidden_nan.check(given, out, lse, **HIDING[how])


@pytest.mark.parametrize("how", exhaustive.thin(HIDING, 2))
def test_hopper(machine: MakeDevice, how: str) -> None:
    given = hidden_nan.inputs(shapes(64, 64), hidden_nan.BFLOAT16)
    out, lse = run_forward(machine(arch="sm_90a"), "sm90", *given, **HIDING[how])
    hidden_nan.check(given, out, lse, **HIDING[how])


IN_BACKWARD = hidden_nan.hiding_in_backward(2, 4, ROWS, KEYS)
IN_FLOAT32 = hidden_nan.hiding_in_backward(2, 4, ROWS, KEYS, np.float32)


def differentiate(
    device: Device,
    where: str,
    options: dict[str, Any],
    dtype: Any = hidden_nan.BFLOAT16,
    deterministic: bool = False,
    rows: int = ROWS,
    keys: int = KEYS,
    **tiles: tuple[int, ...],
) -> None:
    arrays = (2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 24)
    given = hidden_nan.gradient_inputs(hidden_nan.inputs(arrays, dtype), where, **options)
    with small_tiles(**tiles):
        got = run_backward(device, "portable", *given, deterministic=deterministic, **options)
    hidden_nan.check_gradients(given, got, **options)


KINDS = [*itertools.product((hidden_nan.BFLOAT16, np.dtype(np.float32)), (False, True))]
WHERE = "keys", "rows"


def traits(case: tuple[Any, bool, str, str]) -> Iterator[Hashable]:
    """Every second one of `IN_BACKWARD` is curated, with the kinds of backward in turn, and NaN keys and rows in turn."""
    dtype, deterministic, where, how = case
    n, odd = divmod(list(IN_BACKWARD).index(how), 2)
    of_turn = (*KINDS[n % len(KINDS)], WHERE[n // len(KINDS) % 2])
    if not odd and (dtype, deterministic, where) == of_turn:
        yield how


@pytest.mark.parametrize(
    ("dtype", "deterministic", "where", "how"),
    exhaustive.mark(
        [(*kind, *of) for kind in KINDS for of in itertools.product(WHERE, IN_BACKWARD)],
        traits,
    ),
    ids=str,
)
def test_backward(
    machine: MakeDevice, how: str, where: str, deterministic: bool, dtype: Any
) -> None:
    options = IN_FLOAT32 if dtype == np.float32 else IN_BACKWARD
    differentiate(machine(), where, options[how], dtype, deterministic)


ONE_TILE = hidden_nan.hiding_in_backward(2, 4, 40, 30)


@pytest.mark.parametrize(
    ("rounds", "where", "how"),
    exhaustive.thin(
        itertools.product(
            (0, 6), WHERE, ("causal", "top-left", "bias", "bias-of-scores", "score_mod")
        ),
        3,
    ),
)
def test_backward_of_one_key_tile(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, rounds: int, how: str, where: str
) -> None:
    """The main kernel writes dq itself, and computes NaN again, or leaves that to another launch."""
    monkeypatch.setattr(portable_backward, "_ROUNDS_WORTH_A_LAUNCH", rounds)
    monkeypatch.setattr(portable_backward, "delta_rows", lambda *_: 512)
    tiles = (16, 32, 2, 1, 2, 1, 1, False)
    differentiate(machine(), where, ONE_TILE[how], rows=40, keys=30, portable_backward=tiles)


@pytest.mark.parametrize(
    ("where", "how"),
    exhaustive.thin(itertools.product(WHERE, ("causal", "top-left", "window", "mask")), 3),
)
def test_backward_of_shared_key_tiles(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, how: str, where: str
) -> None:
    """Several blocks share a key tile, and another kernel adds up their parts."""
    monkeypatch.setattr(backward_parts, "parts", lambda *_: 3)
    differentiate(machine(), where, IN_BACKWARD[how])


@pytest.mark.parametrize(
    ("where", "deterministic"), exhaustive.thin(itertools.product(WHERE, (False, True)), 3)
)
def test_backward_of_packed_sequences(machine: MakeDevice, where: str, deterministic: bool) -> None:
    """A NaN reaches no other sequence either, nor padding between them."""
    dtype, causal = hidden_nan.BFLOAT16, {"causal": True}
    arrays = (1, ROWS, 4, 16), (1, KEYS, 2, 16), (1, KEYS, 2, 24)
    each = [
        hidden_nan.gradient_inputs(hidden_nan.inputs(arrays, dtype), where, **causal)
        for _ in range(2)
    ]
    dout, q, k, v, out, lse = zip(*each, strict=True)
    packed = [np.concatenate([x[0] for x in side]) for side in (dout, q, k, v, out)]
    seqs = SeqLayout(seqstart_q=[0, ROWS, 2 * ROWS], seqstart_k=[0, KEYS, 2 * KEYS])
    with small_tiles():
        got = run_backward(
            machine(), "portable", *packed, np.concatenate([x[0] for x in lse], axis=-1),
            seqs=seqs, deterministic=deterministic, **causal,
        )  # fmt: skip
    for n, given in enumerate(each):
        rows, keys = slice(n * ROWS, (n + 1) * ROWS), slice(n * KEYS, (n + 1) * KEYS)
        own = Gradients(got.dq[None, rows], got.dk[None, keys], got.dv[None, keys])
        hidden_nan.check_gradients(given, own, **causal)


FEW = hidden_nan.hiding(2, 4, 5, 300)


DECODED = itertools.product(
    [how for how in FEW if how != "dropout"], [("sm_80", 24), ("sm_80", 72), ("sm_90a", 64)]
)


@pytest.mark.parametrize(
    ("how", "arch", "headdim_v"), exhaustive.thin([(how, *of) for how, of in DECODED], 4)
)
def test_decoding(machine: MakeDevice, arch: str, headdim_v: int, how: str) -> None:
    """Some head dims are such that a wave stores parts of rows."""
    given = hidden_nan.inputs(
        ((2, 5, 4, 64), (2, 300, 2, 64), (2, 300, 2, headdim_v)), hidden_nan.BFLOAT16
    )
    out, lse = run_forward(machine(arch=arch), "decode", *given, **FEW[how])
    hidden_nan.check(given, out, lse, **FEW[how])


@pytest.mark.parametrize("how", ["causal", "window", "top-left"])
def test_output_by_tma(machine: MakeDevice, how: str) -> None:
    """In packed batches Hopper's forward stores its output by TMA."""
    given = hidden_nan.inputs(((1, ROWS, 4, 64), (1, KEYS, 2, 64), (1, KEYS, 2, 64)), np.float16)
    seqs = SeqLayout(seqstart_q=[0, ROWS], seqstart_k=[0, KEYS])
    packed = [x[0] for x in given]
    out, lse = run_forward(machine(arch="sm_90a"), "sm90", *packed, seqs=seqs, **HIDING[how])
    hidden_nan.check(given, out[None], lse[None], **HIDING[how])


FAMILIES = ("portable", "sm_80"), ("sm90", "sm_90a"), ("decode", "sm_80"), ("decode", "sm_90a")
OPTIONS: tuple[dict[str, Any], ...] = {}, {"causal": True}, {"softcap": 2.0}


@pytest.mark.parametrize(
    ("family", "arch", "options"),
    exhaustive.thin([(*family, of) for family in FAMILIES for of in OPTIONS], 2),
    ids=str,
)
def test_a_query(machine: MakeDevice, family: str, arch: str, options: dict[str, Any]) -> None:
    """lse of a row that sees only NaN is NaN, not that of a row without keys, which would have no gradients."""
    shapes = ((2, 5, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    given = hidden_nan.inputs_of_one_query(shapes, hidden_nan.BFLOAT16)
    out, lse = run_forward(machine(arch=arch), family, *given, **options)
    hidden_nan.check(given, out, lse, **options)


@pytest.mark.parametrize("how", hidden_nan.UNSEEN)
def test_backward_of_a_bias_beside_what_nothing_sees(machine: MakeDevice, how: str) -> None:
    """The tiles of dbias are larger than those of the main kernel, and meet rows and keys that it never does."""
    given, options = hidden_nan.unseen_inputs(how)
    got = run_backward(machine(arch="sm_90a"), "portable", *given, **options)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in got if x is not None)


@pytest.mark.parametrize(
    ("text", "dtype"),
    exhaustive.thin(
        itertools.product((None, "tanh(score) * 2"), (np.float16, hidden_nan.BFLOAT16, np.float32)),
        2,
    ),
    ids=str,
)
def test_backward_of_an_infinite_value_under_dropout(
    machine: MakeDevice, text: str | None, dtype: Any
) -> None:
    given, options = hidden_nan.dropped_inputs(dtype)
    score_mod = None if text is None else ScoreMod(text)
    got = run_backward(machine(), "portable", *given, score_mod=score_mod, **options)
    hidden_nan.check_dropped(got)
