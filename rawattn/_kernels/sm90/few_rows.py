"""Decides which calls of few rows go to decoding's kernels instead of Hopper's forward (docs/notes/decode.md).

Rows are query rows that share keys: the queries of a sequence times the heads of a GQA group. Streams are pairs of a sequence
and a kv head. All limits were measured; the notes have the figures.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels.portable import decode_tiles
from rawattn._kernels.portable.decode_tiles import TILE_ROWS, WIDE_TILE_HEADDIM
from rawattn._kernels.sm90 import forward
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.target import Target

# The least seqlen_k for which decoding is the faster kernel, in calls without a mask. First for more rows than TILE_ROWS: up to
# head dim _FEW_COLUMNS; beyond it; and at any head dim, of keys in rows, with a bias, ALiBi, a score function or a soft cap.
_LEAST_WIDE_NARROW, _LEAST_WIDE, _LEAST_WIDE_SCORED = 768, 1024, 128
# Then for up to TILE_ROWS rows, of keys in rows. Columns: (largest head dim, most rows, least seqlen_k). The first line that
# admits the call decides. _LEAST_KEYS_FEW_STREAMS holds while every stream can have a block of its own, at two blocks an SM;
# _LEAST_KEYS_MANY_STREAMS where there are more streams.
_LEAST_KEYS_FEW_STREAMS = (
    (96, 16, 96),
    (128, 8, 96),
    (128, 16, 512),
    (256, 4, 128),
    (256, 8, 512),
    (256, 16, 768),
)
_LEAST_KEYS_MANY_STREAMS = (
    (96, 4, 512),
    (96, 16, 256),
    (128, 7, 1024),
    (128, 16, 512),
    (256, 16, 1024),
)
# Then, likewise, for up to TILE_ROWS rows that are one query of at least _MANY_HEADS heads: up to head dim WIDE_TILE_HEADDIM;
# beyond it. Such heads are one row each in a tile of decoding, and 16 rows each in a tile of the forward. Where there are more
# streams: for up to TILE_ROWS / 2 such rows; for more.
_MANY_HEADS, _LEAST_MANY_HEADS, _LEAST_MANY_WIDE_HEADS = 7, 96, 320
_LEAST_HEADS_MANY_STREAMS, _LEAST_MANY_HEADS_MANY_STREAMS = 512, 1024
# Then for more than TILE_ROWS / 2 and up to TILE_ROWS rows beyond head dim WIDE_TILE_HEADDIM, of keys in pages. For other such
# calls in pages it is 0.
_LEAST_WIDE_PAGED = 512
# One query with more rows than one tile: decoding is the faster kernel up to this many streams for each SM. With so few, the
# forward takes longer to find and begin its tiles than decoding takes to compute in small tiles (_NARROW_STREAMS, up to head
# dim _FEW_COLUMNS) or to read keys once more for each tile (_FEW_STREAMS, beyond that head dim and two tiles' rows).
_FEW_STREAMS, _NARROW_STREAMS = 1 / 12, 1 / 2
# The least seqlen_k under a mask that the forward reads as bools (`forward.masks_keys`).
_LEAST_MASKED = 448
# More rows than one tile: the most keys of decoding. _WIDE_MAX_KEYS in general; _FEW_COLUMNS_KEYS where the forward has more to
# find or less to compute, which is with keys in pages, a mask, a changed score or a head dim of up to _FEW_COLUMNS. There is
# no limit for one wide tile without a bias, in pages, under a mask or up to that head dim. Calls
# without a mask and without changed scores go to decoding up to head dim _WIDE_PLAIN_MAX_HEADDIM alone.
_WIDE_MAX_KEYS, _FEW_COLUMNS_KEYS, _FEW_COLUMNS, _WIDE_PLAIN_MAX_HEADDIM = 2048, 8192, 64, 96
# More rows than a wide tile, of few streams: the most keys of all streams together. First of keys in pages with a mask or a
# soft cap, which have no other limit of keys then. Then of keys in rows, without a mask and without changed scores: for up to
# _FEWER_STREAMS streams; for more.
_FEW_KEYS_CAPPED, _FEW_KEYS_PLAIN, _FEWER_KEYS_PLAIN, _FEWER_STREAMS = 100_000, 65_536, 32_768, 12
# The least and the most seqlen_k of a wide tile beyond head dim _FEW_COLUMNS with a soft cap, of few streams and keys in rows.
_CAPPED_KEYS_IN_ROWS = 512, 8192
# Wide tiles of more streams than SMs: decoding is the faster kernel from so many keys on. Columns: (largest head dim, least
# seqlen_k in pages, in rows) without a mask and without changed scores; then, up to head dim _FEW_COLUMNS, of keys in pages
# with a mask, slopes, a score function or a soft cap.
_LEAST_MANY_WIDE = ((64, 0, 1024), (96, 2048, 2048))
_LEAST_MANY_WIDE_LISTED = 512
# Keys of float8, which two warps of the forward convert for all its rows, up to head dim WIDE_TILE_HEADDIM. Columns:
# (most rows, least heads of a GQA group, largest head dim, whether a mask, slopes, a score function or a soft cap must be
# there, least seqlen_k for up to as many streams as there are SMs, for up to _VERY_MANY_FLOAT8 times as many, for more). Any
# line that admits the call decides for decoding. The first is of tiles of three blocks of eight rows.
_LEAST_KEYS_FLOAT8 = (
    (24, 1, 128, False, 512, 96, 96),
    (32, 1, 64, False, 512, 512, 512),
    (32, 1, 128, True, 1024, 1024, 1024),
    (32, 16, 128, False, 512, 0, 0),
    (64, 16, 64, False, 512, 0, 0),
    (64, 16, 128, False, 512, 1024, 0),
)
_VERY_MANY_FLOAT8 = 2.5
# Beyond that head dim, of no more streams than a sixteenth of the SMs: the most rows, the least seqlen_k, and the most keys of
# all streams together.
_FEW_WIDE_FLOAT8 = 48, 1024, 100_000
# So many tiles of the forward for each tile of decoding are slower at any number of keys.
_WORTH_TILES, _WORTH_TILES_FLOAT8 = 4, 2.5
# More rows than one tile whose bias, slopes or score text differ by head, so that each head takes at least 16 rows of the
# forward's tiles. Decoding is the faster kernel where that makes many rows of few, on enough keys of all streams together.
# Columns: (least rows of the forward for each row of decoding's tiles, enough keys up to head dim _FEW_COLUMNS, beyond it).
# First for a bias that the forward copies by TMA, as its rows are aligned; for any other bias; without one.
_ENOUGH_KEYS_ALIGNED_BIAS = 4, 150_000, 60_000
_ENOUGH_KEYS_BIAS = 3, 15_000, 15_000
_ENOUGH_KEYS_BY_HEAD = 4, 250_000, 120_000
# The first column beyond head dim WIDE_TILE_HEADDIM, where decoding reads keys once more for each tile of 16 rows. Beyond
# _PADDED_MAX_HEADDIM the forward is the faster kernel.
_WIDE_PADDING, _PADDED_MAX_HEADDIM = 6, 192
# Rows of a tile of the forward. Where heads are not interleaved each head takes at least 16 of them, so with few queries the
# tile is nearly empty.
_FORWARD_ROWS = 128, 192


def are_few(problem: Problem, target: Target) -> bool:
    """Whether a call has so few rows for the keys which they share that decoding's kernels are asked before the forward."""
    if _are_many_wide(problem, target) or _are_few_of_float8(problem, target):
        return True
    # The forward reads such a mask's bools itself. For decoding an earlier launch makes bits of them.
    if forward.masks_keys(problem):
        if problem.max_seqlen_k < _LEAST_MASKED:
            return False
        problem = replace(problem, mask=None)
    rows = problem.max_seqlen_q * problem.group_heads
    keys, dim = problem.max_seqlen_k, max(problem.headdim, problem.headdim_v)
    # For pages and masks the forward needs launches before it, and what changes scores takes it longer than decoding.
    listed = problem.pages is not None or problem.mask is not None
    forward_has_more_work = listed or _changes_scores(problem)
    tiles, forward_tiles = decode_tiles.sharing_keys(problem), _forward_tiles(problem)
    worth = _WORTH_TILES_FLOAT8 if problem.float8 else _WORTH_TILES
    if keys < _least_keys(problem, target) and forward_tiles < worth * tiles:
        return False
    if rows <= TILE_ROWS or tiles < forward_tiles:
        return True
    narrow = dim <= _FEW_COLUMNS
    decode_favoured = narrow or forward_has_more_work
    streams, all_busy = problem.batch * problem.nheads_kv, target.multiprocessors
    if _changes_scores(problem) and not listed:
        if streams * keys >= _enough_keys(problem, tiles):
            return True
        if not narrow:
            capped = _is_capped(problem) and dim <= WIDE_TILE_HEADDIM and rows <= 2 * TILE_ROWS
            least, most = _CAPPED_KEYS_IN_ROWS
            return capped and least <= keys <= most and streams <= all_busy // 4
    if problem.max_seqlen_q == 1:  # of many heads
        few = _FEW_STREAMS if rows > 2 * TILE_ROWS else 0.0
        if streams <= (_NARROW_STREAMS if narrow else few) * all_busy:
            return True
    # In plain calls the forward puts few rows of several heads into one small tile, and is faster at larger head dims.
    plain = problem.mask is None and not _changes_scores(problem)
    if dim > (_WIDE_PLAIN_MAX_HEADDIM if plain else WIDE_TILE_HEADDIM):
        return False
    most_keys = _FEW_COLUMNS_KEYS if decode_favoured else _WIDE_MAX_KEYS
    if rows > 2 * TILE_ROWS:
        return _are_few_in_two_wide_tiles(problem, target, most_keys)
    unlimited = problem.bias is None and (narrow or listed)
    most_streams = all_busy if decode_favoured else all_busy // 4
    return streams <= most_streams and (unlimited or keys <= most_keys)


