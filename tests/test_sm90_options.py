"""Choices of Hopper's forward: query heads that share a tile, ALiBi as part of Q K^T, masks of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rawattn import ScoreMod
from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode
from rawattn._kernels.sm90 import decode as sm90_decode
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config, tile_heads, tma
from rawattn._strides import contiguous
from tests.problems import CALL_OF_MANY, H200


@pytest.mark.parametrize(
    ("group", "rows", "tile_rows", "heads", "interleaved"),
    [
        (4, 100, 128, 4, False),
        (5, 100, 128, 5, True),
        (5, 128, 128, 1, False),  # interleaved: six tiles instead of five
        (7, 4096, 192, 1, False),
        (7, 20, 64, 7, True),
        (8, 4, 64, 8, True),
        (8, 4, 128, 8, False),
        (8, 100, 192, 4, False),  # interleaved: five tiles instead of six, too small a gain
        (71, 1, 64, 1, False),
    ],
)
def test_heads_of_a_tile(
    group: int, rows: int, tile_rows: int, heads: int, interleaved: bool
) -> None:
    problem = replace(CALL_OF_MANY, nheads_q=group, rows_q=rows, max_seqlen_q=rows)
    assert tile_heads.heads_per_tile(problem, tile_rows) == heads
    assert tile_heads.interleaves(problem, tile_rows) == interleaved


@pytest.mark.parametrize(
    ("consumers", "heads", "first"),
    [
        *((3, heads, heads in (1, 2, 4)) for heads in (1, 2, 3, 4, 6, 12)),
        *((2, heads, heads == 1) for heads in (1, 2, 4, 8)),
        *((4, heads, heads == 1) for heads in (1, 2, 4, 8, 16)),
    ],
)
def test_consumers_that_have_the_first_rows(consumers: int, heads: int, first: bool) -> None:
    """Whether the first 64 rows of a tile have rows of all heads, as kernels_cu/sm90/rows.cuh lays them."""
    tile_q, run = 64 * consumers // heads, forward_config.run_rows(consumers, heads)
    found = {n // run % heads if run < tile_q else n // run for n in range(64)}
    assert (found == set(range(heads))) == first
    assert forward_config.first_has_first_rows(consumers, heads) == first


def test_heads_of_a_packed_batch() -> None:
    """The mean length of a packed batch decides whether heads are interleaved: with many short sequences and one long chunk
    most tiles would be nearly empty otherwise."""
    problem = replace(CALL_OF_MANY, nheads_q=5, packed=True, ragged=True, batch=32)
    mixed = replace(problem, rows_q=512 + 31, max_seqlen_q=512)
    alike = replace(problem, rows_q=512 * 32, max_seqlen_q=512)
    padded = replace(mixed, packed=False, rows_q=512)
    for each, interleaved in ((mixed, True), (alike, False), (padded, False)):
        assert tile_heads.interleaves(each, 128) == interleaved


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": ArrayForm("float32", (5,), (5,))},
        {"sink_logits": ArrayForm("float32", (5,), (5,))},
        {"mask": ArrayForm("bool", (1, 1, 20, 128), (1, 1, 20, 128))},
        {"bias": ArrayForm("bfloat16", (1, 1, 20, 128), (1, 1, 20, 128))},
        {"dropout_p": 0.1},
        {"float8": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_differs_from_head_to_head_is_not_interleaved(options: dict[str, Any]) -> None:
    problem = replace(CALL_OF_MANY, nheads_q=5, rows_q=20, max_seqlen_q=20)
    assert tile_heads.interleaves(problem, 128)
    assert not tile_heads.interleaves(replace(problem, **options), 128)


@pytest.mark.parametrize(
    ("ramp", "options"),
    [
        (True, {}),
        (True, {"window_left": 50, "sink": 3}),
        (True, {"window_right": None}),
        (True, {"window_right": 20}),
        (True, {"dropout_p": 0.1}),
        (True, {"mask": ArrayForm("bool", (1, 1, 500, 500), (1, 1, 500, 500))}),
        (True, {"headdim": 128}),
        (False, {"headdim": 136}),
        (False, {"headdim": 192, "window_right": None}),
        (True, {"headdim": 96, "bias": ArrayForm("bfloat16", (1, 1, 500, 500), (1, 1, 500, 500))}),
        (
            False,
            {"headdim": 128, "bias": ArrayForm("bfloat16", (1, 1, 500, 500), (1, 1, 500, 500))},
        ),
        (False, {"score_mod": ScoreMod("2 * score").text}),
        (False, {"softcap": 30.0}),
        (False, {"softcap": 30.0, "window_right": None}),
        (False, {"scale": -0.1}),
        (False, {"scale": 1e-25}),
        (False, {"alibi_slopes": None}),
    ],
    ids=str,
)
def test_what_alibi_adds_along_keys(ramp: bool, options: dict[str, Any]) -> None:
    """Q K^T includes what ALiBi adds along the keys if only a positive scale, not too small, comes between the two, and if that
    is faster."""
    problem = replace(CALL_OF_MANY, nheads_q=4, nheads_kv=4, rows_q=500, max_seqlen_q=500)
    problem = replace(problem, rows_k=500, max_seqlen_k=500, window_right=0, headdim=64)
    problem = replace(problem, alibi_slopes=ArrayForm("float32", (4,), (4,)))
    operands = Operands(
        option_strides={"bias": (500_000, 500_000, 1000, 2)}, alignments={"bias": 0}
    )
    config = sm90_forward.choose(replace(problem, **options), H200, operands)
    assert config.ramp == ramp
    # Late scaling compares scores without addends, so it needs a bound of each row's addends. Without a ramp there is none for
    # ALiBi on both sides of the diagonal, which must be added before the running max.
    assert not config.late_scaling or ramp or config.one_sided or not config.alibi


@pytest.mark.parametrize(
    ("as_it_comes", "shape", "options"),
    [
        (True, (2, 1, 1, 500), {}),
        (True, (1, 1, 1, 500), {"window_right": None, "window_left": 50}),
        (False, (2, 1, 1, 1), {}),
        (False, (2, 4, 1, 500), {}),
        (False, (2, 1, 500, 500), {}),
        (False, (2, 1, 1, 2000), {"rows_k": 2000, "max_seqlen_k": 2000}),
        (False, (2, 1, 1, 500), {"ragged": True}),
        (False, (2, 1, 1, 500), {"softcap": 30.0}),
        (True, (2, 1, 1, 500), {"headdim": 192, "window_left": 50}),
        (False, (2, 1, 1, 500), {"headdim": 200, "window_left": 50}),
        (False, (2, 1, 1, 500), {"headdim_v": 256, "window_left": 50}),
    ],
    ids=str,
)
def test_masks_of_keys(as_it_comes: bool, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """The forward itself reads a mask of few keys that all rows and heads share, with the tiles of a call without a mask."""
    problem = replace(CALL_OF_MANY, batch=2, nheads_q=4, nheads_kv=4, rows_q=500, max_seqlen_q=500)
    problem = replace(replace(problem, rows_k=500, max_seqlen_k=500), **options)
    masked = replace(problem, mask=ArrayForm("bool", shape, shape))
    config = sm90_forward.choose(masked, H200, Operands())
    assert (config.key_mask, config.block_mask) == (as_it_comes, not as_it_comes)
    if as_it_comes:
        assert replace(config, key_mask=False) == sm90_forward.choose(problem, H200, Operands())
    strided = replace(problem, mask=ArrayForm("bool", shape, shape, dense=False))
    assert not sm90_forward.choose(strided, H200, Operands()).key_mask


@pytest.mark.parametrize("family", [decode, sm90_decode])
@pytest.mark.parametrize("where", ["top_left", "positions"])
def test_the_only_query_is_the_last_row_unless_it_has_a_place_of_its_own(
    family: Any, where: str
) -> None:
    """Decoding's kernels leave out a causal mask for one query at the end of its keys, which hides nothing from it."""
    assert not family.choose(CALL_OF_MANY, H200, Operands()).right
    assert family.choose(replace(CALL_OF_MANY, **{where: True}), H200, Operands()).right


