"""Calls of the CPU backend with score options, and their check against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import rawattn
from rawattn import Gradients, ScoreMod, SeqLayout, reference
from rawattn._call.options import Options
from rawattn.reference._call import read
from rawattn.reference._passes import backward
from tests.tolerance import check, check_lse, column_orders, low_precision_attention, scale_of

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


class Form(NamedTuple):
    """The sequences and sizes of a call.

    seqs: the `SeqLayout` of the call, None for a dense batch.
    """

    name: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    packed: bool = False
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
        if self.packed:
            starts = (np.cumsum([1, *lens]) for lens in (self.lens_q, self.lens_k))
            names = ("seqstart_q", "seqstart_k")
            return SeqLayout(**dict(zip(names, starts, strict=True)))
        if self.padded:
            return SeqLayout(seqlen_q=self.lens_q, seqlen_k=self.lens_k)
        return None

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of q and of k: of a batch entry, or in group mode the extent of a bias."""
        pad = 2 if self.padded or self.packed else 0
        return max(self.lens_q) + pad, max(self.lens_k) + pad

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return q, k, v with NaN in padding."""
        rng = np.random.default_rng(len(self.name))
        found = []
        for lens, rows, nheads, headdim in (
            (self.lens_q, self.rows[0], self.nheads_q, self.headdim),
            (self.lens_k, self.rows[1], self.nheads_kv, self.headdim),
            (self.lens_k, self.rows[1], self.nheads_kv, self.headdim_v),
        ):
            shape = (sum(lens) + 2,) if self.packed else (len(lens), rows)
            array = np.full((*shape, nheads, headdim), np.nan, np.float32)
            logical = self.logical(lens, rows)
            array[logical] = rng.standard_normal((int(logical.sum()), nheads, headdim))
            found.append(array.astype(DTYPES[self.dtype]))
        return tuple(found)

    def logical(self, lens: tuple[int, ...], rows: int) -> np.ndarray:
        if self.packed:
            indices = np.arange(sum(lens) + 2)
            return (indices > 0) & (indices <= sum(lens))
        return np.arange(rows) < np.array(lens)[:, None]

    @property
    def logical_q(self) -> np.ndarray:
        return self.logical(self.lens_q, self.rows[0])

    @property
    def logical_k(self) -> np.ndarray:
        return self.logical(self.lens_k, self.rows[1])


def bias_of(form: Form, heads: int | None = None) -> np.ndarray:
    """A bias with -inf at single keys, in whole rows, and over a whole leading tile."""
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
    """Uses every position variable, captured arrays of several dtypes, a number, hidden keys, and gradients of two arrays."""
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


def gradients_of(form: Form, options: dict[str, Any]) -> tuple[Gradients, dict[str, Any]]:
    """Return the CPU backend's gradients, from its own out and lse, and the arrays to pass to the reference."""
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
    """Gradients in float32 arithmetic, with scores, probabilities and their gradients rounded to q's dtype."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    dtype = q.dtype
    options = {**options, "scale": scale_of(q, options)}
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    out, lse = out.astype(dtype), lse.astype(np.float32)
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        found = backward(
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


SMALL = [
    Form("dense", (11, 11, 11), (13, 13, 13)),
    Form("padded", (11, 1, 0, 9), (3, 13, 4, 0), padded=True),
    Form("ragged", (11, 1, 5, 0), (13, 3, 7, 2), packed=True),
]
