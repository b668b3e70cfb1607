"""How calls with a bias choose kernels: whether it is copied first, how it is loaded, and the tiles of short sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rawattn import ScoreMod
from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem
from rawattn._kernels import aligned_bias, registry
from rawattn._kernels.features import features
from rawattn._kernels.operands import Operands, strides_of_pages
from rawattn._kernels.portable import backward, backward_options
from rawattn._kernels.portable.backward_options import ATOMIC_SUMS, DIRECT, OWN_KERNEL, VIA_COPY
from rawattn._kernels.sm90 import bias_slots, forward
from rawattn._kernels.target import Target, without_device
from tests import problems

H200 = replace(without_device("sm_90a"), multiprocessors=132)
A100 = replace(without_device("sm_80"), multiprocessors=108)


def problem(batch: int, rows: int, heads: int, headdim: int, **options: Any) -> Problem:
    shapes = dict.fromkeys("qkv", (batch, rows, heads, headdim))
    return replace(problems.problem(shapes), dtype="bfloat16", **options)


def biased(
    shape: tuple[int, ...], batch: int = 4, heads: int = 8, headdim: int = 64, **form: Any
) -> Problem:
    dtype = form.pop("dtype", "bfloat16")
    bias = ArrayForm(dtype, shape, shape, **form)
    return problem(batch, 100, heads, headdim, bias=bias)


def operands(*strides: int, alignment: int = 0) -> Operands:
    """Return operands with these strides of the bias, in elements of 2 bytes."""
    return Operands(
        option_strides={"bias": tuple(2 * n for n in strides)}, alignments={"bias": alignment}
    )


ODD = (8 * 101 * 101, 101 * 101, 101, 1)  # rows of 101 keys


@pytest.mark.parametrize(
    ("call", "given", "reason"),
    [
        (biased((1, 8, 100, 100)), operands(*ODD), None),
        (biased((1, 8, 100, 100)), operands(80000, 10000, 104, 1, alignment=2), None),
        (biased((1, 8, 100, 100)), operands(80640, 10400, 104, 1), "aligned"),
        (biased((1, 8, 100, 100)), operands(80000, 10004, 104, 1), None),
        (biased((1, 1, 100, 100)), operands(80000, 10004, 104, 1), "aligned"),
        (biased((4, 8, 100, 100)), operands(*ODD), "few scores"),
        (biased((2, 8, 100, 100), batch=2), operands(*ODD), "few scores"),
        (biased((4, 8, 100, 100)), operands(0, 0, 101, 1), None),
        (biased((1, 1, 1, 100)), operands(*ODD), "few rows"),
        (biased((1, 1, 100, 100)), operands(0, 0, 0, 1, alignment=2), "few rows"),
        (biased((1, 8, 100, 100), dense=False), operands(*ODD), "16 bits"),
        (biased((1, 8, 100, 100), dtype="float32"), operands(*ODD), "16 bits"),
        (problem(4, 100, 8, 64), Operands(), "16 bits"),
        (biased((1, 8, 100, 100)), Operands(option_strides={"bias": ODD}), "not known"),
    ],
)
def test_which_biases_are_copied_to_aligned_rows(
    call: Problem, given: Operands, reason: str | None
) -> None:
    for target in (H200, A100):
        found = aligned_bias.supports(call, target, given)
        assert found is None if reason is None else found is not None and reason in found
    # Forward kernels other than Hopper's read the bias element by element.
    assert aligned_bias.supports_forward(call, A100, given) is not None


def test_copies_are_as_large_as_the_bias_and_keep_what_is_shared() -> None:
    call = biased((4, 8, 100, 101))
    for strides, own in (
        (ODD, (8 * 100 * 104 * 2, 100 * 104 * 2, 208, 2)),
        ((0, 10100, 101, 1), (0, 100 * 104 * 2, 208, 2)),
        ((0, 0, 101, 1), (0, 0, 208, 2)),
    ):
        copied = aligned_bias.operands_of(call, operands(*strides, alignment=6))
        assert copied.option_strides["bias"] == own
        assert copied.alignments["bias"] == 0
        assert aligned_bias.supports(call, H200, copied) is not None


def test_families_behind_a_copy() -> None:
    call = biased((1, 8, 100, 100))
    for verb, inner in (("attention", "sm90"), ("attention_backward", "portable")):
        assert registry.choose(verb, call, H200, operands(*ODD)).name == "aligned_bias"
        copied = aligned_bias.operands_of(call, operands(*ODD))
        assert registry.choose(verb, call, H200, copied).name == inner


def test_rows_that_begin_anywhere_have_two_slots_where_they_can() -> None:
    """Unaligned rows of a bias get two stages where possible: a key tile shorter by 16 keys is preferred to a single stage."""
    chosen = {}
    for headdim in (64, 128, 192, 256):
        call = replace(problem(1, 2001, 16, headdim), bias=ArrayForm("bfloat16", *(PLANE,) * 2))
        config = forward.choose(call, H200, operands(*ODD_PLANE))
        assert config.bias_by_rows
        assert config.shared_bytes <= H200.shared_limit
        chosen[headdim] = config.bias_stages, config.tile_k
    assert chosen[128] == (2, 112)
    assert all(stages == 2 for stages, _ in chosen.values())
    aligned = forward.choose(call, H200, operands(16 * 2001 * 2008, 2001 * 2008, 2008, 1))
    assert not aligned.bias_by_rows
    assert aligned.bias_stages > 0


@pytest.mark.parametrize("headdim", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64, 128])
def test_tiles_of_whole_boxes_of_pages(headdim: int, page_size: int) -> None:
    """Key tiles are multiples of a box of pages, also where rows of a bias take shared memory."""
    shape = (8, 8, 512, 1023)
    call = replace(
        problem(8, 512, 8, headdim, bias=ArrayForm("bfloat16", shape, shape)),
        rows_k=1024,
        max_seqlen_k=1024,
        pages=PageForm(page_size, 2048, -(-1024 // page_size), False, "int32"),
    )
    given = Operands(
        strides_of_pages(call),
        option_strides={"bias": tuple(2 * n for n in (8 * 512 * 1023, 512 * 1023, 1023, 1))},
        alignments={"bias": 0},
    )
    config = forward.choose(call, H200, given)
    assert config.page_rows
    assert config.tile_k % config.page_rows == 0
    assert config.bias_by_rows
    assert config.blocks_per_sm == 1


PLANE = (1, 16, 2001, 2001)
ODD_PLANE = (16 * 2001 * 2001, 2001 * 2001, 2001, 1)


def blocks(call: Problem, target: Target = H200) -> int:
    """Return how many blocks share an SM."""
    rows = -(-call.rows_k // 8) * 8
    given = operands(*(call.nheads_q * call.rows_q * rows, call.rows_q * rows, rows, 1))
    return forward.choose(call, target, given).blocks_per_sm


@pytest.mark.parametrize("headdim", [32, 64, 128])
def test_short_sequences_share_a_multiprocessor(headdim: int) -> None:
    def with_bias(batch: int, rows: int, **options: Any) -> Problem:
        shape = (1, 12, rows, rows)
        return problem(
            batch, rows, 12, headdim, bias=ArrayForm("bfloat16", shape, shape), **options
        )

    small = headdim <= 64
    assert (blocks(with_bias(300, 49)) > 1) == small
    assert (blocks(with_bias(100, 197)) > 1) == small
    assert (blocks(with_bias(64, 577)) > 1) == small
    slopes = ArrayForm("float32", (1, 12), (12,))
    assert (blocks(problem(300, 49, 12, headdim, alibi_slopes=slopes)) > 1) == small
    # Neither calls of long sequences share an SM, nor calls with more options.
    assert blocks(with_bias(64, 720)) == blocks(with_bias(10, 2000)) == 1
    assert blocks(with_bias(300, 49, softcap=9.0)) == 1
    # A single consumer warpgroup serves only calls without further score options.
    assert forward.choose(with_bias(300, 49, softcap=9.0), H200, operands(*ODD)).consumers > 1


@pytest.mark.parametrize(
    ("rows", "shape", "small"),
    [
        (49, (1, 6, 49, 49), True),
        (197, (1, 6, 197, 197), True),
        (384, (256, 6, 384, 384), True),
        (384, (1, 1, 1, 384), True),
        (384, (1, 6, 384, 384), False),  # dbias is summed over the batch
        (600, (256, 6, 600, 600), False),
    ],
)
def test_small_tiles_of_the_backward(rows: int, shape: tuple[int, ...], small: bool) -> None:
    call = problem(256, rows, 6, 64, bias=ArrayForm("bfloat16", shape, shape))
    keys = -(-rows // 8) * 8
    strides = tuple(2 * n for n in (6 * shape[2] * keys, shape[2] * keys, keys, 1))
    given = Operands(option_strides={"bias": strides, "dbias": strides}, alignments={"bias": 0})
    config = backward.choose(call, H200, given)
    assert (config.tile_k == 64) == small
    assert config.bias_of_keys == (shape[2] == 1)
    # If dbias is not wanted, there are no sums.
    alone = Operands(option_strides={"bias": strides}, alignments={"bias": 0})
    assert (backward.choose(call, H200, alone).tile_k == 64) == (rows <= 384)


@pytest.mark.parametrize(
    ("strides", "alignment", "by_rows"),
    [
        ((83200, 10400, 104, 1), 0, False),
        ((83200, 10400, 104, 1), 8, True),
        ((83200, 10400, 100, 1), 0, True),
        ((83200, 10401, 104, 1), 0, True),
        ((83200, -10400, 104, 1), 0, True),
        ((0, 0, 104, 1), 0, False),
    ],
)
def test_a_bias_that_tensor_maps_cannot_have_is_copied_by_rows(
    strides: tuple[int, ...], alignment: int, by_rows: bool
) -> None:
    given = operands(*strides, alignment=alignment)
    assert bias_slots.slot(biased((4, 8, 100, 104)), given, 128, 1).by_rows == by_rows


def test_the_lines_of_a_slot() -> None:
    """A slot has a line for each row and head of a tile, or one for all of them where the bias is shared by them."""
    for shape, strides, lines in (
        ((4, 8, 100, 104), (83200, 10400, 104, 1), (64, 4)),
        ((4, 8, 1, 104), (832, 104, 104, 1), (1, 4)),
        ((4, 8, 100, 104), (83200, 0, 104, 1), (64, 1)),
        ((4, 2, 100, 104), (20800, 10400, 104, 1), (64, 1)),
        ((1, 1, 100, 104), (10400, 10400, 104, 1), (64, 1)),
    ):
        slot = bias_slots.slot(biased(shape), operands(*strides), 64, 4)
        assert (slot.rows, slot.heads) == lines


WHOLE = (4, 8, 100, 104)


@pytest.mark.parametrize(
    ("call", "owned", "found"),
    [
        (biased(WHOLE), True, DIRECT),
        (biased(WHOLE), False, VIA_COPY),
        (biased((4, 8, 100, 100)), True, VIA_COPY),  # rows are no whole pieces of 16 bytes
        (biased((4, 1, 100, 104)), True, ATOMIC_SUMS),
        (biased((1, 8, 100, 104)), True, ATOMIC_SUMS),
        (biased((4, 8, 1, 104)), True, OWN_KERNEL),
        (biased(WHOLE, dtype="float32"), True, OWN_KERNEL),
        (replace(biased(WHOLE), softcap=3.0), True, OWN_KERNEL),
        (replace(biased(WHOLE), ragged=True), True, OWN_KERNEL),
        (replace(biased(WHOLE), mask=ArrayForm("bool", WHOLE, WHOLE)), True, OWN_KERNEL),
        (replace(biased(WHOLE), score_mod=ScoreMod("2 * score").text), True, OWN_KERNEL),
    ],
)
def test_what_the_main_kernel_does_for_dbias(call: Problem, owned: bool, found: int) -> None:
    assert call.bias is not None
    call = replace(call, rows_k=call.bias.shape[3])
    names = frozenset({"dbias"} if owned else ())
    given = Operands(option_strides={"dbias": (1, 1, 1, 1)}, library_owned=names)
    assert backward_options.by_main(call, given) == found
    assert backward_options.by_main(call, Operands()) == OWN_KERNEL


@pytest.mark.parametrize(
    ("strides", "alignment", "pairs", "chunks"),
    [
        ((83200, 10400, 104, 1), 0, True, True),
        ((83200, 10400, 104, 1), 4, True, False),
        ((83200, 10400, 104, 1), 2, False, False),
        ((83200, 10400, 106, 1), 0, True, False),
        ((83200, 10400, 105, 1), 0, False, False),
        ((83200, 10401, 104, 1), 0, False, False),
        ((83201, 10400, 104, 1), 0, False, False),
    ],
)
def test_neighbouring_keys_are_read_at_once_where_all_rows_allow_it(
    strides: tuple[int, ...], alignment: int, pairs: bool, chunks: bool
) -> None:
    found = features(biased(WHOLE), operands(*strides, alignment=alignment))
    assert (found.bias_pairs, found.bias_chunks) == (pairs, chunks)
    assert not features(biased((4, 8, 100, 101)), operands(83200, 10400, 104, 1)).bias_pairs