def test_what_tma_cannot_read_in_place() -> None:
    """TMA reads rows at multiples of 16 bytes. A stride between elements of which there is one alone does not matter."""
    problem = replace(CALL_OF_MANY, batch=2, rows_q=3, nheads_q=4, nheads_kv=4)
    shapes = {"q": (2, 3, 4, 128), "k": (2, 128, 4, 128), "v": (2, 128, 4, 128)}
    strides = {name: contiguous(shape, 2) for name, shape in shapes.items()}
    for pointers in range(0, 17, 2):
        found = tma.unaligned(problem, Operands(strides, pointers))
        assert found == (("q", "k", "v") if pointers % 16 else ())
    for axis in range(3):
        odd = list(strides["k"])
        odd[axis] += 8
        given = Operands({**strides, "k": tuple(odd)})
        assert tma.unaligned(problem, given) == ("k",)
        alone = {"batch": 1} if axis == 0 else {"rows_k": 1} if axis == 1 else {"nheads_kv": 1}
        assert tma.unaligned(replace(problem, **alone), given) == ()


@pytest.mark.parametrize(
    ("page_size", "headdim", "pages", "values", "whole"),
    [
        (16, 128, 100, None, True),
        (8, 192, 100, None, True),
        (48, 256, 100, None, True),
        (32, 128, 100, None, False),  # boxes of 32 rows
        (16, 64, 100, None, False),  # one block of columns
        (16, 96, 100, None, False),
        (16, 128, 100, 2, False),  # values have another distance between pages, in heads
        (16, 128, 1_000_000, None, True),
        (16, 128, 20_000_000, None, False),  # more heads of pages than an axis of a map has
    ],
)
def test_boxes_of_whole_rows_in_decoding(
    page_size: int, headdim: int, pages: int, values: int | None, whole: bool
) -> None:
    form = PageForm(page_size, pages, 512, False, "int32")
    dims = {"headdim": headdim, "headdim_v": headdim, "nheads_q": 8, "nheads_kv": 8}
    call = replace(CALL_OF_MANY, batch=4, ragged=True, max_seqlen_k=8192, pages=form, **dims)
    keys = contiguous((pages, page_size, 8, headdim), 2)
    of_values = (keys[0] * (values or 1), *keys[1:])
    config = sm90_decode.choose(call, H200, Operands({"k_pages": keys, "v_pages": of_values}))
    assert config.whole_rows == whole


@pytest.mark.parametrize("given", [Operands({"q": (1024, 1024, 256, 2)}, 8), Operands({}, 8)])
def test_decoding_needs_keys_that_tma_can_read(given: Operands) -> None:
    keys = dict.fromkeys("kv", (1 << 16, 256, 256, 2))
    call = replace(CALL_OF_MANY, batch=2)
    assert sm90_decode.supports(call, H200, Operands({**given.strides, **keys})) is None
    refused = sm90_decode.supports(call, H200, replace(given, strides={**given.strides, **keys}))
    assert refused is not None and "16 bytes" in refused