def _are_few_in_two_wide_tiles(problem: Problem, target: Target, most_keys: int) -> bool:
    """`are_few` for more rows than a wide tile, of few streams. most_keys: of decoding in general."""
    rows, keys = problem.max_seqlen_q * problem.group_heads, problem.max_seqlen_k
    streams = problem.batch * problem.nheads_kv
    if rows > 4 * TILE_ROWS or streams > target.multiprocessors // 4:
        return False
    changed = _changes_scores(problem)
    if problem.pages is None and problem.mask is None and not changed:
        few_keys = _FEW_KEYS_PLAIN if streams <= _FEWER_STREAMS else _FEWER_KEYS_PLAIN
        if streams * keys > few_keys:
            return False
    capped = _is_capped(problem) or (problem.mask is not None and not changed)
    if problem.pages is not None and capped and streams * keys <= _FEW_KEYS_CAPPED:
        return True
    narrow = max(problem.headdim, problem.headdim_v) <= _FEW_COLUMNS
    return keys <= most_keys and (narrow or problem.mask is not None)


def _are_many_wide(problem: Problem, target: Target) -> bool:
    """Whether decoding in several blocks an SM is faster, as there are many streams of a wide tile each."""
    rows, keys = problem.max_seqlen_q * problem.group_heads, problem.max_seqlen_k
    if not TILE_ROWS < rows <= 2 * TILE_ROWS:
        return False
    if problem.batch * problem.nheads_kv <= target.multiprocessors:
        return False
    dim = max(problem.headdim, problem.headdim_v)
    if problem.mask is not None or _changes_scores(problem):
        timed = problem.pages is not None and problem.bias is None
        return timed and dim <= _FEW_COLUMNS and keys >= _LEAST_MANY_WIDE_LISTED
    least = next((least for most, *least in _LEAST_MANY_WIDE if dim <= most), None)
    return least is not None and keys >= least[problem.pages is None]


