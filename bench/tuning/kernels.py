"""The kernels whose tiles are searched: the values to try, and a lower bound on the registers of a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rawattn._call.problem import Problem
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import backward_config
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import tile_choice
from rawattn._kernels.source import round_up
from rawattn._kernels.target import SHARED_LIMIT, Target

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel with tile tables of its own.

    values: the values to try for each field.
    possible: whether the kernel can be built with these fields, whatever the problem.
    registers: (a lower bound on the registers that a thread holds at once, the registers that it can have).
    choose: the configuration that the library chooses for (problem, architecture, bytes of shared memory).
    """

    name: str
    verb: str
    note: str  # the page of docs/notes that keeps the figures
    entry: str
    values: Mapping[str, Sequence[int]]
    possible: Callable[[Fields], bool]
    registers: Callable[[Any], tuple[int, int]]
    choose: Callable[[Problem, str, int], Any]
    family: str | None = None  # the forward family that calls are restricted to
    deterministic: bool = False  # searched with the deterministic backward
    may_spill: bool = True  # up to the spills of the present choice

    def tables(self, dtype: str) -> tuple[str, ...]:
        """The tables that serve calls of this dtype."""
        if self.name == tile_choice.TILES:
            return ("any", "long", "left")
        return ("32bit" if dtype == "float32" else "16bit",)


def _itemsize(config: Any) -> int:
    return 4 if config.element == "float" else 2


