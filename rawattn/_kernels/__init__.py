"""Kernel families: each module turns a problem into the configuration and source of one kernel of kernels_cu/."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rawattn._compile.compiler import Source
    from rawattn._kernels.tile_tables import Row

# Families of forward kernels, the fastest first: the first that applies to a call is taken.
FORWARD_FAMILIES = ("sm90", "portable")


class Selection(NamedTuple):
    """What the current context changes about which kernel runs: part of what decides a launch."""

    family: str | None = None  # the one that forward calls are kept to
    # Tile tables in the place of shipped ones: (kernel, name of the table, rows).
    tables: tuple[tuple[str, str, tuple[Row, ...]], ...] = ()


_UNCHANGED = Selection()
_selection: ContextVar[Selection] = ContextVar("rawattn_selection", default=_UNCHANGED)
selection = _selection.get


def allowed(family: str) -> bool:
    """Whether calls may choose this family now."""
    return selection().family in (None, family)


@contextmanager
def only(family: str) -> Iterator[None]:
    """Keeps calls to one family of kernels, so that families can be compared.

    "portable" applies to every call. Where another does not apply, the portable one runs all the same.
    """
    if family not in FORWARD_FAMILIES:
        raise ValueError(f"family: got {family!r}; accepted are {', '.join(FORWARD_FAMILIES)}")
    token = _selection.set(selection()._replace(family=family))
    try:
        yield
    finally:
        _selection.reset(token)


@contextmanager
def using_tiles(kernel: str, table: str, rows: Iterable[Row]) -> Iterator[None]:
    """Puts rows in the place of a shipped tile table, so that candidates can be compared as calls would run them."""
    others = tuple(each for each in selection().tables if each[:2] != (kernel, table))
    tables = (*others, (kernel, table, tuple(rows)))
    token = _selection.set(selection()._replace(tables=tables))
    try:
        yield
    finally:
        _selection.reset(token)


# Shared memory one block may use, by architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"); used where there is no device to ask.
SHARED_LIMIT = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_90a": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
}


def common_variants(arch: str, *, every: bool = False) -> list[Source]:
    """Sources worth compiling ahead of time for `arch`, without a GPU.

    The common ones are 16-bit, dense and packed, causal and full, at the usual head dims. `every` adds float32, windows,
    top-left alignment, scales that are not positive, narrow copies and head dims between the usual ones, and the backward's
    kernels: each code path of each tile shape, not the product of all. Of portable kernels that differ in nothing but the
    16-bit type it leaves out one.
    """
    from rawattn._call.problem import Problem
    from rawattn._kernels.portable import backward as portable_backward
    from rawattn._kernels.portable import fill_padding, repack, schedule
    from rawattn._kernels.portable import forward as portable_forward
    from rawattn._kernels.sm90 import forward as sm90_forward

    sources = [schedule.source(), fill_padding.source()]

    def add(
        dtype: str,
        headdim: int,
        headdim_v: int | None = None,
        *,
        ragged: bool = False,
        left: int | None = None,
        right: int | None = None,
        top_left: bool = False,
        scale: float = 1.0,
        copy_bytes: int = 16,
        backward: bool = False,
        seqlens: tuple[int, int] = (1, 1),  # of queries and keys
        group: int = 1,
    ) -> None:
        problem = Problem(
            dtype=dtype,
            batch=1,
            nheads_q=group,
            nheads_kv=1,
            headdim=headdim,
            headdim_v=headdim if headdim_v is None else headdim_v,
            group=ragged,
            rows_q=seqlens[0],
            rows_k=seqlens[1],
            max_seqlen_q=seqlens[0],
            max_seqlen_k=seqlens[1],
            ragged=ragged,
            window_left=left,
            window_right=right,
            sink=0,
            top_left=top_left,
            scale=scale,
        )
        if not (every and dtype == "float16"):
            portable = portable_forward.choose(
                problem, copy_bytes=copy_bytes, shared_limit=SHARED_LIMIT[arch]
            )
            sources.append(portable.source())
        persistent = sm90_forward.choose(problem, arch=arch, strides={}, pointers=0)
        if persistent is not None:
            sources.append(persistent.source())
            if copy_bytes < 16:
                sources.append(repack.source(headdim, copy_bytes))
        if not backward:
            return
        shared_limit = SHARED_LIMIT[arch]
        for with_dq in (True, False):
            main = portable_backward.choose(
                problem, copy_bytes=copy_bytes, shared_limit=shared_limit, with_dq=with_dq
            )
            sources.append(main.source())
        dq = portable_backward.choose_dq(problem, copy_bytes=copy_bytes, shared_limit=shared_limit)
        sources.extend(
            (
                dq.source(),
                portable_backward.prepare_source(problem, copy_bytes),
                portable_backward.finish_source(problem, copy_bytes),
            )
        )

    usual, long = (64, 96, 128, 192, 256), sm90_forward.LONG_SEQLEN
    for dtype, headdim, ragged, right in itertools.product(
        ("bfloat16", "float16"), usual, (False, True), (None, 0)
    ):
        for seqlens in ((1, 1), (1, long), (long, long)):
            add(dtype, headdim, ragged=ragged, right=right, seqlens=seqlens)
    for headdim, ragged in itertools.product(usual, (False, True)):
        add("bfloat16", headdim, ragged=ragged, right=0, group=4)
    if every:
        for headdim in (32, *usual):
            add("float32", headdim, ragged=True, right=0)
            add("float32", headdim)
            add("bfloat16", headdim, ragged=True, left=0, right=0, backward=True)
            add("bfloat16", headdim, left=0, top_left=True)
            add("bfloat16", headdim, left=0, group=2)
            add("bfloat16", headdim, seqlens=(long, long), group=4)
            add("float16", headdim, ragged=True, right=0, group=12)
            add("float16", headdim, left=0, right=0, scale=-1.0)
            add("bfloat16", headdim, left=0, right=0, scale=-1.0)
        add("bfloat16", 36, 36, copy_bytes=8, right=0, backward=True)
        add("bfloat16", 34, 66, copy_bytes=4, right=0, backward=True)
        add("bfloat16", 7, 1, copy_bytes=2, right=0, backward=True)
        add("bfloat16", 192, 128, right=0)
        add("bfloat16", 40, 256, right=0)
        add("float32", 33, 65, copy_bytes=4, ragged=True, left=0, backward=True)
    return list(dict.fromkeys(sources))
