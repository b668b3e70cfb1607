"""Host twin of kernels_cu/portable/backward*.cu: problem -> configurations, sources; `backward_steps` launches them.

The default launches are prepare (row_delta of each query row, and what follows from a ragged batch's lengths alone), main (dk
and dv; dq is summed in float32 by atomic additions) and finish (converts those sums to dq). Where key tiles are few, several
blocks share one, and a kernel behind main adds up their parts of dk and dv. The deterministic launches are prepare, main
without dq, and a kernel that computes dq alone. Where keys may be hidden from some rows of a tile, finish comes last in any
call but some of one key tile (`rewrites`), and computes gradients again that are NaN.

A block of main owns a key tile and walks the query tiles that see it, in all query heads of the group. A turn is one query tile
of that walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import features, helper_params, params
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.portable import backward_options, choice
from rawattn._kernels.portable.backward_config import (
    ROW_THREADS,
    Config,
    DqConfig,
    FinishConfig,
    dq_pitch,
)
from rawattn._kernels.source import ELEMENT, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.structs import Struct
from rawattn._kernels.target import Target, shared_limit_of

# The files of their tile tables.
TILES = "portable_backward"
DQ_TILES = "portable_backward_dq"
FEATURES = features.names() - {"paged"}
# For those kernels: the waves of an SM that hide each other's latency, the columns that a wave has at once, and the fewest
# waves that share a row, if any share one. So many share it even where rows are many, since long waves end unevenly.
_ROW_WAVES, _ROW_COLUMNS, _WORTH_SHARING = 64, 256, 4

# The most query rows that meet a key tile, over all heads of the group, for which the table "short" is the faster one. One line
# for each head dim of _SHORT_DIMS, as the largest; columns: ragged batches, causal calls, other calls
# (docs/notes/portable-backward.md).
_SHORT_DIMS = (64, 128)
_SHORT_ROWS = ((640, 384, 384), (384, 256, 96))
# The same limit where main adds to float32 sums of dbias.
_SUMMED_ROWS = 240
# Keys of a tile of the table "short", and of other tables up to the last of _SHORT_DIMS.
_SHORT_KEYS, _USUAL_KEYS = 64, 128

# Rounds of blocks from which on a launch behind main takes less time than code in it (`rewrites`).
_ROUNDS_WORTH_A_LAUNCH = 6
# The costs that `delta_rows` reckons with, in microseconds of an H200. What a block of main takes for row_delta: constant, and
# for each time its waves load _DELTA_CHUNKS chunks a lane of two arrays. The launch before main instead: constant, which counts
# the host's time too, and bytes a microsecond. The most rounds of blocks.
_DELTA, _DELTA_STEP, _DELTA_CHUNKS = 0.2, 1.1, 8
_PREPARE, _PREPARED_BYTES = 3.0, 3.7e6
_DELTA_ROUNDS = 8
# Room for row_delta is a power of two, so that few kernels differ by it; the least of them.
_LEAST_ROOM = 128


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """None: these kernels serve every call."""
    return None


def choose(problem: Problem, target: Target, operands: Operands, *, with_dq: bool = True) -> Config:
    """The main kernel's configuration; operands: all arrays and gradients.

    with_dq: whether the kernel adds up dQ too, in an order that is not defined.
    """
    # Further work on scores takes registers, and the largest tile at small head dims leaves none.
    table = None if problem.dtype == "float32" or problem.plain_scores else "scored"
    dbias = backward_options.by_main(problem, operands) if with_dq else backward_options.OWN_KERNEL
    pairs = backward_options.in_pairs(problem, dbias)
    # The backward treats a score function as a line only where all queries of a head share its step. Float32 products cannot
    # begin with what the line adds, since they have no digits to spare for it.
    line = features.adds_a_plane(problem) and problem.dtype != "float32"
    more = {"with_dq": with_dq, "dbias": dbias, "pairs": pairs, "mod_line": line}
    if (
        problem.bias is not None
        and problem.bias.shape[2] == 1
        and dbias == backward_options.OWN_KERNEL
    ):
        more |= {"bias_of_keys": True, "bias_chunks": False}
    chosen = choice.choose(Config, TILES, problem, target, operands, table, **more)
    if problem.dtype != "float32" and is_short(problem, with_dq, dbias):
        small = choice.choose(Config, TILES, problem, target, operands, "short", **more)
        # Small tiles are slower where shared memory holds fewer of their blocks at once.
        if small.shared_bytes <= shared_limit_of(small.blocks_per_sm, target.shared_limit):
            chosen = small
    # Two heads of a pair share one tile of the bias in shared memory. The next may be copied only when all waves have read it.
    return replace(chosen, late_copies=True) if pairs else chosen


def is_short(problem: Problem, with_dq: bool, dbias: int) -> bool:
    """Whether a key tile meets so few query rows that small tiles, of which several blocks run at once, take less time."""
    rows = problem.max_seqlen_q * problem.group_heads
    dim = max(problem.headdim, problem.headdim_v)
    # A score function, or several other options together, take registers that small tiles do not have either.
    if dim > _SHORT_DIMS[-1] or problem.score_mod is not None:
        return False
    options = (problem.softcap, problem.alibi_slopes, problem.mask, problem.bias)
    if sum(option is not None for option in options) + (problem.dropout_p > 0) > 1:
        return False
    # If one usual tile holds all keys, main writes dQ without sums (`has_one_key_tile`), which gains more than small tiles do.
    if with_dq and problem.max_seqlen_k <= _USUAL_KEYS and _rows_see_keys(problem):
        return problem.max_seqlen_k <= _SHORT_KEYS
    which = 0 if problem.ragged else 1 if problem.window_right is not None else 2
    limit = _SHORT_ROWS[dim > _SHORT_DIMS[0]][which]
    # More tiles make more additions to the sums of dbias.
    return rows <= (min(limit, _SUMMED_ROWS) if dbias == backward_options.ATOMIC_SUMS else limit)


def choose_dq(problem: Problem, target: Target, operands: Operands) -> DqConfig:
    """The configuration of the kernel that computes dQ alone."""
    return choice.choose(DqConfig, DQ_TILES, problem, target, operands)


def choose_captured(
    problem: Problem, target: Target, operands: Operands, *, exact_sums: bool
) -> DqConfig:
    """The configuration of the same kernel where it makes gradients of captured arrays instead of dQ."""
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
    """The source of `prepare` and the setup of a ragged call in one launch."""
    struct = helper_params.BACKWARD_SETUP
    return _row_source("backward_setup", problem, copy_bytes, struct=struct)


def finish(config: Config, copy_bytes: int, *, with_sums: bool) -> FinishConfig:
    """The configuration of the last kernel. config: of the main kernel."""
    return FinishConfig(
        element=config.element,
        headdim=config.headdim,
        headdim_v=config.headdim_v,
        copy_bytes=copy_bytes,
        unit_shift=config.unit_shift,
        with_sums=with_sums,
        **(config.known_to(FinishConfig) if config.hides_from_some else {}),
    )


def parts_source(problem: Problem, copy_bytes: int, config: Config) -> Source:
    """config: of the main kernel."""
    more = {"kDepth": config.depth, "kSplitSinks": config.split_sinks}
    return _row_source("backward_parts", problem, copy_bytes, more)


def physical_queries(problem: Problem) -> int:
    """Rows of queries of all sequences, padding among them."""
    return problem.rows_q * (1 if problem.packed else problem.batch)


def physical_keys(problem: Problem) -> int:
    """Rows of keys of all sequences, padding among them."""
    return problem.rows_k * (1 if problem.packed else problem.batch)


def has_one_key_tile(problem: Problem, config: Config) -> bool:
    """Whether one tile holds all keys of a sequence, and every query row sees some. Then main writes dQ without sums."""
    return config.with_dq and problem.max_seqlen_k <= config.tile_k and _rows_see_keys(problem)


def rewrites(problem: Problem, target: Target, config: Config, operands: Operands) -> bool:
    """Whether a block of main, which has all keys and queries of a sequence and kv head, computes NaN of hidden keys again.

    The mere code for that makes blocks a few percent slower. Where they are many, another launch takes less (see `finish`). It
    is also that launch which does it for dbias, which heads may share.
    """
    if not (config.hides_from_some and config.one_key_tile) or config.split:
        return False
    if "dbias" in operands.option_strides:
        return False
    at_once = target.multiprocessors * config.blocks_per_sm
    return problem.batch * problem.nheads_kv < _ROUNDS_WORTH_A_LAUNCH * at_once


def delta_rows(problem: Problem, target: Target, config: Config) -> int:
    """Room for row_delta in a block of main that has all keys and queries of a sequence and kv head; 0: a launch makes it.

    The first turn of a block waits for row_delta. The launch before main, which it takes the place of, has the whole GPU.
    """
    rows = problem.group_heads * round_up(problem.max_seqlen_q, config.tile_q)
    room = max(_LEAST_ROOM, 1 << (rows - 1).bit_length())
    with_it = replace(config, delta_rows=room).shared_bytes
    if with_it > shared_limit_of(config.blocks_per_sm, target.shared_limit):
        return 0
    at_once = target.multiprocessors * config.blocks_per_sm
    rounds = -(-problem.batch * problem.nheads_kv // at_once)
    row = problem.headdim_v * ITEMSIZE[problem.dtype]
    loaded = problem.max_seqlen_q * problem.group_heads * row
    steps = -(-loaded // (config.threads * config.copy_bytes * _DELTA_CHUNKS))
    read = 2 * physical_queries(problem) * problem.nheads_q * row
    alone, launch = rounds * (_DELTA + _DELTA_STEP * steps), _PREPARE + read / _PREPARED_BYTES
    return room if rounds <= _DELTA_ROUNDS and alone < launch else 0


def _rows_see_keys(problem: Problem) -> bool:
    """Whether every row sees the first key, whatever the lengths are."""
    if problem.rows_k == 0 or problem.mask is not None or problem.window_left is not None:
        return False
    if problem.ragged:  # with shared lengths a sequence has as many keys as queries
        return problem.shared_lengths
    first = 0 if problem.top_left else problem.rows_k - problem.rows_q
    return problem.window_right is None or first + problem.window_right >= 0


def row_waves(problem: Problem, target: Target, of: Literal["q", "k"]) -> int:
    """How many waves of the kernels that visit rows share a row: a power of two, above 1 for rows with many heads."""
    queries = of == "q"
    rows = physical_queries(problem) if queries else physical_keys(problem)
    heads = problem.nheads_q if queries else problem.nheads_kv
    columns = heads * max(problem.headdim, problem.headdim_v)
    enough = max(_WORTH_SHARING, target.multiprocessors * _ROW_WAVES // max(1, rows))
    most = max(1, min(enough, -(-columns // _ROW_COLUMNS)))
    return 1 << most.bit_length() - 1 if most >= _WORTH_SHARING else 1


def row_blocks(rows: int, waves: int = 1, wave: int = 32) -> int:
    """Blocks of the kernels that visit rows, where `waves` waves share a row."""
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
