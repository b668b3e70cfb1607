"""`paged_attention` and its plans on the simulator: the whole host code of a GPU call, with stand-ins for CuPy arrays."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, paged_attention
from rawattn._kernels.selection import only
from rawattn._runtime import dispatch, on_gpu
from tests.append import appended
from tests.paged import Paged, paged, verify
from tests.shim.on_device import OnDevice, Put
from tests.shim.whole import small_tiles

LENS = (70, 3, 0, 129)


def inputs_of(call: Paged, put: Put) -> list[Any]:
    table = call.block_table
    pair = isinstance(table, tuple)
    return [*map(put, call.inputs[:3]), tuple(map(put, table)) if pair else put(table)]


def result(found: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = found
    return out.in_memory.array(), lse.in_memory.array()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_calls(put: Put, pair: bool, on_device: bool) -> None:
    """Two calls of the same form share a prepared call; each uses its own pages and lengths."""
    for seed in range(3):
        call = paged(LENS, 6, pair=pair, rows=3, seed=seed)
        lengths = put(call.seqlen_k) if on_device else call.seqlen_k
        with small_tiles():
            found = paged_attention(
                *inputs_of(call, put), seqlen_k=lengths, causal=True, return_lse=True
            )
        verify(call, *result(found), causal=True)
    assert len(on_gpu._prepared) == 1


def test_group_mode_and_options(put: Put) -> None:
    call = paged((70, 9, 0, 129), 6, packed=True, rows=(20, 9, 4, 1))
    bias = np.random.default_rng(0).standard_normal((4, 20, 150)).astype(np.float32)
    assert call.seqs is not None
    seqs = SeqLayout(seqstart_q=put(call.seqs.seqstart_q), seqlen_q=put(call.seqs.seqlen_q))
    with small_tiles():
        found = paged_attention(
            *inputs_of(call, put), seqlen_k=put(call.seqlen_k), seqs=seqs, bias=put(bias), window=(40, 1),
            return_lse=True,
        )  # fmt: skip
    verify(call, *result(found), bias=bias, window=(40, 1))


@pytest.mark.parametrize("pair", [False, True])
def test_a_plan_whose_lengths_and_pages_change_in_place(put: Put, pair: bool) -> None:
    call, other = (paged(LENS, 6, pair=pair, rows=3, seed=seed) for seed in range(2))
    inputs, lengths = inputs_of(call, put), put(call.seqlen_k)
    with small_tiles():
        made = rawattn.plan(
            paged_attention, *inputs, seqlen_k=lengths, causal=True, return_lse=True
        )
        assert made._gpu is not None
        verify(call, *result(made()), causal=True)
        # The other call's pages, written into the arrays that the plan was made with.
        for array, values in zip(inputs[:3], other.inputs[:3], strict=True):
            array.write(values)
        ids = inputs[3][1] if pair else inputs[3]
        ids.write(other.block_table[1] if pair else other.block_table)
        verify(other, *result(made()), causal=True)
        lengths.write(np.zeros(4, np.int32))
        out, lse = result(made())
        assert not np.any(out.astype(np.float32))
        assert np.all(lse == -np.inf)
        for each in (other, call, other):
            arrays = inputs_of(each, put)
            given = [*arrays[:3], arrays[3][1] if pair else arrays[3]]
            verify(each, *result(made(*given, seqlen_k=put(each.seqlen_k))), causal=True)
        assert len(made._repeats) == 1
        with pytest.raises(ValueError, match=r"^block_table: got shape"):
            made(*inputs[:3], put(np.zeros((9, 1), np.int32)))


@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
def test_pages_of_8_bits(put: Put, float8: str) -> None:
    """Calls that differ only in the values of scales share a prepared call; a plan reads arrays of scales anew."""
    calls = [paged(LENS, 6, rows=3, float8=float8, seed=seed) for seed in range(2)]
    with small_tiles():
        for call in calls:
            scales = {
                name: put(x) if isinstance(x, np.ndarray) else x for name, x in call.scales.items()
            }
            inputs, lengths = inputs_of(call, put), put(call.seqlen_k)
            found = paged_attention(*inputs, seqlen_k=lengths, **scales, return_lse=True)
            verify(call, *result(found))
        assert len(on_gpu._prepared) == 1
        made = rawattn.plan(paged_attention, *inputs, seqlen_k=lengths, **scales, return_lse=True)
        assert made._gpu is not None
        verify(calls[1], *result(made()))
        for array, values in zip(inputs[:3], calls[0].inputs[:3], strict=True):
            array.write(values)
        inputs[3].write(calls[0].block_table)
        if float8 == "arrays":
            for name, array in scales.items():
                array.write(calls[0].scales[name])
        if float8 != "numbers":
            verify(calls[0], *result(made()))
            return
        out, _ = result(made())
        wanted = paged_attention(
            *calls[0].inputs, **calls[0].lengths, **calls[1].scales, backend="cpu"
        )
        np.testing.assert_allclose(out.astype(np.float32), wanted.astype(np.float32), atol=0.02)


def test_mistakes_are_told_before_anything_is_launched(put: Put) -> None:
    call = paged(LENS, 6, rows=3)
    q, k_pages, v_pages, table = inputs_of(call, put)
    for change, says in (
        ({"block_table": put(np.zeros((4, 3), np.float32))}, "block_table: got dtype float32"),
        ({"block_table": put(np.zeros((3, 3), np.int32))}, r"block_table: got shape \(3, 3\)"),
        ({"v_pages": q}, "v_pages: got num_pages"),
        ({"seqlen_k": put(np.zeros(3, np.int64))}, "seqlen_k: got 3 lengths, expected 4"),
        ({"seqlen_k": [70, 3, 0, 10**6]}, "seqlen_k: got length 1000000 for sequence 3"),
    ):
        given = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": table}
        lengths = {"seqlen_k": put(call.seqlen_k)}
        with pytest.raises((TypeError, ValueError), match=f"^{says}"):
            paged_attention(**{**given, **lengths, **change})


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that went to the dispatcher."""
    found: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *call: found.append(call) or run(*call))
    return found


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_repeated_steps_find_their_launch(
    put: Put, dispatched: list[Any], pair: bool, written: bool
) -> None:
    """Repeated calls find their prepared launch, and use their own pages, lengths and `out`."""
    for seed in range(4):
        call = paged(LENS, 6, pair=pair, rows=3, seed=seed)
        inputs, lengths = inputs_of(call, put), put(call.seqlen_k)
        out = blank(put, call) if written else None
        found = paged_attention(
            *inputs, seqlen_k=lengths, causal=True, window=(90, None), return_lse=True, out=out
        )
        assert not written or found[0] is out
        verify(call, *result(found), causal=True, window=(90, None))
    assert len(dispatched) <= 2  # the first may find no reader yet, the second is remembered


