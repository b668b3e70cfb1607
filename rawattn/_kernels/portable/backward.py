"""Host twin of kernels_cu/portable/backward*.cu: problem -> configurations -> sources and steps.

By default: prepare (what each query row needs), main (dk, dv; dq summed in float32 by atomic additions), finish (those sums
to dq). Where key tiles are few, several blocks share one, and their parts of dk and dv are added up behind main.
Deterministic: prepare, main without dq, and a kernel that computes dq alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import attention_params, features, params, score_params, structs
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward_options, choice, fill_padding, mask_tiles, schedule
from rawattn._kernels.source import ELEMENT, dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, Steps, Tiles, checked, patches
from rawattn._kernels.target import Target

ENTRY = "rawattn_backward"
DQ_ENTRY = "rawattn_backward_dq"
# The files of their tile tables.
TILES = "portable_backward"
DQ_TILES = "portable_backward_dq"
FEATURES = features.names() - {"paged"}
ROW_THREADS = 256  # of the kernels that visit rows: one wave a row

# What `parts` reckons with.
_TURN, _LAUNCH, _BYTES_A_MICROSECOND = 2.0, 5.0, 2.5e6
_MOST_PARTS, _FEWEST_TURNS, _WORTH_IT = 16, 8, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """Everything the compiler is told about the main kernel: the named constants of namespace `config`."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset(
        {"packed", "scale_first", "sink_logits", "paged", "mod_line"}
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
    dbias: int = 0  # see backward_options.by_main
    split: bool = False  # a key tile has several blocks, see `parts`
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
        tiles = 3 if self.with_dq else 1 + (not from_registers)
        # Weights of all bits, with no room for the second half (see portable/handover.cuh).
        tiles += self.exact_weights and not (from_registers and self.with_dq)
        elements += tiles * self.tile_k * (self.tile_q + padding)
        if self.bias_chunks and itemsize == self.bias == 2:
            elements += self.stages * self.tile_q * (self.tile_k + padding)
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
        if self.score_mod is not None:
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
    def arrivals(self) -> int:
        """How waves meet for the weights: see `meet_for_weights` in kernels_cu/portable/handover.cuh."""
        if not self.from_registers:
            return 0
        if not self.wide:
            return 1
        if not self.exact_weights:
            return 0
        return 1 if self._exact_and_plain else 2

    @property
    def early_dq(self) -> bool:
        """Whether the half that owns dv does its share of dq before its product, not behind it."""
        return not (self.wide and self._exact_and_plain)

    @property
    def _exact_and_plain(self) -> bool:
        """Of weights with all bits from lane to lane, which ptxas has registers for in one order of a turn or another."""
        plain = self.score_mod is None and not self.has_scores_of_memory
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
            ),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.key_waves}x{self.column_waves} stages={self.stages}"
        traits = [*features.traits(self), *([] if self.with_dq else ["without-dq"])]
        traits += [[], ["dbias"], ["sums-of-dbias"]][self.dbias] + ["split"] * self.split
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
    return choice.choose(
        Config, TILES, problem, target, operands, table, with_dq=with_dq, dbias=dbias
    )


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
    microseconds of an H200.
    """
    if problem.ragged or problem.mask is not None:
        return 1
    tiles = -(-problem.rows_k // config.tile_k) * problem.nheads_kv * problem.batch
    turns = -(-problem.rows_q // config.tile_q) * (problem.nheads_q // problem.nheads_kv)
    places = target.multiprocessors * config.blocks_per_sm
    traffic = 16 * tiles * config.tile_k * config.depth / _BYTES_A_MICROSECOND

    def time(count: int) -> float:
        if problem.window_right is None:
            walks = -(-tiles * count // places) / count
        else:  # the first key tiles, which come first, are met by all query tiles, the last ones by few
            walks = max(1 / count, tiles / places / 2)
        return walks * turns * _TURN + (_LAUNCH + count * traffic if count > 1 else 0)

    counts = range(1, max(1, min(_MOST_PARTS, turns // _FEWEST_TURNS)) + 1)
    best = min(counts, key=time)
    return best if time(best) < _WORTH_IT * time(1) else 1


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


def steps(
    problem: Problem,
    structure: Structure,
    operands: Operands,
    target: Target,
    *,
    deterministic: bool,
) -> Steps:
    """The launches of a call."""
    _refuse(problem, operands, deterministic)
    config = choose(problem, target, operands, with_dq=not deterministic)
    shared_by = parts(problem, target, config)
    config = replace(config, split=shared_by > 1)
    options = backward_options.Gradients(problem, operands, target, config.dbias)
    values = {**attention_params.backward(problem, structure, operands), **options.values}
    values["parts"] = shared_by
    masks = mask_tiles.of_inner(problem, structure, operands, values, target.wave)
    packed = structs.fill(params.BACKWARD, values)
    arrays = patches(
        params.BACKWARD,
        ("dout", "dlse", "dq", "dk", "dv", "row_delta"),
        **{f"forward__{name}": name for name in ("q", "k", "v", "out", "lse")},
    )
    arrays += attention_params.side_addresses(params.BACKWARD, "forward.", structure)
    arrays += score_params.patches(problem, params.BACKWARD, "forward.")
    arrays += options.patches
    if not deterministic:
        arrays += patches(params.BACKWARD, ("dq_sum",))
    if config.split:
        arrays += patches(params.BACKWARD, ("part_sums",))
    rows = problem.rows_q * (1 if problem.group else problem.batch)
    visits = checked("q", row_blocks(rows, target.wave), 1)
    scratch = {"row_delta": 4 * rows * problem.nheads_q}
    schedules: list[Step] = []
    orders: dict[str, int] = {}

    def scheduled(of: Any, tile: int) -> tuple[tuple[int, str], ...]:
        """The order of one side's tiles, and where a kernel finds it."""
        if not problem.ragged:
            return ()
        names = (f"order_{of}", f"first_tile_{of}")
        schedules.append(schedule.step(structure, tile, of=of, names=names))
        orders.update(schedule.orders(structure, names))
        order, first_tile = names
        return patches(params.BACKWARD, forward__order=order, forward__first_tile=first_tile)

    def step(
        source: Source,
        blocks: int | Tiles,
        threads: int,
        shared_bytes: int,
        *more: tuple[int, str],
        listed: mask_tiles.Listed = mask_tiles.NOTHING,
    ) -> Step:
        own = packed
        if listed.fields:
            lists = {f"forward.{name}": value for name, value in listed.fields.items()}
            own = structs.fill(params.BACKWARD, {**values, **lists})
        more += listed.patches(params.BACKWARD, "forward.")
        return Step(source, blocks, threads, own, (*arrays, *more), shared_bytes)

    copy_bytes = operands.copy_bytes(problem)
    launches = [
        step(
            config.source(),
            Tiles("k", config.tile_k, problem.nheads_kv, times=shared_by),
            config.threads,
            config.shared_bytes,
            *scheduled("k", config.tile_k),
            listed=masks.of_keys(config.tile_q, config.tile_k),
        ),
    ]
    if config.split:
        keys = problem.batch * problem.rows_k
        scratch["part_sums"] = 8 * shared_by * keys * problem.nheads_kv * config.depth
        launches.append(
            step(
                parts_source(problem, copy_bytes, config.depth),
                checked("k", row_blocks(keys, target.wave), 1),
                ROW_THREADS,
                0,
            )
        )
    captured = []
    if options.captured:
        alone = choose_captured(problem, target, operands)
        captured.append(
            step(
                alone.source(),
                Tiles("q", alone.tile_q, problem.nheads_q),
                alone.threads,
                alone.shared_bytes,
                *scheduled("q", alone.tile_q),
                listed=masks.of_queries(alone.tile_q, alone.tile_k),
            )
        )
    launches += options.steps(packed, arrays, captured)
    scratch |= options.scratch
    if deterministic:
        alone = choose_dq(problem, target, operands)
        launches.append(
            step(
                alone.source(),
                Tiles("q", alone.tile_q, problem.nheads_q),
                alone.threads,
                alone.shared_bytes,
                *scheduled("q", alone.tile_q),
                listed=masks.of_queries(alone.tile_q, alone.tile_k),
            )
        )
    else:
        scratch["dq_sum"] = scratch["row_delta"] * dq_pitch(problem.headdim)
        launches.append(
            step(finish_source(problem, copy_bytes, config.unit_shift), visits, ROW_THREADS, 0)
        )
    launches = [
        *_padding(problem, structure, operands),
        step(prepare_source(problem, copy_bytes), visits, ROW_THREADS, 0),
        *(step(*each) for each in options.before),
        *masks.steps,
        *launches,
    ]
    scratch |= masks.scratch
    return Steps(tuple(launches), config, tuple(schedules), orders, scratch, options.counters)


