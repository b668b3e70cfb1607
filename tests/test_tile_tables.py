"""Tile tables as data, and temporary replacements of them."""

from __future__ import annotations

import bisect
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.tuning import tables
from rawattn import SeqLayout
from rawattn._call.options import DEFAULTS
from rawattn._call.problem import describe
from rawattn._interop.native import Read, View
from rawattn._kernels import tile_tables as _tiles
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.selection import only, selection, using_tiles
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import line_estimate, stream_k, tile_choice
from rawattn._kernels.target import without_device
from rawattn._runtime import on_gpu
from rawattn._runtime.verbs import BACKWARD, FORWARD, Verb
from tests.tiles import clusters, splitting, tensor_stores

HOPPER = without_device("sm_90a")
ROOT = Path(__file__).resolve().parents[1]


# The tables


def test_importing_the_library_reads_no_table():
    code = "import rawattn; from rawattn._kernels import tile_tables; print(tile_tables._shipped.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("kernel", _tiles.SCHEMAS)
def test_shipped_tables_are_as_the_tuner_writes_them(kernel: str):
    path = _tiles.DIRECTORY / f"{kernel}.json"
    text = path.read_text(encoding="utf-8")
    source = json.loads(text)["kernel"]
    assert tables.dump(source, _tiles.read(kernel, path)) == text
    assert (ROOT / source).is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1].pop("stages"), r"any\[1\]: stages missing"),
        (lambda rows: rows[1].update(tile=3), r"any\[1\]: tile unknown"),
        (lambda rows: rows[2].update(ping_pong=1), r"any\[2\]: ping_pong is 1, expected true"),
        (lambda rows: rows[0].update(stages=True), r"any\[0\]: stages is True, expected a pos"),
        (lambda rows: rows[0].update(tile_k=0), r"any\[0\]: tile_k is 0"),
        (lambda rows: rows[0].update(tile_k="64"), r"any\[0\]: tile_k is '64'"),
        (lambda rows: rows[0].update(measured=3), r"any\[0\]: measured is 3"),
        (lambda rows: rows[0].update(headdim=200), r"any\[1\]: headdim 96 follows 200"),
        (lambda rows: rows.pop(), r"any\[3\]: headdim 192; the last row must serve 256"),
        (lambda rows: rows.clear(), "any: got no list of rows"),
        (lambda rows: rows.insert(0, 7), r"any\[0\]: got int, expected an object"),
    ],
)
def test_a_wrong_row_is_named(tile_tables: Path, change: Any, message: str):
    path = tile_tables / "sm90_forward.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data["tables"]["any"])
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as raised:
        _tiles.table("sm90_forward", "any")
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tables": 3}', '{"tables": {"any": []}}'])
def test_a_file_without_the_tables_is_named(tile_tables: Path, text: str):
    path = tile_tables / "sm90_forward.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"sm90_forward\.json"):
        _tiles.table("sm90_forward", "any")


# Temporary replacements of tables, and the choices that follow


def test_using_tiles_replaces_one_table_and_is_undone():
    shipped = _tiles.table("portable_forward", "16bit")
    row = _tiles.Row(256, shipped[-1].shape)
    with only("portable"), using_tiles("portable_forward", "16bit", [row]):
        assert selection().family == "portable"
        assert _tiles.table("portable_forward", "16bit") == (row,)
        assert _tiles.table("portable_forward", "32bit") != (row,)
        with using_tiles("portable_forward", "16bit", shipped):
            assert _tiles.table("portable_forward", "16bit") == shipped
        assert len(selection().tables) == 1
        q = np.zeros((1, 1, 1, 64), np.float16)
        problem, _ = describe(q, q, q)
        config = portable_forward.choose(problem, HOPPER, Operands())
        assert {name: getattr(config, name) for name in row.fields} == row.fields
    assert _tiles.table("portable_forward", "16bit") == shipped
    assert selection() == (None, ())


class FakeArrays:
    """Implements what the dispatcher calls on a framework, without arrays."""

    def read(self, arrays: Sequence[Any], required: int) -> Read:
        form = ((1, 4, 1, 8), (64, 16, 16, 2), np.dtype(np.float16), 0)
        return [0] * len(arrays), (*form * len(arrays), 0), False

    def view(self, array: Any) -> View:
        return View(0, (1, 4, 1, 8), (64, 16, 16, 2), np.dtype(np.float16), 0)

    def stream(self, device: int) -> int:
        return 0

    def current_device(self) -> int:
        return 0


