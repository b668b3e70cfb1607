"""Host twin of kernels_cu/portable/backward*.cu: problem -> configurations -> sources; `backward_steps` launches them.

By default: prepare (what each query row needs), main (dk, dv; dq summed in float32 by atomic additions), finish (those sums
to dq). Where key tiles are few, several blocks share one, and their parts of dk and dv are added up behind main.
Deterministic: prepare, main without dq, and a kernel that computes dq alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import features, params
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward_options, choice
from rawattn._kernels.source import ELEMENT, dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.target import Target, shared_limit_of

ENTRY = "rawattn_backward"
DQ_ENTRY = "rawattn_backward_dq"
# The files of their tile tables.
TILES = "portable_backward"
DQ_TILES = "portable_backward_dq"
FEATURES = features.names() - {"paged"}
ROW_THREADS = 256  # of the kernels that visit rows: one wave a row

# By head dims, the most query rows that share a key tile of the table "short": in ragged batches, under a causal mask, and
# without one (docs/notes/portable-backward.md).
_SHORT_DIMS = (64, 128)
_SHORT_ROWS = ((640, 384, 384), (384, 256, 96))
# At most, where they add to float32 sums of dbias.
_SUMMED_ROWS = 240
# Keys of those tiles, and of the others up to such head dims.
_SHORT_KEYS, _USUAL_KEYS = 64, 128

# What `parts` reckons with.
_TURN, _LAUNCH, _BYTES_A_MICROSECOND = 2.0, 5.0, 2.5e6
_MOST_PARTS, _FEWEST_TURNS, _WORTH_IT = 64, 8, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """Everything the compiler is told about the main kernel: the named constants of namespace `config`."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset(
        {"packed", "scale_first", "sink_logits", "paged"}
    )

    element: str
    headdim: int
    headdim_v: int
    tile_q: int
    tile_k: int
    key_waves: int
    column_waves: int
    stages: int
    blocks_per_sm: int
    dq_row_waves: int
    late_copies: bool  # of the next queries and douts: behind the barrier that P waits for
    copy_bytes: int
    with_dq: bool
    accumulator_feeds_a: bool
    bias_of_keys: bool = False  # the bias has one row, for all queries
    dbias: int = 0  # see backward_options.by_main
    pairs: bool = False  # of heads, see backward_options.in_pairs
    split: bool = False  # a key tile has several blocks, see `parts`
    lone_keys: bool = False  # see `has_lone_keys`
    wave: int = 32

    @property
    def threads(self) -> int:
        return 2 * self.key_waves * self.column_waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2
        padding = 16 // itemsize
        elements = 2 * (self.tile_k + self.stages * self.tile_q) * (self.depth + padding)
        # P, and two of dS; without dQ one, or none where the accumulators that hold it are operands.
        from_registers = self.from_registers
        tiles = 3 + self.pairs if self.with_dq else 1 + (not from_registers)
        # Weights of all bits, with no room for the second half (see portable/handover.cuh).
        tiles += self.exact_weights and not (from_registers and self.with_dq)
        elements += tiles * self.tile_k * (self.tile_q + padding)
        if self.bias_chunks and itemsize == self.bias == 2:
            stages = 1 if self.pairs else self.stages
            elements += stages * self.tile_q * (self.tile_k + padding)
        return elements * itemsize + self.stages * 2 * self.tile_q * 4

    @property
    def depth(self) -> int:
        """Columns of every tile of rows."""
        return round_up(max(self.headdim, self.headdim_v), 16 * self.column_waves)

    @property
    def from_registers(self) -> bool:
        """Whether a wave has all it needs of P or dS in its own accumulators, in the form of an operand."""
        return self.accumulator_feeds_a and self.column_waves == 1

    @property
    def exact_weights(self) -> bool:
        """Whether weights are handed over with all their bits: see kernels_cu/portable/handover.cuh."""
        if self.element == "float":
            return False
        if self.modifies:
            return True
        # To round weights to float16 costs gradients in float16 accuracy. Beside a bias or a mask, wide heads are slower so.
        return self.from_registers and (
            self.element == "float16" or (self.wide and self.has_scores_of_memory)
        )

    @property
    def wide(self) -> bool:
        """Whether gradients of keys take more registers than head dims to 64 do."""
        return self.depth > 64

    @property
    def has_scores_of_memory(self) -> bool:
        """Whether scores get something from memory, element by element."""
        return self.bias > 0 or self.block_mask

    @property
    def modifies(self) -> bool:
        """Whether a score function does more than to add a line."""
        return self.score_mod is not None and not self.mod_line

    @property
    def arrivals(self) -> int:
        """How waves meet for the weights: see `meet_for_weights` in kernels_cu/portable/handover.cuh."""
        if not self.from_registers:
            return 0
        if not self.wide:
            return 1
        if not self.exact_weights:
            return 0
        return 1 if self._exact_and_plain or self.pairs else 2

    @property
    def early_dq(self) -> bool:
        """Whether the half that owns dv does its share of dq before its product, not behind it."""
        return not (self.wide and self._exact_and_plain)

    @property
    def dq_by_half(self) -> bool:
        """Whether the half that owns dk computes all of dq: what scores cost the other half keeps it longer than that."""
        if not self.from_registers or self.depth > 128:
            return False
        return self.softcap or (self.dropout and not self.wide)

    @property
    def _exact_and_plain(self) -> bool:
        """Of weights with all bits from lane to lane, which ptxas has registers for in one order of a turn or another."""
        plain = not self.modifies and not self.has_scores_of_memory
        return self.from_registers and self.exact_weights and plain

    @property
    def unit_shift(self) -> int:
        """The power of 2 that probabilities are multiplied by: see kernels_cu/portable/gradient_unit.cuh."""
        # A probability is 1 and rounding: three times as much fits.
        return 14 if self.element == "bfloat16" and not self.exact_weights else 0

    @property
    def dq_pitch(self) -> int:
        return dq_pitch(self.headdim)

    def source(self) -> Source:
        return _source(
            ENTRY,
            "portable/backward.cu",
            self.summary(),
            params.BACKWARD,
            element=self.element,
            constants=features.constants(
                self,
                "shared_bytes",
                "dq_pitch",
                "unit_shift",
                "exact_weights",
                "arrivals",
                "early_dq",
                "dq_by_half",
            ),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.key_waves}x{self.column_waves} stages={self.stages}"
        traits = [*features.traits(self), *([] if self.with_dq else ["without-dq"])]
        traits += ["one-row"] * self.bias_of_keys
        traits += [[], ["dbias"], ["sums-of-dbias"], ["rows-of-dbias"]][self.dbias]
        traits += ["pairs"] * self.pairs + ["split"] * self.split
        traits += ["lone-keys"] * self.lone_keys
        words = ["portable backward", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        return " ".join([*words, *traits])


@dataclass(frozen=True, slots=True, kw_only=True)
class DqConfig(Features):
    """What the compiler is told about the kernel that computes dQ alone, or gradients of captured arrays.

    partials_by_row, partials_by_key: see `backward_options.partials`.
    """

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset(
        {"bias_chunks", "packed", "scale_first", "sink_logits", "paged", "mod_line"}
    )

    element: str
    headdim: int
    headdim_v: int
    tile_q: int
    tile_k: int
    waves: int
    stages: int
    blocks_per_sm: int
    copy_bytes: int
    accumulator_feeds_a: bool
    captured: bool = False
    partials_by_row: int = 0
    partials_by_key: int = 0
    wave: int = 32

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2
        padding = 16 // itemsize
        depths = round_up(self.headdim, 16) + round_up(self.headdim_v, 16) + 2 * padding
        elements = (self.tile_q + self.stages * self.tile_k) * depths
        if not self.accumulator_feeds_a:
            elements += self.tile_q * (self.tile_k + padding)
        return elements * itemsize

    def source(self) -> Source:
        return _source(
            DQ_ENTRY,
            "portable/backward_dq.cu",
            self.summary(),
            params.BACKWARD,
            element=self.element,
            constants=features.constants(self, "shared_bytes"),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves} stages={self.stages}"
        words = ["portable backward_dq", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        traits = [*features.traits(self), *(["captured-gradients"] if self.captured else [])]
        return " ".join([*words, *traits])


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
    if with_dq and problem.rows_k <= _USUAL_KEYS and _rows_see_keys(problem):
        return problem.rows_k <= _SHORT_KEYS
    which = 0 if problem.ragged else 1 if problem.window_right is not None else 2
    limit = _SHORT_ROWS[dim > _SHORT_DIMS[0]][which]
    # More tiles give more to the sums of dbias.
    return rows <= (min(limit, _SUMMED_ROWS) if dbias == backward_options.SUMMED else limit)


def choose_dq(problem: Problem, target: Target, operands: Operands) -> DqConfig:
    """As `choose`, of the kernel that computes dQ alone."""
    return choice.choose(DqConfig, DQ_TILES, problem, target, operands)


def choose_captured(problem: Problem, target: Target, operands: Operands) -> DqConfig:
    """As `choose_dq`, where the same kernel makes gradients of captured arrays instead."""
    by_row, by_key = backward_options.partials(problem.score_mod)
    return replace(
        choose_dq(problem, target, operands),
        captured=True,
        partials_by_row=by_row,
        partials_by_key=by_key,
    )


def dq_pitch(headdim: int) -> int:
    """Columns of a row of the dQ sums: whole blocks of 16."""
    return round_up(headdim, 16)


def prepare_source(problem: Problem, copy_bytes: int) -> Source:
    return _row_source("backward_prepare", problem, copy_bytes)


def finish_source(problem: Problem, copy_bytes: int, unit_shift: int) -> Source:
    """unit_shift: of the main kernel's configuration."""
    return _row_source("backward_finish", problem, copy_bytes, kUnitShift=unit_shift)


def parts_source(problem: Problem, copy_bytes: int, depth: int) -> Source:
    """depth: of the main kernel's configuration."""
    return _row_source("backward_parts", problem, copy_bytes, kDepth=depth)


def parts(problem: Problem, target: Target, config: Config) -> int:
    """How many blocks share the query tiles of a key tile: several where key tiles leave multiprocessors idle.

    Each part's dk and dv go through memory in float32. What that takes, and what a turn of the walk does, is in
    microseconds of an H200. Which tiles a mask leaves, and what lengths hold, is not known here: all tiles count, and
    sequences are as long as the longest one.
    """
    if problem.ragged and _is_short(problem, config.with_dq, config.dbias):
        return 1  # there is little to share, and small tiles have short turns
    rows = physical_keys(problem)
    tiles = problem.batch * -(-problem.max_seqlen_k // config.tile_k)
    if problem.group:
        tiles = min(tiles, rows // config.tile_k + problem.batch)
    # There are sums of rows that no sequence has, too.
    tiles = max(tiles, -(-rows // config.tile_k)) * problem.nheads_kv
    turns = -(-problem.max_seqlen_q // config.tile_q) * problem.group_heads
    slots = target.multiprocessors * config.blocks_per_sm
    traffic = 16 * tiles * config.tile_k * config.depth / _BYTES_A_MICROSECOND

    def time(count: int) -> float:
        if problem.window_right is None:
            walks = -(-tiles * count // slots) / count
        else:  # the first key tiles, which come first, are met by all query tiles, the last ones by few
            walks = max(1 / count, tiles / slots / 2)
        return walks * turns * _TURN + (_LAUNCH + count * traffic if count > 1 else 0)

    counts = range(1, max(1, min(_MOST_PARTS, turns // _FEWEST_TURNS)) + 1)
    best = min(counts, key=time)
    return best if time(best) < _WORTH_IT * time(1) else 1


def physical_keys(problem: Problem) -> int:
    """Rows of keys of all sequences, padding among them."""
    return problem.rows_k * (1 if problem.group else problem.batch)


def has_lone_keys(problem: Problem, config: Config) -> bool:
    """Whether one tile has all keys of a sequence, and every query row sees some: then the main kernel's dQ is no sum."""
    return config.with_dq and problem.rows_k <= config.tile_k and _rows_see_keys(problem)


def _rows_see_keys(problem: Problem) -> bool:
    """Whether every row sees the first key, whatever the lengths are."""
    if problem.ragged or problem.mask is not None or problem.window_left is not None:
        return False
    if problem.rows_k == 0:
        return False
    first = 0 if problem.top_left else problem.rows_k - problem.rows_q
    return problem.window_right is None or first + problem.window_right >= 0


def row_blocks(rows: int, wave: int = 32) -> int:
    """Blocks of the kernels that visit rows."""
    return -(-rows // (ROW_THREADS // wave))


def _row_source(kernel: str, problem: Problem, copy_bytes: int, **more: int) -> Source:
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
        params.BACKWARD,
        element=element,
        constants=constants,
    )
