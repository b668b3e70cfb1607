"""Host twin of kernels_cu/portable/decode.cu: problem -> configuration -> source and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import features, params
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import choice, forward, splits
from rawattn._kernels.source import dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Steps
from rawattn._kernels.target import Target

ENTRY = "rawattn_decode"
TILES = "portable_decode"  # the file of its tile tables
# What changes scores by the head or the place of a query has no code here.
FEATURES = frozenset(
    ("ragged", "packed", "left", "right", "top_left", "scale_first", "softcap", "sink_logits", "paged")
)  # fmt: skip

# Query rows of all heads that share keys, at most: of more, each of a sequence's tiles would read its keys again.
MOST_ROWS = 128
# Of wider values the output of so many rows would not stay in registers.
_WIDE_TILE_HEADDIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """Everything the compiler is told: the named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks", "packed"})

    element: str
    headdim: int
    headdim_v: int
    heads: int  # query heads of a tile
    tile_rows: int  # of all its heads
    tile_k: int
    waves: int
    stages: int
    blocks_per_sm: int
    copy_bytes: int
    accumulator_feeds_a: bool  # of the target's product: decides whether P needs shared memory
    split: bool = False  # several blocks may share a query tile
    wave: int = 32

    @property
    def tile_q(self) -> int:
        """Queries of a tile."""
        return self.tile_rows // self.heads

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def partial_bytes(self) -> int:
        """Of what the tile's rows come to in a piece of their keys."""
        return splits.partial_bytes(self.tile_rows, self.headdim_v, self.wave)

    @property
    def out_bytes(self) -> int:
        """Of the tile of outputs in shared memory."""
        return round_up(self.tile_rows * self._pitch(round_up(self.headdim_v, 16)) * self._size, 16)

    @property
    def shared_bytes(self) -> int:
        keys = self._pitch(round_up(self.headdim, 16))
        values = self._pitch(round_up(self.headdim_v, 16))
        wave = self.stages * self.tile_k * (keys + values)
        if not self.accumulator_feeds_a:
            wave += self.tile_rows * self._pitch(self.tile_k)
        used = (self.tile_rows * keys + self.waves * wave) * self._size
        return max(used, self.out_bytes + (self.waves - 1) * self.partial_bytes)

    @property
    def _size(self) -> int:
        return 4 if self.element == "float" else 2

    def _pitch(self, columns: int) -> int:
        return columns + 16 // self._size

    def source(self) -> Source:
        derived = ("tile_q", "shared_bytes", "partial_bytes", "out_bytes")
        return _source(
            ENTRY,
            "portable/decode.cu",
            self.summary(),
            params.FORWARD,
            element=self.element,
            constants=features.constants(self, *derived),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_rows}x{self.tile_k} waves={self.waves} stages={self.stages}"
        words = ["portable decode", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        heads = [f"heads={self.heads}"] if self.heads > 1 else []
        return " ".join([*words, *heads, *features.traits(self), *["split"] * self.split])


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for this kernel, else None."""
    rows = problem.max_seqlen_q * (problem.nheads_q // problem.nheads_kv)
    if rows > MOST_ROWS:
        return f"{rows} query rows share keys, more than {MOST_ROWS}"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports; operands: q, k, v and out."""
    group = problem.nheads_q // problem.nheads_kv
    wide = problem.max_seqlen_q * group > 16 and problem.headdim_v <= _WIDE_TILE_HEADDIM
    tile_rows = 32 if wide else 16
    heads = max(n for n in range(1, tile_rows + 1) if group % n == 0)
    return choice.choose(Config, TILES, problem, target, operands, heads=heads, tile_rows=tile_rows)


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call. A block's first wave leaves what all have come to."""
    config = choose(problem, target, operands)
    return forward.of_query_tiles(config, config.heads, 1, problem, structure, operands, target)
