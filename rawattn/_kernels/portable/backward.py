"""Host twin of kernels_cu/portable/backward*.cu: problem -> configurations, sources; `backward_steps` launches them.

By default: prepare (what each query row needs, and what follows from a ragged batch's lengths alone), main (dk, dv; dq summed
in float32 by atomic additions), finish (those sums to dq). Where key tiles are few, several blocks share one, and their parts
of dk and dv are added up behind main. Deterministic: prepare, main without dq, and a kernel that computes dq alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import features, helper_params, params
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward_options, choice
from rawattn._kernels.portable.backward_config import Config, DqConfig, dq_pitch
from rawattn._kernels.source import ELEMENT, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.structs import Struct
from rawattn._kernels.target import Target, shared_limit_of

# The files of their tile tables.
TILES = "portable_backward"
DQ_TILES = "portable_backward_dq"
FEATURES = features.names() - {"paged"}
ROW_THREADS = 256  # of the kernels that visit rows
# Of those kernels: waves of a multiprocessor that hide what each waits for, columns that a wave has at once, and how many waves
# share a row, if any do.
_ROW_WAVES, _ROW_COLUMNS, _WORTH_SHARING = 64, 256, 4

# By head dims, the most query rows that share a key tile of the table "short": in ragged batches, under a causal mask, and
# without one (docs/notes/portable-backward.md).
_SHORT_DIMS = (64, 128)
_SHORT_ROWS = ((640, 384, 384), (384, 256, 96))
# At most, where they add to float32 sums of dbias.
_SUMMED_ROWS = 240
# Keys of those tiles, and of the others up to such head dims.
_SHORT_KEYS, _USUAL_KEYS = 64, 128

# What `parts` reckons with, in microseconds: a turn, what a block does around its turns, and a launch; and how much is
# done in one.
_TURN, _FLOPS_A_MICROSECOND = 0.5, 2.6e6
_AROUND, _KEYS_A_MICROSECOND = 2.0, 5500
_LAUNCH, _BYTES_A_MICROSECOND = 5.0, 2.5e6
_MOST_PARTS, _WORTH_IT, _OF_ALL = 64, 0.85, 0.25


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for these kernels; they are for every call."""
    return None


def choose(problem: Problem, target: Target, operands: Operands, *, with_dq: bool = True) -> Config:
    """The main kernel's configuration; operands: all arrays and gradients.

    with_dq: whether the kernel adds up dQ too, in an order that is not defined.
    """
    # What becomes of scores takes registers, which the largest tile at small head dims has none left of.
    table = "16bit" if problem.plain_scores else "scored"
    dbias = backward_options.by_main(problem, operands) if with_dq else backward_options.ALONE
    pairs = backward_options.in_pairs(problem, dbias)
    # Here a line is one that all queries of a head share, and float32 has no digits to spare for it.
    line = features.adds_a_plane(problem) and problem.dtype != "float32"
    more = {"with_dq": with_dq, "dbias": dbias, "pairs": pairs, "mod_line": line}
    if problem.bias is not None and problem.bias.shape[2] == 1 and dbias == backward_options.ALONE:
        more |= {"bias_of_keys": True, "bias_chunks": False}
    chosen = choice.choose(Config, TILES, problem, target, operands, table, **more)
    if _is_short(problem, with_dq, dbias):
        small = choice.choose(Config, TILES, problem, target, operands, "short", **more)
        # They are slower where fewer of them run at once.
        if small.shared_bytes <= shared_limit_of(small.blocks_per_sm, target.shared_limit):
            chosen = small
    # A pair has one tile of the bias: the next one may come when all have read this one.
    return replace(chosen, late_copies=True) if pairs else chosen


def _is_short(problem: Problem, with_dq: bool, dbias: int) -> bool:
    """Whether a key tile meets so few query rows that small tiles, of which several blocks run at once, take less time."""
    rows = problem.max_seqlen_q * problem.group_heads
    dim = max(problem.headdim, problem.headdim_v)
    # What a score function does, or several other options take registers that small tiles do not have either.
    if dim > _SHORT_DIMS[-1] or problem.score_mod is not None:
        return False
    options = (problem.softcap, problem.alibi_slopes, problem.mask, problem.bias)
    if sum(option is not None for option in options) + (problem.dropout_p > 0) > 1:
        return False
    # Where one tile has all keys, dQ is no sum (`has_lone_keys`), which is worth more.
    if with_dq and problem.max_seqlen_k <= _USUAL_KEYS and _rows_see_keys(problem):
        return problem.max_seqlen_k <= _SHORT_KEYS
    which = 0 if problem.ragged else 1 if problem.window_right is not None else 2
    limit = _SHORT_ROWS[dim > _SHORT_DIMS[0]][which]
    # More tiles give more to the sums of dbias.
    return rows <= (min(limit, _SUMMED_ROWS) if dbias == backward_options.SUMMED else limit)


