"""Host twin of kernels_cu/portable/forward.cu: problem -> configuration -> source."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import source as _source
from rawattn._kernels.portable import choice
from rawattn._kernels.source import round_up

ENTRY = "rawattn_forward"
TILES = "portable_forward"  # the file of its tile tables

# Keys of one kv head whose K and V fill this much are scheduled together: the part of L2 that running blocks should share.
SECTION_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the compiler is told: the named constants of namespace `config` in the kernel."""

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
    ragged: bool
    left: bool
    right: bool
    top_left: bool
    scale_first: bool
    accumulator_feeds_a: bool  # of the target's product: decides whether P needs shared memory
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

        def pitch(columns: int) -> int:
            return columns + 16 // itemsize

        keys = pitch(round_up(self.headdim, 16))
        values = pitch(round_up(self.headdim_v, 16))
        elements = self.tile_q * keys + self.stages * self.tile_k * (keys + values)
        if not self.accumulator_feeds_a:
            elements += self.tile_q * pitch(self.tile_k)
        return max(elements, self.tile_q * values) * itemsize

    def source(self) -> Source:
        constants = {
            "kHeadDim": self.headdim,
            "kHeadDimV": self.headdim_v,
            "kTileQ": self.tile_q,
            "kTileK": self.tile_k,
            "kWaves": self.waves,
            "kStages": self.stages,
            "kBlocksPerSm": self.blocks_per_sm,
            "kQueryInRegisters": self.query_in_registers,
            "kCopyBytes": self.copy_bytes,
            "kRagged": self.ragged,
            "kLeft": self.left,
            "kRight": self.right,
            "kTopLeft": self.top_left,
            "kScaleFirst": self.scale_first,
            "kSharedBytes": self.shared_bytes,
        }
        text = _source.text(self.element, constants, "portable/forward.cu")
        return Source(entry=ENTRY, text=text, summary=self.summary())

    def summary(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves} stages={self.stages}"
        traits = _source.traits(
            ragged=self.ragged,
            left=self.left,
            right=self.right,
            top_left=self.top_left,
            scale_first=self.scale_first,
        )
        dims = _source.dims(self)
        return " ".join(
            ["portable forward", self.element, dims, shape, f"{self.copy_bytes}B", *traits]
        )


def choose(problem: Problem, *, copy_bytes: int, shared_limit: int) -> Config:
    """As `_portable.choose`; copy_bytes is of q, k, v and out."""
    return choice.choose(
        Config,
        TILES,
        problem,
        copy_bytes=copy_bytes,
        shared_limit=shared_limit,
        scale_first=not problem.scale > 0,
    )