def _of_launch(threads: int, blocks: int) -> int:
    return min(255, 65536 // (threads * blocks) // 8 * 8)


# Registers of a thread for everything but accumulators and operands, by kernel. A 16 x 16 block takes 8 registers of a thread
# as an accumulator, and 4 as an operand of 16-bit elements. The bounds only discard hopeless candidates before compilation.
_SM90_REST, _FORWARD_REST, _BACKWARD_REST = 16, 24, 24


def _sm90_registers(config: sm90_forward_config.Config) -> tuple[int, int]:
    out = round_up(config.headdim_v, 16) // 2
    scores_and_operands = config.tile_k // 2 + config.tile_k // 4
    return out + scores_and_operands + _SM90_REST, config.consumer_registers


def _forward_registers(config: portable_forward.Config) -> tuple[int, int]:
    blocks = config.tile_q // (16 * config.waves)
    out, scores = round_up(config.headdim_v, 16) // 2, config.tile_k // 2
    held = round_up(config.headdim, 16) // 8 * _itemsize(config) if config.query_in_registers else 0
    limit = _of_launch(config.threads, config.blocks_per_sm)
    return blocks * (out + scores + held) + _FORWARD_REST, limit


def _backward_registers(config: backward_config.Config) -> tuple[int, int]:
    keys = config.tile_k // (16 * config.key_waves)
    queries = config.tile_q // (16 * config.column_waves)
    wide = round_up(max(config.headdim, config.headdim_v), 16 * config.column_waves)
    gradient = keys * (wide // (16 * config.column_waves)) * 8
    waves = 2 * config.key_waves * config.column_waves
    columns = -(-round_up(config.headdim, 16) // 16 // (waves // config.dq_row_waves))
    dq = config.tile_q // (16 * config.dq_row_waves) * columns * 8 if config.with_dq else 0
    limit = _of_launch(config.threads, config.blocks_per_sm)
    return gradient + max(keys * queries * 8, dq) + _BACKWARD_REST, limit


def _dq_registers(config: backward_config.DqConfig) -> tuple[int, int]:
    rows = config.tile_q // (16 * config.waves)
    dq, scores = round_up(config.headdim, 16) // 2, config.tile_k // 2
    limit = _of_launch(config.threads, config.blocks_per_sm)
    return rows * (dq + 2 * scores) + _BACKWARD_REST, limit


def _sm90_possible(fields: Fields) -> bool:
    # setmaxnreg takes 24 to 256. The producer warpgroup gets the registers that the consumers leave, and needs few. tile_k is a
    # multiple of 16: the N of wgmma may be a multiple of 8, but P is an A operand in blocks of K = 16.
    threads = 128 * (1 + fields["consumers"])
    each = 65536 // threads // 8 * 8
    producer = each * (1 + fields["consumers"]) - fields["consumers"] * fields["consumer_registers"]
    return bool(24 <= producer <= 64 and fields["tile_k"] % 16 == 0)


def _rows_of_waves(fields: Fields) -> bool:
    return bool(fields["tile_q"] % (16 * fields["waves"]) == 0)


def _backward_possible(fields: Fields) -> bool:
    waves = 2 * fields["key_waves"] * fields["column_waves"]
    return bool(
        fields["tile_k"] % (16 * fields["key_waves"]) == 0
        and fields["tile_q"] % (16 * fields["column_waves"]) == 0
        and waves % fields["dq_row_waves"] == 0
        and fields["tile_q"] % (16 * fields["dq_row_waves"]) == 0
        and waves <= 16
    )


def _choose_sm90(problem: Problem, arch: str, shared_limit: int) -> Any:
    # The tiles do not depend on the shared memory limit, but the buffers beside them do.
    limit = min(shared_limit, SHARED_LIMIT[arch])
    return sm90_forward.choose(problem, Target(arch, limit), Operands())


def _portable(choose: Callable[..., Any]) -> Callable[[Problem, str, int], Any]:
    return lambda problem, arch, limit: choose(problem, Target(arch, limit), Operands())


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name=tile_choice.TILES,
            verb="forward",
            note="hopper-forward.md",
            entry=sm90_forward_config.ENTRY,
            values={
                "tile_k": tuple(range(48, 193, 16)),
                "consumers": (2, 3, 4),
                "stages": (2, 3, 4),
                "cluster": (1, 2),
                "ping_pong": (True, False),
                "late_scaling": (True, False),
                "consumer_registers": (112, 152, 160, 224, 232, 240),
                "tensor_stores": (False, True),
            },
            possible=_sm90_possible,
            registers=_sm90_registers,
            choose=_choose_sm90,
            family="sm90",
            may_spill=False,
        ),
        Kernel(
            name=portable_forward.TILES,
            verb="forward",
            note="portable-forward.md",
            entry=portable_forward.ENTRY,
            values={
                "tile_q": (64, 128),
                "tile_k": (32, 48, 64, 80, 96, 128),
                "waves": (4, 8),
                "stages": (1, 2),
                "blocks_per_sm": (1, 2, 3),
                "query_in_registers": (False, True),
            },
            possible=_rows_of_waves,
            registers=_forward_registers,
            choose=_portable(portable_forward.choose),
            family="portable",
        ),
        Kernel(
            name=portable_backward.TILES,
            verb="backward",
            note="portable-backward.md",
            entry=backward_config.ENTRY,
            values={
                "tile_q": (32, 64, 128),
                "tile_k": (64, 128, 192, 256),
                "key_waves": (2, 4, 8),
                "column_waves": (1, 2),
                "stages": (1, 2),
                "blocks_per_sm": (1, 2),
                "dq_row_waves": (1, 2, 4, 8),
                "late_copies": (False, True),
            },
            possible=_backward_possible,
            registers=_backward_registers,
            choose=_portable(portable_backward.choose),
        ),
        Kernel(
            name=portable_backward.DQ_TILES,
            verb="backward",
            note="portable-backward.md",
            entry=backward_config.DQ_ENTRY,
            values={
                "tile_q": (64, 128),
                "tile_k": (16, 32, 48, 64, 80, 96),
                "waves": (4, 8),
                "stages": (1, 2),
                "blocks_per_sm": (1, 2, 3),
            },
            possible=_rows_of_waves,
            registers=_dq_registers,
            choose=_portable(portable_backward.choose_dq),
            deterministic=True,
        ),
    )
}