def choose_dq(problem: Problem, target: Target, operands: Operands) -> DqConfig:
    """As `choose`, of the kernel that computes dQ alone."""
    return choice.choose(DqConfig, DQ_TILES, problem, target, operands)


def choose_captured(
    problem: Problem, target: Target, operands: Operands, *, exact_sums: bool
) -> DqConfig:
    """As `choose_dq`, where the same kernel makes gradients of captured arrays instead."""
    by_row, by_key = backward_options.partials(problem.score_mod)
    return replace(
        choose_dq(problem, target, operands),
        captured=True,
        exact_sums=exact_sums,
        partials_by_row=by_row,
        partials_by_key=by_key,
    )


def prepare_source(problem: Problem, copy_bytes: int) -> Source:
    return _row_source("backward_prepare", problem, copy_bytes)


def setup_source(problem: Problem, copy_bytes: int) -> Source:
    """Of `prepare`, with what goes before a ragged call."""
    struct = helper_params.BACKWARD_SETUP
    return _row_source("backward_setup", problem, copy_bytes, struct=struct)


def finish_source(problem: Problem, copy_bytes: int, unit_shift: int) -> Source:
    """unit_shift: of the main kernel's configuration."""
    return _row_source("backward_finish", problem, copy_bytes, {"kUnitShift": unit_shift})


def parts_source(problem: Problem, copy_bytes: int, config: Config) -> Source:
    """config: of the main kernel."""
    more = {"kDepth": config.depth, "kSplitSinks": config.split_sinks}
    return _row_source("backward_parts", problem, copy_bytes, more)


