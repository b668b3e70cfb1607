"""Calls at the limits of what kernels count in 32 bits. No array here takes memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from rawattn._call.integers import LONGEST
from rawattn._call.layout import Lengths
from rawattn._call.pages import PagedLayout
from rawattn._call.problem import Problem, describe
from rawattn._call.structure import Structure, structure
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import append, backward, backward_sections, decode, mask_tiles
from rawattn._kernels.sm90 import stream_k
from rawattn._kernels.steps import MAX_BLOCKS, Tiles
from rawattn._strides import contiguous
from tests.problems import H200, INT32_MAX, PACKED, arrays, problem


def dense(batch: int, rows: int, keys: int, heads: int, headdim: int) -> tuple[Any, ...]:
    """Return the problem, lengths and operands of a call whose heads all have keys of their own."""
    shapes = {"q": (batch, rows, heads, headdim), "k": (batch, keys, heads, headdim)}
    shapes["v"] = shapes["k"]
    described, lengths = describe(**arrays(shapes))
    strides = {name: contiguous(shape, 2) for name, shape in shapes.items()}
    return described, lengths, Operands(strides | {"out": strides["q"]})


def broadcast(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("axis", [2, 3])
def test_axes_of_a_bias_and_a_mask(name: str, axis: int) -> None:
    shape = [1, 1, 21, 21]
    shape[axis] = LONGEST
    dtype = np.float16 if name == "bias" else np.bool_
    starts = SeqLayout(seqstart_q=[0, 5, 15], seqstart_k=[0, 7, 21])
    problem(PACKED, seqs=starts, **{name: broadcast(*shape, dtype=dtype)})
    shape[axis] += 1
    with pytest.raises(ValueError, match=rf"^{name}: got shape .*both at most {LONGEST}"):
        problem(PACKED, seqs=starts, **{name: broadcast(*shape, dtype=dtype)})


def test_axes_of_captured_arrays() -> None:
    table = broadcast(2**31, dtype=np.float32)
    text = rawattn.ScoreMod("score + table[q_idx]", table=table)
    with pytest.raises(ValueError, match=rf"^score_mod: .*{2**31}.*at most {INT32_MAX} along"):
        problem(score_mod=text)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pages_of_more_keys_than_int32_counts(dtype: Any) -> None:
    """Pages of a sequence may have room for 2**31 keys, as long as fewer are there."""
    pages = 2**21
    layout = PagedLayout(
        SeqLayout(), np.array([5, 5]), np.array([0, pages, pages + 1], dtype), None
    )
    assert layout.bind((2, 1, 1, 64), (8, 1024, 1, 64), (pages + 1,)).k.max_seqlen == 5


@pytest.mark.parametrize("keys", [0, 1, 17])
def test_a_line_of_decoding_fits_an_int(keys: int) -> None:
    """Each query tile has a unit of the line, one without keys too."""
    for batch, taken in ((2**24, True), (2**24 * 128 // 127 + 1, False)):
        described, _, operands = dense(batch, 1, keys, 127, 2)
        assert (decode.supports(described, H200, operands) is None) == (taken and keys <= 16)


def test_parts_of_tiles_count() -> None:
    """Blocks are counted with all that share a tile."""
    lengths = describe(**arrays(dict.fromkeys("qkv", (2**23, 1, 1, 8))))[1]
    assert Tiles("q", 64, blocks_each=255).blocks(lengths) == 255 * 2**23
    with pytest.raises(ValueError, match=rf"^q: {2**31} tiles .*{MAX_BLOCKS}; split the batch"):
        Tiles("q", 64, blocks_each=256).blocks(lengths)


def test_queries_of_a_section_fit_an_int() -> None:
    described, _, operands = dense(1, 2**26, 1000, 67, 4)
    causal = replace(described, window_right=0)
    config = backward.choose(causal, H200, operands)
    assert 0 < backward_sections.section_queries(causal, H200, config, 1 << 10, 1) <= INT32_MAX


def test_lists_of_a_mask_fit_an_int() -> None:
    form = problem(mask=broadcast(1, 1, 1, 7, dtype=np.bool_)).mask
    rows = {"rows_q": 2**29, "max_seqlen_q": 2**29, "nheads_q": 1024, "nheads_kv": 1}
    described = replace(problem(), batch=0, mask=form, **rows)
    form_of_lengths = structure(describe(**arrays(dict.fromkeys("qkv", (0, 5, 1, 8))))[1])
    sizes: dict[str, Any] = {"of": "k", "tile_q": 64, "tile_k": 64, "name": "lists"}
    with pytest.raises(ValueError, match=r"^mask: 8589934592 tiles of 64 rows"):
        mask_tiles.lists(described, form_of_lengths, {}, H200, **sizes)


def paged(keys: int) -> tuple[Problem, Structure]:
    shapes = {"q": (1, 4096, 32, 128), "k": (1, 4096, 8, 128), "v": (1, 4096, 8, 128)}
    found: tuple[Problem, Lengths] = describe(**arrays(shapes))
    return replace(found[0], rows_k=keys, max_seqlen_k=keys, ragged=True), structure(found[1])


def test_stream_k_leaves_more_keys_than_an_int_counts_whole() -> None:
    """A line has up to as many units as the last query tiles have key tiles together."""
    assert stream_k.may_split_keys(paged(2**29)[0], 0)
    assert not stream_k.may_split_keys(paged(2**29 + 1)[0], 0)


def test_many_rows_are_appended() -> None:
    """A block of `append_kv` takes several heads, so these may be more than a launch has blocks."""
    config = append.Config(dtype="float16", headdim=8, headdim_v=8)
    assert config.blocks(2**32, 32) == 2**32 // 256
