"""The public verbs of the backward: gradients of `rawattn.attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rawattn._call.gradients import Gradients
from rawattn._call.layout import SeqLayout
from rawattn._interop import arrays as _arrays
from rawattn._runtime import dispatch_backward
from rawattn._verbs.attention import attention


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    seqs: SeqLayout | None = None,
    causal: bool = False,
    align: Literal["bottom-right", "top-left"] = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    score_mod: Any = None,
    sink_logits: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    dlse: Any = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    backend: Literal["cuda", "cpu"] | None = None,
) -> Gradients:
    """Gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    dout : array, the shape and dtype of `out`
        Gradient with respect to `out`.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned; lse is float32.
    seqs, causal, align, window, sink, scale
        As given to `attention`.
    dlse : array, the shape of `lse`, float32, optional
        Gradient with respect to `lse`.
    want_dbias : bool, optional
        Whether to compute the gradient of `bias`; by default whenever there is one. True without a bias is an error.
    deterministic : bool
        The same bits run after run. By default dq is summed by atomic additions, in an order that differs from run to
        run; dk and dv are always the same. On a GPU it costs about a quarter more time and needs less memory: 1 float32
        of a query row and head, instead of D + 1 (D rounded up to a multiple of 16).
    into : Gradients, optional
        Arrays to write, each of the shape, dtype and device of q, k or v, with unit last stride, writable, without
        overlap with each other or with an input; a field that is None is allocated. Their padding rows are left
        untouched. In arrays allocated here they are 0.
    backend : "cuda" or "cpu", optional
        Default: the GPU where there is one, for NumPy arrays too; else the CPU.
    bias, mask, alibi_slopes, softcap, score_mod, sink_logits, dropout_p, seed
        Part of the contract and of `rawattn.reference`; not implemented on the GPU and CPU backends of this version.

    Returns
    -------
    Gradients
        (dq, dk, dv, dbias, dsink_logits) in q's framework, on q's device. dk and dv have the heads of k and v: the query
        heads that share one are summed. dbias and dsink_logits are None.

    Rows that see no key have dq 0; keys that no query sees have dk = dv = 0. Whatever padding rows hold, NaN included,
    reaches no gradient.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    NotImplementedError
        For an option that this version does not have.

    Notes
    -----
    The work runs on the current stream of q's framework and never waits for it, as that of `attention`.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 5, 4, 16), dtype=np.float32) for _ in range(3))
    >>> out, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    >>> gradients = rawattn.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> gradients.dk.shape
    (2, 5, 4, 16)
    """
    options = {
        "seqs": seqs,
        "causal": causal,
        "align": align,
        "window": window,
        "sink": sink,
        "scale": scale,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "softcap": softcap,
        "score_mod": score_mod,
        "sink_logits": sink_logits,
        "dropout_p": dropout_p,
        "seed": seed,
    }
    if backend not in (None, "cuda", "cpu"):
        raise ValueError(f"backend: got {backend!r}; accepted are 'cuda', 'cpu' and None")
    for name, flag in (("deterministic", deterministic), ("want_dbias", want_dbias)):
        if not isinstance(flag, bool) and not (name == "want_dbias" and flag is None):
            raise TypeError(f"{name}: got {type(flag).__name__}, expected a bool")
    if want_dbias and bias is None:
        raise ValueError("want_dbias: got True, but bias is None; pass the bias or drop want_dbias")
    if into is not None and not isinstance(into, Gradients):
        raise TypeError(
            f"into: got {type(into).__name__}, expected rawattn.Gradients(dq=..., dk=..., dv=...) or None"
        )
    wanted = into or Gradients()
    for name in ("dbias", "dsink_logits"):
        if getattr(wanted, name) is not None:
            raise ValueError(
                f"into.{name}: got an array, but the call has no input of which it is the gradient"
            )

    framework = _arrays.framework_of(q)
    with _arrays.on_stream_of(q, framework) as stream:
        arrays = {
            name: None
            if x is None and name == "dlse"
            else _arrays.import_array(name, x, stream=stream)
            for name, x in (
                ("dout", dout),
                ("q", q),
                ("k", k),
                ("v", v),
                ("out", out),
                ("lse", lse),
                ("dlse", dlse),
            )
        }
        targets = {
            name: None
            if (x := getattr(wanted, name)) is None
            else _arrays.import_array(f"into.{name}", x, stream=stream)
            for name in dispatch_backward.RESULTS
        }
        results = dispatch_backward.backward(
            arrays, targets, options, deterministic=deterministic, backend=backend
        )
        return Gradients(
            *(
                _arrays.export_array(result, framework, stream) if given is None else given
                for given, result in zip(wanted[:3], results, strict=True)
            )
        )


def attention_vjp(
    q: Any, k: Any, v: Any, *, deterministic: bool = False, return_lse: bool = False, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """`attention`, and the function that pulls gradients of its result back to q, k and v.

    Parameters
    ----------
    q, k, v : array
    **options
        Those of `attention` but `num_splits` and `out`.
    deterministic : bool
        Of the backward.
    return_lse : bool
        Also return lse, as `attention` does.

    Returns
    -------
    out : array, or (out, lse) with `return_lse`
    backward : callable, ``backward(dout, *, dlse=None, want_dbias=None, into=None) -> Gradients``
        As `attention_backward`. It holds q, k, v, out and lse: they must not be changed before it is called.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q = k = v = np.ones((1, 3, 2, 8), np.float32)
    >>> out, backward = rawattn.attention_vjp(q, k, v, causal=True)
    >>> backward(np.ones_like(out)).dv[0, :, 0, 0].round(3)
    array([1.833, 0.833, 0.333], dtype=float32)
    """
    for name in ("num_splits", "out"):
        if options.get(name) is not None:
            raise TypeError(
                f"{name}: attention_vjp does not take it; expected an option of the backward"
            )
        options.pop(name, None)
    out, lse = attention(q, k, v, **options, return_lse=True)

    def backward(
        dout: Any,
        *,
        dlse: Any = None,
        want_dbias: bool | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        return attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            **options,
            dlse=dlse,
            want_dbias=want_dbias,
            deterministic=deterministic,
            into=into,
        )

    return ((out, lse) if return_lse else out), backward
