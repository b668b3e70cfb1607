"""Host twin of kernels_cu/sm90/forward.cu: which calls it takes, and the configuration of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rawattn._call.problem import Problem
from rawattn._kernels import features, tile_tables
from rawattn._kernels.operands import ITEMSIZE, Operands, access_bytes
from rawattn._kernels.sm90 import forward_fit as fit
from rawattn._kernels.sm90 import line_estimate, query_tiles, time_estimate, tma
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

# The least seqlen_k for which the tables "long" and "alibi_long" are used, whose larger tiles begin and end less often. It is
# also the least seqlen_q for which blocks run in clusters, where the table says so.
LONG_SEQLEN = 8192

# Few query rows on cached keys, in pairs of blocks: the most tiles of the heads that share one, the head dim from which on
# there may be more of them, and the least number of all tiles for each SM (docs/notes/hopper-forward.md).
_MOST_TILES_IN_PAIRS, _WIDE_PAIRS, _PAIRS_FILL = 6, 192, 0.9

# Stream-K splits the keys of the last query tiles among all blocks. Its limits (docs/notes/hopper-forward.md):
# Keys of a query tile from which on the last tiles are split without an estimate, where all tiles are alike.
STREAM_K_ALWAYS_KEYS = LONG_SEQLEN
# Keys of a query tile from which on the last tiles are split where that is expected to take less time.
STREAM_K_LEAST_KEYS = 1024
# Keys of the longest query tile from which on causal tiles of unlike length are split.
STREAM_K_LEAST_KEYS_UNLIKE = 2048
# Splitting must end the tiles earlier by the time of this many key tiles.
LEAST_GAIN_TILES = 8
# The fewest key tiles of a piece.
LEAST_PIECE_TILES = 4

# The least seqlen_k for which it pays to copy those of q, k and v that TMA cannot read as they lie
# (docs/notes/hopper-forward.md).
ALIGN_SEQLEN = 1024

# A call of many query tiles takes the usual row of its table without an estimate of other rows: the time of a tile then matters
# more than the last round, and the tables give it best. Many are _ROUNDS_ENOUGH_PLAIN tiles an SM, or _ROUNDS_ENOUGH_SCORED in
# calls that do more to scores (bias, ALiBi, mask, dropout), where the longest causal tile may take as long as two rounds.
# Short sequences get the estimate whatever the number of tiles: those of up to _SHORT_SEQLEN query rows, or with a bias or
# ALiBi of up to _SHORT_SCORED_SEQLEN where blocks may share an SM. Where they may not, _ONE_CONSUMER_SEQLEN rows and fewer do
# not count as short: one consumer of 64 rows that has an SM to itself is slower than the usual, larger tile.
_ROUNDS_ENOUGH_SCORED, _ROUNDS_ENOUGH_PLAIN = 2, 12
_SHORT_SEQLEN, _SHORT_SCORED_SEQLEN, _ONE_CONSUMER_SEQLEN = 512, 640, 64
# The most query rows of a sequence under a mask whose blocks may share an SM.
_SHORT_MASKED_SEQLEN = 400
# The fewest keys of a query tile for which blocks do not share an SM, because each of them reads all of them for itself.
_ONE_BLOCK_LEAST_KEYS = 1024
# The largest head dim at which there are registers for a mask of keys beside a left window.
_KEY_MASK_WINDOW_MAX_HEADDIM = 192
# Another row replaces the usual one if it is expected to take less than this fraction of the usual one's time.
_WORTH_CHANGING = 0.98
# Rows with two consumers replace the usual one with three up to this factor of its time, in fewer rounds than these
# (`_fits_rows_better`).
_ABOUT_AS_LONG, _FIT_ROUNDS = 1.04, 8
_MANY_KEYS = 2048
# A line that weighs last tiles replaces those rows if it is expected to take less than this fraction of their time.
_WEIGHED_WORTH_CHANGING = 0.97
# The most blocks that share an SM. Kernels for ragged batches have too few registers at four.
_MOST_BLOCKS, _MOST_RAGGED_BLOCKS = 4, 3
# Rows whose expected times differ by no more than this factor count as equally fast.
_EQUAL = 1.02

# The most registers of a consumer's thread where a block has two consumers and keys are in pages. The producer needs the rest:
# to look up pages, and more where its lanes also copy rows of up to 128 columns. Beyond 128 columns consumers cannot spare
# as many, and a key tile has fewer rows to copy.
_CONSUMER_REGISTERS_PAGED, _CONSUMER_REGISTERS_PAGED_ROWS = 224, 208


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
    if tma.copies_rows(problem) and not tma.page_offsets_fit_32_bits(problem, operands):
        return f"pages of {form.page_size} keys lie further apart than rows are found"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports."""
    if masks_keys(problem):
        plain = choose(replace(problem, mask=None), target, operands)
        return replace(plain, key_mask=True, cluster=1)
    fields, split_keys = _fields(problem, target, max(problem.headdim, problem.headdim_v))
    between = operands.strides.get("out", ())[:-1]
    store_bytes = access_bytes(problem.headdim_v * 2, operands.pointers, *between)
    if problem.max_seqlen_q < LONG_SEQLEN or problem.mask is not None or problem.pages is not None:
        # With few queries the last block of a cluster has no rows and occupies an SM all the same. Under a mask the
        # blocks of a cluster would visit each other's key tiles. Boxes of pages are too small to be divided among blocks.
        fields["cluster"] = 1
    if problem.pages is not None and fields["consumers"] == 2:
        copies = tma.copies_rows(problem) and max(problem.headdim, problem.headdim_v) <= 128
        most = _CONSUMER_REGISTERS_PAGED_ROWS if copies else _CONSUMER_REGISTERS_PAGED
        fields["consumer_registers"] = min(fields["consumer_registers"], most)
    # Stores by TMA pay where tiles are stored often: in ragged batches and under masks. Other calls gain nothing by them.
    # Where a bias stands beside the mask, its slots need the shared memory more.
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
        stream_k=split_keys,
    )
    config = fit.with_heads(fit.with_room(config, target), problem)
    config = fit.with_bias(config, problem, target, operands)
    if problem.pages is not None:
        copied = tma.copies_rows(problem)
        config = replace(
            config,
            page_rows=1 if copied else math.gcd(problem.pages.page_size, config.tile_k),
            whole_rows=not copied and tma.page_strides_in_heads(problem, operands) is not None,
        )
    if _works_in_pairs(problem, config, target):
        config = replace(config, cluster=2)
    return fit.with_ramp(fit.with_query_slots(config, target), problem, target)


