"""The public verbs: arrays in, a problem described, a backend run, arrays of the caller's framework out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from rawattn._call.options import ForwardOptions, flag
from rawattn._call.signatures import options_of, takes_options
from rawattn._masks.block_mask import memo_of
from rawattn._runtime.asked import Asked
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD
from rawattn._verbs.repeats import repeating

if TYPE_CHECKING:  # type checkers bring it: nothing is installed for it
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")


class CallOptions(ForwardOptions, total=False):
    """All that `attention` takes by name but `return_lse`, to type checkers."""

    out: Any
    backend: Literal["cuda", "cpu"] | None


@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> ArrayT: ...


@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[ArrayT, Any]: ...


@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: bool, **options: Unpack[CallOptions]
) -> ArrayT | tuple[ArrayT, Any]: ...


@repeating(FORWARD, out="out")
@takes_options(ForwardOptions)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[ForwardOptions],
) -> Asked[Any]:
    """Scaled dot-product attention, ``softmax(scale * q @ k.T) @ v`` over the keys each query sees.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        CuPy, NumPy or any object with ``__dlpack__`` (torch, JAX, ...); float16, bfloat16 or float32; D from 1 to 256.
        Of arrays that are (batch, heads, seqlen, D), as torch's own attention takes them, pass ``x.transpose(1, 2)``
        (in NumPy, CuPy and JAX ``x.swapaxes(1, 2)``) for each of q, k and v: of strided arrays nothing is copied.
    k : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
        ``nheads_q % nheads_kv == 0``; query head h reads head ``h // (nheads_q // nheads_kv)``.
    v : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
        Dv from 1 to 256, free of D. q, k, v share one dtype and one device. Rows may have any strides; a last axis that
        is not of unit stride is copied.
    seqs : SeqLayout, optional
        Where sequences start and how long they are. With ``seqstart_q`` the batch is packed (group mode); with logical
        lengths alone it is padded. Whatever padding rows hold, NaN included, reaches no result.
    causal : bool
        Query i sees keys j <= i + off.
    align : "bottom-right" or "top-left"
        off = seqlen_k - seqlen_q of each sequence, or 0. Places the diagonal of `causal`, `window` and `alibi_slopes`.
    window : (left, right), optional
        Query i sees keys i + off - left <= j <= i + off + right, both ends included; None is unbounded.
    sink : int
        This many leading keys stay visible whatever ``left`` says, never past the right edge.
    scale : float, optional
        Default ``1 / sqrt(D)``; 0 and negative are legal.
    num_splits : int, optional
        Into so many pieces, 1 to 256, the keys of a tile of queries are split, each of which is another block's; no more than
        it has tiles of keys. 1 splits nothing; None is chosen for lengths and GPU. It changes rounding alone, and the same
        value gives the same bits. Meanwhile, pieces take memory: about `num_splits` times that of `out` in float32, with
        the rows of each sequence filled up to whole tiles of queries. ValueError where the GPU has less than that. On the
        CPU there are no pieces.
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials of each row's scores, float32,
        (batch, nheads_q, seqlen_q) or (nheads_q, total_q).
    out : array, optional
        Written and returned: the shape, dtype and device of the result, unit last stride, writable, no overlap with q, k
        or v. Its padding rows are left untouched. In arrays allocated here they are 0, and -inf in lse.
    backend : "cuda" or "cpu", optional
        Default: the GPU where there is one, for NumPy arrays too; else the CPU.
    softcap : float, optional
        Above 0: a scaled score s becomes ``softcap * tanh(s / softcap)``.
    score_mod : ScoreMod, optional
        A function of the score and its position, compiled into the kernels; -inf hides a key. Text in C++ runs on GPUs alone.
    bias : array, optional
        Added to the scores, never scaled; -inf hides a key. The dtype of q, or float32. Broadcasts by NumPy's rules to
        (batch, heads, seqlen_q, seqlen_k), any strides, with 1, nheads_kv or nheads_q heads: a head of nheads_kv is that of
        its group's query heads. In group mode the last two axes count positions inside each sequence, and are 1 or at least
        as long as the longest sequence.
    alibi_slopes : array, (nheads_q,) or (batch, nheads_q), optional
        float32, or 16-bit. Adds ``-slope * abs(i + off - j)`` to the score of query i and key j, off being that of `align`.
    mask : array of bool, or BlockMask, optional
        True keeps a key. The shapes of `bias`. Beside `causal` and `window`, which hide keys too. A mask that many calls use is
        cheaper as a `BlockMask`, made once by `rawattn.block_mask`. On a GPU for 2**20 query heads at most.
    sink_logits : array, (nheads_q,), optional
        float32, or 16-bit. A logit for each head that joins the softmax's denominator and lse, with no value: probabilities
        then sum to less than 1. A row that sees no key has lse = its sink logit. -inf is none.
    dropout_p : float
        In [0, 1). Each probability is dropped with this chance, the others are divided by ``1 - dropout_p``; lse is that
        without dropout. Needs a seed. Draws have 16 bits: below 2**-17 nothing is dropped, and above 1 - 2**-16 one in 65536
        is still kept, which makes the output too large in the mean.
    seed : int, or integer array of one element, optional
        What is dropped depends on (seed, batch, head, row, key) alone, so it is the same in the backward, on every backend
        and for every tiling. An array (int32 or int64, on q's device) is read by the kernels: a captured graph draws anew in
        each replay where it was changed in between.

    Returns
    -------
    out : array of q's framework, on q's device, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : array, only with ``return_lse``

    The order of what happens to a score::

        s = scale * (q . k);  softcap;  score_mod;  s += bias;  s += alibi;  hidden keys: s = -inf
        lse = log(sum(exp(s)) + exp(sink_logit));  p = exp(s - lse);  dropout of p;  out = p v

    A row that sees no key gives out 0 and lse -inf. On a GPU, NaN in a key or value inside the logical length may reach rows
    that do not see it, where a tile that they visit has it: what hides it may be a mask that shows it to another row of the
    head, `causal`, `window`, a bias of -inf or a score_mod that gives -inf. A key that `mask` hides from all rows of a head
    reaches none of them. Garbage at the end of sequences is kept out by lengths in `seqs`, elsewhere by such a `mask`, not
    by a bias of -inf.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    NotImplementedError
        On the CPU, for a `score_mod` in C++.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for a torch tensor that requires a gradient, which would be
        lost: call `rawattn.torch.attention`, or pass ``x.detach()``.

    Notes
    -----
    The work runs on the current stream of q's framework and never waits for it. Lengths that live on the GPU are never
    read back, with or without ``max_seqlen_*``; the CPU backend alone has to. The algorithm is that of FlashAttention-2
    (Dao 2023, arXiv:2307.08691), on Hopper of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 5, 4, 16), dtype=np.float32) for _ in range(3))
    >>> rawattn.attention(q, k, v, causal=True).shape
    (2, 5, 4, 16)

    A bias of each head, added before the softmax, and a mask of keys:

    >>> bias = rng.standard_normal((4, 5, 5), dtype=np.float32)
    >>> keep = np.array([True, True, True, False, True])
    >>> rawattn.attention(q, k, v, bias=bias, mask=keep).shape
    (2, 5, 4, 16)

    Dropout is the same for the same seed:

    >>> a, b = (rawattn.attention(q, k, v, dropout_p=0.2, seed=3) for _ in range(2))
    >>> bool((a == b).all())
    True

    A function of scores:

    >>> near = rawattn.ScoreMod("where(abs(q_idx - kv_idx) <= reach, score, -inf)", reach=2)
    >>> x, y = rawattn.attention(q, k, v, score_mod=near), rawattn.attention(q, k, v, window=(2, 2))
    >>> bool(np.allclose(x, y, atol=1e-6))
    True
    """
    return_lse = flag("return_lse", return_lse)
    given = options_of(options, ForwardOptions, "rawattn.attention", attention)
    verb, arrays, values, left = with_arrays(FORWARD, given, q=q)
    returned: Callable[[Sequence[Any]], Any] = tuple if return_lse else first
    inputs, targets = (q, k, v, *arrays), (out, None)
    call = verb, inputs, targets, left, return_lse, backend, values
    return Asked(*call, returned, memo_of(given.mask))


def first(results: Sequence[Any]) -> Any:
    """What a call that does not return lse gives back."""
    return results[0]
