"""Host twin of kernels_cu/sm90/forward.cu: which calls it takes, and the configuration of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rawattn._call.problem import Problem
from rawattn._kernels import features, tile_tables
from rawattn._kernels.operands import ITEMSIZE, Operands, access_bytes
from rawattn._kernels.sm90 import filling, tma
from rawattn._kernels.sm90 import forward_fit as fit
from rawattn._kernels.sm90.forward_config import (
    MOST_MASKED_KEYS,
    Config,
    blocks_per_sm,
    rows_of,
)
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.sm90.tma import MAX_PAGES, MAX_ROWS
from rawattn._kernels.target import Target
from rawattn._kernels.tile_tables import Row

TILES = "sm90_forward"  # the file of its tile tables
ARCH = "sm_90a"
FEATURES = features.names()

# Keys of a sequence from which on the tiles of the table "long" are the faster ones: more work a tile, less often begun.
LONG_SEQLEN = 8192

# Keys of a query tile from which on the last tiles are shared out by keys, from which on they may be, where that is expected
# to take less time, and the longest of unlike ones; by how many key tiles they must be done earlier for it, and how many a
# piece must have (docs/notes/hopper-forward.md).
STREAM_K_SEQLEN = LONG_SEQLEN
SHARED_SEQLEN = 1024
UNLIKE_SEQLEN = 2048
WORTH_SHARING = 8
LEAST_PIECE = 4

# Keys of a sequence from which on it pays to copy q, k and v where this kernel cannot read them as they lie
# (docs/notes/hopper-forward.md).
ALIGN_SEQLEN = 1024

# Of tiles for each multiprocessor: with more than these, how a table's usual tiles fill the machine matters less than what
# each takes, which the tables say best. Of calls with what joins scores, whose longest causal tile may take as long as two
# rounds of all; of others, and of those with short sequences, which blocks with a bias or ALiBi that share a multiprocessor
# are the faster ones for up to more rows, and blocks under a mask up to fewer.
_FEW_ROUNDS, _SOME_ROUNDS, _SHORT_SEQLEN, _SHORT_SCORED_SEQLEN, _LONE_SEQLEN = 2, 8, 512, 640, 64
_SHORT_MASKED_SEQLEN = 400
# Keys of a sequence from which on blocks do not share a multiprocessor: each reads them for itself.
_CROWDED_KEYS = 1024
# Columns of a window, up to which a mask of keys has registers beside it.
_MASKED_WINDOW_COLUMNS = 192
# Another row of the tables must be expected to take less than this of the usual one's time.
_WORTH_CHANGING = 0.96
# Blocks that share a multiprocessor: of ragged batches four have no registers.
_MOST_BLOCKS, _MOST_RAGGED_BLOCKS = 4, 3
_EQUAL = 1.02

# At most of one of two consumers, where who finds pages needs what is left, and where those copy rows of up to 128 columns:
# beyond, consumers have none to spare, and tiles fewer rows.
_FINDING_REGISTERS, _COPYING_REGISTERS = 224, 208


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for this kernel, else None."""
    if target.arch != ARCH:
        return f"it is for {ARCH}, not {target.arch}"
    if problem.dtype == "float32":
        return "its products take 16-bit elements"
    copied = tma.unaligned(problem, operands)
    if copied and not _aligning_pays(problem, operands):
        return f"{', '.join(copied)} would be copied for TMA, and that does not pay"
    if min(problem.batch, problem.rows_q, problem.rows_k) == 0:
        return "an array is empty"
    if problem.num_splits is not None and problem.num_splits > 1:
        return "it splits no keys on request"
    if problem.rows_q > MAX_ROWS or (problem.pages is None and problem.rows_k > MAX_ROWS):
        return f"an array has more than {MAX_ROWS} rows"
    if (reason := _pages_refused(problem, operands)) is not None:
        return reason
    for name in tma.loaded(problem):
        if not tma.mappable(problem, name, operands):
            return f"a tensor map cannot have the strides of {name}"
    return None