def _refuse(problem: Problem, operands: Operands, deterministic: bool) -> None:
    """NotImplementedError for gradients of a score function that these kernels do not have."""
    if problem.score_mod is None:
        return
    from rawattn._scores.program import ScoreText
    from rawattn._scores.score_mod import require_gradient

    assert isinstance(problem.score_mod, ScoreText)
    require_gradient(problem.score_mod)
    if deterministic and any(name.startswith("dcaptured") for name in operands.of_options):
        raise NotImplementedError(
            "deterministic: got True, but gradients of the arrays that score_mod captured are added up in an order that "
            "is not defined; drop deterministic, or leave wrt out of the ScoreMod"
        )


def _padding(problem: Problem, structure: Structure, operands: Operands) -> tuple[Step, ...]:
    """Fills padding rows of the gradients that are the library's own."""
    heads_q, heads_kv = problem.nheads_q, problem.nheads_kv
    shapes: dict[str, tuple[Any, int, int]] = {
        "dq": ("q", heads_q, problem.headdim),
        "dk": ("k", heads_kv, problem.headdim),
        "dv": ("k", heads_kv, problem.headdim_v),
    }
    found = []
    for name, (of, nheads, headdim) in shapes.items():
        side = structure.side(of)
        if name in operands.ours and side.padded and side.rows:
            strides = operands.elements(problem, name)
            shape = nheads, headdim
            found.append(fill_padding.step(problem, structure, of, shape, strides, {"out": name}))
    return tuple(found)
