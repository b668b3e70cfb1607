"""Libraries that read pages: what they are asked, on fake modules of torch, FlashAttention-4 and FlashInfer."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from rawattn._bench import graph_peers, graphs, paged_peers, serving, serving_cases
from rawattn._bench.graph_peers import Sides
from rawattn._bench.grids import FA2, FA4_PAGED, FLASHINFER
from rawattn._bench.paged_peers import Pages
from rawattn._bench.serving_cases import Serving


class Tensor(np.ndarray):
    """An array with the methods of a tensor that the peers use."""

    def cuda(self) -> Tensor:
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the libraries were asked, by name of the function."""
    log: dict[str, Any] = {}

    def module(name: str, **members: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    def wrapper(name: str) -> type:
        class Wrapper:
            def __init__(self, scratch: Any, layout: str, **kind: Any) -> None:
                log[name] = [layout, kind]

            def plan(self, *arrays: Any, **options: Any) -> None:
                log[name] += [arrays, options]

            def run(self, q: Any, pages: tuple[Any, Any]) -> Any:
                log[name].append(q.shape)
                return q

        return Wrapper

    def flash4(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, str]:
        log["flash4"] = options
        return q, "lse"

    module(
        "torch",
        cuda=types.SimpleNamespace(get_device_capability=lambda: (9, 0)),
        int32=np.int32,
        zeros=np.zeros,
        arange=lambda count, dtype: np.arange(count, dtype=dtype),
        from_numpy=lambda array: array.view(Tensor),
    )
    module("cupy", asnumpy=np.asarray)
    for name in ("flash_attn", "flash_attn.cute"):
        module(name)
    module("flash_attn.cute.interface", flash_attn_varlen_func=flash4)
    module(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=wrapper("decode"),
        BatchPrefillWithPagedKVCacheWrapper=wrapper("prefill"),
    )
    monkeypatch.setattr(paged_peers, "_scratch", lambda: "scratch")
    monkeypatch.setattr(
        paged_peers, "tensors", lambda *arrays: [array.view(Reshaped) for array in arrays]
    )
    return log


class Reshaped(np.ndarray):
    """An array whose `view` takes a shape, as a tensor's does."""

    def view(self, *shape: Any) -> Any:
        of_array = len(shape) == 1 and isinstance(shape[0], type)
        return super().view(*shape) if of_array else self.reshape(*shape)


def pages_of(case: Serving) -> Pages:
    q = np.zeros((case.batch, case.rows, case.nheads_q, 8), np.float16)
    k, v = np.zeros((2, case.pages, case.page_size, case.nheads_kv, 8), np.float16)
    lengths = np.asarray(case.contexts, np.int32)
    return Pages(q, k, v, serving.table_of(case), lengths)


UNEVEN = Serving("uneven", (40, 16, 7), 8, 2, page_size=16)


def test_flash_attention_4_gets_the_table_and_the_lengths(asked: dict[str, Any]) -> None:
    pages = pages_of(UNEVEN)
    out = paged_peers.PEERS[FA4_PAGED](pages)()
    assert out.shape == pages.q.shape
    assert asked["flash4"]["causal"] is True
    np.testing.assert_array_equal(asked["flash4"]["page_table"], pages.table)
    np.testing.assert_array_equal(asked["flash4"]["seqused_k"], [40, 16, 7])
    assert asked["flash4"].keys() == {"causal", "page_table", "seqused_k"}


def test_flash_attention_4_splits_keys_of_pages_where_it_can(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch"].cuda, "get_device_capability", lambda: (10, 0))
    paged_peers.PEERS[FA4_PAGED](pages_of(UNEVEN))()
    assert asked["flash4"]["num_splits"] == 0


@pytest.mark.parametrize(("nheads_kv", "tensor_cores"), [(2, True), (4, False)])
def test_flashinfer_decodes_pages_in_the_order_of_sequences(
    asked: dict[str, Any], nheads_kv: int, tensor_cores: bool
) -> None:
    case = Serving("uneven", (40, 16, 7), 8, nheads_kv, page_size=16)
    pages = pages_of(case)
    assert paged_peers.PEERS[FLASHINFER](pages)().shape == pages.q.shape
    layout, kind, (starts, ids, last, *heads), options, joined = asked["decode"]
    assert (layout, kind) == ("NHD", {"use_tensor_cores": tensor_cores})
    np.testing.assert_array_equal(starts, [0, 3, 4, 5])
    np.testing.assert_array_equal(ids, pages.table[pages.table >= 0])
    np.testing.assert_array_equal(last, [8, 16, 7])
    assert heads == [8, nheads_kv, 8, 16]
    assert options == {"q_data_type": np.float16, "kv_data_type": np.float16}
    assert joined == (3, 8, 8)


def test_flashinfer_prefills_causally(asked: dict[str, Any]) -> None:
    case = Serving("chunks", (40, 16, 7), 8, 2, page_size=16, rows=5)
    assert paged_peers.PEERS[FLASHINFER](pages_of(case))().shape == (3, 5, 8, 8)
    _, kind, (row_starts, starts, *_), options, joined = asked["prefill"]
    assert kind == {} and options["causal"] is True and joined == (15, 8, 8)
    np.testing.assert_array_equal(row_starts, [0, 5, 10, 15])
    np.testing.assert_array_equal(starts, [0, 3, 4, 5])


def test_only_cases_in_pages_have_these_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def entrant(side: str, sides: Sides, nbytes: int) -> Any:
        measured.append(side)
        raise ImportError(side)

    monkeypatch.setattr(graph_peers, "_entrant", entrant)
    rows = Sides((), (), causal=True)
    for sides in (rows, rows._replace(pages=[pages_of(UNEVEN)])):
        graph_peers._ready(sides, 7, (FA2, FA4_PAGED, FLASHINFER))
    assert measured == ["rawattn", FA2, "rawattn", FA2, FA4_PAGED, FLASHINFER]


def test_a_paged_peer_gets_each_set_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "entrant", lambda *args: args)
    monkeypatch.setitem(paged_peers.PEERS, FLASHINFER, lambda pages: ("planned", pages))
    sides: Any = Sides(["a call"], ["rows"], causal=True, pages=["pages", "pages'"])
    calls = [("planned", "pages"), ("planned", "pages'")]
    assert graph_peers._entrant(FLASHINFER, sides, 7) == (graphs.of_torch, calls, 7)


def test_sides_have_pages_where_the_case_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(case: Serving, dtype: str) -> serving.Cache:
        return serving.Cache("q", "k", "v", "table", "lengths")

    monkeypatch.setattr(serving, "make", made)
    monkeypatch.setattr(serving, "_ours", lambda case, cache: "call")
    monkeypatch.setattr(serving, "_in_rows", lambda case, cache: "rows")
    monkeypatch.setattr(graphs, "sets", lambda nbytes: 2)
    case = serving_cases.SMALL[0]
    assert serving._sides(case, "bfloat16").pages == []
    in_pages = serving._sides(case.in_pages(16), "bfloat16").pages
    assert in_pages == [Pages("q", "k", "v", "table", "lengths")] * 2
