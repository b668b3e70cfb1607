"""Cells of the test matrix: each is a case of tests/cases.py and the configuration of the kernel that runs it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from rawattn._call.layout import Lengths
from rawattn._call.problem import Problem, describe
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.portable import ragged_setup
from rawattn._kernels.portable.forward import Config
from rawattn._kernels.target import without_device
from tests.cases import Case
from tests.inputs import Inputs, materialise
from tests.memory import CANARY, Strided, strided
from tests.shim.launch import Forward, Machine, operands_of
from tests.shim.shim import Build, Builder
from tests.tolerance import check, check_lse
from tests.verify import expected, layout


class Tiles(NamedTuple):
    """Tiles other than the tables': small tiles put many tile edges into a short sequence."""

    tile_q: int
    tile_k: int
    waves: int
    stages: int
    held: bool  # queries in registers

    def __str__(self) -> str:
        shape = f"{self.tile_q}x{self.tile_k}w{self.waves}s{self.stages}"
        return shape + ("r" if self.held else "")


@dataclass(frozen=True, kw_only=True)
class Cell:
    case: Case
    wave: int = 32
    tiles: Tiles | None = None
    checked: bool = False
    fibers: str = "own"
    section_keys: int | None = None

    def __str__(self) -> str:
        knobs = [f"{self.case}", f"wave{self.wave}"]
        knobs += [str(self.tiles)] if self.tiles else []
        knobs += [f"section{self.section_keys}"] if self.section_keys is not None else []
        knobs += ["checked"] if self.checked else []
        knobs += [self.fibers] if self.fibers != "own" else []
        return "-".join(knobs)

    @cached_property
    def call(self) -> Call:
        return call_of(self.case)

    @property
    def form(self) -> Call:
        return form_of(self.case)

    @cached_property
    def config(self) -> Config:
        config = portable_forward.choose(
            self.form.problem, without_device("sm_90a"), self.form.operands
        )
        if self.tiles is not None:
            config = replace(
                config,
                tile_q=self.tiles.tile_q,
                tile_k=self.tiles.tile_k,
                waves=self.tiles.waves,
                stages=self.tiles.stages,
                query_in_registers=self.tiles.held,
            )
        feeds_a = config.accumulator_feeds_a and self.wave == 32
        return replace(config, wave=self.wave, accumulator_feeds_a=feeds_a)

    @property
    def builds(self) -> list[Build]:
        """The builds of the kernels that the cell runs."""
        sources = [self.config.source()]
        sources += [ragged_setup.source()] if self.form.problem.ragged else []
        return [Build(source, self.wave, self.checked, self.fibers) for source in sources]

    @property
    def fill(self) -> bool:
        """Whether the library writes the padding rows."""
        return self.call.lengths.q.padded and not self.case.give_out

    def run(self, builder: Builder) -> tuple[np.ndarray, np.ndarray | None]:
        seed = zlib.crc32(str(self).encode())
        machine = Machine(builder, self.wave, self.checked, self.fibers, seed)
        return self.call.forward(return_lse=self.case.return_lse).run(
            machine,
            self.config,
            exact_grid=not self.case.on_device,
            section_keys=self.section_keys,
            fill=self.fill,
        )


@dataclass(frozen=True, eq=False)
class Call:
    inputs: Inputs
    problem: Problem
    lengths: Lengths
    out: Strided

    @property
    def operands(self) -> Operands:
        inputs = self.inputs
        return operands_of({"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": self.out})

    def forward(self, *, return_lse: bool = True) -> Forward:
        inputs = self.inputs
        arrays = inputs.q, inputs.k, inputs.v, self.out
        return Forward(self.problem, self.lengths, *arrays, return_lse=return_lse)


def call_of(case: Case) -> Call:
    return _call(materialise(case))


# Many cells have one case, and all are asked for their builds while tests are collected.
@lru_cache(maxsize=1024)
def form_of(case: Case) -> Call:
    """The call without values: what decides which kernels it takes."""
    return _call(materialise(case, drawn=False))


def _call(inputs: Inputs) -> Call:
    q, k, v = inputs.q, inputs.k, inputs.v
    problem, lengths = describe(q.view(), k.view(), v.view(), seqs=layout(inputs), **inputs.options)
    out = inputs.out or dense_out(inputs.rows.shape, problem, q.buffer.dtype)
    return Call(inputs, problem, lengths, out)


def dense_out(rows: tuple[int, ...], problem: Problem, dtype: np.dtype[Any]) -> Strided:
    out = strided((*rows, problem.nheads_q, problem.headdim_v), dtype, "dense")
    out.buffer.view(np.uint8)[:] = CANARY
    return out


def verify(cell: Cell, builder: Builder) -> None:
    """Checks that values are within the tolerance, padding is as documented and nothing else was written.

    A subclass of Cell may run another kernel.
    """
    call, case = cell.call, cell.case
    exact = expected(case)
    rows = call.inputs.rows
    buffer, lse = cell.run(builder)
    got = replace(call.out, buffer=buffer).view()
    check(got[rows], exact.out, exact.low_out, what="out")
    mine = replace(call.out, buffer=np.zeros(buffer.shape, bool))
    mine.view()[... if cell.fill else rows] = True
    touched = _bits(buffer) != _bits(call.out.buffer)
    assert not np.any(touched & ~mine.buffer), "out: memory outside its rows changed"
    if cell.fill:
        assert not np.any(_bits(np.ascontiguousarray(got[~rows]))), "padding rows of out are not 0"
    if lse is not None:
        log = lse.swapaxes(-1, -2)
        check_lse(log[rows], exact.lse, exact.low_lse)
        padding = np.ascontiguousarray(log[~rows])
        if cell.fill:
            assert np.all(padding == -np.inf), "padding rows of lse are not -inf"
        else:
            assert np.all(padding.view(np.uint8) == CANARY), "padding rows of lse changed"


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")