@pytest.mark.parametrize("verb", [FORWARD, BACKWARD], ids=lambda verb: verb.name)
def test_a_prepared_call_belongs_to_its_tables(verb: Verb, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []

    def prepare(*args: Any) -> on_gpu.Call:
        made.append(selection())
        launches: Any = SimpleNamespace(run=lambda *args: None)
        nothing: Any = None
        return on_gpu.Call(launches, nothing, nothing, (), (), None, ())

    prepared: dict[Any, Any] = {}
    monkeypatch.setattr(on_gpu, "_prepared", prepared)
    monkeypatch.setattr(on_gpu, "prepare", prepare)
    own: Any = FakeArrays()
    inputs, targets = (object(),) * len(verb.inputs), (None,) * len(verb.outputs)

    def call() -> None:
        read = own.read(inputs, verb.required_count)
        on_gpu.run(verb, own, read, inputs, targets, DEFAULTS, False, "cupy")

    rows = _tiles.table("portable_forward", "16bit")
    for _ in range(2):
        call()
        with using_tiles("portable_forward", "16bit", rows[-1:]):
            call()
    assert len(made) == len(prepared) == 2
    assert made[0] != made[1]


@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_what_tests_run_in_clusters(headdim: int, window: tuple[int, int] | None):
    x = np.broadcast_to(np.float16(0), (1, 70, 1, headdim))
    with clusters():
        problem, _ = describe(x, x, x, window=window)
        config = sm90_forward.choose(problem, HOPPER, Operands())
    assert config is not None
    assert config.cluster == 2


def test_clusters_where_every_block_has_queries():
    def cluster(rows_q: int, rows_k: int) -> int:
        q, k = (np.broadcast_to(np.float16(0), (1, rows, 1, 256)) for rows in (rows_q, rows_k))
        config = sm90_forward.choose(describe(q, k, k)[0], HOPPER, Operands())
        assert config is not None
        return config.cluster

    long = tile_choice.LONG_SEQLEN
    assert cluster(long, long) == 2
    assert [cluster(1, long), cluster(long - 1, long), cluster(long, long - 1)] == [1, 1, 1]


@pytest.mark.parametrize("clusters", [1, 2, 7, 66, 132])
@pytest.mark.parametrize(
    "seqlens",
    [(1, 9000), (300, 8192), (8192, 8192), (9000, 20000), (9, 2**29), (3000, 33000), (1600, 10000)],
)
def test_split_tiles_are_covered(seqlens: tuple[int, int], clusters: int):
    """Stream-K's pieces, cut as in attn/schedule/stream_k.cuh, cover every key tile once, in the slots that there are."""
    for heads, headdim in itertools.product((1, 3, 40, 131), (64, 128, 256)):
        q, k = (np.broadcast_to(np.float16(0), (1, rows, heads, headdim)) for rows in seqlens)
        problem, _ = describe(q, k, k)
        config = sm90_forward.choose(problem, HOPPER, Operands())
        assert config is not None
        assert config.stream_k
        shared = stream_k.split(problem, config, clusters)
        keys = -(-seqlens[1] // config.tile_k)
        least = stream_k.least_piece_tiles(problem, config.tile_k)
        every = -(-seqlens[0] // config.schedule_rows) * heads
        if shared is None or not shared.last_share:
            tiles = every % clusters
            pieces = line_estimate.pieces_of(tiles, keys, clusters, least)
        else:
            tiles, pieces = (every - heads) % clusters + heads, clusters
        if shared is None:
            gain = (pieces - tiles) * keys
            assert tiles == 0 or gain < clusters * stream_k.LEAST_GAIN_TILES
            continue
        assert pieces <= clusters
        assert shared.tiles == tiles
        units = [shared.units] * tiles
        if share := shared.last_share:
            units[-heads:] = [shared.units * share // line_estimate.SHARES] * heads
        ends = [*itertools.accumulate(shared.begin + each for each in units)]
        line = ends[-1]
        assert line < 2**31, "the kernel counts in 32 bits"
        assert shared.piece * keys >= least * shared.units
        assert shared.piece > shared.begin, "no piece lies in what counts for a beginning"
        assert 0 <= pieces * shared.piece - line < pieces, "all pieces are alike"
        items, done = [], [0] * tiles
        for piece in range(pieces):
            begin, end = piece * shared.piece, min((piece + 1) * shared.piece, line)
            for tile in range(bisect.bisect_right(ends, begin), tiles):
                if (start := ends[tile] - units[tile]) >= end:
                    break
                items.append(piece + tile)
                assert start // shared.piece <= piece <= (ends[tile] - 1) // shared.piece
                assert done[tile] == max(begin - start, 0)
                done[tile] = min(end - start, units[tile])
        assert done == units
        of_tiles = (
            (ends[n] - 1) // shared.piece - (ends[n] - units[n]) // shared.piece
            for n in range(tiles)
        )
        assert len(items) == tiles + sum(of_tiles), "as the kernel counts them (items_of)"
        assert items == sorted(set(items)), "two items share a slot"
        assert items[-1] <= shared.items - 1


def test_what_is_split():
    def shares(rows_k: int, rows_q: int = 70, **options: Any) -> bool:
        q, k = (np.broadcast_to(np.float16(0), (1, rows, 1, 128)) for rows in (rows_q, rows_k))
        problem, _ = describe(q, k, k, **options)
        config = sm90_forward.choose(problem, HOPPER, Operands())
        assert config is not None
        return config.stream_k

    long = stream_k.ALWAYS_KEYS
    assert shares(long)
    assert not shares(long - 1)
    assert shares(long, causal=True)
    assert shares(4 * long, long, causal=True)
    assert shares(long, long, causal=True), (
        "the shortest tile is a fraction of the longest: by length"
    )
    assert not shares(2047, 2047, causal=True)
    assert not shares(long, long, causal=True, seqs=SeqLayout(seqlen_q=[long], seqlen_k=[long]))
    assert not shares(long, long, window=(5000, 0))
    assert shares(2 * long, window=(long, 0))
    assert not shares(2 * long, window=(long - 2, 0))
    assert shares(2 * long, seqs=SeqLayout(seqlen_k=[long]))
    assert not shares(2 * long, seqs=SeqLayout(seqlen_k=[long - 9])), "the longest is known"
    assert not shares(long, num_splits=1)
    with splitting():
        assert shares(70)
        assert shares(70, causal=True)


def test_what_tma_stores():
    def stores(
        *, headdim: int = 128, headdim_v: int = 128, packed: bool = True, seqlen: int = 70
    ) -> bool:
        rows = (seqlen,) if packed else (1, seqlen)
        q = np.broadcast_to(np.float16(0), (*rows, 1, headdim))
        v = np.broadcast_to(np.float16(0), (*rows, 1, headdim_v))
        seqs = SeqLayout(seqstart_q=[0, seqlen]) if packed else None
        problem, _ = describe(q, q, v, seqs=seqs)
        config = sm90_forward.choose(problem, HOPPER, Operands())
        assert config is not None
        assert config.shared_bytes <= HOPPER.shared_limit
        return config.tensor_stores

    assert stores()
    assert not stores(packed=False)  # nothing to gain
    assert not stores(headdim_v=20)  # rows are no multiples of 16 bytes
    assert not stores(headdim=256)  # no room in shared memory
    assert not stores(headdim=64, headdim_v=64, seqlen=tile_choice.LONG_SEQLEN)
    with tensor_stores():
        assert stores(headdim=64, headdim_v=64, seqlen=tile_choice.LONG_SEQLEN)
        assert not stores(headdim=256)


def test_outputs_that_tma_cannot_store():
    x = np.broadcast_to(np.float16(0), (70, 2, 128))
    problem, _ = describe(x, x, x, seqs=SeqLayout(seqstart_q=[0, 70]))

    def stores(*out: int) -> bool:
        strides = dict.fromkeys("qkv", (512, 256, 2))
        strides["out"] = (*out, 2)
        config = sm90_forward.choose(problem, HOPPER, Operands(strides))
        assert config is not None
        return config.tensor_stores

    assert stores(512, 256)
    assert not stores(-512, 256)
    assert not stores(520, 260)