def _are_few_of_float8(problem: Problem, target: Target) -> bool:
    """Whether decoding is faster because the forward takes long to convert the keys; see _LEAST_KEYS_FLOAT8."""
    if not problem.float8 or problem.bias is not None:
        return False
    rows, heads = problem.max_seqlen_q * problem.group_heads, problem.group_heads
    dim = max(problem.headdim, problem.headdim_v)
    forward_has_more_work = problem.mask is not None or _changes_scores(problem)
    streams, keys = problem.batch * problem.nheads_kv, problem.max_seqlen_k
    if rows <= TILE_ROWS:
        return False
    if dim > WIDE_TILE_HEADDIM:
        most_rows, least, together = _FEW_WIDE_FLOAT8
        few = streams <= target.multiprocessors // 16 and streams * keys <= together
        return few and rows <= most_rows and keys >= least
    each = streams / target.multiprocessors
    column = 0 if each <= 1 else 1 if each <= _VERY_MANY_FLOAT8 else 2
    return any(
        rows <= most
        and heads >= least_heads
        and dim <= columns
        and forward_has_more_work >= more_work
        and keys >= least[column]
        for most, least_heads, columns, more_work, *least in _LEAST_KEYS_FLOAT8
    )


def _least_keys(problem: Problem, target: Target) -> int:
    rows = problem.max_seqlen_q * problem.group_heads
    dim = max(problem.headdim, problem.headdim_v)
    scored = _changes_scores(problem)
    if problem.mask is not None:
        return 0
    if problem.pages is not None and (scored or rows <= TILE_ROWS):
        wide = dim > WIDE_TILE_HEADDIM and 2 * rows > TILE_ROWS
        return _LEAST_WIDE_PAGED if wide and not scored else 0
    if scored:
        return _LEAST_WIDE_SCORED if rows > TILE_ROWS else 0
    if rows > TILE_ROWS:
        return _LEAST_WIDE_NARROW if dim <= _FEW_COLUMNS else _LEAST_WIDE
    idle = problem.batch * problem.nheads_kv <= 2 * target.multiprocessors
    if problem.max_seqlen_q == 1 and rows >= _MANY_HEADS:
        if not idle:
            half = 2 * rows <= TILE_ROWS
            return _LEAST_HEADS_MANY_STREAMS if half else _LEAST_MANY_HEADS_MANY_STREAMS
        return _LEAST_MANY_HEADS if dim <= WIDE_TILE_HEADDIM else _LEAST_MANY_WIDE_HEADS
    table = _LEAST_KEYS_FEW_STREAMS if idle else _LEAST_KEYS_MANY_STREAMS
    return next(keys for columns, most, keys in table if dim <= columns and rows <= most)