def _pages_refused(problem: Problem, operands: Operands) -> str | None:
    """Why keys in pages are not for this kernel, else None."""
    form = problem.pages
    if form is None:
        return None
    if not 0 < form.num_pages < MAX_PAGES:
        return f"a tensor map has from 1 to {MAX_PAGES} pages"
    if tma.copies_rows(problem) and not tma.near(problem, operands):
        return f"pages of {form.page_size} keys lie further apart than rows are found"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports."""
    if masks_keys(problem):
        plain = choose(replace(problem, mask=None), target, operands)
        return replace(plain, key_mask=True, cluster=1)
    fields, shared = _fields(problem, target, max(problem.headdim, problem.headdim_v))
    between = operands.strides.get("out", ())[:-1]
    store_bytes = access_bytes(problem.headdim_v * 2, operands.pointers, *between)
    if problem.max_seqlen_q < LONG_SEQLEN or problem.mask is not None or problem.pages is not None:
        # Of few queries a cluster's last block has none, and takes a multiprocessor all the same. Under a mask, its
        # blocks would visit key tiles for each other. Boxes of pages are small already.
        fields["cluster"] = 1
    if problem.pages is not None and fields["consumers"] == 2:
        copies = tma.copies_rows(problem) and max(problem.headdim, problem.headdim_v) <= 128
        most = _COPYING_REGISTERS if copies else _FINDING_REGISTERS
        fields["consumer_registers"] = min(fields["consumer_registers"], most)
    # Of ragged batches, and under masks, whose tiles are stored often: others gain nothing by it. Stages of a bias need the
    # room more.
    often = problem.ragged or (problem.mask is not None and problem.bias is None)
    storable = store_bytes == 16 and tma.mappable(problem, "out", operands)
    fields["tensor_stores"] &= often and storable
    known = features.features(problem, operands).known_to(Config)
    fields["late_scaling"] &= not known["bias"]
    config = Config(
        element=problem.dtype,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        **fields,
        **known,
        store_bytes=store_bytes,
        stream_k=shared,
    )
    config = fit.with_heads(fit.with_room(config, target), problem)
    config = fit.with_bias(config, problem, target, operands)
    if problem.pages is not None:
        copied = tma.copies_rows(problem)
        config = replace(
            config,
            page_rows=1 if copied else math.gcd(problem.pages.page_size, config.tile_k),
            whole_rows=not copied and tma.next_pages(problem, operands) is not None,
        )
    return fit.with_ramp(fit.with_query_slots(config, target), problem, target)


def masks_keys(problem: Problem) -> bool:
    """Whether a mask is read as it comes: bools of few keys alone, side by side, in a dense call with nothing else that changes
    scores or drops probabilities. Learned sinks may be there.

    Tiles of more keys may be shared out, for which their number must be known before. Beside lengths, and beside a window of
    many columns, there are no registers left.
    """
    form = problem.mask
    if form is None or form.dtype != "bool" or form.shape[1:3] != (1, 1) or form.shape[3] == 1:
        return False
    if not form.dense:
        return False
    wide = max(problem.headdim, problem.headdim_v) > _MASKED_WINDOW_COLUMNS
    if problem.ragged or (problem.window_left is not None and wide):
        return False
    return problem.plain_scores and problem.max_seqlen_k < min(MOST_MASKED_KEYS, SHARED_SEQLEN)


def shareable(problem: Problem, seqlen: int) -> bool:
    """Whether query tiles may be shared out by keys: alike ones of so many, and of dense batches causal ones too."""
    if problem.num_splits is not None:
        return False
    longest = filling.extremes(problem)[1]
    if filling.by_length(problem):
        # How long lists of a mask are the host does not know.
        return problem.mask is None and longest >= UNLIKE_SEQLEN
    return longest >= seqlen and filling.alike(problem)


def least_piece(problem: Problem, tile_k: int) -> int:
    """Key tiles of a piece at least: of shorter ones a tile has so many that to merge them takes longer than to make them."""
    shortest = math.sqrt(filling.ITEM_KEYS * filling.extremes(problem)[1])
    return max(LEAST_PIECE, math.ceil(shortest / tile_k))


def worth_sharing(problem: Problem, rows: int, heads: int, workers: int) -> int:
    """By how many key tiles the tiles that are shared out must be done earlier. rows, heads: of a tile."""
    idle = filling.count(problem, rows * heads, heads) < workers
    return WORTH_SHARING // 2 if idle and not filling.by_length(problem) else WORTH_SHARING


def _in_equal_rounds(problem: Problem, idle: bool) -> bool:
    """Whether all query tiles have the same keys, and every multiprocessor has one of its own. idle: some have none."""
    limits = problem.window_left, problem.window_right
    alike = limits == (None, None) and problem.mask is None
    return not idle and not problem.ragged and alike


def _aligning_pays(problem: Problem, operands: Operands) -> bool:
    if problem.pages is not None:
        return False  # all pages would be copied, for the sake of some
    # Copies 2 bytes wide, which the portable kernel would make of every tile, cost it most of its speed.
    return problem.max_seqlen_k >= ALIGN_SEQLEN or operands.copy_bytes(problem) == 2


def _fields(problem: Problem, target: Target, wide: int) -> tuple[dict[str, Any], bool]:
    """Of the row to take, and whether its last tiles are shared out by keys.

    The row is its table's, but where another one would be done sooner for how it fills the machine.
    """
    table = _table(problem)
    usual = _usual(problem, wide)
    rows = rows_of(usual["consumers"])
    tiles = filling.count(problem, rows, heads_per_tile(problem, rows))
    # Of a kernel that is only compiled nobody knows how many multiprocessors there are.
    if target.multiprocessors == 1:
        return usual, problem.mask is None and shareable(problem, STREAM_K_SEQLEN)
    idle = tiles < target.multiprocessors
    if _in_equal_rounds(problem, idle) and shareable(problem, STREAM_K_SEQLEN):
        return usual, True
    # Lists of a mask are unlike: whoever has none gains by a part of another's, and others by the longest first.
    shares = shareable(problem, SHARED_SEQLEN) and (idle or problem.mask is None)
    # What is held or drawn needs registers that no other row leaves it.
    bound = table in ("held", "dropout")
    plain = table in ("any", "long", "left", "narrow_values") or table.startswith("paged")
    crowded = _may_crowd(problem, table, wide)
    # What scores take beside products, a lone consumer hides behind those of other blocks alone.
    longest = _SHORT_SCORED_SEQLEN if crowded and not plain else _SHORT_SEQLEN
    short = not bound and problem.max_seqlen_q <= longest
    short &= crowded or problem.max_seqlen_q > _LONE_SEQLEN
    limit = _SOME_ROUNDS if plain else _FEW_ROUNDS
    if problem.ragged and not problem.group and problem.pages is None:
        limit = 1  # how much of a padded batch is real nobody knows: only of short sequences and few tiles it does not matter
    if tiles >= limit * target.multiprocessors and not short:
        return usual, False
    others: list[Mapping[str, Any]] = []
    if not bound:
        most = (_MOST_RAGGED_BLOCKS if problem.ragged else _MOST_BLOCKS) if crowded else 1
        others = [
            row.fields
            for row in _rows("few", wide)
            if row.measured is not None and _blocks(row.fields) <= most
        ]
        if table in ("any", "long"):
            others += (row.fields for row in (*_rows("any", wide), *_rows("long", wide)))
        if table == "paged":
            others += (row.fields for row in _rows(table, wide)[1:])

    def duration(choice: tuple[Mapping[str, Any], bool], lengths: Problem) -> float:
        fields, shared = choice
        heads = heads_per_tile(problem, rows_of(fields["consumers"]))
        least = least_piece(lengths, fields["tile_k"]) if shared else 0
        return filling.duration(
            lengths, target.multiprocessors, fields, heads, _blocks(fields), least
        )

    rows_of_tables = (usual, *others)
    choices = [(fields, False) for fields in rows_of_tables]
    choices += [(fields, True) for fields in rows_of_tables if shares and _blocks(fields) == 1]
    durations = [duration(each, problem) for each in choices]
    if problem.ragged and problem.group and problem.pages is None:
        # Of sequences as long as they may be, and as long as they are on average: both must say so.
        worth = _WORTH_CHANGING * durations[0]
        by_mean = [duration(each, filling.averaged(problem)) for each in choices]
        durations = [
            mean if each < worth else math.inf
            for mean, each in zip(by_mean, durations, strict=True)
        ]
        durations[0] = by_mean[0]
    if min(durations) >= _WORTH_CHANGING * durations[0]:
        return usual, False
    # Of what is as good as equal the first: tables say better than the rule of thumb which tile takes less.
    best = next(n for n, each in enumerate(durations) if each <= _EQUAL * min(durations))
    fields, shared = choices[best]
    return dict(fields), shared


def _may_crowd(problem: Problem, table: str, wide: int) -> bool:
    """Whether blocks may share a multiprocessor.

    They have registers for scaled scores and for masks, and at small head dims for ALiBi or a bias that comes in slots; none
    for who finds pages. Beyond short sequences a mask's larger tiles win: each tile's list is walked, and its bits are read.
    """
    if problem.max_seqlen_k >= _CROWDED_KEYS or problem.pages is not None:
        return False
    if table == "masked":
        return problem.max_seqlen_q <= _SHORT_MASKED_SEQLEN
    if table in ("bias", "alibi"):
        bias, slopes = problem.bias, problem.alibi_slopes
        alone = bias.dense and slopes is None if bias is not None else slopes is not None
        return alone and wide <= 64 and problem.softcap is None and problem.score_mod is None
    return table in ("any", "long") and problem.plain_scores


def _blocks(fields: Mapping[str, Any]) -> int:
    return blocks_per_sm(fields["consumers"], fields["consumer_registers"])


def _rows(table: str, wide: int) -> list[Row]:
    """Of a table those for a head dim."""
    fitting = [row for row in tile_tables.table(TILES, table) if wide <= row.headdim]
    return [row for row in fitting if row.headdim == fitting[0].headdim]


def _usual(problem: Problem, wide: int) -> dict[str, Any]:
    """The first row of the problem's table."""
    return _rows(_table(problem), wide)[0].fields


