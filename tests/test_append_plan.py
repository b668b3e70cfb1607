"""Plans of `append_kv` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.append import Appended, appended

F32 = np.dtype(np.float32)
LENS = (9, 1, 24, 3)


def planned(call: Appended, **options: Any) -> tuple[tuple[Any, ...], rawattn.Plan]:
    """Return the arrays of a call, in the order in which `append_kv` takes them, and a plan of the call."""
    given = (call.k, call.v, *call.pools(), call.pages.block_table)
    options = {"seqlen_k": call.pages.seqlen_k, "q": call.q, "rotary": call.rotary, **options}
    return given, rawattn.plan(rawattn.append_kv, *given, **options)


def test_calls() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    given, made = planned(call)
    for pool, before in zip(given[2:4], call.pools(), strict=True):
        assert pool.tobytes() == before.tobytes()
    call.verify(*given[2:4], made(*given))
    again = made(*given[:4], block_table=given[4], q=2 * call.q)
    np.testing.assert_allclose(again, 2 * made(*given), rtol=1e-6)
    with pytest.raises(TypeError, match="into"):
        made(*given, into=rawattn.Gradients())
    before = given[2].copy()
    for wrong in (-1, 99):
        with pytest.raises(ValueError, match=f"block_table: got page id {wrong}"):
            made(*given[:4], np.where(given[4] >= 0, wrong, -1).astype(given[4].dtype))
    np.testing.assert_array_equal(given[2], before)
    given, alone = planned(call, q=None, rotary=None)
    assert alone(*given) is None


def test_queries_are_given_by_name() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    given, made = planned(call)
    says = r"^plan: got 6 arrays by position, expected k, v, k_pages, v_pages, block_table; others by name, as in q="
    for wrong in ((*given, call.q), (*given[:4], call.q, given[4])):
        with pytest.raises(TypeError, match=says):
            made(*wrong)


def test_out_is_written_and_returned() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    given, made = planned(call)
    for _ in range(2):
        out = np.empty_like(call.q)
        assert made(*given, out=out) is out
        call.verify(*given[2:4], out)
    given, alone = planned(call, q=None)
    with pytest.raises(TypeError, match=r"^out: got an array, but this plan has no q"):
        alone(*given, out=out)


def test_other_angles() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    given, made = planned(call)
    still = np.ones_like(call.rotary[0]), np.zeros_like(call.rotary[1])
    for named in ({"rotary": still}, {"cos": still[0], "sin": still[1]}):
        np.testing.assert_array_equal(made(*given, **named), call.q)
    with pytest.raises(TypeError, match=r"^rotary: got 1 of them"):
        made(*given, rotary=still[:1])
    given, alone = planned(call, q=None, rotary=None)
    with pytest.raises(TypeError, match=r"^rotary: this plan takes k, v, k_pages, v_pages, block"):
        alone(*given, rotary=still)


def _readonly(pool: Any) -> Any:
    pool = pool.copy()
    pool.flags.writeable = False
    return pool


WRONG: dict[str, tuple[Callable[..., dict[str, Any]], type[Exception], str]] = {
    "shape of out": (lambda q, pool: {"out": q[..., :1]}, ValueError, r"^out: got shape"),
    "dtype of out": (lambda q, pool: {"out": q.astype(np.float16)}, TypeError, r"^out: got dtype"),
    "a list as out": (lambda q, pool: {"out": [1.0]}, TypeError, r"^out: got list"),
    "q as out": (lambda q, pool: {"out": q}, ValueError, r"^out: shares memory with q"),
    "read-only": (lambda q, pool: {"k_pages": _readonly(pool)}, ValueError, r"^k_pages: got a read-only"),
    "one pool": (lambda q, pool: {"v_pages": pool}, ValueError, r"^k_pages: shares memory with v_pages"),
    "rows of it": (lambda q, pool: {"k": pool[:4, :1]}, ValueError, r"^k_pages: shares memory with k"),
    "gaps": (lambda q, pool: {"k_pages": np.repeat(pool, 2, -1)[..., ::2]}, ValueError, r"^k_pages: got a last-axis"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_memory_to_write_is_told_when_planning(name: str) -> None:
    change, error, says = WRONG[name]
    call = appended(LENS, 4, rotary_dim=8, dtype=F32, heads=(2, 2), dims=(24, 24))
    k_pages, v_pages = call.pools()
    given = {"k": call.k, "v": call.v, "k_pages": k_pages, "v_pages": v_pages, "q": call.q}
    options = {"block_table": call.pages.block_table, "seqlen_k": call.pages.seqlen_k}
    with pytest.raises(error, match=says):
        rawattn.plan(
            rawattn.append_kv, **given | options | {"rotary": call.rotary} | change(call.q, k_pages)
        )
