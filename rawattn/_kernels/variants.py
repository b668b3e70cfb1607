"""Kernels worth compiling ahead of time, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import usual_calls
from rawattn._kernels.operands import Operands, strides_of_pages
from rawattn._kernels.portable import align_rows, append, combine, ragged_setup
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import decode as portable_decode
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.score_variants import score_variants
from rawattn._kernels.sm90 import decode as sm90_decode
from rawattn._kernels.sm90 import few_rows, tile_choice
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.target import without_device

_PAGES = PageForm(page_size=16, num_pages=1, entries=1, has_indptr=False, dtype="int32")

_DTYPES = ("bfloat16", "float16", "float32")

# Sequences on one SM, so many that decoding has its smallest blocks.
_MANY_SEQUENCES = 8
# Rows of a sequence that is too long for the backward's table "short".
_MANY_ROWS = 2048


def common_variants(arch: str, *, every: bool = False, purpose: str = "inference") -> list[Source]:
    """Sources worth compiling ahead of time for `arch`, without a GPU.

    The common ones are 16-bit, dense and packed, causal and full, at the usual head dims, and those that plain calls of usual
    shapes take: forward kernels for purpose "inference", backward kernels too for "training", and both also in float32 for
    "all".

    every: adds each code path of each tile shape, though not the product of all: float32, keys in pages, windows, top-left
    alignment, positions, scales that are not positive, narrow copies, head dims between the usual ones, the backward's kernels,
    and options that change scores. Of two portable kernels that differ only in the 16-bit dtype it leaves out one.
    """
    target = without_device(arch)
    sources = [ragged_setup.source(), ragged_setup.carrying_source(), *append.variants()]
    sources += usual_calls.sources(arch, _DTYPES if purpose == "all" else _DTYPES[:2])

    def add(
        dtype: str,
        headdim: int,
        headdim_v: int | None = None,
        *,
        ragged: bool = False,
        left: int | None = None,
        right: int | None = None,
        top_left: bool = False,
        positions: bool = False,
        scale: float = 1.0,
        copy_bytes: int = 16,
        backward: bool = False,
        seqlens: tuple[int, int] = (1, 1),  # of queries and keys
        group: int = 1,
        batch: int = 1,
        pages: PageForm | None = None,
        float8: bool = False,
    ) -> None:
        problem = Problem(
            dtype=dtype,
            batch=batch,
            nheads_q=group,
            nheads_kv=1,
            headdim=headdim,
            headdim_v=headdim if headdim_v is None else headdim_v,
            packed=ragged,
            rows_q=seqlens[0],
            rows_k=seqlens[1],
            max_seqlen_q=seqlens[0],
            max_seqlen_k=seqlens[1],
            ragged=ragged,
            window_left=left,
            window_right=right,
            sink=0,
            top_left=top_left,
            positions=positions,
            scale=scale,
            pages=pages,
            float8=float8,
        )
        # Addresses that are multiples of `copy_bytes` alone allow no wider access.
        operands = Operands(pointers=copy_bytes)
        # For kernels with tensor maps, whose form depends on strides of pages.
        aligned = Operands(strides_of_pages(problem))
        mapped = sm90_decode.supports(problem, target, aligned) is None and copy_bytes == 16
        few = (
            sm90_decode.choose(problem, target, aligned)
            if mapped
            else portable_decode.choose(problem, target, operands)
        )
        decoded = portable_decode.supports(problem, target, operands) is None
        if pages is None and decoded and few_rows.are_few(problem, target):
            sources.append(few.source())
        if not (every and dtype == "float16"):
            config = portable_forward.choose(problem, target, operands)
            sources.append(config.source())
            if pages is not None:
                plain = replace(few, plain_integers=True)
                kernels = replace(config, split=True), few, plain
                sources.extend(each.source() for each in kernels)
        if sm90_forward.supports(problem, target, aligned) is None:
            chosen = sm90_forward.choose(problem, target, aligned)
            sources.append(chosen.source())
            if ragged and pages is None and not positions:  # lengths of the host, of few sequences
                sources.append(replace(chosen, carried=True).source())
            if copy_bytes < 16 and pages is None:  # pages are never copied
                sources.append(align_rows.source(headdim, copy_bytes))
        if not backward:
            return
        for rows, with_dq in ((64, True), (128, True), (_MANY_ROWS, True), (_MANY_ROWS, False)):
            sized = replace(problem, rows_q=rows, rows_k=rows, max_seqlen_q=rows, max_seqlen_k=rows)
            # The keys of a packed batch may have the lengths of its queries, or others.
            for shared in (False, True) if ragged else (False,):
                sized = replace(sized, shared_lengths=shared)
                main = portable_backward.choose(sized, target, operands, with_dq=with_dq)
                one_key_tile = portable_backward.has_one_key_tile(sized, main)
                main = replace(main, one_key_tile=one_key_tile)
                sources.append(main.source())
                if one_key_tile:
                    alone = replace(main, rewrites=main.hides_from_some, delta_rows=128)
                    sources.append(alone.source())
        width = operands.copy_bytes(problem)
        if every:
            sources.append(replace(main, split=True).source())
            sources.append(portable_backward.parts_source(problem, width, main))
        sources.extend(
            (
                portable_backward.choose_dq(problem, target, operands).source(),
                portable_backward.prepare_source(problem, width),
                *([portable_backward.setup_source(problem, width)] if ragged else []),
                portable_backward.finish(main, width, with_sums=True).source(),
            )
        )

    usual, long = (64, 96, 128, 192, 256), tile_choice.LONG_SEQLEN
    for dtype, headdim, ragged, right in itertools.product(
        ("bfloat16", "float16"), usual, (False, True), (None, 0)
    ):
        for seqlens in ((1, 1), (1, long), (long, long)):
            add(dtype, headdim, ragged=ragged, right=right, seqlens=seqlens)
        if purpose != "inference":
            add(dtype, headdim, ragged=ragged, right=right, backward=True)
    if purpose == "all":
        for headdim, ragged, right in itertools.product(usual, (False, True), (None, 0)):
            add("float32", headdim, ragged=ragged, right=right, backward=True)
    for headdim, ragged in itertools.product(usual, (False, True)):
        add("bfloat16", headdim, ragged=ragged, right=0, group=4)
    for group in (1, 4, 8):
        add("bfloat16", 128, ragged=True, right=0, group=group, pages=_PAGES)
    # Chunks whose GQA group no tile divides evenly, so that heads are interleaved.
    for headdim, pages in ((64, None), (128, None), (128, _PAGES), (256, None)):
        add("bfloat16", headdim, ragged=True, right=0, group=5, seqlens=(20, 1), pages=pages)
    if every:
        for headdim in (32, *usual):
            add("float32", headdim, ragged=True, right=0)
            add("float32", headdim)
            add("bfloat16", headdim, ragged=True, right=0, pages=_PAGES)
            add("float32", headdim, ragged=True, left=0, right=0, group=5, pages=_PAGES)
            add("bfloat16", headdim, ragged=True, left=0, right=0, group=4, pages=_PAGES)
            add("bfloat16", headdim, ragged=True, right=0, group=4, pages=_PAGES, float8=True)
            add("float32", headdim, ragged=True, right=0, pages=_PAGES, float8=True)
            add("bfloat16", headdim, ragged=True, left=0, right=0, backward=True)
            add("bfloat16", headdim, left=0, top_left=True)
            add("bfloat16", headdim, ragged=True, left=0, right=0, positions=True, backward=True)
            add("float32", headdim, ragged=True, right=0, positions=True, seqlens=(long, long))
            add("bfloat16", headdim, left=0, group=2)
            add("bfloat16", headdim, seqlens=(long, long), group=4)
            add("float16", headdim, ragged=True, right=0, group=12)
            add("float16", headdim, left=0, right=0, scale=-1.0)
            add("bfloat16", headdim, left=0, right=0, scale=-1.0)
        add("float16", 128, ragged=True, group=24, seqlens=(1, 1), pages=_PAGES, float8=True)
        for headdim, rows, float8 in (
            (64, 1, False),
            (64, 5, False),
            (128, 1, True),
            (128, 5, True),
        ):
            add(
                "bfloat16",
                headdim,
                ragged=True,
                right=0,
                seqlens=(rows, 1),
                group=4,
                batch=_MANY_SEQUENCES,
                pages=_PAGES,
                float8=float8,
            )
        for width in (8, 4, 1):
            add("bfloat16", 40, copy_bytes=width, ragged=True, pages=_PAGES, float8=True)
        add("bfloat16", 36, 36, copy_bytes=8, right=0, backward=True)
        add("bfloat16", 34, 66, copy_bytes=4, right=0, backward=True)
        add("bfloat16", 7, 1, copy_bytes=2, right=0, backward=True)
        add("bfloat16", 192, 128, right=0)
        add("bfloat16", 40, 256, right=0)
        add("float32", 33, 65, copy_bytes=4, ragged=True, left=0, backward=True)
        sources += score_variants(target)
        sources += combine.variants()
        sources += append.variants(every=True)
    return list(dict.fromkeys(sources))