def _table(problem: Problem) -> str:
    # What is drawn or read under the products, as much as scores, stays in registers until those are there.
    beside = problem.bias is not None or problem.mask is not None
    if problem.dropout_p > 0 and not beside:
        return "dropout"
    if problem.dropout_p > 0 or (problem.bias is not None and ITEMSIZE[problem.bias.dtype] == 4):
        return "held"
    # Few rows meet fewer tiles of a mask, and whole 16 bytes of its bits are read at once.
    if problem.mask is not None:
        return "masked"
    if problem.bias is not None:
        return "bias"
    # Who finds pages needs more registers than who finds rows.
    if problem.pages is not None:
        if problem.float8:
            return "paged_8bit"
        return "paged_rows" if tma.copies_rows(problem) else "paged"
    # With a limit on the left a thread has more to remember, and a window is better met by small key tiles.
    if problem.window_left is not None:
        return "left"
    slopes = problem.alibi_slopes is not None or features.features(problem).mod_line
    if slopes and problem.softcap is None:
        return "alibi_long" if problem.max_seqlen_k >= LONG_SEQLEN else "alibi"
    # Keys wider than 128 columns leave room for a larger tile where the output takes fewer registers.
    if problem.headdim_v <= 128 < problem.headdim:
        return "narrow_values"
    return "long" if problem.max_seqlen_k >= LONG_SEQLEN else "any"
