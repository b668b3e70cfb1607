"""The suites `decode` and `prefill`: the bytes that their cases read, block tables, and lines with bounds."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._bench import graph_peers, graphs, serving, serving_cases, suites
from rawattn._bench.graph_peers import Sides
from rawattn._bench.grids import CUDNN, FA2, FA4, FA4_PAGED
from rawattn._bench.report import Figure
from rawattn._bench.serving_cases import Serving
from rawattn._bench.timing import Entrant, Timing
from tests.bench_fakes import pretended, pretended_race

CASES = [
    *serving_cases.BIG,
    *serving_cases.SMALL,
    *serving_cases.PREFILL,
    serving_cases.AS_WINDOWED,
]
IN_PAGES = [case.in_pages(16) for case in CASES] + [serving_cases.UNEVEN, serving_cases.WINDOWED]


def test_bytes_are_those_of_what_is_seen() -> None:
    big = serving_cases.BIG[0]
    assert big.key_bytes == 64 * 8192 * 8 * (128 + 128) * 2
    assert big.nbytes - big.key_bytes == 2 * 64 * 32 * 128 * 2
    assert 2 * big.in_pages(16).in_float8().key_bytes == big.key_bytes
    assert serving_cases.WINDOWED.key_bytes == serving_cases.AS_WINDOWED.key_bytes
    assert serving_cases.UNEVEN.key_bytes == (131072 + 63 * 2048) * 8 * 256 * 2


@pytest.mark.parametrize("case", [serving_cases.UNEVEN, serving_cases.SMALL[2].in_pages(128)])
def test_every_page_is_one_sequences(case: Serving) -> None:
    table = serving.table_of(case)
    assert table.dtype == np.int32 and len(table) == case.batch
    ids = table[table >= 0]
    np.testing.assert_array_equal(np.sort(ids), np.arange(case.pages))
    for row, keys in zip(table, case.contexts, strict=True):
        assert (row >= 0).sum() == -(-keys // case.page_size)
        assert (row[: -(-keys // case.page_size)] >= 0).all()


def test_names_tell_cases_apart() -> None:
    names = [case.name for case in CASES + IN_PAGES]
    assert len(set(names)) == len(names)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 1 us for each MB of its case, a peer's call twice that. FlashAttention-4 is missing."""

    def peer(side: str, sides: Any, nbytes: int) -> Entrant:
        if side == FA4:
            raise ImportError("no flash_attn")
        return pretended(nbytes * 1e-12 * (1 if side == "rawattn" else 2))

    monkeypatch.setattr(serving, "_sides", lambda case, dtype: Sides((), (), causal=True))
    monkeypatch.setattr(graph_peers, "_entrant", peer)
    monkeypatch.setattr(
        serving, "_entrant", lambda make, case, dtype, nbytes: pretended(nbytes * 1e-12)
    )
    monkeypatch.setattr(serving, "_eager", lambda make, case, dtype: pretended(case.nbytes * 2e-12))
    for module in (serving, graph_peers):
        monkeypatch.setattr(module, "race", pretended_race)
    monkeypatch.setattr(serving, "read_bandwidth", lambda nbytes=0: 4e12)


def figures_of(suite: Any, dtype: str, peers: list[str]) -> list[Figure]:
    """The figures of a suite, which must have told each name that it lists."""
    told: list[str] = []
    figures: list[Figure] = suite(dtype, peers, told.append)
    assert tuple(told) == suites.SUITES[suite.__name__].listed
    return figures


def bounded(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures if figure.bound is not None}


def test_decode_has_a_line_for_each_bound(without_gpu: None) -> None:
    found = bounded(figures_of(serving.decode, "bfloat16", [CUDNN, FA4]))
    shares = [figure for name, figure in found.items() if "share" in name]
    assert len(shares) == 12
    assert all(
        figure.value == pytest.approx(0.25) and figure.verdict == "below" for figure in shares
    )
    small = [figure for name, figure in found.items() if "fastest peer" in name]
    assert len(small) == 2 * len(serving_cases.SMALL) + 2 * len(serving_cases.MASKED)
    assert all(0.4 < (figure.value or 0) < 0.6 and figure.verdict == "ok" for figure in small)
    uneven = found[f"{serving_cases.UNEVEN.name}: over its bytes at read bandwidth"]
    assert uneven.value == pytest.approx(4) and uneven.verdict == "above"
    new = found[f"{serving_cases.APPENDED.name}: new rows over their bytes"]
    assert new.bound == pytest.approx(3 + 1.3 * serving_cases.APPENDED.new_bytes / 4e6)
    assert len(found) == 4 + 12 + 4 + len(small) + 3
    halves = [figure for name, figure in found.items() if "over 16 bits" in name]
    assert all(0.5 < (figure.value or 0) < 0.52 and figure.verdict == "ok" for figure in halves)


