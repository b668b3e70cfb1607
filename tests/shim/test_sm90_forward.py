"""sm90/forward.cu on the simulator, with its TMA copies, mbarriers and wgmma, against the float64 reference."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config, forward_steps, stream_k
from rawattn._kernels.target import without_device
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.shim import cells_sm90_calls as calls
from tests.shim import cells_sm90_schedule as schedule
from tests.shim.cells import form_of, verify
from tests.shim.cells_sm90 import Sm90Cell
from tests.shim.device import MakeDevice
from tests.shim.paged import normal
from tests.shim.shim import Builder
from tests.shim.traits import of_case, of_kernel
from tests.shim.whole import run_forward, small_tiles

CELLS = [
    *calls.cells_of_curated(),
    *calls.cells_of_edges(),
    *calls.cells_of_shapes(),
    *calls.cells_of_table(),
    *schedule.cells_of_sections(),
    *schedule.cells_of_kept_tiles(),
    *calls.cells_of_interleaved(),
    *calls.cells_of_groups(),
    *calls.cells_of_dims(),
    *calls.cells_of_chance(),
    *schedule.cells_of_orders(),
    *calls.cells_of_checks(),
    *schedule.cells_of_clusters(),
    *schedule.cells_of_stores(),
    *schedule.cells_of_split_keys(),
    *schedule.cells_of_shared_keys(),
]
TILE = ("tile_k", "consumers", "stages", "cluster", "ping_pong", "late_scaling")


def traits(cell: Sm90Cell) -> Iterable[Hashable]:
    yield from of_kernel(cell.config, TILE)
    yield "checked", cell.checked
    yield "sections", cell.section_keys is not None
    yield "kept tiles", cell.kept_tiles
    yield "blocks", cell.blocks
    yield "order", cell.seed % 4
    yield from of_case(cell.case)


@pytest.mark.parametrize("cell", exhaustive.mark(CELLS, traits, lambda cell: cell.builds), ids=str)
def test_sm90_forward(cell: Sm90Cell, builder: Builder) -> None:
    verify(cell, builder)


def test_tiles_are_kept_where_some_are_longer() -> None:
    def kept(case: Case, blocks: int = 132) -> tuple[int, int]:
        cell = Sm90Cell(case=case)
        tiles = -(-cell.form.problem.rows_q // cell.config.schedule_rows)
        return forward_steps.kept_tiles(cell.form.problem, cell.config, blocks), tiles

    causal = dense("causal", 1, 2000, 300, nheads_q=16, nheads_kv=16, causal=True)
    few, tiles = kept(causal)
    assert 0 < few < tiles
    assert few < kept(causal, blocks=500)[0] <= tiles
    assert kept(causal, blocks=10**6)[0] == tiles
    for other in (
        dense("full", 1, 2000, 300, nheads_q=16),
        dense("window", 1, 2000, 300, nheads_q=16, window=(9, 0)),
        ragged("ragged", (2000, 3), (300, 5), causal=True),
    ):
        assert kept(other)[0] == 0


def test_fewer_consumers_where_tiles_leave_multiprocessors_idle() -> None:
    """Fewer consumers are chosen if tiles leave SMs idle; the usual ones if tiles fill the SMs, perhaps by split keys, or if
    the number of tiles is unknown."""

    def consumers(case: Case, multiprocessors: int = 132) -> int:
        call = form_of(case)
        target = replace(without_device(sm90_forward.ARCH), multiprocessors=multiprocessors)
        return sm90_forward.choose(call.problem, target, call.operands).consumers

    def causal(rows: int, heads: int, **knobs: Any) -> Case:
        return dense("fill", 1, rows, rows, nheads_q=heads, nheads_kv=heads, headdim=128, causal=True, **knobs)  # fmt: skip

    assert consumers(causal(2048, 25)) == 3
    assert consumers(causal(2048, 16)) == 2
    assert consumers(causal(1024, 4)) == 1
    assert consumers(causal(1024, 4), multiprocessors=1) == 3
    assert consumers(dense("full", 1, 2048, 300, nheads_q=12, nheads_kv=12, headdim=128)) == 3
    assert consumers(dense("full", 1, 2048, 1024, nheads_q=8, nheads_kv=8, headdim=128)) == 2
    long = stream_k.ALWAYS_KEYS
    assert consumers(dense("few", 1, 64, long, nheads_q=1, nheads_kv=1, headdim=128)) == 1
    assert consumers(dense("rounds", 1, 3000, long, nheads_q=9, nheads_kv=9, headdim=128)) == 3
    packed = {"headdim": 128, "causal": True}
    assert consumers(ragged("lengths", (9, 2000), (9, 2000), **packed)) == 1
    assert consumers(ragged("many", (2000,) * 30, (2000,) * 30, **packed)) == 3
    # How many rows of a padded batch are real is unknown. It has few tiles only if all its rows, real or not, make few.
    assert consumers(padded("rooms", (9, 2000), (9, 2000), 2000, 2000, **packed)) == 1
    assert consumers(padded("rooms", (2000,) * 30, (2000,) * 30, 2000, 2000, **packed)) == 3


def test_what_merging_leaves_behind(hopper: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that follow one whose keys consumers share have the same bits as without it, in the same memory.

    Where heads are interleaved some rows of a tile belong to no query. Outputs of consumers that stayed there would be huge
    queries, and the warp's other rows would move their running maxima with those.
    """
    # Each sequence is a section, so that tiles of others follow: an odd number, as there may be two slots for queries.
    monkeypatch.setattr(forward_config, "SECTION_BYTES", 460 * 256)
    q, k, v = (
        normal(6, n, heads, 64, dtype=np.dtype(np.float16))
        for n, heads in ((62, 5), (460, 1), (460, 1))
    )
    with small_tiles(sm90_forward=(16, 2, 2, 1, False, False, 232, False)):
        device = hopper()
        found, _ = run_forward(device, "sm90", q, k, v * np.float16(1000))
        alone, _ = run_forward(hopper(), "sm90", q[:, :50].copy(), k, v * np.float16(1000))
    assert "interleaved" in device.summaries[-1]
    assert (found[:, :50].view(np.uint16) == alone.view(np.uint16)).all()
