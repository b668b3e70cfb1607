"""`attention_backward` and `attention_vjp`: gradients of `rawattn.attention`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.gradients import Gradients, wanted
from rawattn._call.options import AttentionOptions, Options, flag
from rawattn._call.signatures import options_of, takes_options
from rawattn._masks.block_mask import memo_of
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.option_arrays import differentiated, named_gradients, with_arrays
from rawattn._runtime.verbs import BACKWARD, FORWARD
from rawattn._verbs.attention import ArrayT, CallOptions
from rawattn._verbs.fast_path import with_fast_path

if TYPE_CHECKING:  # type checkers have their own copy: it is no dependency
    from typing_extensions import Unpack


@with_fast_path(BACKWARD)
@takes_options(AttentionOptions)
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[AttentionOptions],
) -> CallRequest[Gradients]:
    """Gradients of `attention` with respect to q, k, v, the bias, learned sinks and the arrays that a score function captures.

    Parameters
    ----------
    dout : array, the shape and dtype of `out`
        Gradient with respect to `out`.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned; lse is float32.
    **options
        The options that were given to `attention`, except `num_splits`. A seed must have the value that it had there,
        since the backward recomputes what was dropped.
    dlse : array, the shape of `lse`, float32, optional
        Gradient with respect to `lse`.
    want_dbias : bool, optional
        Whether to compute the gradient of `bias`; by default whenever there is one. True without a bias is an error.
    deterministic : bool
        True gives the same bits run after run. By default dq is summed by atomic additions, in an order that differs from
        run to run. dbias may be too, where sequences or more than two heads share the bias. dk and dv always have the same
        bits. On a GPU True costs about a quarter more time and needs less scratch memory: one float32 for each query row
        and head instead of D + 1 (D rounded up to a multiple of 16).
    into : Gradients, optional
        Arrays that the gradients are written to. Each has the shape, dtype and device of the input that it is the gradient
        of and unit stride along the last axis, is writable, and overlaps neither another one nor an input. For a field that
        is None the call allocates an array. `captured` is a dict. Padding rows of dq, dk and dv are left untouched. Padding
        rows of arrays that the call allocates are 0.
    backend : "cuda" or "cpu", optional
        Default: the GPU where there is one, for NumPy arrays too; else the CPU.

    Returns
    -------
    Gradients
        (dq, dk, dv, dbias, dsink_logits, captured) in q's framework, on q's device. dk and dv have the heads of k and v:
        the query heads that share a kv head are summed. dbias has the shape and dtype of the bias, summed in float32 over
        the axes along which the bias is broadcast. captured is a dict of the gradients of the arrays that ``score_mod`` has
        in ``wrt``. A gradient whose input was not given, or that is not wanted, is None. `alibi_slopes` have no gradient;
        slopes that a `ScoreMod` captures have one. Small gradients of CuPy arrays may share one block of memory, of 4 MiB at
        most, which is freed with the last of them.

    Rows that see no key have dq 0; keys that no query sees have dk = dv = 0. The contents of padding rows, NaN included,
    never affect a gradient. A NaN in q, k, v or dout reaches only gradients of queries and keys that see each other.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    NotImplementedError
        For a `score_mod` in C++ without a `backward`, on the CPU for any in C++, and for `dropout_p` where `seqs` has
        positions.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for an array in `into` that is a torch tensor that requires a
        gradient.

    Notes
    -----
    As in `attention`, the work is enqueued on the current stream of q's framework, and the call does not wait for it.

    Unlike `attention`, this function accepts torch tensors that require a gradient even while grad mode is on: it reads
    their ``detach()`` and records nothing.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 5, 4, 16), dtype=np.float32) for _ in range(3))
    >>> out, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    >>> gradients = rawattn.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> gradients.dk.shape
    (2, 5, 4, 16)

    The gradient of a bias that all sequences share, and of learned sinks:

    >>> options = {"bias": rng.standard_normal((4, 5, 5), dtype=np.float32), "sink_logits": np.zeros(4, np.float32)}
    >>> out, lse = rawattn.attention(q, k, v, **options, return_lse=True)
    >>> gradients = rawattn.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
    >>> gradients.dbias.shape, gradients.dsink_logits.shape
    ((4, 5, 5), (4,))
    """
    given = options_of(options, AttentionOptions, "rawattn.attention_backward", attention_backward)
    deterministic = flag("deterministic", deterministic)
    targets = wanted(into, given.bias, want_dbias)
    names, written = named_gradients(targets, given, want_dbias)
    verb, arrays, values, left = with_arrays(BACKWARD, given, names, q)
    inputs = (dout, q, k, v, out, lse, dlse, *arrays)
    returned = functools.partial(gradients, names, given.score_mod) if names else dense_gradients
    arrays = (*targets[:3], *written)
    call = verb, inputs, arrays, left, deterministic, backend, values
    return CallRequest(*call, returned, memo_of(given.mask))


def dense_gradients(results: Sequence[Any]) -> Gradients:
    """The return value of a backward whose outputs are dq, dk and dv alone."""
    return tuple.__new__(Gradients, (*results, None, None, None))


def gradients(names: tuple[str, ...], score_mod: Any, results: Sequence[Any]) -> Gradients:
    """The return value of a backward, from its outputs. names: those behind dq, dk and dv."""
    others = dict(zip(names, results[3:], strict=True))
    text = None if score_mod is None else score_mod.text
    captured = {name: others[f"dcaptured{n}"] for n, name in differentiated(text).items()}
    dq, dk, dv = results[:3]
    return Gradients(dq, dk, dv, others.get("dbias"), others.get("dsink_logits"), captured or None)


_FORWARD_ALONE = "num_splits", "out"  # options that the backward does not take

# The forward of a vjp. Its caller computes the gradients, so a tensor that requires one is accepted and read as its values.
_UNTRACKED = replace(FORWARD, refuses_gradients=False)


@with_fast_path(_UNTRACKED, "out")
def _forward(
    q: Any, k: Any, v: Any, *, out: Any = None, backend: Any = None, **options: Any
) -> CallRequest[tuple[Any, Any]]:
    verb, arrays, values, left = with_arrays(_UNTRACKED, Options(**options), q=q)
    inputs: tuple[Any, ...] = (q, k, v, *arrays)
    memo = memo_of(options.get("mask"))
    return CallRequest(verb, inputs, (out, None), left, True, backend, values, tuple, memo)


class Pullback(Protocol):
    """The second result of `attention_vjp`."""

    def __call__(
        self,
        dout: Any,
        *,
        dlse: Any = None,
        want_dbias: bool | None = None,
        into: Gradients | None = None,
    ) -> Gradients: ...


@overload
def attention_vjp(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[ArrayT, Pullback]: ...


@overload
def attention_vjp(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[tuple[ArrayT, Any], Pullback]: ...


@overload
def attention_vjp(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    return_lse: bool,
    **options: Unpack[CallOptions],
) -> tuple[ArrayT | tuple[ArrayT, Any], Pullback]: ...


@checks_arguments("rawattn.attention_vjp", tuple(CallOptions.__annotations__))
def attention_vjp(
    q: Any, k: Any, v: Any, *, deterministic: bool = False, return_lse: bool = False, **options: Any
) -> tuple[Any, Pullback]:
    """The result of `attention`, and a function that maps gradients of this result to gradients of the inputs.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        q, k and v are as in `attention`. Unlike there, torch tensors that require a gradient are accepted while grad mode is
        on: they are read as their ``detach()``, and nothing is recorded.
    k : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    v : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    **options
        Those of `attention`, `out` and `backend` too. `num_splits` applies to the forward only.
    deterministic : bool
        As in `attention_backward`.
    return_lse : bool
        Also return lse, as `attention` does.

    Returns
    -------
    out : array, or (out, lse) with `return_lse`
    backward : callable, ``backward(dout, *, dlse=None, want_dbias=None, into=None) -> Gradients``
        Computes what `attention_backward` does. It keeps references to q, k, v, out, lse and the arrays of options, also
        to an `out` that was given: do not change them before it is called.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    NotImplementedError
        On the CPU, for a `score_mod` in C++, and for `dropout_p` where `seqs` has positions. `backward` raises it too for a
        `score_mod` in C++ without a `backward`.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for an `out` that is a torch tensor that requires a gradient.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q = k = v = np.ones((1, 3, 2, 8), np.float32)
    >>> out, backward = rawattn.attention_vjp(q, k, v, causal=True)
    >>> backward(np.ones_like(out)).dv[0, :, 0, 0].round(3)
    array([1.833, 0.833, 0.333], dtype=float32)
    """
    return_lse, deterministic = flag("return_lse", return_lse), flag("deterministic", deterministic)
    out, lse = _forward(q, k, v, **options)
    for name in _FORWARD_ALONE:
        options.pop(name, None)

    @checks_arguments("the backward of rawattn.attention_vjp")
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