def _enough_keys(problem: Problem, tiles: int) -> float:
    """How many keys of all streams are enough for decoding `tiles` tiles of rows whose scores are changed; see
    _ENOUGH_KEYS_ALIGNED_BIAS."""
    form, dim = problem.bias, max(problem.headdim, problem.headdim_v)
    if dim > _PADDED_MAX_HEADDIM:
        return math.inf
    if form is not None:
        aligned = form.shape[3] % 8 == 0 and form.dtype != "float32"
        least, narrow, others = _ENOUGH_KEYS_ALIGNED_BIAS if aligned else _ENOUGH_KEYS_BIAS
    elif problem.alibi_slopes is not None or problem.score_mod is not None:
        least, narrow, others = _ENOUGH_KEYS_BY_HEAD
    else:
        return math.inf
    tile_rows, *_ = decode_tiles.shape(problem)
    if tile_rows == TILE_ROWS:
        least = _WIDE_PADDING
    forward_rows = problem.group_heads * -(-problem.max_seqlen_q // 16) * 16
    if forward_rows < least * tiles * tile_rows:
        return math.inf
    return narrow if dim <= _FEW_COLUMNS else others


def _changes_scores(problem: Problem) -> bool:
    options = problem.bias, problem.alibi_slopes, problem.score_mod, problem.softcap
    return any(option is not None for option in options)


def _is_capped(problem: Problem) -> bool:
    """Whether a soft cap is all that changes scores."""
    return problem.softcap is not None and not _changes_scores(replace(problem, softcap=None))


def _forward_tiles(problem: Problem) -> int:
    """The forward's query tiles that read the same keys."""

    def tiles(rows: int) -> int:
        heads = heads_per_tile(problem, rows)
        return -(-problem.max_seqlen_q // (rows // heads)) * (problem.group_heads // heads)

    return min(tiles(rows) for rows in _FORWARD_ROWS)
