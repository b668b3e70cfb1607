"""The launches before and after attention to kept keys: gathered rows, mask bits, tile lists and lengths, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem, describe
from rawattn._kernels import attention_params, gathered
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import kept_setup, mask_tiles
from rawattn._kernels.portable.kept_setup import KeptRows, Mask
from rawattn._kernels.target import without_device
from rawattn._masks import layout
from rawattn._strides import contiguous
from tests import exhaustive
from tests.shim.launch import Machine
from tests.shim.shim import Builder, Memory
from tests.shim.test_mask import run, scratch, to_bits, visibility

BATCH, HEADS_Q, HEADS = 2, 4, 2
Array = Any


def kept_lists(shape: tuple[int, int], keys: int, count: int, fills: tuple[int, ...]) -> Array:
    """Ascending lists of kept keys. shape: (batch entries, heads); fills: the numbers of keys of the lists, in turn."""
    rng = np.random.default_rng(count)
    lists = np.full((*shape, count), -1, np.int32)
    for n, at in enumerate(np.ndindex(shape)):
        fill = fills[n % len(fills)]
        lists[at][:fill] = np.sort(rng.choice(keys, fill, replace=False))
        if n % 2 == 0:
            lists[at][: min(fill, 1)] = 0  # the first entry is key 0
    return lists


def problem_of(
    rows: int, keys: int, dims: tuple[int, int], lists: Array, **options: Any
) -> Problem:
    q, k, v = (
        np.broadcast_to(np.float16(0), shape)
        for shape in (
            (BATCH, rows, HEADS_Q, dims[0]), (BATCH, keys, HEADS, dims[0]), (BATCH, keys, HEADS, dims[1])
        )
    )  # fmt: skip
    problem, _ = describe(q, k, v, **options)
    shape = (*lists.shape[:2], 1, keys)
    return replace(problem, mask=ArrayForm("bits", shape, shape, kept=lists.shape[2]))


# Value: (gaps after each row, head and batch entry, in elements), then the array's address modulo 16.
LAYOUTS: dict[str, tuple[tuple[int, int, int], int]] = {
    "dense": ((0, 0, 0), 0),
    "gaps": ((8, 16, 24), 0),
    "odd": ((1, 3, 5), 2),
    "half": ((4, 8, 4), 8),
}


def with_gaps(name: str, array: Array, layout: str) -> tuple[Memory, tuple[int, ...], Array]:
    """Puts the array in memory with gaps of NaN. Returns the memory, the strides, and the indices of the elements there."""
    (of_rows, of_heads, of_batch), phase = LAYOUTS[layout]
    _, rows, heads, dim = array.shape
    head = dim + of_heads
    row = heads * head + of_rows
    strides = (rows * row + of_batch, row, head, 1)
    at = sum(x * s for x, s in zip(np.ogrid[tuple(map(slice, array.shape))], strides, strict=True))
    raw = np.full(int(at.max()) + 1, np.nan, array.dtype)
    raw[at] = array
    memory = Memory(name, raw, phase=phase, readonly=False)
    return memory, tuple(s * array.itemsize for s in strides), at


def rows_of(
    problem: Problem, arrays: dict[str, Array], layout: str, names: dict[str, str]
) -> tuple[dict[str, Memory], list[KeptRows], dict[str, Array]]:
    found = {name: with_gaps(name, x, layout) for name, x in arrays.items()}
    pointers = 0
    for memory, *_ in found.values():
        pointers |= memory.address
    operands = Operands({name: strides for name, (_, strides, _) in found.items()}, pointers)
    rows = [KeptRows(problem, operands, name, copy) for name, copy in names.items()]
    return {n: m for n, (m, *_) in found.items()}, rows, {n: at for n, (*_, at) in found.items()}


CASES: dict[str, tuple[tuple[int, int], str, tuple[int, ...]]] = {
    "own-lists": ((7, 1), "odd", (50, 20, 0, 49)),
    "dense": ((64, 64), "dense", (1, 50)),
    "gaps": ((24, 8), "gaps", (50, 3)),
    "half": ((20, 36), "half", (0, 50, 7, 50)),
}


def keys_and_values(dims: tuple[int, int], keys: int) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        name: rng.standard_normal((BATCH, keys, HEADS, dim)).astype(np.float16)
        for name, dim in zip("kv", dims, strict=True)
    }


@pytest.mark.parametrize("shape", [(2, 2), (1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("case", exhaustive.thin(CASES, 1))
def test_rows_there_and_back(case: str, shape: tuple[int, int], builder: Builder) -> None:
    dims, form, fills = CASES[case]
    keys, count = 210, 50
    lists = kept_lists(shape, keys, count, fills)
    problem = problem_of(9, keys, dims, lists)
    given = keys_and_values(dims, keys)
    each = np.broadcast_to(lists, (BATCH, HEADS, count))
    # Keys and values that no list has may hold anything.
    for b, h in np.ndindex(BATCH, HEADS):
        unkept = np.setdiff1d(np.arange(keys), each[b, h])
        for x in given.values():
            x[b, unkept, h] = np.nan
    memory, rows, _ = rows_of(problem, given, form, gathered._INPUTS)
    arrays = {
        **memory,
        "mask_kept": Memory("mask_kept", lists),
        "kept_lengths": scratch("kept_lengths", 4 * BATCH * HEADS, np.int32),
        **{x.copy: scratch(x.copy, x.nbytes, np.float16) for x in rows},
    }
    step = kept_setup.by_lengths(rows[0], rows[1], HEADS, without_device("sm_90a"))
    run(Machine(builder, checked=True), step, arrays)
    lengths = arrays["kept_lengths"].array().reshape(BATCH, HEADS)
    np.testing.assert_array_equal(lengths, (each >= 0).sum(-1))
    few = {}
    for x, dim in zip(rows, dims, strict=True):
        few[x.name] = arrays[x.copy].array().reshape(BATCH, HEADS, count, -1)[..., :dim]
        for b, h in np.ndindex(BATCH, HEADS):
            wanted = np.where(each[b, h, :, None] >= 0, given[x.name][b, each[b, h], h], 0)
            np.testing.assert_array_equal(few[x.name][b, h], wanted)

    blank = {f"d{name}": np.full_like(x, np.nan) for name, x in given.items()}
    memory, rows, at = rows_of(problem, blank, form, gathered._GRADIENTS)
    arrays |= memory
    for x in rows:
        arrays[x.copy] = arrays[gathered._INPUTS[x.name[1:]]]
    run(Machine(builder, checked=True), kept_setup.scatter(rows[0], rows[1], 32), arrays)
    for name, x in given.items():
        raw = arrays[f"d{name}"].array()
        np.testing.assert_array_equal(raw[at[f"d{name}"]], np.nan_to_num(x))
        raw[at[f"d{name}"]] = np.nan
        assert np.isnan(raw).all(), "between the rows"


RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (70, 3), "sink": 200},
    "left": {"window": (40, None), "align": "top-left"},
    "narrow": {"window": (0, 0)},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("rows", "keys", "count", "shape", "wave"),
    [(300, 700, 330, (2, 2), 32), (70, 400, 1, (1, 2), 64), (600, 500, 129, (1, 1), 32)],
    ids=str,
)
def test_bits_and_lists(
    rule: str, rows: int, keys: int, count: int, shape: tuple[int, int], wave: int, builder: Builder
) -> None:
    options = RULES[rule]
    fills = (count, count // 2, 0, count - 1 if count > 1 else 1)
    lists = kept_lists(shape, keys, count, fills)
    problem = problem_of(rows, keys, (8, 8), lists, **options)
    given = keys_and_values((8, 8), keys)
    memory, of_rows, _ = rows_of(problem, given, "dense", gathered._INPUTS)
    strides = {name: contiguous((BATCH, rows, HEADS_Q, 8), 2) for name in ("q", "out")}
    operands = replace(of_rows[0].operands, strides={**of_rows[0].operands.strides, **strides})
    call = gathered.by_mask(problem, operands)
    assert (call.problem.mask.shape[2] == 1) == (kept_setup.limits(problem) is None)
    values = attention_params.forward(call.problem, call.structure, call.operands, 1 << 20)
    target = replace(without_device("sm_90a"), wave=wave)
    listed = {}
    for of, tile_q, tile_k in (("q", 64, 32), ("k", 48, 80)):
        found = mask_tiles.lists(
            call.problem,
            call.structure,
            values,
            target,
            of=of,
            tile_q=tile_q,
            tile_k=tile_k,
            name=f"of_{of}",
            ordered=of == "q",
        )
        assert found.step is None
        assert not found.counters
        listed[of] = found, tile_q, tile_k
    mask = Mask(call.problem.mask.shape, [each.sub_task for each, *_ in listed.values()])
    sizes = {name: n for each, *_ in listed.values() for name, n in each.scratch.items()}
    arrays = {
        **memory,
        "mask_kept": Memory("mask_kept", lists),
        "kept_bits": scratch("kept_bits", layout.bits_bytes(mask.shape), np.uint16),
        "kept_keys": scratch("kept_keys", layout.keys_bytes(mask.shape), np.uint16),
        **{name: scratch(name, n, np.int32) for name, n in sizes.items()},
        **{x.copy: scratch(x.copy, x.nbytes, np.float16) for x in of_rows},
    }
    run(
        Machine(builder, wave, checked=True),
        kept_setup.by_mask(of_rows[0], of_rows[1], mask, target),
        arrays,
    )

    seen = visibility(rows, keys, options)
    keep = np.where(lists[:, :, None] >= 0, seen[:, lists.clip(0)].transpose(1, 2, 0, 3), False)
    given_rows = keep[:, :, : mask.shape[2]]
    bits = arrays["kept_bits"].array().reshape(layout.bits_shape(mask.shape))
    np.testing.assert_array_equal(bits, to_bits(given_rows)[0])
    any_row = to_bits(keep.any(2, keepdims=True))[0][:, :, 0]
    np.testing.assert_array_equal(arrays["kept_keys"].array().reshape(any_row.shape), any_row)
    for of, (each, tile_q, tile_k) in listed.items():
        check_lists(arrays, of, each, keep, tile_q, tile_k)
    if "window" not in options:  # with a window any order is allowed
        lists_q, tile_q, _ = listed["q"]
        nheads = lists_q.fields["block_mask.lists.nheads"]
        order = arrays["of_q_order"].array().reshape(-1, -(-rows // tile_q), nheads)
        lengths = arrays["of_q"].array().reshape(*order.shape, -1)[..., 0]
        assert (np.diff(np.take_along_axis(lengths, order, 1), axis=1) <= 0).all()


def check_lists(
    arrays: dict[str, Memory], of: str, listed: Any, keep: Array, tile_q: int, tile_k: int
) -> None:
    """Checks that lists have every tile that a row sees, mark those with a hidden key as masked, and have few others."""
    nheads, capacity, between = (
        listed.fields[f"block_mask.lists.{name}"] for name in ("nheads", "capacity", "sequence")
    )
    pair = 1 if of == "q" else 2
    memory = arrays[f"of_{of}"].array().reshape(-1, nheads, 1 + capacity * pair)
    rows, count = keep.shape[2:]
    tiles_q, tiles_k = -(-rows // tile_q), -(-count // tile_k)
    own, others = (tiles_q, tiles_k) if of == "q" else (tiles_k, tiles_q)
    in_vain = 0
    for b, h in np.ndindex(keep.shape[:2]):
        found = np.zeros((own, others), int)
        for tile in range(own):
            list_ = memory[b * between + tile, h]
            length = list_[0]
            got = list_[1 : 1 + length * pair].reshape(-1, pair)
            numbers = got[:, -1] >> 1
            assert (np.diff(numbers[: length // pair]) > 0).all(), "in the order of tiles"
            if of == "k":
                half = length // 2
                np.testing.assert_array_equal(got[:, 0], np.repeat([0, 1], half))
                np.testing.assert_array_equal(got[:half, 1], got[half:, 1])
            found[tile, numbers] = 1 + (got[:, -1] & 1)
        for tile, n in np.ndindex(own, others):
            r, c = (tile, n) if of == "q" else (n, tile)
            part = keep[b, h, r * tile_q : (r + 1) * tile_q, c * tile_k : (c + 1) * tile_k]
            if part.any():
                assert found[tile, n] == (1 if part.all() else 2)
            else:
                in_vain += found[tile, n] != 0
        if of == "q":
            at = slice(b * between, b * between + own)
            order = arrays["of_q_order"].array().reshape(-1, nheads)[at, h]
            assert sorted(order) == list(range(own))
    assert in_vain <= 0.1 * keep[:, :, 0, 0].size * own * others


@pytest.mark.parametrize("entry", [-2, 700, 2**31 - 1, -(2**31)])
def test_entries_that_are_no_keys(entry: int, builder: Builder) -> None:
    """List entries that are no keys give rows of zeros, and no access leaves the arrays (the simulator would fault)."""
    lists = kept_lists((1, 2), 700, 130, (130, 60))
    lists[0, 1, 60:] = entry
    lists[0, 0, 5] = entry
    problem = problem_of(9, 700, (8, 8), lists)
    given = keys_and_values((8, 8), 700)
    memory, rows, _ = rows_of(problem, given, "dense", gathered._INPUTS)
    arrays = {
        **memory,
        "mask_kept": Memory("mask_kept", lists),
        "kept_lengths": scratch("kept_lengths", 4 * BATCH * HEADS, np.int32),
        **{x.copy: scratch(x.copy, x.nbytes, np.float16) for x in rows},
    }
    step = kept_setup.by_lengths(rows[0], rows[1], HEADS, without_device("sm_90a"))
    run(Machine(builder), step, arrays)
    assert (arrays["kept_lengths"].array()[1::2] == 60).all()
    for x in rows:
        few = arrays[x.copy].array().reshape(BATCH, HEADS, 130, -1)
        assert not few[:, 1, 60:].any()
        assert not few[:, 0, 5].any()


def test_topk_lists_are_such() -> None:
    scores = np.random.default_rng(0).standard_normal((2, 2, 1, 300))
    scores[1, 1, :, 20:] = -np.inf
    kept = rawattn.topk_mask(scores, 50).kept
    fills = (kept >= 0).sum(-1)
    assert fills.tolist() == [[[50], [50]], [[50], [20]]]
    for at in np.ndindex(2, 2):
        own = kept[at][0]
        assert (np.diff(own[: fills[at][0]]) > 0).all()
        assert (own[fills[at][0] :] == -1).all()
