"""Mask bits, and the tile lists made of them, against NumPy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rawattn import SeqLayout
from rawattn._call.options import ArrayForm
from rawattn._call.problem import describe
from rawattn._call.structure import structure
from rawattn._kernels import attention_params
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import mask_tiles, mask_writing
from rawattn._kernels.steps import Step
from rawattn._kernels.target import without_device
from rawattn._masks import host, layout
from rawattn._scores.score_mod import Predicate
from rawattn._strides import contiguous
from tests import exhaustive
from tests.shim.launch import Machine
from tests.shim.shim import POISON, Builder, Memory

RNG = np.random.default_rng(0)


def to_bits(keep: NDArray[np.bool_]) -> tuple[host.Bits, host.Map]:
    """The bits and the map of a bool mask (batch, nheads, rows, keys)."""
    bits = np.zeros(layout.bits_shape(keep.shape), np.uint16)
    found = np.zeros(layout.map_shape(keep.shape), np.uint8)
    for at in np.ndindex(keep.shape[:2]):
        host.write_rows(keep[at], bits[at], found[at])
    return bits, found


def run(machine: Machine, step: Step, arrays: dict[str, Memory]) -> None:
    """Runs a step on arrays that it finds by name."""
    params = bytearray(step.params)
    for at, name in step.patches:
        params[at : at + 8] = arrays[name].address.to_bytes(8, "little")
    value = np.frombuffer(bytes(params), np.dtype((np.void, len(params))))
    machine.run(
        step.source,
        value,
        grid=step.blocks,
        threads=step.threads,
        shared_bytes=step.shared_bytes,
        memory=arrays.values(),
    )


def scratch(name: str, nbytes: int, dtype: Any) -> Memory:
    poison = np.full(nbytes, POISON, np.uint8).view(dtype)
    return Memory(name, poison, readonly=False)


def keys_of(shape: Any) -> dict[str, Memory]:
    sizes = {"mask_keys": layout.keys_bytes(shape), "mask_bands": mask_writing.band_bytes(shape)}
    return {name: scratch(name, nbytes, np.uint16) for name, nbytes in sizes.items()}


def check_keys(machine: Machine, shape: Any, arrays: dict[str, Memory], keep: np.ndarray) -> None:
    """Checks which keys any row sees, after the step that makes the bits."""
    step = mask_writing.keys_step(shape)
    if step is not None:
        run(machine, step, arrays)
    wide = np.broadcast_to(keep, (*shape[:3], 128 if shape[3] == 1 else shape[3]))
    whole = to_bits(wide.any(axis=2, keepdims=True))[0]
    np.testing.assert_array_equal(arrays["mask_keys"].array().reshape(whole.shape), whole)


def blocky(shape: tuple[int, ...], block: int = 64) -> np.ndarray:
    """A mask with granules of every kind, the first of them partial. It does not depend on tests that ran before."""
    rng = np.random.default_rng(shape)
    rows, keys = (-(-n // block) for n in shape[2:])
    kinds = rng.integers(0, 3, (*shape[:2], rows, keys))
    kinds[..., 0, 0] = 1
    kinds = np.repeat(np.repeat(kinds, block, 2), block, 3)[:, :, : shape[2], : shape[3]]
    return np.where(kinds == 1, rng.random(shape) < 0.5, kinds == 2)


SHAPES = ((1, 1, 1, 1), (2, 3, 70, 130), (1, 2, 129, 515), (2, 1, 1, 300), (1, 2, 200, 1), (1, 1, 64, 128))  # fmt: skip


@pytest.mark.parametrize("strides", ["dense", "strided", "broadcast", "odd"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_bools(shape: tuple[int, ...], strides: str, builder: Builder) -> None:
    keep = blocky(shape)
    given = buffer = np.asfortranarray(keep) if strides == "strided" else keep
    if strides == "broadcast":
        buffer = np.ascontiguousarray(keep[:1, :, :1])
        given = np.broadcast_to(buffer, shape)
        keep = given.copy()
    raw = buffer.ravel("F" if strides == "strided" else "C").view(np.uint8)
    memory = Memory("mask", raw, phase=3 if strides == "odd" else 0)
    arrays = {
        "mask": memory,
        "mask_bits": scratch("mask_bits", layout.bits_bytes(shape), np.uint16),
        "mask_map": scratch("mask_map", layout.map_bytes(shape), np.uint8),
        **keys_of(shape),
    }
    step = mask_writing.step(shape, given.strides, memory.address % 16)
    run(Machine(builder, checked=True), step, arrays)
    bits, found = to_bits(keep)
    np.testing.assert_array_equal(arrays["mask_bits"].array().reshape(bits.shape), bits)
    ours = arrays["mask_map"].array().reshape(found.shape)
    np.testing.assert_array_equal(host.granules(ours, shape), host.granules(found, shape))
    np.testing.assert_array_equal(host.to_bools(bits, shape), keep)
    check_keys(Machine(builder), shape, arrays, keep)


def test_a_bool_is_whatever_is_not_zero(builder: Builder) -> None:
    shape = (1, 1, 1, 256)
    raw = np.arange(256, dtype=np.uint8)
    arrays = {
        "mask": Memory("mask", raw),
        "mask_bits": scratch("mask_bits", layout.bits_bytes(shape), np.uint16),
        "mask_map": scratch("mask_map", layout.map_bytes(shape), np.uint8),
        **keys_of(shape),
    }
    run(
        Machine(builder),
        mask_writing.step(shape, (256, 256, 256, 1), arrays["mask"].address % 16),
        arrays,
    )
    bits = arrays["mask_bits"].array().reshape(layout.bits_shape(shape))
    np.testing.assert_array_equal(host.to_bools(bits, shape)[0, 0, 0], raw != 0)


@pytest.mark.parametrize("integers", [np.int32, np.int64])
def test_bits_of_ranges(integers: Any, builder: Builder) -> None:
    shape, count = (2, 1, 70, 300), 3
    ranges = RNG.integers(-20, 320, (2, 70, count, 2)).astype(integers)
    ranges[0, 5] = (0, 300), (0, 0), (9, 3)
    ranges[1, 6] = np.iinfo(integers).min, np.iinfo(integers).max
    arrays = {
        "ranges": Memory("ranges", ranges),
        "mask_bits": scratch("mask_bits", layout.bits_bytes(shape), np.uint16),
        "mask_map": scratch("mask_map", layout.map_bytes(shape), np.uint8),
        **keys_of(shape),
    }
    step = mask_writing.ranges_step(shape, count, ranges.dtype.itemsize)
    run(Machine(builder, checked=True), step, arrays)
    keys = np.arange(300)
    keep = ((keys >= ranges[..., :1]) & (keys < ranges[..., 1:])).any(2)[:, None]
    bits, found = to_bits(keep)
    np.testing.assert_array_equal(arrays["mask_bits"].array().reshape(bits.shape), bits)
    ours = arrays["mask_map"].array().reshape(found.shape)
    np.testing.assert_array_equal(host.granules(ours, shape), host.granules(found, shape))


def test_bits_of_predicates(builder: Builder) -> None:
    shape = (2, 3, 70, 150)
    table = np.asfortranarray(RNG.integers(0, 4, (70, 2)).astype(np.int64))
    share = RNG.standard_normal(3).astype(np.float16)
    text = "table[q_idx, batch] == kv_idx % 4 or (share[head] < cut and kv_idx < seqlen_q)"
    predicate = Predicate(text, table=table, share=share, cut=0.25)
    forms = tuple((x.dtype.itemsize, x.shape, x.strides) for x in (table, share))
    arrays = {
        "captured0": Memory("table", table.ravel("F")),
        "captured1": Memory("share", share),
        "mask_bits": scratch("mask_bits", layout.bits_bytes(shape), np.uint16),
        "mask_map": scratch("mask_map", layout.map_bytes(shape), np.uint8),
        **keys_of(shape),
    }
    step = mask_writing.predicate_step(shape, predicate.text, forms, predicate.scalars)
    run(Machine(builder, checked=True), step, arrays)
    batch, head, i, j = np.ogrid[tuple(map(slice, shape))]
    keep = (table[i, batch] == j % 4) | ((share[head] < 0.25) & (j < 70))
    bits, found = to_bits(keep)
    np.testing.assert_array_equal(arrays["mask_bits"].array().reshape(bits.shape), bits)
    ours = arrays["mask_map"].array().reshape(found.shape)
    np.testing.assert_array_equal(host.granules(ours, shape), host.granules(found, shape))


CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dense": ((2, 4, 200, 300), {}),
    "causal": ((1, 2, 300, 300), {"causal": True}),
    "shared": ((1, 1, 1, 300), {"causal": True, "align": "top-left"}),
    "window": ((2, 1, 300, 200), {"window": (70, 3), "sink": 5}),
    "one-key": ((2, 2, 300, 1), {}),
    "many-tiles": ((1, 1, 4200, 40), {}),  # more tiles of 16 rows than can be ordered in shared memory
    "padded": ((2, 4, 200, 300), {"seqs": ((150, 3), (299, 40)), "causal": True}),
    "packed": ((2, 2, 210, 300), {"lens": ((150, 0, 60), (299, 40, 0))}),
    "packed-shared": ((1, 1, 210, 300), {"lens": ((150, 3, 60), (299, 40, 7)), "window": (90, None)}),
}  # fmt: skip


def test_more_heads_than_groups_are_found_for() -> None:
    """A mask with too many heads raises before any launch, with a message that says what to do."""
    shape = (1, 1, 64, 64)
    q = np.broadcast_to(np.float16(0), (1, 64, mask_tiles.MAX_HEADS + 1, 16))
    problem, lengths = describe(q, q, q)
    problem = replace(problem, mask=ArrayForm("bits", shape, shape))
    strides = {name: contiguous(q.shape, 2) for name in ("q", "k", "v", "out")}
    form, operands = structure(lengths), Operands(strides)
    values = attention_params.forward(problem, form, operands, 1 << 20)
    with pytest.raises(ValueError, match=r"^mask: got 1048577 query heads, .* part of the batch"):
        mask_tiles.Masks(problem, form, operands, values, without_device("sm_90a"))


LISTS = itertools.product(CALLS, ((64, 32), (128, 80), (16, 128), (64, 128)), ("q", "k"))


@pytest.mark.parametrize(("name", "tiles", "of"), exhaustive.thin(LISTS, 6), ids=str)
def test_lists_of_tiles(name: str, tiles: tuple[int, int], of: Any, builder: Builder) -> None:
    shape, options = CALLS[name]
    options = dict(options)
    lens = options.pop("lens", None)
    seqs = options.pop("seqs", None)
    nheads_q, nheads_kv, batch = 4, 2, 2
    if lens is not None:
        batch = len(lens[0])
        shape = (batch if shape[0] > 1 else 1, *shape[1:])
        rows_q, rows_k = map(sum, lens)
        starts = [np.cumsum([0, *each]).astype(np.int32) for each in lens]
        layout = SeqLayout(seqstart_q=starts[0], seqstart_k=starts[1])
        q = np.broadcast_to(np.float16(0), (rows_q, nheads_q, 16))
        k = np.broadcast_to(np.float16(0), (rows_k, nheads_kv, 16))
    else:
        rows_q, rows_k = (300 if n == 1 else n for n in shape[2:])
        starts, layout = [np.zeros(batch + 1, np.int32)] * 2, None
        if seqs is not None:
            layout = SeqLayout(seqlen_q=np.array(seqs[0]), seqlen_k=np.array(seqs[1]))
        lens = seqs or ((rows_q,) * batch, (rows_k,) * batch)
        q = np.broadcast_to(np.float16(0), (batch, rows_q, nheads_q, 16))
        k = np.broadcast_to(np.float16(0), (batch, rows_k, nheads_kv, 16))
    problem, lengths = describe(q, k, k, seqs=layout, **options)
    keep = blocky(shape)
    form = structure(lengths)
    problem = replace(problem, mask=ArrayForm("bits", shape, shape))
    strides = {n: contiguous(x.shape, 2) for n, x in (("q", q), ("k", k), ("v", k), ("out", q))}
    values = attention_params.forward(problem, form, Operands(strides), 1 << 20)
    tile_q, tile_k = tiles
    listed = mask_tiles.lists(
        problem,
        form,
        values,
        without_device("sm_90a"),
        of=of,
        tile_q=tile_q,
        tile_k=tile_k,
        name="lists",
        ordered=of == "q",
    )
    _, found = to_bits(keep)
    arrays = {
        "mask_map": Memory("mask_map", found),
        **{name: scratch(name, nbytes, np.int32) for name, nbytes in listed.scratch.items()},
        **{
            name: Memory(name, np.zeros(nbytes // 4, np.int32), readonly=False)
            for name, nbytes in listed.counters.items()
        },
    }
    for side, each in (("q", lengths.q), ("k", lengths.k)):
        for what in ("start", "length", "position"):
            integers = getattr(each, what)
            if integers is not None:
                width = {4: np.int32, 8: np.int64}[getattr(form.side(side), what)]
                arrays[f"{what}_{side}"] = Memory(what, np.asarray(integers).astype(width))
    run(Machine(builder), listed.step, arrays)

    nheads = listed.fields["block_mask.lists.nheads"]
    capacity = listed.fields["block_mask.lists.capacity"]
    between = listed.fields["block_mask.lists.sequence"]
    pair = 2 if of == "k" else 1
    memory = arrays["lists"].array().reshape(-1, nheads, 1 + capacity * pair)
    own, other = (tile_k, tile_q) if of == "k" else (tile_q, tile_k)
    seen_partial = False
    for sequence in range(batch):
        len_q, len_k = lens[0][sequence], lens[1][sequence]
        visible = visibility(len_q, len_k, options)
        start = int(starts[of == "k"][sequence])
        for head in range(nheads):
            tiles = -(-(len_k if of == "k" else len_q) // own)
            if of == "q":
                first = sequence * between + start // own
                at = slice(first, first + tiles)
                order = arrays["lists_order"].array().reshape(-1, nheads)[at, head]
                assert sorted(order) == list(range(tiles))
                lengths = memory[at, head, 0][order]
                assert (np.maximum.accumulate(lengths[::-1])[::-1] == lengths).all()
            for tile in range(tiles):
                list_ = memory[sequence * between + start // own + tile, head]
                got = list_[1 : 1 + list_[0] * pair].reshape(-1, pair)
                entries = [((e[0] if pair == 2 else 0), e[-1] >> 1, e[-1] & 1) for e in got]
                expected = []
                for part in range(2 if of == "k" else 1):
                    mask_head = head if of == "q" else (head * 2 + part) * shape[1] // nheads_q
                    mask = np.broadcast_to(
                        keep[sequence if shape[0] > 1 else 0, mask_head],
                        (max(shape[2], len_q), max(shape[3], len_k)),
                    )[:len_q, :len_k]
                    for n in range(-(-(len_q if of == "k" else len_k) // other)):
                        r, c = (n, tile) if of == "k" else (tile, n)
                        at = np.s_[r * tile_q : (r + 1) * tile_q, c * tile_k : (c + 1) * tile_k]
                        state = mask[at][visible[at]]
                        if state.any():
                            expected.append((part, n, int(not mask[at].all())))
                # A tile that touches a granule counts as all of it, so it may be listed, or marked partial, needlessly.
                known = {e[:2]: e[2] for e in entries}
                assert list(known) == sorted(known), "not in the order of tiles"
                for part, n, partial in expected:
                    assert known[part, n] >= partial
                    seen_partial |= bool(partial)
                if tile_q % 64 == tile_k % 64 == 0 and not options:
                    assert len(known) == len(expected)
    assert seen_partial
    assert not any(arrays[name].array().any() for name in listed.counters)


def visibility(len_q: int, len_k: int, options: dict[str, Any]) -> np.ndarray:
    i, j = np.arange(len_q)[:, None], np.arange(len_k)
    offset = 0 if options.get("align") == "top-left" else len_k - len_q
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    seen = np.ones((len_q, len_k), bool)
    if right is not None:
        seen &= j <= i + offset + right
    if left is not None:
        seen &= (j >= i + offset - left) | (j < options.get("sink", 0))
    return seen
