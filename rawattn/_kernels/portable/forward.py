"""Host twin of kernels_cu/portable/forward.cu: problem -> configuration -> source and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import attention_params, features, params, score_params, structs
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import choice, fill_padding, mask_tiles, schedule, splits
from rawattn._kernels.source import dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, Steps, SubTask, Tiles, patches
from rawattn._kernels.target import Target

ENTRY = "rawattn_forward"
TILES = "portable_forward"  # the file of its tile tables
FEATURES = features.names()

# Bytes of K and V whose query tiles are scheduled next to each other (a section of kv heads): the part of the L2 cache that
# running blocks should share.
SECTION_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """The named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks", "packed"})

    element: str
    headdim: int
    headdim_v: int
    tile_q: int
    tile_k: int
    waves: int
    stages: int
    blocks_per_sm: int
    query_in_registers: bool
    copy_bytes: int
    key_bytes: int  # of an access to keys and values; copy_bytes: to other arrays
    # An accumulator of the target's mma is an operand A as it is, so that P needs no shared memory.
    accumulator_feeds_a: bool
    split: bool = False  # several blocks may share a query tile
    wave: int = 32

    @property
    def schedule_rows(self) -> int:
        """Query rows of each head that the schedule hands out together."""
        return self.tile_q

    @property
    def section_bytes(self) -> int:
        return SECTION_BYTES

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2

        def row(columns: int, itemsize: int = itemsize) -> int:
            return columns * itemsize + 16

        dims = round_up(self.headdim, 16), round_up(self.headdim_v, 16)
        keys = sum(row(columns, 1 if self.float8 else itemsize) for columns in dims)
        nbytes = self.tile_q * row(dims[0]) + self.stages * self.tile_k * keys
        if not self.accumulator_feeds_a:
            nbytes += self.tile_q * row(self.tile_k)
        return max(nbytes, self.tile_q * row(dims[1]))

    @property
    def partial_bytes(self) -> int:
        """Bytes of a wave's partial result of a piece of its keys."""
        return splits.partial_bytes(self.tile_q // self.waves, self.headdim_v, self.wave)

    def source(self) -> Source:
        return _source(
            ENTRY,
            "portable/forward.cu",
            self.summary(),
            params.FORWARD,
            element=self.element,
            constants=features.constants(self, "shared_bytes", "partial_bytes"),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves} stages={self.stages}"
        access = f"{self.copy_bytes}B"
        if self.key_bytes != self.copy_bytes:
            access += f" keys={self.key_bytes}B"
        return " ".join(
            [
                *("portable forward", self.element, dims(self), shape, access),
                *features.traits(self),
                *["split"] * self.split,
            ]
        )


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """None: this kernel serves every call."""
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for `problem`; operands: q, k, v and out."""
    key_bytes = operands.key_bytes(problem)
    return choice.choose(Config, TILES, problem, target, operands, key_bytes=key_bytes)


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call."""
    config = choose(problem, target, operands)
    return of_query_tiles(config, 1, config.waves, problem, structure, operands, target)


def of_query_tiles(
    config: Any,
    heads: int,
    waves: int,
    problem: Problem,
    structure: Structure,
    operands: Operands,
    target: Target,
) -> Steps:
    """The launches of a kernel whose blocks take query tiles, or pieces of their keys.

    heads: query heads of a tile. waves: those of a block that each leave a partial result of a piece.
    """
    values = attention_params.forward(problem, structure, operands, SECTION_BYTES)
    names = ["q", "out", "lse"]
    keys = dict(zip("kv", attention_params.KEYS[config.paged], strict=True))
    if config.paged:
        structure = attention_params.without_pages(structure)
    masks = mask_tiles.Masks(problem, structure, operands, values, target)
    listed = masks.of_queries(config.tile_q, config.tile_k)
    tiles = Tiles("q", config.tile_q, problem.nheads_q // heads)
    pieces = splits.split(problem, structure, config, target, tiles)
    config = replace(config, split=pieces.any)
    schedules: tuple[SubTask, ...] = ()
    orders: dict[str, int] = {}
    if problem.ragged:
        names.append("order")
        schedules = (schedule.sub_task(structure, config.tile_q, of="q", name="order"),)
        orders["order"] = schedule.order_bytes(problem.batch)
    main = Step(
        source=config.source(),
        blocks=replace(tiles, blocks_each=pieces.count),
        threads=config.threads,
        params=structs.fill(params.FORWARD, {**values, **listed.fields, **pieces.fields()}),
        patches=(
            *patches(params.FORWARD, names, **keys),
            *listed.patches(params.FORWARD),
            *attention_params.side_addresses(params.FORWARD, "", structure),
            *attention_params.page_addresses(problem, params.FORWARD),
            *score_params.patches(problem, params.FORWARD),
            *pieces.patches(params.FORWARD),
        ),
        shared_bytes=config.shared_bytes,
    )
    partials = splits.affordable(problem, target, pieces.scratch(waves * config.partial_bytes))
    scratch = {**masks.scratch, **partials}
    paddings = fill_padding.of_results(problem, structure, operands)
    launches = (*masks.steps, main)
    counters = pieces.counters()
    return Steps(launches, config, schedules, paddings, orders, scratch, counters, masks.lists)
