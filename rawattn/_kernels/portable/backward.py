"""Host twin of kernels_cu/portable/backward*.cu: problem -> configurations -> sources of the backward's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import source as _source
from rawattn._kernels.portable import choice
from rawattn._kernels.source import round_up

ENTRY = "rawattn_backward"
DQ_ENTRY = "rawattn_backward_dq"
# The files of their tile tables.
TILES = "portable_backward"
DQ_TILES = "portable_backward_dq"
ROW_THREADS = 256  # of the kernels that visit rows: one wave a row


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the compiler is told about the main kernel: the named constants of namespace `config`."""

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
    ragged: bool
    left: bool
    right: bool
    top_left: bool
    with_dq: bool
    accumulator_feeds_a: bool
    wave: int = 32

    @property
    def threads(self) -> int:
        return 2 * self.key_waves * self.column_waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2
        padding = 16 // itemsize
        depth = round_up(max(self.headdim, self.headdim_v), 16 * self.column_waves)
        elements = 2 * (self.tile_k + self.stages * self.tile_q) * (depth + padding)
        # P, and two of dS; without dQ one, or none where the accumulators that hold it are operands.
        tiles = 3 if self.with_dq else 1 + (not self.accumulator_feeds_a or self.column_waves > 1)
        elements += tiles * self.tile_k * (self.tile_q + padding)
        return elements * itemsize + self.stages * 2 * self.tile_q * 4

    def source(self) -> Source:
        constants = {
            "kHeadDim": self.headdim,
            "kHeadDimV": self.headdim_v,
            "kDqPitch": dq_pitch(self.headdim),
            "kTileQ": self.tile_q,
            "kTileK": self.tile_k,
            "kKeyWaves": self.key_waves,
            "kColumnWaves": self.column_waves,
            "kStages": self.stages,
            "kBlocksPerSm": self.blocks_per_sm,
            "kDqRowWaves": self.dq_row_waves,
            "kLateCopies": self.late_copies,
            "kCopyBytes": self.copy_bytes,
            "kRagged": self.ragged,
            "kLeft": self.left,
            "kRight": self.right,
            "kTopLeft": self.top_left,
            "kWithDq": self.with_dq,
            "kSharedBytes": self.shared_bytes,
        }
        text = _source.text(self.element, constants, "portable/backward.cu")
        return Source(entry=ENTRY, text=text, summary=self.summary())

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.key_waves}x{self.column_waves} stages={self.stages}"
        traits = [*_traits(self), *([] if self.with_dq else ["without-dq"])]
        return " ".join(
            [
                "portable backward",
                self.element,
                _source.dims(self),
                shape,
                f"{self.copy_bytes}B",
                *traits,
            ]
        )


@dataclass(frozen=True, slots=True)
class DqConfig:
    """What the compiler is told about the kernel that computes dQ alone."""

    element: str
    headdim: int
    headdim_v: int
    tile_q: int
    tile_k: int
    waves: int
    stages: int
    blocks_per_sm: int
    copy_bytes: int
    ragged: bool
    left: bool
    right: bool
    top_left: bool
    accumulator_feeds_a: bool
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
        constants = {
            "kHeadDim": self.headdim,
            "kHeadDimV": self.headdim_v,
            "kTileQ": self.tile_q,
            "kTileK": self.tile_k,
            "kWaves": self.waves,
            "kStages": self.stages,
            "kBlocksPerSm": self.blocks_per_sm,
            "kCopyBytes": self.copy_bytes,
            "kRagged": self.ragged,
            "kLeft": self.left,
            "kRight": self.right,
            "kTopLeft": self.top_left,
            "kSharedBytes": self.shared_bytes,
        }
        text = _source.text(self.element, constants, "portable/backward_dq.cu")
        return Source(entry=DQ_ENTRY, text=text, summary=self.summary())

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves} stages={self.stages}"
        return " ".join(
            [
                "portable backward_dq",
                self.element,
                _source.dims(self),
                shape,
                f"{self.copy_bytes}B",
                *_traits(self),
            ]
        )


def _traits(config: Config | DqConfig) -> list[str]:
    return _source.traits(
        ragged=config.ragged, left=config.left, right=config.right, top_left=config.top_left
    )


def choose(problem: Problem, *, copy_bytes: int, shared_limit: int, with_dq: bool = True) -> Config:
    """As `_portable.choose`; copy_bytes is of all arrays and gradients.

    with_dq: whether the kernel adds up dQ too, in an order that is not defined.
    """
    return choice.choose(
        Config, TILES, problem, copy_bytes=copy_bytes, shared_limit=shared_limit, with_dq=with_dq
    )


def choose_dq(problem: Problem, *, copy_bytes: int, shared_limit: int) -> DqConfig:
    """As `choose`, of the kernel that computes dQ alone."""
    return choice.choose(
        DqConfig, DQ_TILES, problem, copy_bytes=copy_bytes, shared_limit=shared_limit
    )


def dq_pitch(headdim: int) -> int:
    """Columns of a row of the dQ sums: whole blocks of 16."""
    return round_up(headdim, 16)


def prepare_source(problem: Problem, copy_bytes: int) -> Source:
    return _row_source("backward_prepare", problem, copy_bytes)


def finish_source(problem: Problem, copy_bytes: int) -> Source:
    return _row_source("backward_finish", problem, copy_bytes)


def row_blocks(rows: int, wave: int = 32) -> int:
    """Blocks of the kernels that visit rows."""
    return -(-rows // (ROW_THREADS // wave))


def _row_source(kernel: str, problem: Problem, copy_bytes: int) -> Source:
    element = _source.ELEMENT[problem.dtype]
    constants = {
        "kHeadDim": problem.headdim,
        "kHeadDimV": problem.headdim_v,
        "kDqPitch": dq_pitch(problem.headdim),
        "kThreads": ROW_THREADS,
        "kCopyBytes": copy_bytes,
    }
    return Source(
        entry=f"rawattn_{kernel}",
        text=_source.text(element, constants, f"portable/{kernel}.cu"),
        summary=f"portable {kernel} {element} D={problem.headdim},{problem.headdim_v} {copy_bytes}B",
    )
