"""The CPU backend with options of scores, against the reference."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import Gradients, ScoreMod, SeqLayout, reference
from rawattn._call.options import Options
from rawattn._cpu import backward as cpu_backward
from rawattn._cpu import threads, tiles
from rawattn.reference._call import read
from tests import exhaustive
from tests.tolerance import check, check_lse, column_orders, low_precision_attention, scale_of

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


class Form(NamedTuple):
    """Sequences of a call. `seqs` is that of `SeqLayout`, None for a dense batch."""

    name: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    group: bool = False
    padded: bool = False
    nheads_q: int = 4
    nheads_kv: int = 2
    headdim: int = 16
    headdim_v: int = 16
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def seqs(self) -> SeqLayout | None:
        if self.group:
            starts = (np.cumsum([1, *lens]) for lens in (self.lens_q, self.lens_k))
            names = ("seqstart_q", "seqstart_k")
            return SeqLayout(**dict(zip(names, starts, strict=True)))
        if self.padded:
            return SeqLayout(seqlen_q=self.lens_q, seqlen_k=self.lens_k)
        return None

    @property
    def rows(self) -> tuple[int, int]:
        """Of a batch entry, or, in group mode, of a bias."""
        pad = 2 if self.padded or self.group else 0
        return max(self.lens_q) + pad, max(self.lens_k) + pad

    def arrays(self) -> tuple[np.ndarray, ...]:
        """q, k, v; padding is NaN."""
        rng = np.random.default_rng(len(self.name))
        found = []
        for lens, rows, nheads, headdim in (
            (self.lens_q, self.rows[0], self.nheads_q, self.headdim),
            (self.lens_k, self.rows[1], self.nheads_kv, self.headdim),
            (self.lens_k, self.rows[1], self.nheads_kv, self.headdim_v),
        ):
            shape = (sum(lens) + 2,) if self.group else (len(lens), rows)
            array = np.full((*shape, nheads, headdim), np.nan, np.float32)
            logical = self.logical(lens, rows)
            array[logical] = rng.standard_normal((int(logical.sum()), nheads, headdim))
            found.append(array.astype(DTYPES[self.dtype]))
        return tuple(found)

    def logical(self, lens: tuple[int, ...], rows: int) -> np.ndarray:
        if self.group:
            places = np.arange(sum(lens) + 2)
            return (places > 0) & (places <= sum(lens))
        return np.arange(rows) < np.array(lens)[:, None]

    @property
    def logical_q(self) -> np.ndarray:
        return self.logical(self.lens_q, self.rows[0])

    @property
    def logical_k(self) -> np.ndarray:
        return self.logical(self.lens_k, self.rows[1])


BUNDLED = [
    Form("dense", (7, 7, 7), (9, 9, 9)),
    Form("padded", (7, 3, 0, 7), (5, 9, 4, 5), padded=True),
    Form("ragged", (5, 1, 5, 0, 6), (7, 3, 7, 2, 0), group=True, dtype="bfloat16"),
    Form("one-head", (4, 4), (6, 6), nheads_q=3, nheads_kv=1, headdim=8, headdim_v=5),
    Form("each-head", (4, 4), (6, 6), nheads_q=3, nheads_kv=3, headdim=8, dtype="float16"),
]
TILED = [
    Form("long", (150, 150), (600, 600), nheads_q=4, nheads_kv=2),
    Form("one-pass", (300,), (200,), nheads_q=2, nheads_kv=2, dtype="bfloat16"),
    Form("ragged-long", (70, 0, 300, 5), (540, 40, 130, 8), group=True, headdim=40, headdim_v=24),
    Form("padded-long", (300, 20), (90, 700), padded=True, nheads_q=6, dtype="float16"),
]


def masks_of(form: Form, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.random(shape) < 0.7)


def bias_of(form: Form, heads: int | None = None) -> np.ndarray:
    """Some of it is -inf: single keys, whole rows, a whole leading tile."""
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((len(form.lens_q), heads or form.nheads_q, *form.rows), np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    bias[:, 0, 1::3] = -np.inf
    bias[..., 2:4, : form.rows[1] - 2] = -np.inf
    return bias.astype(DTYPES[form.dtype])


def mask_of(form: Form) -> np.ndarray:
    rng = np.random.default_rng(6)
    mask = rng.random((len(form.lens_q), form.nheads_kv, *form.rows)) < 0.7
    mask[:, -1, ::4] = False
    mask[..., 1:3, : form.rows[1] - 3] = False
    return mask


def slopes_of(form: Form) -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.uniform(0, 0.3, (len(form.lens_q), form.nheads_q)).astype(np.float32)


def sinks_of(form: Form) -> np.ndarray:
    sinks = np.random.default_rng(8).standard_normal(form.nheads_q).astype(np.float32)
    sinks[0] = -np.inf
    return sinks


def score_mod_of(form: Form) -> ScoreMod:
    """Every place, arrays of several types, a number, hidden keys; two arrays with gradients."""
    rng = np.random.default_rng(8)
    return ScoreMod(
        "where((kv_idx + shift) % 5 == table[kv_head, q_idx] % 3, -inf, "
        "tanh(score * gain[head]) + slope[batch, kv_idx % 7, 0] * (q_idx - kv_idx) / (seqlen_k + seqlen_q))",
        gain=rng.uniform(0.5, 1.5, form.nheads_q).astype(DTYPES[form.dtype]),
        slope=rng.standard_normal((len(form.lens_q), 7, 1), np.float32),
        table=rng.integers(0, 5, (form.nheads_kv, form.rows[0])),
        shift=2,
        wrt=("gain", "slope"),
    )


OPTIONS: dict[str, Callable[[Form], dict[str, Any]]] = {
    "softcap": lambda form: {"softcap": 1.5},
    "bias": lambda form: {"bias": bias_of(form)},
    "mask": lambda form: {"mask": mask_of(form)},
    "alibi_slopes": lambda form: {"alibi_slopes": slopes_of(form)},
    "sink_logits": lambda form: {"sink_logits": sinks_of(form)},
    "dropout_p": lambda form: {"dropout_p": 0.3, "seed": -(2**60) + 5},
    "score_mod": lambda form: {"score_mod": score_mod_of(form)},
    "window": lambda form: {"window": (3, 1), "sink": 1},
}


def options_of(form: Form, names: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {} if form.seqs is None else {"seqs": form.seqs}
    for name in names:
        options |= OPTIONS[name](form)
    return options


ALONE = [(name,) for name in OPTIONS]
PAIRS = list(itertools.combinations(OPTIONS, 2))
ALL = [tuple(OPTIONS)]


def of_forms(forms: list[Form], marks: Any = ()) -> list[Any]:
    """Every option alone and all of them in each form; each pair in one, in turns.

    marks: of the pairs, and of an option alone in every other form.
    """

    def marked(form: int, alone: int) -> Any:
        seldom = marks if (form + alone) % 2 else ()
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


def verify(form: Form, options: dict[str, Any]) -> None:
    verify_forward(*form.arrays(), options, form.logical_q)


def verify_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any], rows: np.ndarray
) -> None:
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    exact, exact_lse = reference.attention(q, k, v, **options, return_lse=True)
    low, low_lse = low_precision_attention(q, k, v, **options)
    check(out[rows], exact[rows], tuple(x[rows] for x in low), what="out")
    lses = (x.swapaxes(-1, -2)[rows] for x in (lse, exact_lse, *low_lse))
    got, expected, *others = lses
    check_lse(got, expected, tuple(others))
    assert not np.any(out[~rows] != 0) and np.all(lse.swapaxes(-1, -2)[~rows] == -np.inf)


@IN_BUNDLES
def test_forward_of_bundles(form: Form, names: tuple[str, ...]) -> None:
    verify(form, options_of(form, names))


@IN_TILES
def test_forward_of_tiles(form: Form, names: tuple[str, ...]) -> None:
    verify(form, options_of(form, names))


def gradients_of(form: Form, options: dict[str, Any]) -> tuple[Gradients, dict[str, Any]]:
    """Of the CPU backend, from its own out and lse, and what the reference is to be given."""
    q, k, v = form.arrays()
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    rng = np.random.default_rng(9)
    dout = np.full(out.shape, np.nan, np.float32)
    rows = form.logical_q
    dout[rows] = rng.standard_normal(dout[rows].shape)
    dout = dout.astype(out.dtype)
    dlse = np.full(lse.shape, np.nan, np.float32)
    dlse.swapaxes(-1, -2)[rows] = rng.standard_normal((int(rows.sum()), form.nheads_q))
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "dlse": dlse}
    found = rawattn.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options, backend="cpu")
    return found, arrays


def low_precision(arrays: dict[str, Any], options: dict[str, Any]) -> Iterator[Gradients]:
    """As float32 arithmetic gives them with scores, probabilities and their gradients rounded to q's dtype."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    dtype = q.dtype
    options = {**options, "scale": scale_of(q, options)}
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    out, lse = out.astype(dtype), lse.astype(np.float32)
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        found = reference._backward(
            call,
            dout[..., order_v],
            out[..., order_v],
            lse,
            arrays["dlse"],
            want_dbias=options.get("bias") is not None,
            rounded=lambda x: x.astype(dtype).astype(np.float32),
        )
        back, back_v = np.argsort(order), np.argsort(order_v)
        yield found._replace(
            dq=found.dq[..., back].astype(dtype),
            dk=found.dk[..., back].astype(dtype),
            dv=found.dv[..., back_v].astype(dtype),
        )


