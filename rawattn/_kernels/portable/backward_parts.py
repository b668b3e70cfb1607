"""How many blocks share a key tile in the backward. Each has a part of the tile's turns."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels.portable import backward
from rawattn._kernels.portable.backward_config import Config
from rawattn._kernels.portable.backward_sections import end, turns_of_blocks
from rawattn._kernels.source import round_up
from rawattn._kernels.target import Target

# What the word of a turn in kernels_cu/portable/backward_walk.cuh has room for.
_WORD_HEADS, _WORD_TILES = 1 << 8, 1 << 24

# The costs that `parts` reckons with, in microseconds of an H200, and rates a microsecond.
# A turn: constant, and floating-point operations.
_TURN, _FLOPS_A_MICROSECOND = 0.5, 2.6e6
# What a block does before and behind its turns: constant, and elements of its key tile.
_AROUND, _ELEMENTS_A_MICROSECOND = 2.0, 5500
# The launch that adds up parts: constant, and bytes that it moves.
_LAUNCH, _BYTES_A_MICROSECOND = 5.0, 2.5e6
# The numbers of blocks that may share a key tile. More rounds of blocks than _ROUNDS end no sooner.
_COUNTS, _ROUNDS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4)), 8
# The least part of the time without sharing that sharing must save, besides a launch's time; the fraction of a block's equal
# share of all turns below which walks with sink tokens are not cut.
_WORTH_IT, _FAIR_SHARE = 0.1, 0.25


def parts(problem: Problem, target: Target, config: Config) -> int:
    """How many blocks share the turns of a key tile's walk: several where there are too few key tiles for all SMs.

    The parts of dk and dv go through memory in float32. The number is that with the shortest estimated time: until the last
    block ends, and to add up the parts. Masks' lists are not known here, so all tiles count.
    """
    if problem.ragged and backward.is_short(problem, config.with_dq, config.dbias):
        return 1  # few turns, and those of small tiles are short
    sequences, heads = _sequences(problem), problem.nheads_kv
    tiles = heads * sum(number * -(-rows_k // config.tile_k) for number, _, rows_k in sequences)
    slots = target.multiprocessors * config.blocks_per_sm
    if not 0 < tiles <= _ROUNDS * slots or not _turns_are_words(problem, config):
        return 1
    # The sums of parts include padding rows.
    summed = max(tiles, -(-backward.physical_keys(problem) // config.tile_k) * heads)
    traffic = 16 * summed * config.tile_k * config.depth / _BYTES_A_MICROSECOND
    around = _around(config)

    def time(count: int) -> float:
        # Where key tiles have a block each, `parts_of_sinks` may cut the walks of those with sink tokens.
        walks = replace(problem, sink=0) if count == 1 else problem
        turns = [
            (turns_of_blocks(walks, config, rows_q, rows_k, count),) * number
            for number, rows_q, rows_k in sequences
        ]
        together = min(config.blocks_per_sm, -(-tiles * count // target.multiprocessors))
        turn = _turn(config, together)
        last = turn * end(heads, heads, itertools.chain(*turns), slots, around / turn)
        return last + (_LAUNCH + count * traffic if count > 1 else 0)

    most = min(_COUNTS[-1], _turns_of_sinks(problem, config), _ROUNDS * slots // tiles)
    times = {count: time(count) for count in _COUNTS if count <= max(1, most)}
    best = min(times, key=lambda count: times[count])
    return best if times[1] - times[best] > max(_LAUNCH, _WORTH_IT * times[1]) else 1


def _sequences(problem: Problem) -> list[tuple[int, int, int]]:
    """What sequences are taken to be: (number of equal ones, rows of queries, rows of keys), the longest first.

    Those of a packed batch: one is as long as the bound, the others share the other rows evenly. In a padded batch all are as
    long as the bound.
    """
    longest = problem.max_seqlen_q, problem.max_seqlen_k
    if not problem.packed or problem.batch < 2:
        return [(problem.batch, *longest)]
    others = problem.batch - 1
    rest = [
        min(most, -(-max(0, rows - most) // others))
        for rows, most in zip((problem.rows_q, problem.rows_k), longest, strict=True)
    ]
    return [(1, *longest), (others, rest[0], rest[1])]


def parts_of_sinks(problem: Problem, target: Target, config: Config) -> int:
    """How many blocks share the turns of a key tile with sink tokens, where other key tiles meet only a window's queries.

    As many as leave no part longer than the walk of another key tile, or than `_FAIR_SHARE` of a block's equal share of all
    turns. Long parts would delay the end, because those of the last heads begin late.
    """
    turns, alike = _turns(problem, config)
    if problem.window_left is None or not alike or not _turns_are_words(problem, config):
        return 1
    if min(problem.sink, problem.max_seqlen_k, turns) == 0:
        return 1
    long = _turns_of_sinks(problem, config)
    heads = problem.batch * problem.nheads_kv
    sinks = sink_rows(problem, config) // config.tile_k
    tiles = -(-problem.max_seqlen_k // config.tile_k)
    slots = target.multiprocessors * config.blocks_per_sm
    fair = heads * (sinks * long + max(0, tiles - sinks) * turns) / slots
    count = min(_COUNTS[-1], math.ceil(long / max(turns, _FAIR_SHARE * fair)))
    saved = (long - long / count) * _turn(config, config.blocks_per_sm)
    return count if count > 1 and saved > 2 * _LAUNCH else 1


def _turns_are_words(problem: Problem, config: Config) -> bool:
    """Whether a turn, or the end of a head's turns, fits the word of `SharedWalk` (backward_walk.cuh). Lists have no words."""
    tiles = -(-problem.rows_q // config.tile_q)
    return problem.mask is not None or (problem.group_heads < _WORD_HEADS and tiles < _WORD_TILES)


def sink_rows(problem: Problem, config: Config) -> int:
    """The number of keys in the key tiles of a sequence that have sink tokens."""
    return round_up(min(problem.sink, problem.max_seqlen_k), config.tile_k)


def _turns(problem: Problem, config: Config) -> tuple[int, bool]:
    """The most turns of a key tile without sink tokens, and whether key tiles have about equally many turns."""
    left, right = problem.window_left, problem.window_right
    rows = problem.max_seqlen_q
    if left is not None and right is not None and config.tile_k + left + right < rows:
        return (-(-(config.tile_k + left + right) // config.tile_q) + 1) * problem.group_heads, True
    # Otherwise key tiles are unlike if there is a right limit: few queries see the last ones.
    return -(-rows // config.tile_q) * problem.group_heads, right is None


def _turns_of_sinks(problem: Problem, config: Config) -> int:
    """The turns of a key tile with sink tokens."""
    return -(-problem.max_seqlen_q // config.tile_q) * problem.group_heads


def _turn(config: Config, together: int) -> float:
    """Microseconds of a turn where an SM runs `together` blocks at once."""
    flops = 10 * config.tile_q * config.tile_k * config.depth
    return _TURN + together * flops / _FLOPS_A_MICROSECOND


def _around(config: Config) -> float:
    """Microseconds that a block takes before and behind its turns."""
    return _AROUND + config.tile_k * config.depth / _ELEMENTS_A_MICROSECOND
