"""The CPU backend with score options, alone and together, in tiles of any size, against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn._cpu import backward_tiles, threads, tiles
from tests import exhaustive
from tests.cpu_score_calls import (
    OPTIONS,
    SMALL,
    Form,
    bias_of,
    gradients_of,
    options_of,
    verify,
    verify_backward,
    verify_forward,
)

BUNDLED = [
    Form("dense", (7, 7, 7), (9, 9, 9)),
    Form("padded", (7, 3, 0, 7), (5, 9, 4, 5), padded=True),
    Form("ragged", (5, 1, 5, 0, 6), (7, 3, 7, 2, 0), packed=True, dtype="bfloat16"),
    Form("one-head", (4, 4), (6, 6), nheads_q=3, nheads_kv=1, headdim=8, headdim_v=5),
    Form("each-head", (4, 4), (6, 6), nheads_q=3, nheads_kv=3, headdim=8, dtype="float16"),
]
TILED = [
    Form("long", (150, 150), (600, 600), nheads_q=4, nheads_kv=2),
    Form("one-pass", (300,), (200,), nheads_q=2, nheads_kv=2, dtype="bfloat16"),
    Form("ragged-long", (70, 0, 300, 5), (540, 40, 130, 8), packed=True, headdim=40, headdim_v=24),
    Form("padded-long", (300, 20), (90, 700), padded=True, nheads_q=6, dtype="float16"),
]


ALONE = [(name,) for name in OPTIONS]
PAIRS = list(itertools.combinations(OPTIONS, 2))
ALL = [tuple(OPTIONS)]


def of_forms(forms: list[Form], marks: Any = ()) -> list[Any]:
    """Pair each form with every option alone and with all options; each pair of options gets one form, in turn.

    marks: marks of the pairs, and of a single option in three of four forms.
    """

    def marked(form: int, alone: int) -> Any:
        seldom = marks if (form + alone) % 4 else ()
        return pytest.param(forms[form], ALONE[alone], marks=seldom)

    return [
        *(marked(form, alone) for form in range(len(forms)) for alone in range(len(ALONE))),
        *((form, names) for form in forms for names in ALL),
        *(pytest.param(forms[n % len(forms)], names, marks=marks) for n, names in enumerate(PAIRS)),
    ]


def name_of(value: Any) -> str:
    return str(value) if isinstance(value, Form) else "+".join(value)


IN_BUNDLES = pytest.mark.parametrize(("form", "names"), of_forms(BUNDLED), ids=name_of)
IN_TILES = pytest.mark.parametrize(
    ("form", "names"), of_forms(TILED, pytest.mark.exhaustive), ids=name_of
)


@IN_BUNDLES
def test_forward_of_bundles(form: Form, names: tuple[str, ...]) -> None:
    verify(form, options_of(form, names))


@IN_TILES
def test_forward_of_tiles(form: Form, names: tuple[str, ...]) -> None:
    verify(form, options_of(form, names))


@IN_BUNDLES
def test_backward_of_bundles(form: Form, names: tuple[str, ...]) -> None:
    verify_backward(form, options_of(form, names))


@IN_TILES
def test_backward_of_tiles(form: Form, names: tuple[str, ...]) -> None:
    verify_backward(form, options_of(form, names))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that sequences of a dozen rows and keys have several in each direction."""
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "KEYS", 4)
    monkeypatch.setattr(backward_tiles, "KEYS", 4)


# The axes of (batch, heads, rows, keys) that a bias or mask has; its heads are one, those of keys, or those of queries.
PATTERNS = list(itertools.product((False, True), ("one", "keys", "queries"), *[(False, True)] * 2))


def narrowed(array: np.ndarray, form: Form, pattern: tuple[Any, ...]) -> np.ndarray:
    """Cut an array (batch, nheads_q, rows, keys) down to the axes of the pattern; the others are dropped or have size 1."""
    batch, heads, rows, keys = pattern
    nheads = {"one": 1, "keys": form.nheads_kv, "queries": form.nheads_q}[heads]
    array = array[:, :nheads]
    for axis, has in ((0, batch), (2, rows), (3, keys)):
        if not has:
            array = array.take([3 % array.shape[axis]], axis=axis)
    return array if batch or nheads > 1 else array[0, 0]


@pytest.mark.parametrize("tiled", exhaustive.thin([True, False], 4), ids=["tiles", "bundles"])
@pytest.mark.parametrize(
    "form", [SMALL[2], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in SMALL[:2])], ids=str
)
def test_every_broadcast(request: pytest.FixtureRequest, form: Form, tiled: bool) -> None:
    if tiled:
        request.getfixturevalue("small_tiles")
    rng = np.random.default_rng(3)
    shape = (len(form.lens_q), form.nheads_q, *form.rows)
    bias, mask = rng.standard_normal(shape, np.float32), rng.random(shape) < 0.8
    bias[rng.random(shape) < 0.1] = -np.inf
    base = options_of(form, ())
    for n, pattern in enumerate(PATTERNS):
        options = {"bias": narrowed(bias, form, pattern), **base}
        if n % 2:
            options["causal"] = True
        verify(form, options)
        verify_backward(form, options)
        options["mask"] = narrowed(mask, form, PATTERNS[(7 * n + 5) % len(PATTERNS)])
        verify_backward(form, options)


@pytest.mark.parametrize("names", [*ALONE, tuple(OPTIONS)], ids="+".join)
@pytest.mark.parametrize("form", SMALL, ids=str)
def test_small_tiles(small_tiles: None, form: Form, names: tuple[str, ...]) -> None:
    options = options_of(form, names)
    verify(form, options)
    verify_backward(form, options)


def test_options_of_any_strides() -> None:
    """An option's array may have any strides, including axes of stride 0."""
    form = Form("dense", (11, 11, 11), (13, 13, 13))
    bias = bias_of(form)
    turned = np.ascontiguousarray(bias.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    spread = np.broadcast_to(bias[:1], bias.shape)
    for given in (turned, spread, bias[:, :, ::-1]):
        found, _ = gradients_of(form, {"bias": given})
        expected, _ = gradients_of(form, {"bias": given.copy()})
        for name in ("dq", "dk", "dv", "dbias"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_dead_tiles_before_live_ones() -> None:
    """A row that sees its first key after several hidden tiles keeps nothing of the hidden keys."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 1300, 1, 16), np.float32)
    mask = np.zeros((1300, 1300), bool)
    mask[:, 1200:] = True
    mask[7] = False
    mask[9] = np.arange(1300) == 1299
    form = Form("dead", (1300,), (1300,), nheads_q=1, nheads_kv=1)
    bias = np.where(mask, np.float32(0), -np.inf).astype(np.float32)
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "softcap": 3.0}):
        verify_forward(q, k, v, options, form.logical_q)
        verify_backward(form, options)


@pytest.mark.parametrize("form", [SMALL[0], SMALL[2]], ids=str)
def test_same_bits_with_any_number_of_threads(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    monkeypatch.setattr(threads, "WORK_OF_A_THREAD", 1)
    options = options_of(form, tuple(OPTIONS))
    options["bias"] = options["bias"][0, 0]  # so that dbias is a sum over sequences and heads

    def bits() -> list[bytes]:
        found, _ = gradients_of(form, options)
        arrays = [*found[:5], *found.captured.values()]
        return [x.tobytes() for x in arrays]

    monkeypatch.setattr(threads, "available_threads", lambda: 1)
    first = bits()
    for cores in (2, 7, 2):
        monkeypatch.setattr(threads, "available_threads", lambda cores=cores: cores)
        assert bits() == first