def verify_backward(form: Form, options: dict[str, Any]) -> None:
    found, arrays = gradients_of(form, options)
    q, k, v, dout, dlse = (arrays[name] for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    exact = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    low = list(low_precision(arrays, options))
    rows = {"dq": form.logical_q, "dk": form.logical_k, "dv": form.logical_k}
    for name, where in rows.items():
        got = getattr(found, name)
        assert got.dtype == q.dtype
        lows = tuple(getattr(x, name)[where] for x in low)
        check(got[where], getattr(exact, name)[where], lows, what=name)
        assert not np.any(got[~where] != 0), name
    for name in ("bias", "sink_logits"):
        got, expected = (getattr(x, f"d{name}") for x in (found, exact))
        assert (got is None) == (expected is None) == (name not in options)
        if got is None:
            continue
        assert got.dtype == options[name].dtype and got.shape == options[name].shape
        lows = tuple(getattr(x, f"d{name}").astype(got.dtype) for x in low)
        check(got, expected, lows, what=f"d{name}")
    mod = options.get("score_mod")
    assert set(found.captured or {}) == set(() if mod is None else mod.text.wrt)
    for name, got in (found.captured or {}).items():
        assert got.dtype == mod.arrays[name].dtype and got.shape == mod.arrays[name].shape
        lows = tuple(x.captured[name].astype(got.dtype) for x in low)
        check(got, exact.captured[name], lows, what=name)


@IN_BUNDLES
def test_backward_of_bundles(form: Form, names: tuple[str, ...]) -> None:
    verify_backward(form, options_of(form, names))


@IN_TILES
def test_backward_of_tiles(form: Form, names: tuple[str, ...]) -> None:
    verify_backward(form, options_of(form, names))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a dozen rows and keys have several tiles of each."""
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "KEYS", 4)
    monkeypatch.setattr(cpu_backward, "KEYS", 4)


SMALL = [
    Form("dense", (11, 11, 11), (13, 13, 13)),
    Form("padded", (11, 1, 0, 9), (3, 13, 4, 0), padded=True),
    Form("ragged", (11, 1, 5, 0), (13, 3, 7, 2), group=True),
]
# Which axes of (batch, heads, rows, keys) a bias or mask has; of heads those of keys or of queries.
PATTERNS = list(itertools.product((False, True), ("one", "keys", "queries"), *[(False, True)] * 2))


def narrowed(array: np.ndarray, form: Form, pattern: tuple[Any, ...]) -> np.ndarray:
    """An array (batch, nheads_q, rows, keys) without the axes that the pattern lacks, or with 1."""
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
    """Any strides, and axes of stride 0."""
    form = Form("dense", (11, 11, 11), (13, 13, 13))
    bias = bias_of(form)
    turned = np.ascontiguousarray(bias.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    spread = np.broadcast_to(bias[:1], bias.shape)
    for given in (turned, spread, bias[:, :, ::-1]):
        found, _ = gradients_of(form, {"bias": given})
        expected, _ = gradients_of(form, {"bias": given.copy()})
        for name in ("dq", "dk", "dv", "dbias"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("nkeys", [12, 700])
@pytest.mark.parametrize("hidden_by", ["mask", "bias", "score_mod"])
def test_nan_in_a_hidden_key_stays_away(nkeys: int, hidden_by: str) -> None:
    """In its key where a mask hides it, in its value whatever hides it; other heads see them."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 2, nkeys, 2, 8), np.float32)
    bad = 5
    mask = np.ones((2, 2, nkeys, nkeys), bool)
    mask[1, 0, :, bad] = False
    mask[1, 1, : nkeys // 2, bad] = False
    options: dict[str, Any] = {
        "mask": {"mask": mask},
        "bias": {"bias": np.where(mask, 0, -np.inf).astype(np.float32)},
        "score_mod": {
            "score_mod": ScoreMod("where(seen[batch, head, q_idx, kv_idx], score, -inf)", seen=mask)
        },
    }[hidden_by]

    def results() -> tuple[Any, ...]:
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
        found = rawattn.attention_backward(dout, q, k, v, out, lse, **options, backend="cpu")
        return out, lse, found

    clean, clean_lse, clean_gradients = results()
    v[1, bad] = np.nan
    if hidden_by != "bias":  # NaN - inf is NaN, in the contract too
        k[1, bad] = np.nan
    out, lse, found = results()
    seen = np.zeros(out.shape[:3], bool)
    seen[1, nkeys // 2 :, 1] = True
    assert np.isnan(out[seen]).all()
    np.testing.assert_allclose(out[~seen], clean[~seen], atol=1e-6)
    by_row = lse.swapaxes(1, 2)
    np.testing.assert_array_equal(by_row[~seen], clean_lse.swapaxes(1, 2)[~seen])
    assert np.isnan(found.dq[seen]).all()
    np.testing.assert_allclose(found.dq[~seen], clean_gradients.dq[~seen], atol=1e-5)
    # Every key of head 1 of the second sequence is seen by rows that see the NaN.
    for name in ("dk", "dv"):
        got, expected = getattr(found, name), getattr(clean_gradients, name)
        np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
        np.testing.assert_allclose(got[1, :, 0], expected[1, :, 0], atol=1e-5)


@pytest.mark.parametrize("seqlen", [12, 700])
def test_rows_without_keys(seqlen: int) -> None:
    """Emptied by -inf or a mask: 0, lse -inf or the sink, gradients 0 whatever dout holds."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 1, seqlen, 2, 8), np.float32)
    bias = np.zeros((seqlen, seqlen), np.float32)
    bias[::3] = -np.inf
    sinks = np.array([-np.inf, 1.5], np.float32)
    dead = np.arange(seqlen) % 3 == 0
    dout[0, dead] = np.nan
    for options in ({"bias": bias}, {"mask": bias == 0}, {"bias": bias, "sink_logits": sinks}):
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
        assert not out[0, dead].any() and np.isfinite(out).all()
        has_sinks = "sink_logits" in options
        np.testing.assert_array_equal(lse[0, 0, dead], -np.inf)
        np.testing.assert_array_equal(lse[0, 1, dead], 1.5 if has_sinks else -np.inf)
        found = rawattn.attention_backward(dout, q, k, v, out, lse, **options, backend="cpu")
        for gradient in found[:3]:
            assert np.isfinite(gradient).all()
        assert not found.dq[0, dead].any()
        if "bias" in options:
            assert np.isfinite(found.dbias).all() and not found.dbias[dead].any()
        if has_sinks:
            assert found.dsink_logits[0] == 0


def test_dead_tiles_before_live_ones() -> None:
    """Nothing of the keys that a row's first tiles hide is left when it sees one."""
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
    options["bias"] = options["bias"][0, 0]  # summed over sequences and heads

    def bits() -> list[bytes]:
        found, _ = gradients_of(form, options)
        arrays = [*found[:5], *found.captured.values()]
        return [x.tobytes() for x in arrays]

    monkeypatch.setattr(threads, "available_threads", lambda: 1)
    first = bits()
    for cores in (2, 7, 2):
        monkeypatch.setattr(threads, "available_threads", lambda cores=cores: cores)
        assert bits() == first


def test_want_dbias_false_and_into() -> None:
    form = SMALL[1]
    options = options_of(form, ("bias", "sink_logits", "score_mod"))
    expected, arrays = gradients_of(form, options)
    q, k, v, dout, dlse = (arrays[name] for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    into = Gradients(
        dbias=np.full_like(options["bias"], 7),
        dsink_logits=np.full_like(options["sink_logits"], 7),
        captured={"gain": np.full_like(options["score_mod"].arrays["gain"], 7)},
    )
    call = (dout, q, k, v, out, lse)
    found = rawattn.attention_backward(*call, dlse=dlse, into=into, **options, backend="cpu")
    assert found.dbias is into.dbias and found.dsink_logits is into.dsink_logits
    assert found.captured["gain"] is into.captured["gain"]
    np.testing.assert_array_equal(found.dbias, expected.dbias)
    np.testing.assert_array_equal(found.captured["gain"], expected.captured["gain"])
    np.testing.assert_array_equal(found.captured["slope"], expected.captured["slope"])
    lean = rawattn.attention_backward(*call, dlse=dlse, want_dbias=False, **options, backend="cpu")
    assert lean.dbias is None
    np.testing.assert_array_equal(lean.dq, expected.dq)


def test_seed_on_the_host_or_in_an_array() -> None:
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 40, 2, 8), np.float32)
    for seed in (5, -1, 2**63 + 3):
        out = rawattn.attention(q, k, v, dropout_p=0.4, seed=seed, backend="cpu")
        same = [seed % 2**64, seed - 2**64]
        if -(2**63) <= seed < 2**63:
            same += [np.array([seed]), np.array(seed)]
        for other in same:
            again = rawattn.attention(q, k, v, dropout_p=0.4, seed=other, backend="cpu")
            np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("option", exhaustive.thin(OPTIONS, 10))
def test_memory_is_a_few_tiles(option: str) -> None:
    """Whatever the lengths; all scores would take 64 MiB for each head."""
    form = Form("dense", (4096,), (4096,), nheads_q=2, nheads_kv=2, headdim=8, headdim_v=8)
    options = (
        options_of(form, ())
        | {
            "softcap": {"softcap": 2.0},
            "bias": {"bias": np.zeros(4096, np.float32)},
            "mask": {"mask": np.ones((4096, 1), bool)},
            "alibi_slopes": {"alibi_slopes": np.ones(2, np.float32)},
            "sink_logits": {"sink_logits": np.ones(2, np.float32)},
            "dropout_p": {"dropout_p": 0.5, "seed": 1},
            "score_mod": {
                "score_mod": ScoreMod("score * g[head]", g=np.ones(2, np.float32), wrt="g")
            },
            "window": {"window": (2000, 0)},
        }[option]
    )
    q, k, v = form.arrays()
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    tracemalloc.start()
    try:
        rawattn.attention(q, k, v, **options, backend="cpu")
        rawattn.attention_backward(out, q, k, v, out, lse, **options, backend="cpu")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) * threads.available_threads()