def test_decode_tells_rates_of_every_page_size(without_gpu: None) -> None:
    found = {figure.name: figure for figure in figures_of(serving.decode, "bfloat16", [])}
    for page_size in (16, 64, 128, 256):
        name = serving_cases.BIG[0].in_pages(page_size).name
        assert found[f"{name}: read and written"].value == pytest.approx(1000)
        assert found[f"{name}: share of the read bandwidth"].value == pytest.approx(0.25)


def test_decode_tells_calls_in_a_graph_and_one_by_one(without_gpu: None) -> None:
    found = {figure.name: figure for figure in figures_of(serving.decode, "bfloat16", [])}
    for case in serving_cases.EAGER:
        in_graph, eager = found[case.name], found[f"{case.name}, called one by one"]
        assert (in_graph.of, eager.of) == ("in a graph", "without a graph")
        assert eager.value == pytest.approx(2 * (in_graph.value or 0))


def test_prefill_has_a_line_for_each_bound(without_gpu: None) -> None:
    figures = figures_of(serving.prefill, "bfloat16", [FA2, FA4])
    assert len(bounded(figures)) == 3 * len(serving_cases.PREFILL) + len(serving_cases.CHUNKS)
    assert any("no flash_attn" in figure.of for figure in figures)
    # Both come from one race and read the same number of bytes.
    pages = [figure for figure in figures if "page 16 over rows" in figure.name]
    assert all(figure.value == pytest.approx(1) and figure.verdict == "ok" for figure in pages)
    assert all("rows" in figure.of and "pages" in figure.of for figure in pages)


def test_a_chunk_that_fails_leaves_the_other_lines(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(serving, "_entrant", fail)
    figures = figures_of(serving.prefill, "bfloat16", [FA2])
    pages = [figure for figure in figures if "page 16 over rows" in figure.name]
    assert len(pages) == len(serving_cases.PREFILL)
    assert all("out of memory" in figure.of and figure.value is None for figure in pages)
    in_rows = [f"{case.name}: over the fastest peer" for case in serving_cases.PREFILL]
    assert all(figure.value is not None for figure in figures if figure.name in in_rows)


def test_pages_are_compared_with_libraries_that_read_pages(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}

    def over_fastest(name: str, nbytes: int, prepare: Any, peers: Any, most: float) -> Figure:
        asked[name] = list(peers)
        return Figure(name, 1.0, "x", most, at_most=True)

    monkeypatch.setattr(graph_peers, "over_fastest", over_fastest)
    figures_of(serving.prefill, "bfloat16", [CUDNN, FA4_PAGED])
    for case in serving_cases.PREFILL:
        assert asked[case.name] == [CUDNN, FA4_PAGED]
        assert asked[case.in_pages(16).name] == [FA4_PAGED]
    # In decoding those that read no pages get the same keys in rows.
    figures_of(serving.decode, "bfloat16", [CUDNN, FA4_PAGED])
    assert asked[serving_cases.SMALL[0].in_pages(16).name] == [CUDNN, FA4_PAGED]


def test_without_peers_nothing_is_ok(without_gpu: None) -> None:
    found = bounded(figures_of(serving.decode, "bfloat16", []))
    assert {f.verdict for name, f in found.items() if "fastest peer" in name} == {"not available"}


def test_who_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(serving, "_entrant", fail)
    monkeypatch.setattr(serving, "_sides", fail)
    monkeypatch.setattr(serving, "read_bandwidth", lambda nbytes=0: 4e12)
    figures = figures_of(serving.decode, "bfloat16", [CUDNN])
    ours = [f for f in figures if f.name != "read bandwidth" and "only read" not in f.name]
    assert all(figure.value is None for figure in ours)
    assert any("out of memory" in figure.of for figure in figures)


def test_a_graph_has_calls_on_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.graphs, "sets", lambda nbytes: 3)
    monkeypatch.setattr(serving.graphs, "entrant", lambda *args: args)
    monkeypatch.setattr(serving, "make", lambda case, dtype: object())

    def call_of(case: Serving, cache: Any) -> Any:
        return cache

    case = serving_cases.SMALL[0]
    capture, caches, nbytes = serving._entrant(call_of, case, "bfloat16", 1000)
    assert capture is serving.graphs.of_cupy
    assert len(set(caches)) == 3
    assert nbytes == 1000


def test_who_reads_no_pages_gets_the_same_keys_in_rows() -> None:
    case = serving_cases.alike(3, 64, 2, 1).in_pages(16)
    table = serving.table_of(case)
    k, v = np.random.default_rng(0).standard_normal((2, case.pages, 16, 1, 8)).astype(np.float32)
    cache = serving.Cache("q", k, v, table, None)
    q, *in_rows = serving._in_rows(case, cache)
    assert q == "q"
    for rows, pages in zip(in_rows, (k, v), strict=True):
        assert rows.dtype == pages.dtype
        for sequence, ids in zip(rows, table, strict=True):
            np.testing.assert_array_equal(sequence, np.concatenate(pages[ids]))
    assert serving._in_rows(serving_cases.alike(3, 64, 2, 1), cache)[1] is k
    shorter = serving_cases.alike(3, 60, 2, 1).in_pages(16)
    assert shorter.pages == case.pages
    for rows, whole in zip(serving._in_rows(shorter, cache)[1:], in_rows, strict=True):
        np.testing.assert_array_equal(rows, whole[:, :60])


