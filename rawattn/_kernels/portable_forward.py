"""Host twin of kernels_cu/portable/forward.cu: problem -> configuration -> source."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn._compile import Source
from rawattn._kernels import _source
from rawattn._kernels._source import round_up
from rawattn._problem import Problem

ENTRY = "rawattn_forward"

# Keys of one kv head whose K and V fill this much are scheduled together: the part of L2 that running blocks should share.
SECTION_BYTES = 32 << 20

# (largest padded headdim, tile_q, tile_k, waves, stages, blocks per SM, queries in registers), the fastest first.
# The first whose shared memory fits is taken; the last of each headdim fits every GPU since Ampere.
_TILES_16BIT = (
    (64, 128, 64, 4, 2, 2, True),
    (96, 128, 64, 4, 2, 2, False),
    (128, 128, 48, 4, 2, 2, False),
    (192, 128, 96, 8, 1, 1, False),
    (192, 64, 48, 4, 1, 1, False),
    (256, 128, 80, 8, 1, 1, False),
    (256, 128, 64, 8, 1, 1, False),
    (256, 64, 32, 4, 1, 1, False),
)
_TILES_32BIT = (
    (64, 64, 64, 4, 1, 2, False),
    (128, 64, 32, 4, 1, 2, False),
    (256, 64, 32, 4, 1, 1, False),
    (256, 32, 16, 2, 1, 2, False),
)


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
    """The fastest known configuration of `problem` that fits `shared_limit` bytes of shared memory a block.

    copy_bytes: the widest access that every row of q, k, v and out allows (2 to 16).
    """
    wide = max(round_up(problem.headdim, 16), round_up(problem.headdim_v, 16))
    full = problem.dtype == "float32"
    for limit, tile_q, tile_k, waves, stages, blocks, held in (
        _TILES_32BIT if full else _TILES_16BIT
    ):
        config = Config(
            element=_source.ELEMENT[problem.dtype],
            headdim=problem.headdim,
            headdim_v=problem.headdim_v,
            tile_q=tile_q,
            tile_k=tile_k,
            waves=waves,
            stages=stages,
            blocks_per_sm=blocks,
            query_in_registers=held,
            copy_bytes=copy_bytes,
            ragged=problem.ragged,
            **_source.masks(problem),
            scale_first=not problem.scale > 0,
            accumulator_feeds_a=not full,
        )
        if wide <= limit and config.shared_bytes <= shared_limit:
            return config
    raise AssertionError(f"no tile of the table fits {shared_limit} bytes of shared memory")
