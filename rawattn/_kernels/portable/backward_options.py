"""Host twin of the kernels for gradients of options' arrays: bias, learned sinks, captured arrays of a score function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import features, params, score_params, structs
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import choice
from rawattn._kernels.source import ELEMENT, dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked, patches
from rawattn._kernels.target import Target
from rawattn._scores.expression import KEY, QUERY, SCORE, walk
from rawattn._scores.program import program

BIAS_ENTRY = "rawattn_backward_bias"
BIAS_TILES = "portable_backward_bias"  # the file of its tile tables
SUM_THREADS = 256
SINK_THREADS = 1024
CAPTURED_THREADS = 256
_EXACT_BYTES = 80  # of an ExactSum (kernels_cu/portable/exact_sum.cuh)

# What makes dbias: a kernel of its own; the main kernel, in the array itself; the main kernel, as float32 sums; the main
# kernel, in a copy with aligned rows. See `by_main`.
OWN_KERNEL, DIRECT, ATOMIC_SUMS, VIA_COPY = range(4)

# Rounds of blocks from which on a block takes several tiles one after the other (a strip), so that it copies one tile while it
# computes the previous one; the most tiles of a strip.
_BLOCKS_ENOUGH = 4
_LONGEST_STRIP = 8
# The most blocks that share the scores over which a tile is summed.
_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasConfig(Features):
    """The named constants of the kernel that makes dbias alone.

    sums_rows, sums_keys: whether the bias has one row for all queries, or one value for all keys.
    """

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset(
        {"bias_chunks", "ragged", "packed", "scale_first", "sink_logits", "paged", "mod_line"}
    )

    element: str
    headdim: int
    headdim_v: int
    tile_q: int
    tile_k: int
    waves: int
    column_waves: int
    blocks_per_sm: int
    copy_bytes: int
    sums_rows: bool
    sums_keys: bool
    accumulator_feeds_a: bool
    wave: int = 32

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2
        depths = round_up(self.headdim, 16) + round_up(self.headdim_v, 16) + 2 * (16 // itemsize)
        operands = (self.tile_q + self.tile_k) * depths * itemsize
        sums = self.tile_q * (self.tile_k + 1) * 4
        return max(operands, sums) if self.sums_rows or self.sums_keys else operands

    def source(self) -> Source:
        return _source(
            BIAS_ENTRY,
            "portable/backward_bias.cu",
            self.summary(),
            params.BACKWARD,
            element=self.element,
            constants=features.constants(self, "shared_bytes"),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves}/{self.column_waves}"
        words = ["portable backward_bias", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        sums = [name for name in ("sums_rows", "sums_keys") if getattr(self, name)]
        return " ".join([*words, *features.traits(self), *sums])


class Gradients:
    """What a backward launches for the gradients of options' arrays.

    dbias: what the main kernel does for it, see `by_main`.
    before: launches that come before the main kernel, each as (source, blocks, threads, shared bytes).
    values: fields of `params.BACKWARD`. patches, scratch, counters: as in `Steps`.

    `steps` makes the launches that come after the main kernel, from the bytes of a struct that holds `values`.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        target: Target,
        dbias: int,
        *,
        exact_sums: bool,
    ) -> None:
        self.values: dict[str, Any] = {}
        self.patches: tuple[tuple[int, str], ...] = ()
        self.scratch: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self._problem, self._operands, self._target = problem, operands, target
        self._exact_sums = exact_sums
        self._wanted = operands.option_strides.keys()
        self._launches: list[tuple[Source, int, int, int]] = []
        self.before: list[tuple[Source, int, int, int]] = []
        if "dsink_logits" in self._wanted:
            self._sinks()
        if "dbias" in self._wanted:
            self._dbias_array()
            if dbias == OWN_KERNEL:
                self._bias()
            elif dbias != DIRECT:
                self._bias_rows(dbias)
        self.captured = [name for name in self._wanted if name.startswith("dcaptured")]
        self._written: list[Step] = []
        if self.captured:
            self._captured()

    @property
    def follow(self) -> bool:
        """Whether launches come after the main kernel. They read row_delta."""
        return bool(self._launches or self.captured)

    def steps(
        self, params_bytes: bytes, arrays: tuple[tuple[int, str], ...], captured: list[Step]
    ) -> list[Step]:
        """The launches behind the main kernel. captured: those that make the sums of captured gradients."""
        own = [
            Step(source, blocks, threads, params_bytes, arrays, shared_bytes)
            for source, blocks, threads, shared_bytes in self._launches
        ]
        return [*own, *captured, *self._written]

    def _captured(self) -> None:
        at = [0] * 8
        first = 0
        for name in self.captured:
            number = int(name.removeprefix("dcaptured"))
            form = self._problem.captured[number]
            count, missing = math.prod(form.given), 4 - len(form.given)
            strides = score_params.elements(self._operands.option_strides[name], form.dtype)
            values = {
                "first": first,
                "count": count,
                "strides": (0,) * missing + strides,
                "extents": (1,) * missing + form.given,
                "kind": score_params.KINDS[form.dtype],
            }
            at[number] = first
            first += count
            patched = patches(params.CAPTURED_GRADIENT, sums="captured_sums", to=name)
            filled = structs.fill(params.CAPTURED_GRADIENT, values)
            blocks = -(-count // CAPTURED_THREADS)
            source = captured_source(exact_sums=self._exact_sums)
            self._written.append(Step(source, blocks, CAPTURED_THREADS, filled, patched))
        self.values["captured_at"] = tuple(at)
        self.counters["captured_sums"] = (_EXACT_BYTES if self._exact_sums else 4) * first
        self.patches += patches(params.BACKWARD, ("captured_sums",))

    def _sinks(self) -> None:
        form = self._problem.sink_logits
        assert form is not None
        strides = score_params.elements(self._operands.option_strides["dsink_logits"], form.dtype)
        self.values["dsink_head"] = strides[0]
        self.patches += patches(params.BACKWARD, ("dsink_logits",))
        waves = SINK_THREADS // self._target.wave
        self._launches.append((sinks_source(), self._problem.nheads_q, SINK_THREADS, 4 * waves))

    def _dbias_array(self) -> None:
        form = self._problem.bias
        assert form is not None
        self.values |= {
            **score_params.broadcast(
                "dbias", form.shape, self._operands.option_strides["dbias"], form.dtype
            ),
            "dbias.batches": form.shape[0],
            "dbias.heads": form.shape[1],
        }
        self.patches += patches(params.BACKWARD, dbias__data="dbias")

    def _bias_rows(self, dbias: int) -> None:
        """Scratch to which main writes dbias, or adds it after a launch has cleared it, and the launch that copies it out."""
        form = self._problem.bias
        assert form is not None
        batches, heads, rows, keys = form.shape
        lines = batches * heads * rows
        blocks = checked("bias", -(-lines // (SUM_THREADS // self._target.wave)), 1)
        self.patches += patches(params.BACKWARD, dbias__partials="dbias_partials")
        sums = dbias == ATOMIC_SUMS
        self.scratch["dbias_partials"] = (4 if sums else 2) * lines * round_up(keys, 16)
        if sums:
            clears = bias_rows_source(form.dtype, sums=True, clears=True)
            self.before.append((clears, blocks, SUM_THREADS, 0))
        self._launches.append((bias_rows_source(form.dtype, sums=sums), blocks, SUM_THREADS, 0))

    def _bias(self) -> None:
        problem, operands = self._problem, self._operands
        form = problem.bias
        assert form is not None
        config = choose_bias(problem, self._target, operands)
        batches, heads, rows, keys = form.shape
        row_tiles, key_tiles = -(-rows // config.tile_q), -(-keys // config.tile_k)
        shares = (1 if batches > 1 else problem.batch) * (problem.nheads_q // heads)
        all_rows = -(-problem.max_seqlen_q // config.tile_q) if config.sums_rows else 1
        all_keys = -(-problem.max_seqlen_k // config.tile_k) if config.sums_keys else 1
        tiles = batches * heads * row_tiles
        strip, splits = strip_and_splits(
            tiles * key_tiles,
            shares * all_rows * all_keys,
            self._target.multiprocessors * config.blocks_per_sm,
            sums=config.sums_rows or config.sums_keys,
        )
        self.values |= {
            "dbias.splits": splits,
            "dbias.strip": strip,
            "dbias.row_tiles": all_rows,
            "dbias.key_tiles": all_keys,
        }
        blocks = checked("bias", tiles * -(-key_tiles // strip) * splits, config.tile_q)
        self._launches.append((config.source(), blocks, config.threads, config.shared_bytes))
        if splits > 1:
            count = math.prod(form.shape)
            self.patches += patches(params.BACKWARD, dbias__partials="dbias_partials")
            self.scratch["dbias_partials"] = 4 * splits * count
            self._launches.append(
                (bias_sum_source(form.dtype), -(-count // SUM_THREADS), SUM_THREADS, 0)
            )


def by_main(problem: Problem, operands: Operands) -> int:
    """What the main kernel, which has dS in shared memory, does for dbias (see kernels_cu/portable/bias_gradient.cuh).

    DIRECT: it writes each element, which belongs to one score, or to those of the two query heads of a group.
    VIA_COPY: it writes elements to a copy, as the array is the caller's or its rows are no multiple of eight keys.
    ATOMIC_SUMS: it adds elements in float32, in no defined order, as each belongs to scores of several heads or sequences.
    OWN_KERNEL: nothing. A kernel of its own makes dbias of any other form.
    """
    form = problem.bias
    if form is None or "dbias" not in operands.option_strides:
        return OWN_KERNEL
    other = problem.ragged or problem.mask is not None or problem.score_mod is not None
    # dS is rounded to the dtype of q.
    other = other or problem.softcap is not None or form.dtype != problem.dtype
    if other or problem.dtype == "float32" or form.shape[2:] != (problem.rows_q, problem.rows_k):
        return OWN_KERNEL
    batches, heads, _, keys = form.shape
    shared = problem.nheads_q // heads
    if batches == problem.batch and (shared == 1 or shared == 2 == problem.group_heads):
        return DIRECT if "dbias" in operands.library_owned and keys % 8 == 0 else VIA_COPY
    return ATOMIC_SUMS


def in_pairs(problem: Problem, dbias: int) -> bool:
    """Whether the main kernel takes the heads of a group in pairs that share a bias, one right after the other.

    Then it sums what both add to dbias before that goes to memory. dbias: see `by_main`.
    """
    form = problem.bias
    if form is None or dbias == OWN_KERNEL:
        return False
    shared = problem.nheads_q // form.shape[1]
    return shared % 2 == 0 == problem.group_heads % 2


def choose_bias(problem: Problem, target: Target, operands: Operands) -> BiasConfig:
    """The configuration of the kernel that makes dbias alone."""
    form = problem.bias
    assert form is not None
    return choice.choose(
        BiasConfig,
        BIAS_TILES,
        problem,
        target,
        operands,
        sums_rows=form.shape[2] == 1,
        sums_keys=form.shape[3] == 1,
    )


def strip_and_splits(tiles: int, shares: int, slots: int, *, sums: bool) -> tuple[int, int]:
    """How many tiles of dbias a block takes one after the other, and how many blocks share the sum of one.

    shares: tiles of scores over which each tile of dbias is summed. slots: blocks that run at once. sums: whether a tile is
    also summed over its rows or keys.
    """
    if tiles < slots:
        return 1, max(1, min(slots // max(tiles, 1), shares, _MOST_SPLITS))
    if sums or shares >= _LONGEST_STRIP:
        return 1, 1
    return max(1, min(tiles // (slots * _BLOCKS_ENOUGH), _LONGEST_STRIP)), 1


def bias_sum_source(dtype: str) -> Source:
    """The source of the kernel that adds up the blocks' sums of a tile; dtype: of the bias."""
    return _source(
        "rawattn_backward_bias_sum",
        "portable/backward_bias_sum.cu",
        f"portable backward_bias_sum {dtype}",
        params.BACKWARD,
        element=ELEMENT[dtype],
        constants={"kThreads": SUM_THREADS},
    )


def bias_rows_source(dtype: str, *, sums: bool, clears: bool = False) -> Source:
    """The source of the kernel that copies out what main wrote or added up, or clears sums before it; dtype: of the bias."""
    return _source(
        "rawattn_backward_bias_rows",
        "portable/backward_bias_rows.cu",
        f"portable backward_bias_rows {'clears' if clears else dtype}{' sums' if sums else ''}",
        params.BACKWARD,
        element=ELEMENT[dtype],
        constants={"kThreads": SUM_THREADS, "kSums": sums, "kClears": clears},
    )


def partials(score_mod: Any) -> tuple[int, int]:
    """The partial derivatives of a score text whose element differs by row, and those whose element differs by key, as bits."""
    by_row = by_key = 0
    for n, partial in enumerate(program(score_mod).partials):
        read = {node for index in partial.indices for node in walk(index) if not node.args}
        by_row |= (not read.isdisjoint((SCORE, QUERY))) << n
        by_key |= (not read.isdisjoint((SCORE, KEY))) << n
    return by_row, by_key


def captured_source(*, exact_sums: bool) -> Source:
    """The source of the kernel that writes a captured array's gradient from its sums."""
    return _source(
        "rawattn_backward_captured",
        "portable/backward_captured.cu",
        "portable backward_captured" + (" exact" if exact_sums else ""),
        params.CAPTURED_GRADIENT,
        constants={"kThreads": CAPTURED_THREADS, "kExactSums": exact_sums},
    )


def sinks_source() -> Source:
    return _source(
        "rawattn_backward_sinks",
        "portable/backward_sinks.cu",
        "portable backward_sinks",
        params.BACKWARD,
        constants={"kThreads": SINK_THREADS},
    )
