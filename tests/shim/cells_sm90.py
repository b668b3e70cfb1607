"""Cells of the test matrix for Hopper's forward kernel."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import forward_fit, tma
from rawattn._kernels.target import without_device
from tests.cases import Case
from tests.shim.cells import Cell, form_of
from tests.shim.launch import Machine
from tests.shim.shim import Builder
from tests.tiles import splitting, splitting_by_length, tensor_stores


class Sm90Tiles(NamedTuple):
    """Tiles other than the tables': small tiles put many tile edges into a short sequence."""

    tile_k: int
    consumers: int
    stages: int
    ping_pong: bool
    late_scaling: bool = False
    cluster: int = 1
    tensor_stores: bool = False  # if the call allows them
    consumer_registers: int = 0  # 0 = as many as one block an SM allows

    def __str__(self) -> str:
        return f"{64 * self.consumers}x{self.tile_k}s{self.stages}" + (
            "p" * self.ping_pong
            + "l" * self.late_scaling
            + f"c{self.cluster}" * (self.cluster > 1)
            + "t" * self.tensor_stores
            + f"r{self.consumer_registers}" * (self.consumer_registers > 0)
        )


# Many tile edges in a short sequence.
SMALL = Sm90Tiles(16, 2, 2, True)
LATE = Sm90Tiles(16, 3, 2, False, late_scaling=True)
LONE = Sm90Tiles(16, 1, 2, False)
# Shapes that no table has: rings of one to three slots, consumers with and without ping-pong.
SHAPES = (
    Sm90Tiles(16, 2, 1, False),
    Sm90Tiles(32, 3, 2, True),
    Sm90Tiles(48, 2, 1, True),
    Sm90Tiles(16, 3, 3, False),
    Sm90Tiles(32, 2, 3, True),
    Sm90Tiles(32, 4, 2, True, late_scaling=True),
    Sm90Tiles(16, 4, 1, False),
    Sm90Tiles(48, 1, 3, False, late_scaling=True),
    LONE,
)
# Clusters of two blocks, each of which loads half of the keys and values for both.
PAIR = Sm90Tiles(16, 2, 2, True, cluster=2)
LATE_PAIR = Sm90Tiles(32, 3, 2, False, late_scaling=True, cluster=2)
# Outputs stored by TMA.
STORED = Sm90Tiles(16, 2, 2, True, tensor_stores=True)
LATE_STORED = Sm90Tiles(32, 3, 1, False, late_scaling=True, tensor_stores=True)


@dataclass(frozen=True, kw_only=True)
class Sm90Cell(Cell):
    """A cell of Hopper's forward.

    blocks: how many blocks the GPU runs at once; seed: changes the order in which threads run and copies arrive.
    stream_k: split the keys of the last tiles among blocks wherever a block would be idle otherwise, also if the tiles have
    unequal numbers of keys; by_length: weigh causal tiles by their number of keys.
    """

    shape: Sm90Tiles | None = None
    kept_tiles: int | None = None
    blocks: int = 2
    stream_k: bool = False
    by_length: bool = False
    seed: int = 0

    def __str__(self) -> str:
        knobs = [f"{self.case}"]
        knobs += [str(self.shape)] if self.shape else []
        knobs += [f"section{self.section_keys}"] if self.section_keys is not None else []
        knobs += [f"kept{self.kept_tiles}"] if self.kept_tiles is not None else []
        knobs += [f"blocks{self.blocks}"] if self.blocks != 2 else []
        knobs += ["split"] if self.stream_k else []
        knobs += ["by-length"] if self.by_length else []
        knobs += [f"seed{self.seed}"] if self.seed else []
        knobs += ["checked"] if self.checked else []
        return "-".join(knobs)

    @property
    def around(self) -> AbstractContextManager[None]:
        if not self.stream_k:
            return nullcontext()
        return splitting_by_length() if self.by_length else splitting()

    @cached_property
    def config(self) -> sm90_forward_config.Config:
        with self.around:
            config = chosen(self.case)
        assert config is not None, f"{self.case}: not a call for this kernel"
        if self.shape is None:
            return config
        alone = {1: 256, 2: 232, 3: 160, 4: 112}[self.shape.consumers]
        with tensor_stores():
            allowed = chosen(self.case)
        fields = self.shape._asdict()
        fields["tensor_stores"] &= allowed is not None and allowed.tensor_stores
        fields["consumer_registers"] = fields["consumer_registers"] or alone
        return forward_fit.with_heads(replace(config, **fields), self.form.problem)

    def run(self, builder: Builder) -> tuple[np.ndarray, np.ndarray | None]:
        seed = zlib.crc32(str(self).encode())
        machine = Machine(builder, checked=self.checked, seed=seed)
        with self.around:
            return self.call.forward(return_lse=self.case.return_lse).run_sm90(
                machine,
                self.config,
                blocks=self.blocks,
                exact_grid=not self.case.on_device,
                section_keys=self.section_keys,
                kept_tiles=self.kept_tiles,
                own_order=seed % 2 == 1
                and self.call.problem.batch <= sm90_forward_config.MOST_ORDERED,
                fill=self.fill,
            )


def chosen(case: Case) -> sm90_forward_config.Config | None:
    """The config that a Hopper GPU runs for this call; None if it runs the portable kernel or copies arrays first."""
    if case.layout == "steps" or case.dtype == "float32":
        return None
    call = form_of(case)
    target, operands = without_device(sm90_forward.ARCH), call.operands
    if sm90_forward.supports(call.problem, target, operands) is not None:
        return None
    if tma.unaligned(call.problem, operands):
        return None
    return sm90_forward.choose(call.problem, target, operands)