def blank(put: Put, call: Paged) -> OnDevice:
    """A zeroed array for the result of a call."""
    shape = (*call.q.shape[:-1], call.v_pages.shape[-1])
    return put(np.zeros(shape, call.q.dtype), readonly=False)


@pytest.mark.parametrize("float8", ["numbers", "arrays"])
def test_repeated_steps_on_pages_of_8_bits(put: Put, dispatched: list[Any], float8: str) -> None:
    """Scales that are arrays share a remembered launch; each pair of scales that are numbers has one of its own."""
    calls = [paged(LENS, 6, rows=3, float8=float8, seed=seed) for seed in range(2)]
    for call in calls * 3:
        scales = {
            name: put(x) if isinstance(x, np.ndarray) else x for name, x in call.scales.items()
        }
        lengths = put(call.seqlen_k)
        found = paged_attention(*inputs_of(call, put), seqlen_k=lengths, **scales, return_lse=True)
        verify(call, *result(found))
    # One dispatch for each pair of numbers, and one more for the first call of a process, which may find no reader.
    assert len(dispatched) <= 3 if float8 == "numbers" else len(dispatched) == 6
    if float8 == "numbers":
        other = {**scales, "v_scale": 2 * scales["v_scale"]}
        inputs = inputs_of(call, put)
        twice, _ = paged_attention(*inputs, seqlen_k=lengths, **other, return_lse=True)
        once = found[0].in_memory.array().astype(np.float32)
        np.testing.assert_allclose(twice.in_memory.array().astype(np.float32), 2 * once, atol=0.02)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_repeated_appends(put: Put, dispatched: list[Any], pair: bool, turns: bool) -> None:
    for seed in range(4):
        rotary = {"rotary_dim": 16} if turns else {}
        call = appended((9, 4, 24, 3), 4, pair=pair, rows=2, seed=seed, **rotary)
        pools = [put(x, readonly=False) for x in call.pools()]
        table = call.pages.block_table
        table = tuple(map(put, table)) if pair else put(table)
        options = {**call.options}
        if call.rotary is not None:
            options["rotary"] = tuple(map(put, call.rotary))
        q = None if call.q is None else put(call.q)
        out = rawattn.append_kv(
            put(call.k), put(call.v), *pools, table, seqlen_k=put(call.pages.seqlen_k), q=q, **options
        )  # fmt: skip
        turned = None if out is None else out.in_memory.array()
        call.verify(*(x.in_memory.array() for x in pools), turned)
    assert len(dispatched) <= 2


def test_pages_that_share_memory_are_refused_of_a_known_append(put: Put) -> None:
    call = appended((9, 4, 24, 3), 4, rows=2, rotary_dim=16)
    named = {"seqlen_k": put(call.pages.seqlen_k), "rotary": tuple(map(put, call.rotary))}
    for _ in range(3):
        pools = [put(x, readonly=False) for x in call.pools()]
        given = (put(call.k), put(call.v), *pools, put(call.pages.block_table))
        q = put(call.q)
        out = rawattn.append_kv(*given, q=q, **named)
        call.verify(*(x.in_memory.array() for x in pools), out.in_memory.array())
    made = rawattn.plan(rawattn.append_kv, *given, q=q, **named)
    for _ in range(3):
        made(*given, q=q)
    for n in (0, 1, 2, -1):  # k, v, k_pages, q
        for offset in (0, 64, -64):
            others = [*given, q]
            others[n] = copy.copy(others[n])
            others[n].data = SimpleNamespace(ptr=pools[1].data.ptr + offset, device_id=0)
            for again in (made, partial(rawattn.append_kv, **named)):
                with pytest.raises(ValueError, match=r": shares memory with "):
                    again(*others[:-1], q=others[-1])


