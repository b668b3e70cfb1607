"""NaN reaches only what sees it (attn/row_alone.cuh, portable/gradients_alone.cuh)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests import hidden_nan
from tests.gpu.pages import on_gpu

cupy = pytest.importorskip("cupy")

HIDING = hidden_nan.hiding(2, 4, 300, 420)


def moved(options: dict[str, Any]) -> dict[str, Any]:
    found = {name: on_gpu(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    mod = options.get("score_mod")
    if mod is not None:
        found["score_mod"] = mod.with_arrays({name: on_gpu(x) for name, x in mod.arrays.items()})
    return found


def attend(given: hidden_nan.Inputs, family: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with only(family):
        out, lse = rawattn.attention(*map(on_gpu, given), **moved(options), return_lse=True)
    return out.get(), lse.get()


def check_call(family: str, headdim: int, options: dict[str, Any], sizes: tuple[int, int]) -> None:
    """sizes: of queries and of keys."""
    rows, keys = sizes
    shapes = ((2, rows, 4, headdim), (2, keys, 2, headdim), (2, keys, 2, headdim))
    given = hidden_nan.inputs(shapes, hidden_nan.BFLOAT16)
    hidden_nan.check(given, *attend(given, family, **options), **options)


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm90", "portable"])
def test_many_rows(family: str, headdim: int, how: str) -> None:
    check_call(family, headdim, HIDING[how], (300, 420))


@pytest.mark.parametrize("how", HIDING)
def test_float32(how: str) -> None:
    given = hidden_nan.inputs(((2, 300, 4, 40), (2, 420, 2, 40), (2, 420, 2, 72)), np.float32)
    hidden_nan.check(given, *attend(given, "portable", **HIDING[how]), **HIDING[how])


FEW = hidden_nan.hiding(2, 8, 5, 3000)


@pytest.mark.parametrize("how", [how for how in FEW if how != "dropout"])
@pytest.mark.parametrize("headdim", [64, 96, 256])
def test_few_rows_on_many_keys(headdim: int, how: str) -> None:
    """Few rows, whose keys are split: parts of NaN are merged."""
    shapes = ((2, 5, 8, headdim), (2, 3000, 2, headdim), (2, 3000, 2, headdim))
    given = hidden_nan.inputs(shapes, hidden_nan.BFLOAT16)
    for family in ("decode", "sm90", "portable"):
        hidden_nan.check(given, *attend(given, family, **FEW[how]), **FEW[how])


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize("how", [{"causal": True}, {"window": (40, 0), "sink": 4}], ids=str)
def test_pages(rows: int, page_size: int, how: dict[str, Any]) -> None:
    keys = 20 * page_size
    given = hidden_nan.inputs(((2, rows, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64)), np.float16)
    pools = [x.reshape(40, page_size, 2, 64) for x in given[1:]]
    out, lse = paged_attention(
        *map(on_gpu, (given[0], *pools)), on_gpu(np.arange(40, dtype=np.int32).reshape(2, 20)),
        seqlen_k=on_gpu(np.full(2, keys, np.int32)), return_lse=True, **how,
    )  # fmt: skip
    hidden_nan.check(given, out.get(), lse.get(), **how)


IN_BACKWARD = hidden_nan.hiding_in_backward(2, 4, 300, 424)
IN_FLOAT32 = hidden_nan.hiding_in_backward(2, 4, 300, 424, np.float32)


def differentiate(
    where: str,
    options: dict[str, Any],
    rows: int,
    keys: int,
    headdim: int,
    dtype: Any = hidden_nan.BFLOAT16,
    **more: Any,
) -> None:
    arrays = (2, rows, 4, headdim), (2, keys, 2, headdim), (2, keys, 2, headdim)
    given = hidden_nan.gradient_inputs(hidden_nan.inputs(arrays, dtype), where, **options)
    got = rawattn.attention_backward(*map(on_gpu, given), **moved(options), **more)
    on_host = {
        k: x.get() for k, x in got._asdict().items() if hasattr(x, "get") and k != "captured"
    }
    captured = got.captured and {k: x.get() for k, x in got.captured.items()}
    hidden_nan.check_gradients(given, got._replace(**on_host, captured=captured), **options)


@pytest.mark.parametrize("how", IN_BACKWARD)
@pytest.mark.parametrize("where", ["keys", "rows"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 200])
def test_backward(headdim: int, deterministic: bool, where: str, how: str) -> None:
    differentiate(where, IN_BACKWARD[how], 300, 424, headdim, deterministic=deterministic)


@pytest.mark.parametrize("how", IN_BACKWARD)
@pytest.mark.parametrize("where", ["keys", "rows"])
def test_backward_float32(where: str, how: str) -> None:
    differentiate(where, IN_FLOAT32[how], 300, 424, 40, np.float32)


ONE_TILE = hidden_nan.hiding_in_backward(2, 4, 150, 60)


@pytest.mark.parametrize("how", ["causal", "top-left", "bias", "bias-of-scores", "score_mod"])
@pytest.mark.parametrize("where", ["keys", "rows"])
@pytest.mark.parametrize("headdim", [64, 96, 256])
def test_backward_of_one_key_tile(headdim: int, where: str, how: str) -> None:
    """The main kernel writes dq itself."""
    differentiate(where, ONE_TILE[how], 150, 60, headdim)


@pytest.mark.parametrize("where", ["keys", "rows"])
@pytest.mark.parametrize(
    "options", [{"causal": True, "align": "top-left"}, {"window": (3000, 0), "sink": 5}], ids=str
)
def test_backward_of_shared_key_tiles(options: dict[str, Any], where: str) -> None:
    """Several blocks share a key tile: of the few that there are, or of those with sink tokens."""
    differentiate(where, options, 3000, 200 if "align" in options else 3500, 64)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("rows", [5, 200])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_query(headdim: int, rows: int, options: dict[str, Any]) -> None:
    """lse of a row that sees only NaN is NaN, not that of a row without keys, which would have no gradients."""
    shapes = ((2, rows, 4, headdim), (2, 900, 2, headdim), (2, 900, 2, headdim))
    given = hidden_nan.inputs_of_one_query(shapes, hidden_nan.BFLOAT16)
    for family in ("sm90", "portable", "decode")[: 3 if rows == 5 else 2]:
        hidden_nan.check(given, *attend(given, family, **options), **options)


@pytest.mark.parametrize("how", hidden_nan.UNSEEN)
def test_backward_of_a_bias_beside_what_nothing_sees(how: str) -> None:
    given, options = hidden_nan.unseen_inputs(how)
    got = rawattn.attention_backward(*map(on_gpu, given), **moved(options))
    for each in got:
        assert each is None or np.isfinite(each.get().astype(np.float64)).all()


@pytest.mark.parametrize("dtype", [np.float16, hidden_nan.BFLOAT16, np.float32], ids=str)
@pytest.mark.parametrize("text", [None, "tanh(score) * 2"])
def test_backward_of_an_infinite_value_under_dropout(text: str | None, dtype: Any) -> None:
    given, options = hidden_nan.dropped_inputs(dtype)
    score_mod = None if text is None else rawattn.ScoreMod(text)
    got = rawattn.attention_backward(*map(on_gpu, given), score_mod=score_mod, **options)
    hidden_nan.check_dropped(got._replace(dq=got.dq.get(), dk=got.dk.get(), dv=got.dv.get()))
