"""Which arrays of a call TMA can read where they lie: tensor maps have conditions on alignment, strides and extents."""

from __future__ import annotations

from collections.abc import Iterator

from rawattn._call.problem import Problem
from rawattn._kernels.attention_params import KEYS
from rawattn._kernels.operands import Operands

MAX_ROWS = 2**29  # of an array; the row axis of a ragged tensor map may be twice as long
MAX_PAGES = 2**31 - 1  # coordinates of boxes are ints
SWIZZLE_ROWS = 8  # the swizzle's period, at which boxes begin in shared memory


def loaded(problem: Problem) -> tuple[str, str, str]:
    """The arrays that TMA reads, by name."""
    return ("q", *KEYS[problem.pages is not None])


def unaligned(problem: Problem, operands: Operands) -> tuple[str, ...]:
    """Those of q, k and v that must be copied first: TMA reads rows that begin at multiples of 16 bytes."""
    return tuple(
        name
        for name in loaded(problem)
        if name in operands.strides and not aligned(problem, name, operands)
    )


def aligned(problem: Problem, name: str, operands: Operands) -> bool:
    """Whether the rows of an array begin at multiples of 16 bytes."""
    if name not in operands.strides:
        return True
    return operands.pointers % 16 == 0 and not any(x % 16 for x in _real(problem, name, operands))


def mappable(problem: Problem, name: str, operands: Operands) -> bool:
    """Whether a tensor map can have the strides of an array, given that they are multiples of 16 bytes."""
    return name not in operands.strides or all(
        0 < stride < 2**40 for stride in _real(problem, name, operands)
    )


def _real(problem: Problem, name: str, operands: Operands) -> Iterator[int]:
    """Strides of the axes before the last one that have more than one element."""
    queries = name in ("q", "out")
    rows = problem.rows_q if queries else problem.rows_k
    nheads = problem.nheads_q if queries else problem.nheads_kv
    extents: tuple[int, ...] = (rows, nheads) if problem.packed else (problem.batch, rows, nheads)
    if problem.pages is not None and not queries:
        extents = (problem.pages.num_pages, problem.pages.page_size, nheads)
    between = operands.strides[name][:-1]
    return (stride for stride, extent in zip(between, extents, strict=True) if extent > 1)


def copies_rows(problem: Problem) -> bool:
    """Whether lanes copy rows of keys in pages one by one: boxes of such pages would begin inside the swizzle's period."""
    return problem.pages is not None and problem.pages.page_size % SWIZZLE_ROWS != 0


def page_offsets_fit_32_bits(problem: Problem, operands: Operands) -> bool:
    """Whether 32 bits hold the offset of every row of every page, in units of 16 bytes."""
    form = problem.pages
    assert form is not None
    extents = form.num_pages - 1, form.page_size - 1
    spans = (
        sum(stride * most for stride, most in zip(operands.strides[name], extents, strict=False))
        for name in KEYS[True]
        if name in operands.strides
    )
    return all(span < 16 * (2**32 - 1) for span in spans)


def page_strides_in_heads(problem: Problem, operands: Operands) -> tuple[int, int] | None:
    """The stride from a page to the next in units of the head stride, for keys and for values.

    With it one axis of a tensor map counts heads and pages together, so that boxes can bring whole rows. None where they
    cannot: the page stride is no multiple of the head stride, rows end inside a block of 64 columns or are one such block, or
    keys of 8 bits are to be converted.
    """
    form = problem.pages
    dims = problem.headdim, problem.headdim_v
    if form is None or problem.float8 or any(dim % 64 for dim in dims) or max(dims) == 64:
        return None
    found = []
    for name in KEYS[True]:
        page, _, head = operands.strides[name][:3]
        apart, rest = problem.nheads_kv, 0
        if problem.nheads_kv > 1 and form.num_pages > 1:
            apart, rest = divmod(page, head)
        if rest or apart < problem.nheads_kv or apart * (form.num_pages + 1) > MAX_PAGES:
            return None
        found.append(apart)
    keys, values = found
    return keys, values
