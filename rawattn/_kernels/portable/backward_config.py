"""The configurations that kernels_cu/portable/backward.cu and backward_dq.cu are compiled with. `backward` chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rawattn._compile.compiler import Source
from rawattn._kernels import features, params
from rawattn._kernels.features import Features
from rawattn._kernels.source import dims, round_up
from rawattn._kernels.source import source as _source

ENTRY = "rawattn_backward"
DQ_ENTRY = "rawattn_backward_dq"
FINISH_ENTRY = "rawattn_backward_finish"
ROW_THREADS = 256  # of a block of the kernels that visit rows: prepare, finish and the sum of parts


def dq_pitch(headdim: int) -> int:
    """Columns of a row of the dQ sums: a multiple of 16."""
    return round_up(headdim, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """The main kernel's named constants of namespace `config`."""

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
    late_copies: bool  # the next Q and dO are copied behind the barrier that hands over the weights
    copy_bytes: int
    with_dq: bool
    accumulator_feeds_a: bool
    bias_of_keys: bool = False  # the bias has one row, for all queries
    dbias: int = 0  # see backward_options.by_main
    pairs: bool = False  # heads come in pairs, see backward_options.in_pairs
    split: bool = False  # several blocks share a key tile, see `backward_parts.parts`
    split_sinks: bool = False  # only tiles with sink tokens, see `backward_parts.parts_of_sinks`
    one_key_tile: bool = False  # see `backward.has_one_key_tile`
    rewrites: bool = False  # main computes NaN of hidden keys again, see `backward.rewrites`
    delta_rows: int = 0  # room for row_delta that main computes, see `backward.delta_rows`
    wave: int = 32

    @property
    def threads(self) -> int:
        return 2 * self.key_waves * self.column_waves * self.wave

    @property
    def shared_bytes(self) -> int:
        itemsize = 4 if self.element == "float" else 2
        padding = 16 // itemsize
        elements = 2 * (self.tile_k + self.stages * self.tile_q) * (self.depth + padding)
        # Tiles of P and dS: one of P and two of dS. Without dQ one tile for P, and one for dS unless accumulators are operands.
        from_registers = self.from_registers
        tiles = 3 + self.pairs if self.with_dq else 1 + (not from_registers)
        # Exact weights take two tiles; one more where no tile of dS is free for the second half (see portable/handover.cuh).
        tiles += self.exact_weights and not (from_registers and self.with_dq)
        elements += tiles * self.tile_k * (self.tile_q + padding)
        if self.bias_chunks and itemsize == self.bias == 2:
            stages = 1 if self.pairs else self.stages
            elements += stages * self.tile_q * (self.tile_k + padding)
        return elements * itemsize + (self.stages * 2 * self.tile_q + self.delta_rows) * 4

    @property
    def depth(self) -> int:
        """Columns of the tiles of Q, K, V and dO, padded alike."""
        return round_up(max(self.headdim, self.headdim_v), 16 * self.column_waves)

    @property
    def from_registers(self) -> bool:
        """Whether a wave's own accumulators of P and dS serve as operands of its next products."""
        return self.accumulator_feeds_a and self.column_waves == 1

    @property
    def exact_weights(self) -> bool:
        """Whether weights are handed over in float32: see kernels_cu/portable/handover.cuh."""
        if self.element == "float":
            return False
        if self.has_general_score_mod:
            return True
        # Weights rounded to float16 cost float16 gradients accuracy. Beside a bias or a mask, they are slower at large
        # head dims.
        return self.from_registers and (
            self.element == "float16" or (self.wide and self.reads_score_operands)
        )

    @property
    def wide(self) -> bool:
        """Whether dK and dV take more registers than they do up to head dim 64."""
        return self.depth > 64

    @property
    def reads_score_operands(self) -> bool:
        """Whether each score needs an element from memory: of a bias or a mask."""
        return self.bias > 0 or self.block_mask

    @property
    def has_general_score_mod(self) -> bool:
        """Whether there is a score function that does more than add a line."""
        return self.score_mod is not None and not self.mod_line

    @property
    def arrivals(self) -> int:
        """How waves meet for the weights: see `sync_weights` in kernels_cu/portable/handover.cuh."""
        if not self.from_registers:
            return 0
        if not self.wide:
            return 1
        if not self.exact_weights:
            return 0 if self.late_copies else 1
        return 1 if self._exact_and_plain or self.pairs else 2

    @property
    def early_dq(self) -> bool:
        """Whether the half of the waves that owns dV computes its share of dQ before its own product, not behind it."""
        return not (self.wide and self._exact_and_plain)

    @property
    def dq_by_half(self) -> bool:
        """Whether the half of the waves that owns dK computes all of dQ, because scores keep the other half busy for longer."""
        if not self.from_registers or self.depth > 128:
            return False
        return self.softcap or (self.dropout and not self.wide)

    @property
    def _exact_and_plain(self) -> bool:
        """Whether exact weights go from lane to lane, with nothing else that takes registers.

        Which order of a turn leaves ptxas enough registers depends on this.
        """
        plain = not self.has_general_score_mod and not self.reads_score_operands
        return self.from_registers and self.exact_weights and plain

    @property
    def unit_shift(self) -> int:
        """The exponent of 2 of the factor on probabilities: see kernels_cu/portable/gradient_unit.cuh."""
        # A probability is at most 1, up to rounding. 2^14 of it leaves room for a factor of 3 in float16.
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
        traits += ["of-sinks"] * self.split_sinks
        traits += ["one-key-tile"] * self.one_key_tile + ["rewrites"] * self.rewrites
        traits += [f"delta={self.delta_rows}"] * (self.delta_rows > 0)
        words = ["portable backward", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        return " ".join([*words, *traits])


@dataclass(frozen=True, slots=True, kw_only=True)
class DqConfig(Features):
    """The named constants of the kernel that computes dQ alone, or gradients of captured arrays.

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
    exact_sums: bool = False  # their sums have the same bits in any order of additions
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
        traits = [*features.traits(self), *["captured-gradients"] * self.captured]
        traits += ["exact"] * self.exact_sums
        return " ".join([*words, *traits])


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishConfig(Features):
    """The named constants of the last kernel. It has features only where keys may be hidden from some rows of a tile."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset(
        {"packed", "scale_first", "sink_logits", "paged", "bias_pairs", "bias_chunks"}
    )

    element: str
    headdim: int
    headdim_v: int
    copy_bytes: int
    unit_shift: int  # of the main kernel
    with_sums: bool  # whether it makes dQ of sums, or only computes gradients again that are NaN
    threads: int = ROW_THREADS
    delta_rows: ClassVar[int] = 0  # row_delta is in memory

    @property
    def blocks_per_sm(self) -> int:
        """As many as without the code for NaN, which must do with these registers."""
        return 6 if self.copy_bytes == 16 and self.element != "float" else 8

    @property
    def dq_pitch(self) -> int:
        return dq_pitch(self.headdim)

    def source(self) -> Source:
        return _source(
            FINISH_ENTRY,
            "portable/backward_finish.cu",
            self.summary(),
            params.BACKWARD,
            element=self.element,
            constants=features.constants(self, "dq_pitch", "blocks_per_sm", "delta_rows"),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        words = ["portable backward_finish", self.element, dims(self), f"{self.copy_bytes}B"]
        return " ".join([*words, *features.traits(self), *["sums"] * self.with_sums])
