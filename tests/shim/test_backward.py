"""portable/backward.cu with the kernels around it, against the float64 reference."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._kernels import tile_tables
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable.backward_config import Config, DqConfig
from rawattn._kernels.target import without_device
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.gradients import NAMES, backward_of, check_gradient
from tests.memory import CANARY, Strided, strided
from tests.random_cases import random_case
from tests.shim.backward import Backward
from tests.shim.launch import Machine, operands_of
from tests.shim.shim import Builder
from tests.shim.traits import constants, of_case, of_kernel
from tests.verify import layout

WAVES = (32, 64)


class Tiles(NamedTuple):
    tile_q: int
    tile_k: int
    key_waves: int
    column_waves: int
    stages: int
    dq_row_waves: int
    late_copies: bool

    def __str__(self) -> str:
        return "{}x{}w{}x{}s{}d{}".format(*self) + "late" * self.late_copies


class DqTiles(NamedTuple):
    tile_q: int
    tile_k: int
    waves: int
    stages: int


DQ_SMALL = DqTiles(32, 16, 2, 2)
# Many tile edges in a short sequence.
SMALL = Tiles(16, 16, 1, 1, 1, 1, False)
SHAPES = (
    Tiles(32, 32, 2, 1, 2, 2, False),
    Tiles(32, 16, 1, 2, 1, 1, False),
    Tiles(16, 48, 1, 1, 2, 1, True),
    Tiles(64, 32, 2, 2, 2, 4, True),
    Tiles(48, 32, 1, 1, 1, 1, False),
)
AROUND_EDGES = (0, 1, 15, 16, 17, 33)
TWO_HEADS = {"nheads_q": 2, "nheads_kv": 1}
WINDOWS = (
    ((0, 0), 0), ((16, 1), 16), ((17, 31), 1), ((40, 33), 15), ((5, 2), 1000),
    ((3, None), 0), ((16, None), 17), ((1 << 40, None), 0), ((None, 0), 0), ((None, 17), 0),
)  # fmt: skip
DQ_TABLE = [
    *(("bfloat16", row) for row in tile_tables.table(portable_backward.DQ_TILES, "16bit")),
    *(("float32", row) for row in tile_tables.table(portable_backward.DQ_TILES, "32bit")),
]
TABLE = [
    *(("bfloat16", row) for row in tile_tables.table(portable_backward.TILES, "16bit")),
    *(("bfloat16", row) for row in tile_tables.table(portable_backward.TILES, "short")),
    *(("float32", row) for row in tile_tables.table(portable_backward.TILES, "32bit")),
]


@dataclass(frozen=True, kw_only=True)
class Cell:
    case: Case
    wave: int = 32
    tiles: Tiles | None = None
    checked: bool = False
    section_queries: int = 1 << 20
    with_dq: bool = True  # False: a kernel of its own computes dq
    dq_tiles: DqTiles = DQ_SMALL

    def __str__(self) -> str:
        knobs = [f"{self.case}", f"wave{self.wave}"]
        knobs += [str(self.tiles)] if self.tiles else []
        knobs += [f"section{self.section_queries}"] if self.section_queries != 1 << 20 else []
        knobs += ["checked"] if self.checked else []
        knobs += [] if self.with_dq else ["dq" + "x".join(map(str, self.dq_tiles))]
        return "-".join(knobs)

    @cached_property
    def configs(self) -> tuple[Config, DqConfig]:
        call = backward_of(self.case)
        inputs = call.inputs
        problem, _ = describe(
            *(x.view() for x in (inputs.q, inputs.k, inputs.v)),
            seqs=layout(inputs),
            **inputs.options,
        )
        # `dout` stands for `out`, which has the same layout but would take time to compute.
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": call.dout, "dout": call.dout}
        operands = operands_of({**arrays, **self.gradients})
        target = without_device("sm_90a")
        config = portable_backward.choose(problem, target, operands, with_dq=self.with_dq)
        if self.tiles is not None:
            config = replace(config, **self.tiles._asdict())
        dq_config = portable_backward.choose_dq(problem, target, operands)
        feeds_a = dq_config.accumulator_feeds_a and self.wave == 32
        dq_config = replace(
            dq_config, **self.dq_tiles._asdict(), wave=self.wave, accumulator_feeds_a=feeds_a
        )
        return replace(config, wave=self.wave, accumulator_feeds_a=feeds_a), dq_config

    @property
    def operands(self) -> dict[str, Strided]:
        call = backward_of(self.case)
        inputs = call.inputs
        return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": call.out, "dout": call.dout}

    @cached_property
    def gradients(self) -> dict[str, Strided]:
        call = backward_of(self.case)
        if call.into is not None:
            return dict(zip(NAMES, call.into, strict=True))
        dtype = call.inputs.q.buffer.dtype
        arrays = {}
        for name, shape in zip(NAMES, call.shapes, strict=True):
            arrays[name] = strided(shape, dtype, "dense")
            arrays[name].buffer.view(np.uint8)[:] = CANARY
        return arrays

    def machine(self, builder: Builder) -> Machine:
        return Machine(builder, self.wave, self.checked, "own", zlib.crc32(str(self).encode()))


def verify(cell: Cell, builder: Builder) -> None:
    call, case = backward_of(cell.case), cell.case
    inputs = call.inputs
    problem, lengths = describe(
        *(x.view() for x in (inputs.q, inputs.k, inputs.v)), seqs=layout(inputs), **inputs.options
    )
    backward = Backward(problem, lengths, cell.operands, call.lse, call.dlse, cell.gradients)
    fill = not case.give_out
    buffers = backward.run(
        cell.machine(builder),
        *cell.configs,
        exact_grid=not case.on_device,
        section_queries=cell.section_queries,
        fill=fill,
    )
    for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
        given, buffer = cell.gradients[name], buffers[name]
        got = replace(given, buffer=buffer).view()
        check_gradient(call, n, got[rows])
        mine = replace(given, buffer=np.zeros(buffer.shape, bool))
        mine.view()[... if fill else rows] = True
        touched = _bits(buffer) != _bits(given.buffer)
        assert not np.any(touched & ~mine.buffer), f"{name}: memory outside its rows changed"
        if fill:
            assert not np.any(_bits(np.ascontiguousarray(got[~rows]))), f"{name}: padding is not 0"


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def cells_of_curated() -> Iterable[Cell]:
    """Curated cases with tiles and wave sizes in turn. Cases that share a kernel have the same, to compile it only once.

    Every other kernel is left out: the forward's cells have the cases of those, and the tests on a GPU run all.
    """
    kernels: dict[object, int] = {}
    for case in curated():
        # Arrays with a strided last axis are copied before they reach a kernel.
        if case.scores <= 60_000 and case.layout != "steps" and case.batch <= 50:
            main, _ = Cell(case=case).configs
            n = kernels.setdefault(main, len(kernels))
            if n % 2 == 1:
                yield Cell(case=case, wave=WAVES[n // 2 % 2], tiles=(None, SMALL, SHAPES[0])[n % 3])


def cells_of_edges() -> Iterable[Cell]:
    """Every pair of lengths around the edges of tiles, in one batch, for every kind of mask."""
    lens_q, lens_k = zip(*itertools.product(AROUND_EDGES, AROUND_EDGES), strict=True)
    one_head = {"nheads_q": 1, "nheads_kv": 1, "headdim": 16}
    for n, (align, (window, sink)) in enumerate(
        itertools.product(("bottom-right", "top-left"), WINDOWS)
    ):
        corner = {"bottom-right": "b", "top-left": "t"}[align]
        name = f"edges-{corner}{window[0]},{window[1]},{sink}".replace("None", "x")
        case = ragged(name, lens_q, lens_k, **one_head, align=align, window=window, sink=sink)
        yield Cell(case=case, wave=WAVES[n % 2], tiles=SMALL, with_dq=n % 4 < 2)
    yield Cell(case=ragged("edges", lens_q, lens_k, **one_head), tiles=SMALL)


def cells_of_shapes() -> Iterable[Cell]:
    dtypes = itertools.cycle(("float16", "bfloat16", "float32"))
    for n, (tiles, wave) in enumerate(itertools.product(SHAPES, WAVES)):
        knobs = {"headdim": 40, "headdim_v": (24, 72)[n % 2], "dtype": next(dtypes)}
        window = (30, 20) if n % 3 == 1 else None
        case = dense("shape", 1, 75, 118, **knobs, causal=n % 3 == 0, window=window, sink=9)
        yield Cell(case=case, wave=wave, tiles=tiles)


def cells_of_table() -> Iterable[Cell]:
    """Every tile of the tables, for GPUs of any shared-memory size."""
    for n, (dtype, row) in enumerate(TABLE):
        tiles = Tiles(*(row.fields[name] for name in Tiles._fields))
        knobs = {"headdim": row.headdim, "dtype": dtype, "causal": True, **TWO_HEADS}
        case = dense("table", 1, tiles.tile_q + 9, tiles.tile_k + 5, **knobs)
        yield Cell(case=case, wave=WAVES[n % 2], tiles=tiles)


def cells_of_dq_table() -> Iterable[Cell]:
    for n, (dtype, row) in enumerate(DQ_TABLE):
        tiles = DqTiles(*(row.fields[name] for name in DqTiles._fields))
        knobs = {"headdim": row.headdim, "dtype": dtype, "causal": True, **TWO_HEADS}
        case = dense("dq-table", 1, tiles.tile_q + 9, 2 * tiles.tile_k + 5, **knobs)
        yield Cell(case=case, wave=WAVES[n % 2], tiles=SMALL, dq_tiles=tiles, with_dq=False)


def cells_of_widths() -> Iterable[Cell]:
    """Rows aligned to the element's size and to each larger power of 2 up to 16 bytes."""
    for itemsize, width in ((2, 2), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16)):
        dtype = {2: "float16", 4: "float32"}[itemsize]
        headdim = 32 + width // itemsize
        case = dense(f"width{width}", 2, 40, 50, headdim=headdim, dtype=dtype, causal=True)
        yield Cell(case=case, tiles=SHAPES[0])
        yield Cell(case=case, tiles=SMALL, checked=True, with_dq=False)


