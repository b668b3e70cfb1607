"""Host twin of kernels_cu/portable/forward.cu: problem -> configuration -> source."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn._compile import Source
from rawattn._problem import Problem

ENTRY = "rawattn_forward"

_ELEMENT = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float"}
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

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

        keys = pitch(_round_up(self.headdim, 16))
        values = pitch(_round_up(self.headdim_v, 16))
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
        lines = [
            '#include "target/target.cuh"',
            "namespace config {",
            f"using Element = {self.element};",
        ]
        for name, value in constants.items():
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
        lines += ["}  // namespace config", '#include "portable/forward.cu"', ""]
        return Source(entry=ENTRY, text="\n".join(lines), summary=self.summary())

    def summary(self) -> str:
        dims = f"D={self.headdim}" + (
            "" if self.headdim == self.headdim_v else f",{self.headdim_v}"
        )
        traits = [
            name
            for name, on in (
                ("ragged", self.ragged),
                ("left", self.left),
                ("right", self.right),
                ("top-left", self.top_left),
                ("scale-first", self.scale_first),
            )
            if on
        ]
        shape = f"{self.tile_q}x{self.tile_k} waves={self.waves} stages={self.stages}"
        return " ".join(
            ["portable forward", self.element, dims, shape, f"{self.copy_bytes}B", *traits]
        )


def choose(problem: Problem, *, copy_bytes: int, shared_limit: int) -> Config:
    """The fastest known configuration of `problem` that fits `shared_limit` bytes of shared memory a block.

    copy_bytes: the widest access that every row of q, k, v and out allows (2 to 16).
    """
    wide = max(_round_up(problem.headdim, 16), _round_up(problem.headdim_v, 16))
    full = problem.dtype == "float32"
    for limit, tile_q, tile_k, waves, stages, blocks, held in (
        _TILES_32BIT if full else _TILES_16BIT
    ):
        config = Config(
            element=_ELEMENT[problem.dtype],
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
            left=problem.window_left is not None,
            right=problem.window_right is not None,
            # Without a limit on either side the diagonal is nowhere, so both alignments share one kernel.
            top_left=problem.top_left
            and (problem.window_left is not None or problem.window_right is not None),
            scale_first=not problem.scale > 0,
            accumulator_feeds_a=not full,
        )
        if wide <= limit and config.shared_bytes <= shared_limit:
            return config
    raise AssertionError(f"no tile of the table fits {shared_limit} bytes of shared memory")


def copy_bytes(problem: Problem, strides: int, pointers: int) -> int:
    """The widest access that divides every row's place and length.

    strides: of all arrays but on their last axis, in bytes, OR-ed together; pointers: likewise all addresses.
    """
    itemsize = _ITEMSIZE[problem.dtype]
    together = strides | pointers | problem.headdim * itemsize | problem.headdim_v * itemsize
    return min(16, together & -together)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
