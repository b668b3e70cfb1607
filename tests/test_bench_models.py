"""The suite `models`: shapes, lines with bounds, peers that are left out, and how peers are called."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from rawattn import reference
from rawattn._bench import graph_peers, graphs, machine, model_cases, models, suites
from rawattn._bench.graph_peers import Sides
from rawattn._bench.grids import CUDNN, FA2, FA4
from rawattn._bench.model_cases import Model
from rawattn._bench.timing import Entrant
from tests.bench_fakes import pretended, pretended_race

LINE = "encoder 64 x 128 12/12 D64 full: over the fastest peer"


def test_names_tell_shapes_apart_and_have_what_differs() -> None:
    names = [case.name for case in model_cases.CASES]
    assert len(set(names)) == len(names) == 29
    assert "cross 2 x 4096 rows on 77 10/10 D64 full" in names
    assert "MLA 1 x 8192 16/16 D192 Dv128 causal" in names
    assert "vision 32 x 729 16/16 D72 full" in names


def test_bytes_are_those_of_the_arrays() -> None:
    for case in model_cases.CASES:
        q, k, v = (int(np.prod(shape)) for shape in case.shapes)
        out = q // case.headdim * case.headdim_v
        assert case.nbytes == 2 * (q + k + v + out), case.name


def test_ours_is_the_attention_of_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        machine, "random_array", lambda shape, dtype: rng.standard_normal(shape, np.float32)
    )
    monkeypatch.setattr(graphs, "sets", lambda nbytes: 2)
    sides = models.sides(Model("MLA", 2, 5, 7, 4, 2, 24, 16, causal=True), "float32")
    assert len(sides.ours) == len(sides.rows) == 2
    assert sides.causal is True
    assert sides.rows[0][0] is not sides.rows[1][0]
    for call, qkv in zip(sides.ours, sides.rows, strict=True):
        exact = reference.attention(*qkv, causal=True)
        np.testing.assert_allclose(call(), exact, atol=1e-5)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Entrant | Exception]:
    """What each contender enters into every race."""
    found: dict[str, Entrant | Exception] = {
        "rawattn": pretended(9e-6),
        CUDNN: pretended(10e-6),
        FA2: pretended(12e-6),
        FA4: ImportError("no flash_attn"),
    }

    def entrant(side: str, sides: Any, nbytes: int) -> Entrant:
        made = found[side]
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(models, "sides", lambda case, dtype: Sides((), (), causal=True))
    monkeypatch.setattr(graph_peers, "_entrant", entrant)
    monkeypatch.setattr(graph_peers, "race", pretended_race)
    return found


def first_line(peers: tuple[str, ...] = (CUDNN, FA2, FA4)) -> Any:
    told: list[str] = []
    figures = models.figures("bfloat16", peers, told.append)
    assert tuple(told) == suites.SUITES["models"].listed
    assert all(figure.bound is not None and figure.at_most for figure in figures)
    assert len(figures) == len(model_cases.CASES) + 1
    found = {figure.name: figure for figure in figures}
    return found[LINE], found["median over the fastest peer"]


def test_each_shape_has_a_line_and_all_have_one(made: dict[str, Any]) -> None:
    line, median = first_line()
    assert line.value == pytest.approx(0.9)
    assert (line.bound, line.verdict) == (1, "ok")
    assert line.of == (
        "rawattn 9.0 us, cuDNN 10.0 us, FA2 12.0 us, FA4: ImportError: no flash_attn"
    )
    assert median.value == pytest.approx(0.9)
    assert median.bound == pytest.approx(1 / 1.1)
    assert median.of == "29 of 29 shapes"


def test_the_median_is_of_shapes_that_have_a_ratio(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sides(case: Model, dtype: str) -> Sides:
        if case.kind == "encoder":
            raise MemoryError("full")
        return Sides((), (), causal=True)

    monkeypatch.setattr(models, "sides", sides)
    line, median = first_line()
    assert (line.value, line.verdict, line.of) == (None, "not available", "MemoryError: full")
    assert median.of == "24 of 29 shapes"
    assert median.value == pytest.approx(0.9)


def test_who_computes_something_else_is_not_timed(made: dict[str, Any]) -> None:
    made[CUDNN] = pretended(1e-6, value=1.1)
    line, _ = first_line()
    assert line.value == pytest.approx(0.75)
    assert "cuDNN: not timed: differs from rawattn by 0.1 of its RMS" in line.of


def test_who_fails_in_the_race_is_told(made: dict[str, Any]) -> None:
    made[FA2] = pretended(RuntimeError("launch failed"))
    line, _ = first_line()
    assert line.value == pytest.approx(0.9)
    assert "FA2: RuntimeError: launch failed" in line.of


def test_without_peers_or_without_us_there_is_no_ratio(made: dict[str, Any]) -> None:
    line, median = first_line(())
    assert (line.value, line.of) == (None, "rawattn 9.0 us")
    assert (median.value, median.of) == (None, "0 of 29 shapes")
    made["rawattn"] = NotImplementedError("no such kernel")
    line, _ = first_line()
    assert line.value is None
    assert "rawattn: NotImplementedError: no such kernel" in line.of
    assert "FA2 12.0 us" in line.of


def test_peers_are_captured_by_torch_on_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "entrant", lambda *args: args)
    monkeypatch.setitem(graph_peers._PEERS, FA2, lambda *args: args)
    sides = Sides(["a call"], [("q", "k", "v"), ("q'", "k'", "v'")], causal=True)
    calls = [("q", "k", "v", True, None), ("q'", "k'", "v'", True, None)]
    assert graph_peers._entrant(FA2, sides, 7) == (graphs.of_torch, calls, 7)
    assert graph_peers._entrant("rawattn", sides, 7) == (graphs.of_cupy, ["a call"], 7)
    masked = sides._replace(masks=["mask", "mask'"])
    calls = [(*call[:4], mask) for call, mask in zip(calls, masked.masks, strict=True)]
    assert graph_peers._entrant(FA2, masked, 7) == (graphs.of_torch, calls, 7)


class Tensor:
    """A fake array with the attributes that a peer uses."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def transpose(self, a: int, b: int) -> Tensor:
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Tensor(*shape)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the arguments of calls of torch's attention and of FlashAttention-4."""
    log: list[Any] = []

    @contextlib.contextmanager
    def kernel(backends: list[str]) -> Any:
        log.append(backends)
        yield

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        log.append((q.shape, k.shape, v.shape, options))
        return Tensor(*q.shape[:-1], v.shape[-1])

    def flash4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, str]:
        log.append((q.shape, options))
        return Tensor(*q.shape[:-1], v.shape[-1]), "lse"

    def module(name: str, **members: Any) -> Any:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    backends = types.SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn")
    attention = module("torch.nn.attention", sdpa_kernel=kernel, SDPBackend=backends)
    module("torch.nn.attention.bias", causal_lower_right=lambda *lengths: ("lower right", *lengths))
    functional = types.SimpleNamespace(scaled_dot_product_attention=sdpa)
    cuda = types.SimpleNamespace(get_device_capability=lambda: (9, 0))
    module("torch", nn=module("torch.nn", functional=functional, attention=attention), cuda=cuda)
    for name in ("flash_attn", "flash_attn.cute"):
        module(name)
    module("flash_attn.cute.interface", flash_attn_func=flash4)
    monkeypatch.setattr(graph_peers, "tensors", lambda *arrays: list(arrays))
    return log


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "heads", "options"),
    [
        (6, 6, False, 4, {"enable_gqa": False}),
        (6, 9, False, 4, {"enable_gqa": False}),
        (6, 6, True, 4, {"enable_gqa": False, "is_causal": True}),
        (6, 9, True, 2, {"enable_gqa": True, "attn_mask": ("lower right", 6, 9)}),
        (1, 9, True, 2, {"enable_gqa": True}),
    ],
)
def test_torch_is_told_the_same_mask(
    asked: list[Any], rows: int, keys: int, causal: bool, heads: int, options: dict[str, Any]
) -> None:
    qkv = Tensor(2, rows, 4, 24), Tensor(2, keys, heads, 24), Tensor(2, keys, heads, 16)
    for name, backend in ((CUDNN, "cudnn"), (FA2, "flash")):
        call = graph_peers._PEERS[name](*qkv, causal)
        assert not asked
        assert call().shape == (2, rows, 4, 16)
        shapes = (2, 4, rows, 24), (2, heads, keys, 24), (2, heads, keys, 16)
        assert asked == [[backend], (*shapes, options)]
        asked.clear()


def test_flash_attention_4_returns_its_output_alone(asked: list[Any]) -> None:
    qkv = Tensor(2, 6, 4, 24), Tensor(2, 9, 2, 24), Tensor(2, 9, 2, 16)
    assert graph_peers._PEERS[FA4](*qkv, False)().shape == (2, 6, 4, 16)
    assert asked == [((2, 6, 4, 24), {"causal": False})]


def test_flash_attention_4_splits_keys_where_it_can(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where it cannot, as on Hopper, the option is refused; by default it does not split.
    monkeypatch.setattr(sys.modules["torch"].cuda, "get_device_capability", lambda: (10, 0))
    graph_peers._PEERS[FA4](*(Tensor(2, 1, 4, 24) for _ in "qkv"), True)()
    assert asked == [((2, 1, 4, 24), {"causal": True, "num_splits": 0})]


def test_the_suite_is_there() -> None:
    suite = suites.SUITES["models"]
    assert not suite.cases(False)
    assert list(suite.figures.values()) == [models.figures]
    names = [contender.name for contender in suites.contenders("models")]
    assert {CUDNN, FA2, FA4} <= set(names)
