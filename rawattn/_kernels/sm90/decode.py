"""Host twin of kernels_cu/sm90/decode.cu: decoding (few queries on many keys) whose keys and values come by TMA."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import tile_tables
from rawattn._kernels.attention_params import KEYS
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode, decode_tiles
from rawattn._kernels.sm90 import forward, forward_steps, tma
from rawattn._kernels.source import round_up
from rawattn._kernels.steps import Steps
from rawattn._kernels.target import Target

ENTRY = "rawattn_sm90_decode"
TILES = "sm90_decode"  # the file of its tile tables
FEATURES = decode.FEATURES
LONG_SEQLEN = 4096  # the least seqlen_k for which the tiles of the table "long" are faster
# The tables "short" and "short_8bit" have smaller blocks, of which an SM runs two at once, so that the beginning and the end of
# one come beside another. They are used where there are more streams (sequences times tiles of heads) than SMs, for sequences
# that a block's waves read in at most _SHORT_TURNS turns; and where there are at most _SHORT_STREAMS streams an SM, for those
# of up to _SHORT_KEYS keys, or _SHORT_KEYS_8BIT keys of 8 bits up to the head dim _SHORT_DIM.
_SHORT_TURNS, _SHORT_STREAMS = 3, 2
_SHORT_KEYS, _SHORT_KEYS_8BIT, _SHORT_DIM = 1536, 3072, 128
# The tables "many" and "many_8bit" have still smaller blocks, of which an SM runs four. They are used where there are more than
# _MANY_STREAMS streams an SM. For sequences of up to _MANY_KEYS keys fewer are enough: _MANY_NARROW up to the head dim _NARROW,
# where an SM then runs more waves too, and _MANY_OTHER beyond it. The tables "many_wide" and "many_wide_8bit", for wide tiles,
# have two blocks on an SM: from one stream an SM, and from _MANY_WIDE_8BIT.
_MANY_STREAMS, _MANY_WIDE_8BIT = 3, 1.5
_MANY_KEYS, _NARROW, _MANY_NARROW, _MANY_OTHER = 2048, 64, 2, 2.5
_BLOCK_ROW_BYTES = 128  # of a row of the swizzle
_BARRIER_BYTES = 8  # of an mbarrier
# Boxes of so few rows bring whole rows where they can. Of more rows those of each block of columns take as long.
_FEW_BOX_ROWS = 16
_LEAST_BOX_ROWS = 8  # the rows of a swizzle's period; what a configuration whose boxes are not chosen yet counts with
_MORE_BYTES = 1024  # by which a slot may grow: the alignment of a tile in shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decode.Config):
    """The named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks"})
    NAME: ClassVar[str] = "sm90"
    ENTRY: ClassVar[str] = ENTRY
    FILE: ClassVar[str] = "sm90/decode.cu"
    EARLY: ClassVar[bool] = True

    box_rows: int = 0  # keys of a TMA box
    whole_rows: bool = False  # a box has all columns of its rows

    def summary(self) -> str:
        boxes = f"box_rows={self.box_rows}" + " whole" * self.whole_rows
        return f"{decode.Config.summary(self)} {boxes}"

    @property
    def stage_bytes(self) -> int:
        size = 1 if self.float8 else 2
        dims = self.headdim, self.headdim_v
        blocks = sum(-(-columns * size // _BLOCK_ROW_BYTES) for columns in dims)
        tile = blocks * self.tile_k * _BLOCK_ROW_BYTES
        # A wave's partial result shall fit a slot of its ring, and a slot 1024 bytes larger is worth that: then the next
        # segment's tiles can be loaded before this one is merged (docs/notes/decode.md).
        return tile + (_MORE_BYTES if tile < self.partial_bytes <= tile + _MORE_BYTES else 0)

    @property
    def extra_bytes_per_wave(self) -> int:
        """Bytes of shared memory for the mbarriers of a wave's ring, and for the page ids of its tiles."""
        boxes = self.tile_k // (self.box_rows or _LEAST_BOX_ROWS) if self.paged else 0
        ids = boxes * (4 if self.plain_integers else 8)
        early = self.tile_rows <= decode_tiles.TILE_ROWS
        ahead = max(2, self.stages - 1) if early else self.stages - 1  # kLooksAhead of the kernel
        slots = 1 << ahead.bit_length()
        return round_up(self.stages * _BARRIER_BYTES + slots * ids, 16)


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for this kernel, else None."""
    return decode.supports(problem, target, operands) or _unmapped(problem, target, operands)


def _unmapped(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why TMA cannot bring the keys and values of a call, else None."""
    if target.arch != forward.ARCH:
        return f"it is for {forward.ARCH}, not {target.arch}"
    if problem.dtype == "float32":
        return "the swizzle is of 16-bit elements"
    if min(problem.batch, problem.rows_q, problem.rows_k) == 0:
        return "an array is empty"
    if problem.pages is not None:
        if tma.copies_rows(problem):
            return f"a page of {problem.pages.page_size} keys is no whole number of boxes"
        if not 0 < problem.pages.num_pages < tma.MAX_PAGES:
            return f"a tensor map has from 1 to {tma.MAX_PAGES} pages"
    elif problem.rows_k > tma.MAX_ROWS:
        return f"an array has more than {tma.MAX_ROWS} rows"
    names = KEYS[problem.pages is not None]
    if not all(tma.aligned(problem, name, operands) for name in names):
        return "TMA reads rows that begin at multiples of 16 bytes"
    if not all(tma.mappable(problem, name, operands) for name in names):
        return "a tensor map cannot have the strides of keys or values"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports; operands: q, k, v and out."""

    def chosen(table: str) -> Config:
        return decode.choose_tiles(Config, TILES, table, problem, target, operands)

    if decode_tiles.wide(problem):
        config = chosen("wide_8bit" if problem.float8 else "wide")
    else:
        config = chosen("8bit" if problem.float8 else "any")
    if (table := _other_table(problem, target, config)) is not None:
        config = chosen(table)
    rows = config.tile_k
    if problem.pages is None:
        return replace(config, box_rows=rows)
    # Packed and other batches differ in the tensor maps of keys in rows alone, so with pages one kernel serves both.
    rows = math.gcd(problem.pages.page_size, rows)
    whole = rows <= _FEW_BOX_ROWS and _page_strides(problem, operands) is not None
    return replace(config, packed=False, box_rows=rows, whole_rows=whole)


def _other_table(problem: Problem, target: Target, usual: Config) -> str | None:
    """The tile table of a problem, if another is faster than that of its usual configuration."""
    bits = "_8bit" if problem.float8 else ""
    keys, dim = problem.max_seqlen_k, max(problem.headdim, problem.headdim_v)
    streams = decode.streams_per_sm(problem, target, usual.heads)
    if decode_tiles.wide(problem):
        table, least = f"many_wide{bits}", _MANY_WIDE_8BIT if problem.float8 else 1
        return table if dim <= tile_tables.serves(TILES, table) and streams > least else None
    many = streams > _MANY_STREAMS
    if keys <= _MANY_KEYS:
        many = streams > (_MANY_NARROW if dim <= _NARROW else _MANY_OTHER)
    if many and dim <= tile_tables.serves(TILES, f"many{bits}"):
        return f"many{bits}"
    most = _SHORT_TURNS * usual.tile_k * usual.waves
    if streams <= _SHORT_STREAMS:
        few_bytes = problem.float8 and dim <= _SHORT_DIM
        most = max(most, _SHORT_KEYS_8BIT if few_bytes else _SHORT_KEYS)
    if streams > 1 and keys <= most:
        return f"short{bits}"
    # Large key tiles read many keys in few turns. A window, or a short sequence, would end inside one.
    long = problem.window_left is None and keys >= LONG_SEQLEN
    return "long" if long and not problem.float8 else None


def _page_strides(problem: Problem, operands: Operands) -> tuple[int, int] | None:
    """`tma.page_strides_in_heads`, if the kernel finds the same strides by a quotient of 32 bits; else None."""
    found = tma.page_strides_in_heads(problem, operands)
    if found is None or found[0] != found[1]:
        return None
    return found if operands.strides[KEYS[True][0]][0] < 2**32 else None


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call."""
    config = choose(problem, target, operands)
    strides = _page_strides(problem, operands) if config.whole_rows else None
    maps = forward_steps.maps_of_keys(problem, operands, config.box_rows, strides)
    return decode.launches(config, problem, structure, operands, target, maps)
