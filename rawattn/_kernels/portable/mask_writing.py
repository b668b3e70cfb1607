"""Host twin of kernels_cu/attn/mask_writing.cuh and its kernels, which write masks as bits (layout: `_masks.layout`)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked, patches
from rawattn._masks.layout import (
    GRANULE_ROWS,
    ROW_WORDS,
    WORD_KEYS,
    Shape,
    bands,
    bits_shape,
    keys_bytes,
    words_of_row,
)
from rawattn._scores.cuda_text import predicate_text
from rawattn._scores.program import ScoreText

THREADS = 256
SHARED_BYTES = 3 * THREADS
_BLOCK_WORDS = 16  # words of a row that a block writes


def fields(shape: Shape) -> dict[str, int]:
    """Fields of a `WrittenMask`. A mask with one value for all keys is written for 128."""
    _, nheads, rows, keys = shape
    keys = keys if keys > 1 else WORD_KEYS * ROW_WORDS
    return {
        "written.rows": rows,
        "written.keys": keys,
        "written.words": words_of_row(keys),
        "written.nheads": nheads,
    }


def blocks(shape: Shape) -> int:
    batch, nheads, rows, count = bits_shape(shape)
    bands = -(-rows // GRANULE_ROWS) * -(-count // _BLOCK_WORDS)
    return checked("mask", batch * nheads * bands, GRANULE_ROWS)


@functools.cache
def source(dense: bool) -> Source:
    """dense: whether 16 keys of the mask may be read at once."""
    return _source(
        "rawattn_mask_of_bools",
        "portable/mask_of_bools.cu",
        "portable mask_of_bools" + (" dense" if dense else ""),
        helper_params.BOOLS_MASK,
        constants={"kDense": dense},
    )


@functools.cache
def ranges_source() -> Source:
    return _source(
        "rawattn_mask_of_ranges",
        "portable/mask_of_ranges.cu",
        "portable mask_of_ranges",
        helper_params.RANGES_MASK,
    )


def step(shape: Shape, strides: tuple[int, ...], alignment: int) -> Step:
    """The launch that writes the array "mask" of bools to "mask_bits" and "mask_map".

    strides: in bytes, of the array's own, last axes. alignment: its address modulo 16.
    """
    given = (0,) * (4 - len(strides)) + strides
    own = tuple(x if extent > 1 else 0 for x, extent in zip(given, shape, strict=True))
    dense = own[3] == 1 and not alignment % 16 and not any(x % 16 for x in own[:3])
    names = ("batch", "head", "row", "key")
    return Step(
        source=source(dense),
        blocks=blocks(shape),
        threads=THREADS,
        params=structs.fill(
            helper_params.BOOLS_MASK, {**fields(shape), **dict(zip(names, own, strict=True))}
        ),
        patches=_patches(shape, helper_params.BOOLS_MASK, **{"from": "mask"}),
        shared_bytes=SHARED_BYTES,
    )


def ranges_step(shape: Shape, count: int, itemsize: int) -> Step:
    """The launch that writes the mask given by "ranges": (batch, rows, count, 2) integers of `itemsize` bytes."""
    values = {**fields(shape), "ranges.is_64bit": int(itemsize == 8), "count": count}
    return Step(
        source=ranges_source(),
        blocks=blocks(shape),
        threads=THREADS,
        params=structs.fill(helper_params.RANGES_MASK, values),
        patches=_patches(shape, helper_params.RANGES_MASK, ranges__data="ranges"),
        shared_bytes=SHARED_BYTES,
    )


def predicate_source(text: ScoreText) -> Source:
    whole = _source(
        "rawattn_mask_of_predicate",
        "portable/mask_of_predicate.cu",
        "portable mask_of_predicate",
        helper_params.PREDICATE_MASK,
    )
    lines = ['#include "attn/params.cuh"', predicate_text(text), whole.text]
    return replace(whole, text="\n".join(lines))


def predicate_step(
    shape: Shape,
    text: ScoreText,
    captured: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
    scalars: tuple[float, ...],
) -> Step:
    """The launch that writes the mask of a predicate.

    captured: (bytes of an element, shape, strides) of each array that it captures; these are called "captured0" and so on.
    """
    values: dict[str, Any] = {**fields(shape), "seqlen_q": shape[2], "seqlen_k": shape[3]}
    for n, (itemsize, extents, strides) in enumerate(captured):
        own = tuple(stride // itemsize for stride in strides)
        missing = 4 - len(extents)
        values[f"captured.array{n}.strides"] = (*own, *(0,) * missing)
        values[f"captured.array{n}.extents"] = (*extents, *(1,) * missing)
    if scalars:
        values["captured.scalars"] = (*scalars, *(0.0,) * (8 - len(scalars)))
    addresses = {f"captured__array{n}__data": f"captured{n}" for n in range(len(captured))}
    return Step(
        source=predicate_source(text.of_strides(strides for _, _, strides in captured)),
        blocks=blocks(shape),
        threads=THREADS,
        params=structs.fill(helper_params.PREDICATE_MASK, values),
        patches=_patches(shape, helper_params.PREDICATE_MASK, **addresses),
        shared_bytes=SHARED_BYTES,
    )


def keys_step(shape: Shape) -> Step | None:
    """The launch behind one that writes a mask: it merges the keys seen in each band of rows, "mask_bands", to "mask_keys".

    None where there is one band, for which the mask's own launch writes "mask_keys".
    """
    count = bands(shape)
    if count <= 1:
        return None
    planes, row = shape[0] * shape[1], words_of_row(shape[3])
    source = _source(
        "rawattn_mask_keys",
        "portable/mask_keys.cu",
        "portable mask_keys",
        helper_params.MASK_KEYS,
        constants={"kThreads": THREADS},
    )
    return Step(
        source=source,
        blocks=checked("mask", -(-planes * row // THREADS), GRANULE_ROWS),
        threads=THREADS,
        params=structs.fill(
            helper_params.MASK_KEYS, {"planes": planes, "bands": count, "words": row}
        ),
        patches=patches(helper_params.MASK_KEYS, band_keys="mask_bands", keys="mask_keys"),
    )


def band_bytes(shape: Shape) -> int:
    """Bytes of "mask_bands"."""
    return keys_bytes(shape) * bands(shape)


def _patches(shape: Shape, struct: structs.Struct, **more: str) -> tuple[tuple[int, str], ...]:
    keys = "mask_bands" if bands(shape) > 1 else "mask_keys"
    return patches(
        struct,
        written__bits="mask_bits",
        written__map="mask_map",
        written__band_keys=keys,
        **more,
    )
