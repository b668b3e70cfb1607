"""Figures of the suites `decode` and `prefill`: calls in CUDA graphs, compared with the read bandwidth and with peers.

Peers that read no pages get the same keys in rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import rawattn
from rawattn._bench import (
    graph_peers,
    graphs,
    machine,
    measure,
    paged_peers,
    serving_cases,
)
from rawattn._bench.graph_peers import Sides, ratio
from rawattn._bench.paged_peers import Pages
from rawattn._bench.report import Figure
from rawattn._bench.serving_cases import Serving
from rawattn._bench.timing import Call, Entrant, EventClock, race, rotate

_READ = r"""
extern "C" __global__ void read(const uint4* data, long long count, unsigned* out) {
  unsigned all = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  #pragma unroll 8
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint4 x = data[i];
    all |= x.x | x.y | x.z | x.w;
  }
  if (all != 0) *out = all;
}
"""
_READ_BYTES = 2 << 30
_LAUNCH = 3e-6  # seconds that a launch in a graph may take beyond the time for its bytes


class Cache(NamedTuple):
    """The CuPy arrays of a case: queries, keys and values in rows or pages, the block table, lengths, a mask or a bias."""

    q: Any
    k: Any
    v: Any
    table: Any
    lengths: Any
    mask: Any = None
    bias: Any = None


def decode(dtype: str, peers: Sequence[str], step: Callable[[str], None]) -> list[Figure]:
    """Figures with one new row of each sequence. step(name) is called after each case that the suite lists."""
    bandwidth = read_bandwidth()
    found = [Figure("read bandwidth", bandwidth / 1e12, "TB/s", of="a kernel that reads 2 GiB")]
    for case in serving_cases.BIG:
        small, large = serving_cases.PAGE_SIZES
        in_small = _bandwidth_figures(found, case.in_pages(small), dtype, bandwidth)
        in_large = _bandwidth_figures(found, case.in_pages(large), dtype, bandwidth)
        found.append(
            ratio(f"{case.name}: page {small} over page {large}", in_small, in_large, 1.03)
        )
        alone = read_bandwidth(case.nbytes) / bandwidth
        found.append(Figure(f"{case.name}: as many bytes, only read: share", alone, ""))
        in_8 = case.in_pages(small).in_float8()
        seconds_8 = _bandwidth_figures(found, in_8, dtype, bandwidth)
        found.append(ratio(f"{in_8.name}: over 16 bits", seconds_8, in_small, 0.55))
        step(case.name)
    for case, page_size in itertools.product(serving_cases.BIG[:2], serving_cases.MORE_PAGE_SIZES):
        _bandwidth_figures(found, case.in_pages(page_size), dtype, bandwidth, bound=None)
    for case in serving_cases.SMALL:
        for each in (case, case.in_pages(16)):
            _over_peers(found, each, dtype, peers, 1.0)
        step(case.name)
    for case in (*serving_cases.MASKED, *serving_cases.BIASED):
        _over_peers(found, case, dtype, peers, 1.0)
        step(case.name)
    for case in serving_cases.EAGER:
        in_graph, eager = (
            functools.partial(way, _ours, case, dtype) for way in (_in_graph, _eager)
        )
        _timed(case.name, in_graph, found)
        _timed(f"{case.name}, called one by one", eager, found, "without a graph")
    uneven = serving_cases.UNEVEN
    seconds = _seconds(uneven, dtype, found)
    least = uneven.nbytes / bandwidth
    found.append(ratio(f"{uneven.name}: over its bytes at read bandwidth", seconds, least, 1.15))
    step(uneven.name)
    windowed, plain = serving_cases.WINDOWED, serving_cases.AS_WINDOWED
    in_window, of_all = (_seconds(case, dtype, found) for case in (windowed, plain))
    found.append(ratio(f"{windowed.name}: over {plain.name} in rows", in_window, of_all, 1.2))
    step(windowed.name)
    appended = serving_cases.APPENDED
    prepare = functools.partial(_entrant, _append, appended, dtype, appended.new_bytes)
    seconds = _timed(f"{appended.name}: new rows into pages, turned", prepare, found)
    most = 1e6 * (1.3 * appended.new_bytes / bandwidth + _LAUNCH)
    us = None if seconds is None else 1e6 * seconds
    found.append(
        Figure(f"{appended.name}: new rows over their bytes", us, "us", most, at_most=True)
    )
    step(appended.name)
    return found


def prefill(dtype: str, peers: Sequence[str], step: Callable[[str], None]) -> list[Figure]:
    """Figures with a chunk of new rows of each sequence. step(name) is called after each case."""
    found: list[Figure] = []
    of_pages = [name for name in peers if name in paged_peers.PEERS]
    for case in serving_cases.PREFILL:
        _over_peers(found, case, dtype, peers, 1 / 1.08)
        _over_peers(found, case.in_pages(16), dtype, of_pages, 1 / 1.08)
        _pages_over_rows(found, case, dtype)
        step(case.name)
    for case in serving_cases.CHUNKS:
        _over_peers(found, case, dtype, peers, 1.0)
        step(case.name)
    return found


def read_bandwidth(nbytes: int = _READ_BYTES) -> float:
    """The bytes a second with which a kernel reads `nbytes`, in a graph of calls; the fastest of a few grid sizes.

    The L2 cache must hold much less than `nbytes`.
    """
    import cupy

    data, out = cupy.zeros(nbytes // 16 * 4, np.uint32), cupy.zeros(1, np.uint32)
    kernel = cupy.RawKernel(_READ, "read")
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"]
    inputs = data, data.nbytes // 16, out
    calls = {
        str(times): graphs.entrant(
            graphs.of_cupy,
            [functools.partial(kernel, (blocks * times,), (512,), inputs)],
            nbytes,
        )
        for times in (4, 8, 16)
    }
    best = min(timing.seconds for timing in _raised(race(calls)).values())
    return float(data.nbytes / best)


def make(case: Serving, dtype: str) -> Cache:
    """The arrays of a case. Pages are in random order."""
    import cupy

    q = machine.random_array((case.batch, case.rows, case.nheads_q, case.headdim), dtype)
    lengths = cupy.asarray(case.contexts, np.int32)
    if not case.page_size:
        shape = (case.batch, case.contexts[0], case.nheads_kv, case.headdim)
        k, v = (machine.random_array(shape, dtype) for _ in "kv")
        mask = cupy.asarray(mask_of(case)) if case.masked else None
        of_heads = (case.batch, case.nheads_q, case.rows, case.contexts[0])
        bias = machine.random_array(of_heads, dtype) if case.biased else None
        return Cache(q, k, v, None, lengths, mask, bias)
    shape = (case.pages, case.page_size, case.nheads_kv, case.headdim)
    if case.float8:
        k, v = (machine.random_float8(shape) for _ in "kv")
    else:
        k, v = (machine.random_array(shape, dtype) for _ in "kv")
    return Cache(q, k, v, cupy.asarray(table_of(case)), lengths)


def mask_of(case: Serving) -> np.ndarray[Any, Any]:
    """A padding mask (batch, 1, 1, keys), bool: the first keys of each sequence are hidden."""
    keys = case.contexts[0]
    padding = np.linspace(0, keys // 8, case.batch + 1)[1:]
    return np.arange(keys) >= padding[:, None, None, None]


def table_of(case: Serving) -> np.ndarray[Any, Any]:
    """A block table (batch, most pages of a sequence), int32, with -1 behind the last page of a sequence."""
    ids = np.random.default_rng(0).permutation(case.pages).astype(np.int32)
    counts = [-(-keys // case.page_size) for keys in case.contexts]
    table = np.full((case.batch, max(counts)), -1, np.int32)
    for row, own in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = own
    return table


def _ours(case: Serving, cache: Cache) -> Call:
    options: dict[str, Any] = {"causal": True, "sink": case.sink}
    if case.window_left is not None:
        options["window"] = (case.window_left, 0)
    if cache.mask is not None:
        options["mask"] = cache.mask
    if cache.bias is not None:
        options["bias"] = cache.bias
    arrays = cache.q, cache.k, cache.v
    if case.float8:
        import cupy

        scales = (cupy.full(case.nheads_kv, 0.5, np.float32) for _ in "kv")
        options |= zip(("k_scale", "v_scale"), scales, strict=True)
    if case.page_size:
        inputs = (*arrays, cache.table)
        return functools.partial(
            rawattn.paged_attention, *inputs, seqlen_k=cache.lengths, **options
        )
    return functools.partial(rawattn.attention, *arrays, **options)


def _append(case: Serving, cache: Cache) -> Call:
    import cupy

    shape = (case.batch, case.rows, case.nheads_kv, case.headdim)
    k, v = (machine.random_array(shape, str(cache.q.dtype)) for _ in "kv")
    angles = np.outer(np.arange(max(case.contexts)), 1e4 ** -np.linspace(0, 1, case.headdim // 2))
    rotary = cupy.asarray(np.cos(angles), np.float32), cupy.asarray(np.sin(angles), np.float32)
    inputs = k, v, cache.k, cache.v, cache.table
    options = {"seqlen_k": cache.lengths, "q": cache.q, "rotary": rotary}
    return functools.partial(rawattn.append_kv, *inputs, **options)


def _in_rows(case: Serving, cache: Cache) -> tuple[Any, Any, Any]:
    """Queries, keys and values in rows, for peers that read no pages. All sequences must have equal lengths."""
    if not case.page_size:
        return cache.q, cache.k, cache.v

    def gathered(pages: Any) -> Any:
        # Gathered as unsigned integers, which CuPy can index for every dtype.
        bits = pages.view(f"u{pages.itemsize}")[cache.table]
        joined = bits.reshape(case.batch, -1, *pages.shape[2:])
        return joined[:, : case.contexts[0]].view(pages.dtype)

    return cache.q, gathered(cache.k), gathered(cache.v)


def _sides(case: Serving, dtype: str) -> Sides:
    caches = [make(case, dtype) for _ in range(graphs.sets(case.nbytes))]
    ours = [_ours(case, cache) for cache in caches]
    rows = [_in_rows(case, cache) for cache in caches]
    hidden = [cache.mask if cache.bias is None else cache.bias for cache in caches]
    pages = [Pages(*cache[:5]) for cache in caches] if case.page_size else []
    return Sides(ours, rows, causal=True, masks=hidden, pages=pages)


def _entrant(
    make_call: Callable[[Serving, Cache], Call], case: Serving, dtype: str, nbytes: int
) -> Entrant:
    """A graph of calls on several caches of the case. nbytes: the bytes that a call reads and writes."""
    calls = [make_call(case, make(case, dtype)) for _ in range(graphs.sets(case.nbytes))]
    return graphs.entrant(graphs.of_cupy, calls, nbytes)


def _in_graph(make_call: Callable[[Serving, Cache], Call], case: Serving, dtype: str) -> Entrant:
    return _entrant(make_call, case, dtype, case.nbytes)


def _eager(make_call: Callable[[Serving, Cache], Call], case: Serving, dtype: str) -> Entrant:
    """Calls without a graph, on several caches in turn."""
    calls = [make_call(case, make(case, dtype)) for _ in range(graphs.sets(case.nbytes))]
    return Entrant(rotate(calls), EventClock())


def _raised(outcome: Any) -> Any:
    for timing in outcome.values():
        if isinstance(timing, Exception):
            raise timing
    return outcome


def _seconds(case: Serving, dtype: str, found: list[Figure]) -> float | None:
    """The seconds of our attention, with a figure for them."""
    return _timed(case.name, functools.partial(_entrant, _ours, case, dtype, case.nbytes), found)


def _timed(
    name: str, prepare: Callable[[], Entrant], found: list[Figure], how: str = "in a graph"
) -> float | None:
    """The seconds of one call, for which a figure is added to `found`."""
    try:
        seconds: float = _raised(race({"": prepare()}))[""].seconds
    except Exception as error:  # the other figures are still shown
        found.append(Figure(name, None, "us", of=measure.describe(error)))
        return None
    found.append(Figure(name, 1e6 * seconds, "us", of=how))
    return seconds


def _bandwidth_figures(
    found: list[Figure], case: Serving, dtype: str, bandwidth: float, bound: float | None = 0.95
) -> float | None:
    seconds = _seconds(case, dtype, found)
    rate = None if seconds is None else case.nbytes / seconds
    share = None if rate is None else rate / bandwidth
    gigabytes = None if rate is None else rate / 1e9
    found.append(Figure(f"{case.name}: read and written", gigabytes, "GB/s"))
    found.append(Figure(f"{case.name}: share of the read bandwidth", share, "", bound))
    return seconds


def _pages_over_rows(found: list[Figure], case: Serving, dtype: str) -> None:
    """The figure of our time on keys in pages over that on keys in rows, in one race, so that both have the same GPU clock."""
    name = f"{case.name}: page 16 over rows"
    try:
        timings = _raised(
            race(
                {
                    lie: _entrant(_ours, each, dtype, each.nbytes)
                    for lie, each in (("rows", case), ("pages", case.in_pages(16)))
                }
            )
        )
    except Exception as error:  # the other figures are still shown
        found.append(ratio(name, None, None, 1.05, measure.describe(error)))
        return
    rows, pages = (timings[lie].seconds for lie in ("rows", "pages"))
    shown = f"rows {1e6 * rows:.1f} us, pages {1e6 * pages:.1f} us"
    found.append(ratio(name, pages, rows, 1.05, shown))


def _over_peers(
    found: list[Figure], case: Serving, dtype: str, peers: Sequence[str], most: float
) -> None:
    prepare = functools.partial(_sides, case, dtype)
    found.append(graph_peers.over_fastest(case.name, case.nbytes, prepare, peers, most))
