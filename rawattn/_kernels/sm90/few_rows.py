"""Where decoding's kernels are faster than Hopper's forward: few rows on many keys (docs/notes/decode.md)."""

from __future__ import annotations

from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode as portable_decode
from rawattn._kernels.portable.decode import TILE_ROWS, WIDE_TILE_HEADDIM
from rawattn._kernels.sm90 import decode, forward
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.target import Target

# Keys of a sequence in rows, at least: of more than a tile's rows and few columns, of more columns, and of scores that are more
# than products.
_LEAST_WIDE_NARROW, _LEAST_WIDE, _LEAST_WIDE_SCORED = 768, 1024, 128
# Of up to a tile's rows, by columns and rows, the first that hold a call: where each stream of keys has a block of its own, two
# of which a multiprocessor runs at once, and where there are more.
_LEAST_IDLE = (
    (96, 16, 96),
    (128, 8, 96),
    (128, 16, 512),
    (256, 4, 128),
    (256, 8, 512),
    (256, 16, 768),
)
_LEAST_BUSY = (
    (96, 4, 512),
    (96, 16, 256),
    (128, 7, 1024),
    (128, 16, 512),
    (256, 16, 1024),
)
# Many heads of one query are as many rows of a tile here, and of the forward's each has 16.
_MANY_HEADS, _LEAST_MANY_HEADS, _LEAST_MANY_WIDE_HEADS = 7, 96, 320
# One query of many heads has so few streams of keys for each multiprocessor that to find and to begin the forward's tiles takes
# longer than to read keys a few times, or, of few columns, to compute in small tiles.
_FEW_STREAMS, _NARROW_STREAMS = 1 / 12, 1 / 2
# Keys, at least, under a mask of keys.
_LEAST_MASKED = 192
# Of two tiles' rows, up to so many, and up to so many where the forward has more to find or less to compute: keys in pages, a
# mask, scores that are more than products, or few columns; plain calls of no more than some columns.
_SOME_KEYS, _FEW_COLUMNS_KEYS, _FEW_COLUMNS, _SOME_COLUMNS = 2048, 8192, 64, 96
# Rows of the forward's tiles. A head has 16 of them at least where heads are not interleaved, so of few queries a tile is
# nearly empty.
_FORWARD_ROWS = 128


def supports_mapped(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for Hopper's kernel in front of the forward, else None."""
    return _many(problem, target) or decode.supports(problem, target, operands)


def supports_portable(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Likewise, for the portable one, where TMA cannot bring the keys."""
    return _many(problem, target) or portable_decode.supports(problem, target, operands)


def _many(problem: Problem, target: Target) -> str | None:
    return (
        None if _are_few(problem, target) else "it has too many rows for the keys that they share"
    )


def _are_few(problem: Problem, target: Target) -> bool:
    # The forward reads such a mask as it comes, decoding bits that are made first.
    if forward.masks_keys(problem):
        if problem.max_seqlen_k < _LEAST_MASKED:
            return False
        problem = replace(problem, mask=None)
    rows = problem.max_seqlen_q * problem.group_heads
    keys, dim = problem.max_seqlen_k, max(problem.headdim, problem.headdim_v)
    # The forward finds what is in pages and under a mask in launches of its own, and what changes scores takes it longer.
    listed = problem.pages is not None or problem.mask is not None
    finds = listed or _changes_scores(problem)
    tiles, forward_tiles = portable_decode.tiles_of_keys(problem), _forward_tiles(problem)
    if not listed and keys < _least_keys(problem, target) and forward_tiles < 4 * tiles:
        return False
    if rows <= TILE_ROWS or tiles < forward_tiles:
        return True
    narrow = dim <= _FEW_COLUMNS
    quick = narrow or finds
    streams, all_busy = problem.batch * problem.nheads_kv, target.multiprocessors
    if problem.max_seqlen_q == 1:  # of many heads
        few = _FEW_STREAMS if rows > 2 * TILE_ROWS else 0.0
        if streams <= (_NARROW_STREAMS if narrow else few) * all_busy:
            return True
    # Of plain calls the forward has few rows of several heads in one small tile.
    plain = problem.mask is None and not _changes_scores(problem)
    if dim > (_SOME_COLUMNS if plain else WIDE_TILE_HEADDIM):
        return False
    if keys > (_FEW_COLUMNS_KEYS if quick else _SOME_KEYS):
        return False
    if rows <= 2 * TILE_ROWS:
        return streams <= (all_busy if quick else all_busy // 4)
    quick = narrow or problem.mask is not None
    return rows <= 4 * TILE_ROWS and quick and streams <= all_busy // 4


def _least_keys(problem: Problem, target: Target) -> int:
    rows = problem.max_seqlen_q * problem.group_heads
    dim = max(problem.headdim, problem.headdim_v)
    if _changes_scores(problem):
        return _LEAST_WIDE_SCORED if rows > TILE_ROWS else 0
    if rows > TILE_ROWS:
        return _LEAST_WIDE_NARROW if dim <= _FEW_COLUMNS else _LEAST_WIDE
    if problem.max_seqlen_q == 1 and rows >= _MANY_HEADS:
        return _LEAST_MANY_HEADS if dim <= WIDE_TILE_HEADDIM else _LEAST_MANY_WIDE_HEADS
    idle = problem.batch * problem.nheads_kv <= 2 * target.multiprocessors
    table = _LEAST_IDLE if idle else _LEAST_BUSY
    return next(keys for columns, most, keys in table if dim <= columns and rows <= most)


def _changes_scores(problem: Problem) -> bool:
    options = problem.bias, problem.alibi_slopes, problem.score_mod, problem.softcap
    return any(option is not None for option in options)


def _forward_tiles(problem: Problem) -> int:
    """Query tiles of the forward that share keys."""
    heads = heads_per_tile(problem, _FORWARD_ROWS)
    queries = _FORWARD_ROWS // heads
    return -(-problem.max_seqlen_q // queries) * (problem.group_heads // heads)