def cells_of_sections() -> Iterable[Cell]:
    for section_queries in (1, 100, 250):
        many_heads = {"nheads_q": 10, "nheads_kv": 5, "headdim": 16}
        for case in (
            dense("heads", 2, 70, 100, **many_heads, causal=True),
            ragged("ragged-heads", (70, 0, 33), (100, 50, 300), **many_heads, causal=True),
        ):
            yield Cell(case=case, tiles=SMALL, section_queries=section_queries)


def cells_of_chance() -> Iterable[Cell]:
    for seed in range(30):
        case = random_case(seed)
        if case.layout == "steps" or case.scores > 60_000:
            continue
        rng = np.random.default_rng(seed)
        yield Cell(
            case=case,
            wave=WAVES[int(rng.integers(2))],
            tiles=(None, SMALL, *SHAPES)[int(rng.integers(2 + len(SHAPES)))],
            section_queries=int(rng.integers(1, 400)),
            checked=rng.random() < 0.15,
            with_dq=rng.random() < 0.6,
        )


BASICS = [
    dense("one", 1, 16, 16, nheads_q=1, nheads_kv=1, headdim=16),
    dense("dense", 2, 70, 90, nheads_q=4, headdim=24),
    dense("causal", 1, 75, 118, causal=True, headdim=40, dtype="float16"),
    dense("float32", 1, 33, 40, nheads_q=4, dtype="float32", headdim=7, window=(9, 5), sink=3),
    ragged("slots", (40, 0, 3, 65), (33, 20, 0, 130), by_q="seqlen", by_k="cu_seqlen",
           room_q=(41, 5, 9, 65), room_k=(40, 20, 7, 131), lead=3, tail=4, window=(9, 9)),
    padded("padded", (40, 0, 3, 65), (33, 20, 0, 130), 70, 140, causal=True, align="top-left"),
]  # fmt: skip
CELLS = [
    *(
        Cell(
            case=case,
            wave=wave,
            tiles=tiles,
            with_dq=with_dq,
            checked=tiles == SMALL and wave == 32,
        )
        for case in BASICS
        for wave in WAVES
        for tiles, with_dq in ((SMALL, True), (SHAPES[0], False))
    ),
    *cells_of_curated(),
    *cells_of_edges(),
    *cells_of_shapes(),
    *cells_of_table(),
    *cells_of_dq_table(),
    *cells_of_widths(),
    *cells_of_sections(),
    *cells_of_chance(),
]


TILE = Tiles._fields


def traits(cell: Cell) -> Iterable[Hashable]:
    main, dq = cell.configs
    yield from of_kernel(main, TILE)
    if not cell.with_dq:
        yield from (("dq", *each) for each in constants(dq) if not each[0].startswith("headdim"))
    yield "access", cell.wave, main.copy_bytes
    yield "machine", cell.wave, cell.checked, cell.with_dq
    yield "sections", cell.section_queries < 1 << 20
    yield from of_case(cell.case)


def kernels(cell: Cell) -> Iterable[Hashable]:
    return [(config, cell.checked) for config in cell.configs[: 1 if cell.with_dq else 2]]


@pytest.mark.parametrize("cell", exhaustive.mark(CELLS, traits, kernels), ids=str)
def test_backward(cell: Cell, builder: Builder) -> None:
    verify(cell, builder)