def _works_in_pairs(problem: Problem, config: Config, target: Target) -> bool:
    """Whether pairs of blocks load keys for each other, for few query rows that meet many cached keys.

    Two tiles of the same heads make a pair. The last tile often has few rows, for which alone its keys would come. No tile may
    be left over, and pairs must fill the GPU.
    """
    plain = problem.plain_scores and problem.mask is None and problem.window_left is None
    if problem.ragged or problem.pages is not None or not plain:
        return False
    if config.stream_k or config.interleaved or config.blocks_per_sm > 1:
        return False
    if problem.max_seqlen_k < LONG_SEQLEN or not query_tiles.alike(problem):
        return False
    tiles = -(-problem.rows_q // config.tile_q)
    wide = max(problem.headdim, problem.headdim_v)
    if tiles % 2 or wide <= 64 or (tiles > _MOST_TILES_IN_PAIRS and wide < _WIDE_PAIRS):
        return False
    if config.consumers == 2 and wide <= 128:  # registers are spilled
        return False
    count = query_tiles.count(problem, config.tile_rows, config.heads_per_tile)
    return count >= _PAIRS_FILL * target.multiprocessors


def masks_keys(problem: Problem) -> bool:
    """Whether the kernel reads a mask's bools itself, so that no earlier launch makes bits and lists of tiles.

    It does for bools that differ by sequence and key alone and lie side by side, in a dense call of few keys where nothing
    else changes scores or drops probabilities. Learned sinks may be there. With more keys query tiles may be split by keys,
    for which the number of key tiles must be known beforehand. Beside lengths, and beside a left window at large head dims,
    there are no registers left.
    """
    form = problem.mask
    if form is None or form.dtype != "bool" or form.shape[1:3] != (1, 1) or form.shape[3] == 1:
        return False
    if not form.dense:
        return False
    wide = max(problem.headdim, problem.headdim_v) > _KEY_MASK_WINDOW_MAX_HEADDIM
    if problem.ragged or (problem.window_left is not None and wide):
        return False
    most = min(MOST_MASKED_KEYS, STREAM_K_LEAST_KEYS)
    return problem.plain_scores and problem.max_seqlen_k < most


def may_split_keys(problem: Problem, seqlen: int) -> bool:
    """Whether the keys of query tiles may be split among blocks.

    Tiles with about as many keys as each other may be from `seqlen` keys on, unlike ones of dense causal batches from
    `STREAM_K_LEAST_KEYS_UNLIKE` on.
    """
    if problem.num_splits is not None:
        return False
    # An int counts the units of a line. Only pages have room for more keys.
    if problem.rows_k > MAX_ROWS:
        return False
    longest = query_tiles.fewest_and_most_keys(problem)[1]
    if query_tiles.splits_by_length(problem):
        # The host does not know the lengths of a mask's lists.
        return problem.mask is None and longest >= STREAM_K_LEAST_KEYS_UNLIKE
    return longest >= seqlen and query_tiles.alike(problem)


def least_piece_tiles(problem: Problem, tile_k: int) -> int:
    """The fewest key tiles of a piece. With shorter pieces, merging those of a query tile takes longer than computing them."""
    _, longest = query_tiles.fewest_and_most_keys(problem)
    shortest = math.sqrt(line_estimate.ITEM_MERGE_COST_KEYS * longest)
    return max(LEAST_PIECE_TILES, math.ceil(shortest / tile_k))


def least_gain(problem: Problem, rows: int, heads: int, workers: int) -> int:
    """By how many key tiles' time splitting must end the split tiles earlier.

    rows: query rows of each head that the schedule hands out together; heads: those whose rows share a tile.
    """
    idle = query_tiles.count(problem, rows * heads, heads) < workers
    halved = idle and not query_tiles.splits_by_length(problem)
    return LEAST_GAIN_TILES // 2 if halved else LEAST_GAIN_TILES


def _in_equal_rounds(problem: Problem, idle: bool) -> bool:
    """Whether all query tiles have equally many keys, and every SM has at least one tile. idle: some SMs have none."""
    limits = problem.window_left, problem.window_right
    alike = limits == (None, None) and problem.mask is None
    return not idle and not problem.ragged and alike


def _aligning_pays(problem: Problem, operands: Operands) -> bool:
    if problem.pages is not None:
        return False  # all pages of the cache would be copied, though a call reads some of them
    # Otherwise the portable kernel takes the call. Copies of 2 bytes each cost that kernel most of its speed.
    return problem.max_seqlen_k >= ALIGN_SEQLEN or operands.copy_bytes(problem) == 2


def _fields(problem: Problem, target: Target, wide: int) -> tuple[dict[str, Any], bool]:
    """The fields of the table row to take, and whether the keys of its last query tiles are split among blocks.

    The row is the usual one of the problem's table, unless another row fills the SMs so much better that it is expected to be
    done sooner.
    """
    table = _table(problem)
    usual = _usual(problem, wide)
    rows = rows_of(usual["consumers"])
    tiles = query_tiles.count(problem, rows, heads_per_tile(problem, rows))
    # One stands for an unknown number of SMs: the kernel is only compiled.
    if target.multiprocessors == 1:
        return usual, problem.mask is None and may_split_keys(problem, STREAM_K_ALWAYS_KEYS)
    idle = tiles < target.multiprocessors
    if _in_equal_rounds(problem, idle) and may_split_keys(problem, STREAM_K_ALWAYS_KEYS):
        return usual, True
    # The lists of a mask differ in length. Where SMs are idle it pays to split them; else whole tiles, longest list first, win.
    may_split = may_split_keys(problem, STREAM_K_LEAST_KEYS) and (idle or problem.mask is None)
    # A float32 bias and the random bits of dropout are held in registers that only the rows of these tables leave free.
    bound = table in ("held", "dropout")
    plain = table in ("any", "long", "left", "narrow_values") or table.startswith("paged")
    shares_sm = _may_share_sm(problem, table, wide)
    # A block's only consumer can overlap its work on scores with the products of other blocks of the SM alone.
    longest = _SHORT_SCORED_SEQLEN if shares_sm and not plain else _SHORT_SEQLEN
    length = problem.max_seqlen_q
    if shares_sm and table == "left":
        # Under a window the tiles of long sequences are as short as those of short ones.
        length = min(length, query_tiles.fewest_and_most_keys(problem)[1])
    short = not bound and length <= longest
    short &= shares_sm or problem.max_seqlen_q > _ONE_CONSUMER_SEQLEN
    limit = _ROUNDS_ENOUGH_PLAIN if plain else _ROUNDS_ENOUGH_SCORED
    if problem.ragged and not problem.packed and problem.pages is None:
        # The host does not know how much of a padded batch is padding. Only for few tiles and short sequences this is harmless.
        limit = 1

    def duration(fields: Mapping[str, Any], split_keys: bool, enough: float = math.inf) -> float:
        heads = heads_per_tile(problem, rows_of(fields["consumers"]))
        least = least_piece_tiles(problem, fields["tile_k"]) if split_keys else 0
        return time_estimate.duration(
            problem, target.multiprocessors, fields, heads, _blocks(fields), least, enough
        )

    weighed = may_split and _weighs_last_tiles(problem, usual, target)
    if tiles >= limit * target.multiprocessors and not short:
        pays = weighed and duration(usual, True) < _WORTH_CHANGING * duration(usual, False)
        return usual, pays
    others: list[Mapping[str, Any]] = []
    if not bound:
        most = _most_blocks(problem) if shares_sm else 1
        others = [
            row.fields
            for row in _rows("few", wide)
            if row.measured is not None and _blocks(row.fields) <= most
        ]
        if table in ("any", "long"):
            others += (row.fields for row in (*_rows("any", wide), *_rows("long", wide)))
        if table == "paged":
            others += (row.fields for row in _rows(table, wide)[1:])

    rows_of_tables: list[Mapping[str, Any]] = []
    for row in (usual, *others):  # tables share rows
        if row not in rows_of_tables:
            rows_of_tables.append(row)
    choices = [(fields, False) for fields in rows_of_tables]
    choices += [(fields, True) for fields in rows_of_tables if may_split and _blocks(fields) == 1]
    durations: list[float] = []
    for fields, split_keys in choices:
        enough = _EQUAL * min(durations, default=math.inf)
        durations.append(duration(fields, split_keys, enough))
    if min(durations) >= _WORTH_CHANGING * durations[0]:
        longest_time = _ABOUT_AS_LONG * durations[0]
        about_as_long = usual
        enough = durations[0]  # for a line that weighs last tiles
        few = tiles < min(limit, _FIT_ROUNDS) * target.multiprocessors
        for fields in others if few else ():
            fits = _fits_rows_better(problem, usual, fields)
            if fits and (time := duration(fields, False, longest_time)) <= longest_time:
                about_as_long = dict(fields)
                enough = _WEIGHED_WORTH_CHANGING * time
                break
        if weighed and duration(usual, True) < enough:
            return usual, True
        return about_as_long, False
    # The first of those that are about equally fast: the order of the tables is measured, the times are estimates.
    best = next(n for n, each in enumerate(durations) if each <= _EQUAL * min(durations))
    fields, split_keys = choices[best]
    return dict(fields), split_keys


def _weighs_last_tiles(problem: Problem, fields: Mapping[str, Any], target: Target) -> bool:
    """Whether a line of split tiles of this shape would weigh last tiles."""
    if _blocks(fields) > 1 or fields.get("cluster", 1) > 1:
        return False
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    shape = consumers, tile_k, heads_per_tile(problem, rows_of(consumers))
    least = least_piece_tiles(problem, tile_k)
    return line_estimate.last_share(problem, *shape, target.multiprocessors, least) > 0


def _fits_rows_better(
    problem: Problem, usual: Mapping[str, Any], fields: Mapping[str, Any]
) -> bool:
    """Whether whole tiles of two consumers, one block on each SM, replace the usual ones of three where both are expected to
    take about as long (`_ABOUT_AS_LONG`).

    On thousands of keys tiles of three consumers take longer than `time_estimate` says. In the last tile of each head one or
    two of them may have no rows, and it takes as long as the others.
    """
    if (usual["consumers"], fields["consumers"]) != (3, 2) or _blocks(fields) > 1:
        return False
    if problem.packed or problem.mask is not None or not problem.plain_scores:
        return False
    wide = max(problem.headdim, problem.headdim_v)
    if not 96 < wide <= 128 or fields["tile_k"] != 128:
        return False
    return query_tiles.alike(problem) and problem.max_seqlen_k >= _MANY_KEYS


def _may_share_sm(problem: Problem, table: str, wide: int) -> bool:
    """Whether several blocks may share an SM.

    Such blocks have registers for plain scores and for masks, and up to head dim 64 for ALiBi or for a bias that comes to
    slots. Under a window they also have them for ALiBi or for a score function, and up to head dim 96 for a softcap. They have
    none for a producer that looks up pages. Under a mask larger tiles are faster except for short sequences, since each tile
    walks its own list of key tiles and reads its bits.
    """
    keys = problem.max_seqlen_k
    if table == "left":
        keys = query_tiles.fewest_and_most_keys(problem)[1]
    if keys >= _ONE_BLOCK_LEAST_KEYS or problem.pages is not None:
        return False
    if table == "masked":
        return problem.max_seqlen_q <= _SHORT_MASKED_SEQLEN
    if table in ("bias", "alibi"):
        bias, slopes = problem.bias, problem.alibi_slopes
        alone = bias.dense and slopes is None if bias is not None else slopes is not None
        return alone and wide <= 64 and problem.softcap is None and problem.score_mod is None
    if table == "left":
        options = (problem.softcap, problem.alibi_slopes, problem.score_mod)
        alone = sum(option is not None for option in options) == 1
        return problem.plain_scores or (alone and (problem.softcap is None or wide <= 96))
    return table in ("any", "long") and problem.plain_scores


def _most_blocks(problem: Problem) -> int:
    """The most blocks that share an SM where they may (`_may_share_sm`)."""
    return _MOST_RAGGED_BLOCKS if problem.ragged else _MOST_BLOCKS


def _blocks(fields: Mapping[str, Any]) -> int:
    return blocks_per_sm(fields["consumers"], fields["consumer_registers"])


def _rows(table: str, wide: int) -> list[Row]:
    """The rows of a table that serve a head dim."""
    fitting = [row for row in tile_tables.table(TILES, table) if wide <= row.headdim]
    return [row for row in fitting if row.headdim == fitting[0].headdim]


def _usual(problem: Problem, wide: int) -> dict[str, Any]:
    """The first row of the problem's table."""
    return _rows(_table(problem), wide)[0].fields


def _table(problem: Problem) -> str:
    # Random bits and float32 biases come while the products are under way. They fill as many registers as the scores do.
    beside = problem.bias is not None or problem.mask is not None
    if problem.dropout_p > 0 and not beside:
        return "dropout"
    if problem.dropout_p > 0 or (problem.bias is not None and ITEMSIZE[problem.bias.dtype] == 4):
        return "held"
    # Query tiles of few rows meet fewer key tiles of a mask. Key tiles of 128 keys have 16 bytes of its bits a row: one load.
    if problem.mask is not None:
        return "masked"
    if problem.bias is not None:
        return "bias"
    # A producer that looks up pages needs more registers than one that loads rows.
    if problem.pages is not None:
        if problem.float8:
            return "paged_8bit"
        return "paged_rows" if tma.copies_rows(problem) else "paged"
    # A left limit takes registers, and small key tiles fit the edges of a window better.
    if problem.window_left is not None:
        return "left"
    slopes = problem.alibi_slopes is not None or features.features(problem).mod_line
    if slopes and problem.softcap is None:
        return "alibi_long" if problem.max_seqlen_k >= LONG_SEQLEN else "alibi"
    # Where keys have more than 128 columns and values do not, the output takes fewer registers, which leaves some for a larger
    # key tile.
    if problem.headdim_v <= 128 < problem.headdim:
        return "narrow_values"
    return "long" if problem.max_seqlen_k >= LONG_SEQLEN else "any"