def test_planned_appends_write_out(put: Put) -> None:
    call = appended((9, 4, 24, 3), 4, rows=2, rotary_dim=16)
    pools = [put(x, readonly=False) for x in call.pools()]
    given = (put(call.k), put(call.v), *pools, put(call.pages.block_table))
    options = {"seqlen_k": put(call.pages.seqlen_k), "rotary": tuple(map(put, call.rotary))}
    made = rawattn.plan(rawattn.append_kv, *given, q=put(call.q), **options)
    for _ in range(3):  # from the second call on by the names of its arguments
        out = put(np.zeros(call.q.shape, call.q.dtype), readonly=False)
        assert made(*given, out=out) is out
        call.verify(*(x.in_memory.array() for x in pools), out.in_memory.array())
    assert made._repeats
    out.data.ptr = pools[0].data.ptr
    with pytest.raises(ValueError, match=r"^out: shares memory with k_pages"):
        made(*given, out=out)
    alone = rawattn.plan(rawattn.append_kv, *given, seqlen_k=options["seqlen_k"])
    with pytest.raises(TypeError, match=r"^out: got an array, but this plan has no q"):
        alone(*given, out=out)


def test_angles_that_are_copied(put: Put) -> None:
    """Angles whose last axis is not dense are copied, and the result is right."""
    call = appended((9, 4, 24, 3), 4, rows=2, rotary_dim=16)
    spread = [np.repeat(x, 2, -1)[:, ::2] for x in call.rotary]
    for _ in range(3):
        pools = [put(x, readonly=False) for x in call.pools()]
        given = (put(call.k), put(call.v), *pools, put(call.pages.block_table))
        named = {"seqlen_k": put(call.pages.seqlen_k), "q": put(call.q)}
        named["rotary"] = tuple(map(put, spread))
        out = rawattn.append_kv(*given, **named)
        call.verify(*(x.in_memory.array() for x in pools), out.in_memory.array())
    with pytest.raises(ValueError, match=r"^rotary\[0\]: its last axis is not dense"):
        rawattn.plan(rawattn.append_kv, *given, **named)


def test_steps_for_the_cpu_go_there_each_time(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    run = dispatch.run

    def here(*call: Any) -> Any:
        asked.append(call[5])
        return run(*call[:5], None, *call[6:])

    monkeypatch.setattr(dispatch, "run", here)
    call = paged(LENS, 6, rows=3)
    inputs, lengths = inputs_of(call, put), put(call.seqlen_k)
    for _ in range(4):
        paged_attention(*inputs, seqlen_k=lengths, backend="cpu")
    assert asked == ["cpu"] * 4


def test_steps_that_are_not_like_the_known_one(put: Put, dispatched: list[Any]) -> None:
    call = paged(LENS, 6, rows=3)
    inputs, lengths = inputs_of(call, put), put(call.seqlen_k)

    def went_there(*given: Any, **options: Any) -> bool:
        count = len(dispatched)
        paged_attention(*given, **options)
        return len(dispatched) > count

    for _ in range(3):
        known = not went_there(*inputs, seqlen_k=lengths, causal=True)
    assert known
    for _ in range(3):
        assert went_there(*inputs, seqlen_k=call.seqlen_k, causal=True), "lengths of the host"
        assert went_there(*inputs, seqlen_k=lengths, seqs=SeqLayout(seqlen_q=[3, 1, 0, 2]))
        assert went_there(*inputs, seqlen_k=lengths, dropout_p=0.5, seed=3)
    with only("portable"):
        assert went_there(*inputs, seqlen_k=lengths, causal=True)
    assert went_there(*inputs, seqlen_k=lengths, causal=False)
    with pytest.raises(TypeError, match=r"^causal"):
        paged_attention(*inputs, seqlen_k=lengths, causal=1)
    for _ in range(3):
        went_there(*inputs, seqlen_k=lengths, window=(2, None))
    with pytest.raises(TypeError, match=r"^window"):
        paged_attention(*inputs, seqlen_k=lengths, window=(2.0, None))
    with pytest.raises(
        TypeError, match=r"^rawattn.paged_attention: got 5 arguments by position, expected 4"
    ):
        paged_attention(*inputs, lengths)  # type: ignore[call-overload]
    # Every call checks for overlap.
    out = blank(put, call)
    for _ in range(3):
        known = not went_there(*inputs, seqlen_k=lengths, causal=True, out=out)
    assert known
    out = blank(put, call)
    out.data.ptr = inputs[1].data.ptr
    with pytest.raises(ValueError, match=r"^out: shares memory"):
        paged_attention(*inputs, seqlen_k=lengths, causal=True, out=out)
