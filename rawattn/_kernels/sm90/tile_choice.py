"""Which row of its tile tables Hopper's forward takes, and whether the keys of its last query tiles are split among blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rawattn._call.problem import Problem
from rawattn._kernels import features, tile_tables
from rawattn._kernels.operands import ITEMSIZE
from rawattn._kernels.sm90 import line_estimate, query_tiles, stream_k, time_estimate, tma
from rawattn._kernels.sm90.forward_config import blocks_per_sm, rows_of
from rawattn._kernels.sm90.packed_lengths import as_long_as_likely
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.target import Target
from rawattn._kernels.tile_tables import Row

TILES = "sm90_forward"  # the file of the tile tables

# The least seqlen_k for which the tables "long" and "alibi_long" are used, whose larger tiles begin and end less often. It is
# also the least seqlen_q for which blocks run in clusters, where the table says so.
LONG_SEQLEN = 8192

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


def choose(problem: Problem, target: Target) -> tuple[dict[str, Any], bool]:
    """The fields of the table row to take, and whether the keys of its last query tiles are split among blocks.

    The row is the usual one of the problem's table, unless another row fills the SMs so much better that it is expected to be
    done sooner.
    """
    problem = as_long_as_likely(problem)
    table, wide = table_of(problem), max(problem.headdim, problem.headdim_v)
    usual = dict(rows_of_table(table, wide)[0].fields)
    rows = rows_of(usual["consumers"])
    tiles = query_tiles.count(problem, rows, heads_per_tile(problem, rows))
    # One stands for an unknown number of SMs: the kernel is only compiled.
    if target.multiprocessors == 1:
        return usual, problem.mask is None and stream_k.may_split_keys(
            problem, stream_k.ALWAYS_KEYS
        )
    idle = tiles < target.multiprocessors
    if _in_equal_rounds(problem, idle) and stream_k.may_split_keys(problem, stream_k.ALWAYS_KEYS):
        return usual, True
    # The lists of a mask differ in length. Where SMs are idle it pays to split them; else whole tiles, longest list first, win.
    may_split = stream_k.may_split_keys(problem, stream_k.LEAST_KEYS) and (
        idle or problem.mask is None
    )
    # A float32 bias and the random bits of dropout are held in registers that only the rows of these tables leave free.
    bound = table in ("held", "dropout")
    plain = table in ("any", "long", "left", "narrow_values") or table.startswith("paged")
    shares_sm = may_share_sm(problem, table, wide)
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
        least = stream_k.least_piece_tiles(problem, fields["tile_k"]) if split_keys else 0
        return time_estimate.duration(
            problem, target.multiprocessors, fields, heads, blocks_of(fields), least, enough
        )

    weighed = may_split and _weighs_last_tiles(problem, usual, target)
    if tiles >= limit * target.multiprocessors and not short:
        pays = weighed and duration(usual, True) < _WORTH_CHANGING * duration(usual, False)
        return usual, pays
    others: list[Mapping[str, Any]] = []
    if not bound:
        most = most_blocks(problem) if shares_sm else 1
        others = [
            row.fields
            for row in rows_of_table("few", wide)
            if row.measured is not None and blocks_of(row.fields) <= most
        ]
        if table in ("any", "long"):
            others += (
                row.fields for row in (*rows_of_table("any", wide), *rows_of_table("long", wide))
            )
        if table == "paged":
            others += (row.fields for row in rows_of_table(table, wide)[1:])

    distinct: list[Mapping[str, Any]] = []
    for row in (usual, *others):  # tables share rows
        if row not in distinct:
            distinct.append(row)
    choices = [(fields, False) for fields in distinct]
    choices += [(fields, True) for fields in distinct if may_split and blocks_of(fields) == 1]
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
    if blocks_of(fields) > 1 or fields.get("cluster", 1) > 1:
        return False
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    shape = consumers, tile_k, heads_per_tile(problem, rows_of(consumers))
    least = stream_k.least_piece_tiles(problem, tile_k)
    return line_estimate.last_share(problem, *shape, target.multiprocessors, least) > 0


def _fits_rows_better(
    problem: Problem, usual: Mapping[str, Any], fields: Mapping[str, Any]
) -> bool:
    """Whether whole tiles of two consumers, one block on each SM, replace the usual ones of three where both are expected to
    take about as long (`_ABOUT_AS_LONG`).

    On thousands of keys tiles of three consumers take longer than `time_estimate` says. In the last tile of each head one or
    two of them may have no rows, and it takes as long as the others.
    """
    if (usual["consumers"], fields["consumers"]) != (3, 2) or blocks_of(fields) > 1:
        return False
    if problem.packed or problem.mask is not None or not problem.plain_scores:
        return False
    wide = max(problem.headdim, problem.headdim_v)
    if not 96 < wide <= 128 or fields["tile_k"] != 128:
        return False
    return query_tiles.alike(problem) and problem.max_seqlen_k >= _MANY_KEYS


def may_share_sm(problem: Problem, table: str, wide: int) -> bool:
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


def most_blocks(problem: Problem) -> int:
    """The most blocks that share an SM where they may (`may_share_sm`)."""
    return _MOST_RAGGED_BLOCKS if problem.ragged else _MOST_BLOCKS


def blocks_of(fields: Mapping[str, Any]) -> int:
    return blocks_per_sm(fields["consumers"], fields["consumer_registers"])


def rows_of_table(table: str, wide: int) -> list[Row]:
    """The rows of a table that serve a head dim."""
    fitting = [row for row in tile_tables.table(TILES, table) if wide <= row.headdim]
    return [row for row in fitting if row.headdim == fitting[0].headdim]


def table_of(problem: Problem) -> str:
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


def _in_equal_rounds(problem: Problem, idle: bool) -> bool:
    """Whether all query tiles have equally many keys, and every SM has at least one tile. idle: some SMs have none."""
    limits = problem.window_left, problem.window_right
    alike = limits == (None, None) and problem.mask is None
    return not idle and not problem.ragged and alike