def parts(problem: Problem, target: Target, config: Config) -> int:
    """How many blocks share the turns of a key tile's walk: several where key tiles leave multiprocessors idle.

    Each part's dk and dv go through memory in float32. What that takes, what a turn of the walk does, and what a block
    does around its turns, is in microseconds of an H200. Which tiles a mask leaves, and what lengths hold, is not known
    here: all tiles count, and sequences are as long as the longest one.
    """
    if problem.ragged and _is_short(problem, config.with_dq, config.dbias):
        return 1  # there is little to share, and small tiles have short turns
    rows = physical_keys(problem)
    tiles = problem.batch * -(-problem.max_seqlen_k // config.tile_k)
    if problem.group:
        tiles = min(tiles, rows // config.tile_k + problem.batch)
    # There are sums of rows that no sequence has, too.
    tiles = max(tiles, -(-rows // config.tile_k)) * problem.nheads_kv
    turns, alike = _turns(problem, config)
    longest = _turns_of_sinks(problem, config) if problem.sink else turns
    slots = target.multiprocessors * config.blocks_per_sm
    traffic = 16 * tiles * config.tile_k * config.depth / _BYTES_A_MICROSECOND
    around = _around(config)

    def time(count: int) -> float:
        blocks = tiles * count
        turn = _turn(config, min(config.blocks_per_sm, -(-blocks // target.multiprocessors)))
        time = around + -(-turns // count) * turn
        if alike:
            time *= -(-blocks // slots)
            if count > 1:  # with one, `parts_of_sinks` shares these out
                time = max(time, around + -(-longest // count) * turn)
        else:  # the first key tiles, which come first, are met by all query tiles, the last ones by few
            time = max(time, (blocks * around + tiles * turns * turn / 2) / slots)
        return time + (_LAUNCH + count * traffic if count > 1 else 0)

    counts = range(1, max(1, min(_MOST_PARTS, turns)) + 1)
    best = min(counts, key=time)
    return best if time(best) < _WORTH_IT * time(1) else 1


def parts_of_sinks(problem: Problem, target: Target, config: Config) -> int:
    """How many blocks share the turns of a key tile with sink tokens, where other key tiles meet a window's queries alone.

    As many as leave none of them longer than others, or than a part of what all take together: those of the heads that are
    walked last begin late.
    """
    turns, alike = _turns(problem, config)
    if problem.window_left is None or not alike:
        return 1
    if min(problem.sink, problem.max_seqlen_k, turns) == 0:
        return 1
    long = _turns_of_sinks(problem, config)
    heads = problem.batch * problem.nheads_kv
    sinks = sink_rows(problem, config) // config.tile_k
    tiles = -(-problem.max_seqlen_k // config.tile_k)
    slots = target.multiprocessors * config.blocks_per_sm
    fair = heads * (sinks * long + max(0, tiles - sinks) * turns) / slots
    count = min(_MOST_PARTS, math.ceil(long / max(turns, _OF_ALL * fair)))
    saved = (long - long / count) * _turn(config, config.blocks_per_sm)
    return count if count > 1 and saved > 2 * _LAUNCH else 1


def sink_rows(problem: Problem, config: Config) -> int:
    """Keys of the key tiles that have sink tokens, of each sequence."""
    return round_up(min(problem.sink, problem.max_seqlen_k), config.tile_k)


def _turns(problem: Problem, config: Config) -> tuple[int, bool]:
    """Of a key tile's walk at most, sink tokens aside, and whether key tiles are about alike in that."""
    left, right = problem.window_left, problem.window_right
    rows = problem.max_seqlen_q
    if left is not None and right is not None and config.tile_k + left + right < rows:
        return (-(-(config.tile_k + left + right) // config.tile_q) + 1) * problem.group_heads, True
    # Else a limit on the right leaves the last key tiles few queries.
    return -(-rows // config.tile_q) * problem.group_heads, right is None


def _turns_of_sinks(problem: Problem, config: Config) -> int:
    """Of the walk of a key tile with sink tokens."""
    return -(-problem.max_seqlen_q // config.tile_q) * problem.group_heads


def _turn(config: Config, together: int) -> float:
    """Microseconds of a turn, where a multiprocessor runs so many blocks together."""
    flops = 10 * config.tile_q * config.tile_k * config.depth
    return _TURN + together * flops / _FLOPS_A_MICROSECOND


def _around(config: Config) -> float:
    """Microseconds of what a block does around its turns."""
    return _AROUND + config.tile_k * config.depth / _KEYS_A_MICROSECOND


def physical_queries(problem: Problem) -> int:
    """Rows of queries of all sequences, padding among them."""
    return problem.rows_q * (1 if problem.group else problem.batch)


def physical_keys(problem: Problem) -> int:
    """Rows of keys of all sequences, padding among them."""
    return problem.rows_k * (1 if problem.group else problem.batch)


def has_lone_keys(problem: Problem, config: Config) -> bool:
    """Whether one tile has all keys of a sequence, and every query row sees some: then the main kernel's dQ is no sum."""
    return config.with_dq and problem.max_seqlen_k <= config.tile_k and _rows_see_keys(problem)


def _rows_see_keys(problem: Problem) -> bool:
    """Whether every row sees the first key, whatever the lengths are."""
    if problem.rows_k == 0 or problem.mask is not None or problem.window_left is not None:
        return False
    if problem.ragged:  # of keys as many as of queries
        return problem.shared_lengths
    first = 0 if problem.top_left else problem.rows_k - problem.rows_q
    return problem.window_right is None or first + problem.window_right >= 0


def row_waves(problem: Problem, target: Target, of: Literal["q", "k"]) -> int:
    """How many waves of the kernels that visit rows share one: a power of two, several of few rows with many heads."""
    queries = of == "q"
    rows = physical_queries(problem) if queries else physical_keys(problem)
    heads = problem.nheads_q if queries else problem.nheads_kv
    columns = heads * max(problem.headdim, problem.headdim_v)
    enough = target.multiprocessors * _ROW_WAVES // max(1, rows)
    most = max(1, min(enough, -(-columns // _ROW_COLUMNS)))
    return 1 << most.bit_length() - 1 if most >= _WORTH_SHARING else 1


def row_blocks(rows: int, waves: int = 1, wave: int = 32) -> int:
    """Blocks of the kernels that visit rows, each of which so many waves share."""
    return -(-rows * waves // (ROW_THREADS // wave))


def _row_source(
    kernel: str,
    problem: Problem,
    copy_bytes: int,
    more: Mapping[str, int] = MappingProxyType({}),
    struct: Struct = params.BACKWARD,
) -> Source:
    element = ELEMENT[problem.dtype]
    constants = {
        "kHeadDim": problem.headdim,
        "kHeadDimV": problem.headdim_v,
        "kDqPitch": dq_pitch(problem.headdim),
        "kThreads": ROW_THREADS,
        "kCopyBytes": copy_bytes,
        **more,
    }
    return _source(
        f"rawattn_{kernel}",
        f"portable/{kernel}.cu",
        f"portable {kernel} {element} D={problem.headdim},{problem.headdim_v} {copy_bytes}B",
        struct,
        element=element,
        constants=constants,
    )