SMALLEST = serving_cases.alike(2, 37, 4, 2, 3)


@pytest.mark.parametrize(
    "case",
    [
        SMALLEST,
        SMALLEST.in_pages(16),
        replace(SMALLEST, name="window", window_left=9, sink=2).in_pages(16),
        SMALLEST.under_a_mask(),
        SMALLEST.with_a_bias(),
    ],
    ids=lambda case: case.name,
)
def test_ours_is_the_attention_of_the_case(case: Serving) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32)

    q, k, v = normal(2, 3, 4, 8), normal(2, 37, 2, 8), normal(2, 37, 2, 8)
    i, j = np.arange(34, 37)[:, None], np.arange(37)
    seen = j <= i
    if case.window_left is not None:
        seen &= (i - j <= case.window_left) | (j < case.sink)
    mask = serving.mask_of(case) if case.masked else None
    bias = normal(2, 4, 3, 37) if case.biased else None
    table, lengths = None, np.full(2, 37, np.int32)
    pages = [k, v]
    if case.page_size:
        table = serving.table_of(case)
        pages = [np.full((case.pages, 16, 2, 8), np.nan, np.float32) for _ in "kv"]
        for pool, rows in zip(pages, (k, v), strict=True):
            pool[table] = np.pad(rows, ((0, 0), (0, 11), (0, 0), (0, 0))).reshape(2, 3, 16, 2, 8)
    out = serving._ours(case, serving.Cache(q, *pages, table, lengths, mask, bias))()
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, axis=2)) / np.sqrt(8)
    scores = np.where(seen if mask is None else seen & mask, scores, -np.inf)
    weights = np.exp(scores if bias is None else scores + bias)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhij,bjhd->bihd", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_bytes_of_new_rows_are_read_and_written() -> None:
    case = serving_cases.alike(2, 37, 4, 2, 3)
    of_a_row = (4 + 2 + 2) * 128 * 2  # a query of each head, and keys and values
    assert case.new_bytes == 2 * 2 * 3 * of_a_row


def test_the_bandwidth_is_that_of_the_fastest_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    device = types.SimpleNamespace(attributes={"MultiProcessorCount": 10})
    data = types.SimpleNamespace(nbytes=2 << 30)
    fake = types.SimpleNamespace(
        zeros=lambda count, dtype: data if count > 1 else "out",
        RawKernel=lambda *source: lambda *launch: launched.append(launch),
        cuda=types.SimpleNamespace(Device=lambda: device),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(graphs, "entrant", lambda capture, calls, nbytes: Entrant(calls[0], None))

    def race(entrants: dict[str, Entrant]) -> dict[str, Timing]:
        for entrant in entrants.values():
            entrant.call()
        return {name: Timing((seconds,)) for name, seconds in zip(entrants, (3, 2, 4), strict=True)}

    monkeypatch.setattr(serving, "race", race)
    assert serving.read_bandwidth() == (2 << 30) / 2
    # Every 16 bytes once, by 4, 8 or 16 blocks for each multiprocessor.
    assert launched == [((10 * n,), (512,), (data, (2 << 30) // 16, "out")) for n in (4, 8, 16)]


def test_peers_get_the_mask_or_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_ours", lambda case, cache: "call")
    monkeypatch.setattr(graphs, "sets", lambda nbytes: 2)
    plain = serving.Cache("q", "k", "v", None, "lengths")
    for cache, told in (
        (plain, None),
        (plain._replace(mask="mask"), "mask"),
        (plain._replace(bias="bias"), "bias"),
    ):
        monkeypatch.setattr(serving, "make", lambda case, dtype, cache=cache: cache)
        sides = serving._sides(serving_cases.SMALL[0], "bfloat16")
        assert (sides.masks, sides.causal) == ([told] * 2, True)
        assert sides.rows == [("q", "k", "v")] * 2


def test_the_suites_are_there() -> None:
    for name in ("decode", "prefill"):
        assert not suites.SUITES[name].cases(False)
        assert suites.contenders(name)


def test_a_mask_of_padding() -> None:
    case = serving_cases.alike(4, 800, 2, 1).under_a_mask()
    mask = serving.mask_of(case)
    assert mask.shape == (4, 1, 1, 800)
    assert [np.argmax(row) for row in mask[:, 0, 0]] == [25, 50, 75, 100]
    assert mask[..., 100:].all()
