"""portable/append.cu on the simulator, through the same host code as calls on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn._call.options import Options
from rawattn._call.pages import PagedLayout, split
from rawattn._runtime.append import append_verb
from rawattn._runtime.option_arrays import OptionsSplit
from rawattn._verbs.append import read_append
from rawattn._verbs.paged import scaled
from tests import exhaustive
from tests.append import Appended, appended, rounded
from tests.paged import BFLOAT16
from tests.shim.device import Device, MakeDevice
from tests.shim.whole import run_verb

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (9, 1, 24, 3)


def run(device: Device, call: Appended, *, on_device: bool = False) -> None:
    """Runs a call and checks what it wrote. on_device: the host does not check integers."""
    pools = call.pools()
    named = {
        **{"k": call.k, "v": call.v, "k_pages": pools[0], "v_pages": pools[1]},
        **{"block_table": call.pages.block_table, "seqlen_k": call.pages.seqlen_k},
        **{"q": call.q, "out": None, "validate": False, "backend": None},
        **call.options,
    }
    if on_device:
        indptr, table = split(call.pages.block_table)
        options = Options(seqs=PagedLayout(call.pages.seqs, call.pages.seqlen_k, indptr))
        verb = append_verb(call.rotary is not None, call.interleaved, call.q is not None)
        queries = () if call.q is None else (call.q,)
        verb, factors, values = scaled(verb, call.k, call.pages.scales)
        inputs = (call.k, call.v, *pools, *queries, table, *(call.rotary or ()), *factors)
    else:
        verb, inputs, _, options, values = read_append(**named)
    k_pages, v_pages, out = run_append(
        device, OptionsSplit(verb, (), values, options), inputs, on_device
    )
    call.verify(k_pages, v_pages, out)


def run_append(
    device: Device, given: OptionsSplit, inputs: Any, on_device: bool
) -> tuple[Any, Any, Any]:
    """Returns the pages and the rotated queries."""
    targets = (None,) * len(given.verb.outputs)
    written: dict[str, Any] = {}
    results = run_verb(
        device, "portable", given, inputs, targets, False, on_device, written=written
    )
    return written["k_pages"], written["v_pages"], results[0] if results else None


STYLES = ({}, {"interleaved": True})
BATCHES: dict[str, dict[str, Any]] = {
    "one": {},
    "padded": {"rows": (3, 0, 5, 1), "room_q": 6},
    "packed": {"rows": (3, 1, 5, 0), "packed": True},
    "pair": {"rows": (3, 1, 5, 0), "packed": True, "pair": True, "integers": np.int64},
}


@pytest.mark.parametrize(
    ("batch", "on_device"), exhaustive.thin(itertools.product(BATCHES, (False, True)), 3)
)
def test_batches(machine: MakeDevice, batch: str, on_device: bool) -> None:
    for n, style in enumerate(({}, {"rotary_dim": 16}, {"rotary_dim": 16, "interleaved": True})):
        call = appended(LENS, 4, **style, **BATCHES[batch], heads_first=bool(n))
        run(machine(32), call, on_device=on_device)


# (head dims, rotary dim, element type, type of the angles): accesses of 16, 8, 4 and 2 bytes, heads wider than a wave.
WIDTHS = [
    ((64, 32), 64, BFLOAT16, F32),
    ((64, 64), 32, F16, F16),
    ((40, 8), 24, BFLOAT16, BFLOAT16),
    ((20, 4), 12, F16, F32),
    ((7, 1), 6, BFLOAT16, F32),
    ((3, 5), 2, F32, F32),
    ((256, 256), 256, F32, F32),
    ((66, 66), 66, F16, F32),
]


@pytest.mark.parametrize(("style", "width"), exhaustive.thin(itertools.product((0, 1), WIDTHS), 3))
def test_widths(machine: MakeDevice, style: int, width: Any) -> None:
    dims, rotary_dim, dtype, angles = width
    knobs = {"dims": dims, "dtype": dtype, "angles": angles, "heads": (5, 1)}
    call = appended((5, 2), 3, rotary_dim=rotary_dim, **STYLES[style], **knobs)
    run(machine(64 if style else 32), call)


@pytest.mark.parametrize(
    ("style", "width"), exhaustive.thin(itertools.product((0, 1, 2), WIDTHS), 4)
)
@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
def test_pages_of_8_bits(machine: MakeDevice, float8: str, style: int, width: Any) -> None:
    dims, rotary_dim, dtype, angles = width
    turns = {} if style == 2 else {"rotary_dim": rotary_dim, **STYLES[style]}
    knobs = {"dims": dims, "dtype": dtype, "angles": angles, "heads": (4, 2), "float8": float8}
    call = appended((5, 2), 3, rows=2, **turns, **knobs, heads_first=style == 1)
    run(machine(64 if style else 32), call, on_device=float8 == "arrays")


@pytest.mark.parametrize("dtype", [BFLOAT16, F16, F32], ids=str)
def test_rounding_to_8_bits(machine: MakeDevice, dtype: Any) -> None:
    for call in rounded(dtype):
        run(machine(), call)


@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
def test_pages(machine: MakeDevice, page_size: int) -> None:
    run(machine(), appended(LENS, page_size, rows=LENS, room_q=24))


def test_many_sequences(machine: MakeDevice) -> None:
    lens = tuple(n % 7 for n in range(40))
    run(machine(), appended(lens, 4, rows=lens, packed=True, rotary_dim=8))


@pytest.mark.parametrize("pair", [False, True])
def test_rows_without_a_slot_are_not_written(machine: MakeDevice, pair: bool) -> None:
    """No access leaves the arrays (the simulator would fault), and the pages do not change."""
    call = appended((9, 4, 24, 3), 4, pair=pair, rows=2)
    pools = call.pools()
    indptr, table = split(call.pages.block_table)
    options = Options(seqs=PagedLayout(None, np.full(4, 2), indptr))
    given = OptionsSplit(append_verb(False, False, False), (), (), options)
    device = machine(checked=True)
    room = 4 * table.shape[-1]
    for lengths in ((-1, -(2**31), 0, -7), (2**31 - 1, 2**20, room + 2, room + 40)):
        with device.telling(length=np.array(lengths, np.int32)):
            written = run_append(device, given, (call.k, call.v, *pools, table), True)
        for pool, before in zip(written[:2], pools, strict=True):
            assert pool.tobytes() == before.tobytes()


def test_ids_of_no_page_are_not_written(machine: MakeDevice) -> None:
    call = appended((9, 4, 24, 3), 4)
    pools = call.pools()
    table = call.pages.block_table
    used = -(-call.pages.seqlen_k // 4) - 1
    info = np.iinfo(table.dtype)
    for b, wild in enumerate((-1, info.min, info.max, len(call.pages.k_pages))):
        table[b, used[b]] = wild
    options = Options(seqs=PagedLayout(None, call.pages.seqlen_k, None))
    given = OptionsSplit(append_verb(False, False, False), (), (), options)
    inputs = (call.k, call.v, *pools, table)
    k_pages, v_pages, _ = run_append(machine(checked=True), given, inputs, True)
    assert k_pages.tobytes() == pools[0].tobytes()
    assert v_pages.tobytes() == pools[1].tobytes()


def test_positions_without_an_angle_have_the_nearest(machine: MakeDevice) -> None:
    call = appended((9, 4), 4, rotary_dim=8)
    assert call.rotary is not None
    few = tuple(x[:6].copy() for x in call.rotary)
    last = tuple(np.concatenate((x, np.repeat(x[-1:], 5, axis=0))) for x in few)
    k_pages, v_pages, out = _with_angles(machine(), call, few)
    expected = _with_angles(machine(), call, last)
    for got, wanted in zip((k_pages, v_pages, out), expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


def _with_angles(device: Device, call: Appended, rotary: Any) -> tuple[Any, Any, Any]:
    options = Options(seqs=PagedLayout(None, call.pages.seqlen_k, None))
    given = OptionsSplit(append_verb(True, False, True), (), (), options)
    inputs = (call.k, call.v, *call.pools(), call.q, call.pages.block_table, *rotary)
    return run_append(device, given, inputs, True)
