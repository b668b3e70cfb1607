"""`attention`: the public verb of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from rawattn._call.options import ForwardOptions, flag
from rawattn._call.signatures import options_of, takes_options
from rawattn._masks.block_mask import memo_of
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD
from rawattn._verbs.fast_path import with_fast_path

if TYPE_CHECKING:  # type checkers have their own copy: it is no dependency
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")


class CallOptions(ForwardOptions, total=False):
    """For type checkers: the keywords of `attention`, except `return_lse`."""

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


@with_fast_path(FORWARD, out="out")
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
) -> CallRequest[Any]:
    """Scaled dot-product attention, ``softmax(scale * q @ k.T) @ v`` over the keys each query sees.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        CuPy, NumPy or any object with ``__dlpack__`` (torch, JAX, ...); float16, bfloat16 or float32; D from 1 to 256.
        If arrays are (batch, heads, seqlen, D), as torch's own attention takes them, pass ``x.transpose(1, 2)`` (in NumPy,
        CuPy and JAX ``x.swapaxes(1, 2)``) for each of q, k and v: strided views are read in place, without a copy.
    k : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
        ``nheads_q % nheads_kv == 0``; query head h reads head ``h // (nheads_q // nheads_kv)``.
    v : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
        Dv from 1 to 256, independent of D. q, k, v share one dtype and one device. All axes but the last may have any
        strides; an array whose last axis does not have unit stride is copied.
    seqs : SeqLayout, optional
        Where sequences start and how long they are. With ``seqstart_q`` the batch is packed (group mode); with logical
        lengths alone it is padded. The contents of padding rows, NaN included, never affect a result.
    causal : bool
        Query i sees keys j <= i + off.
    align : "bottom-right" or "top-left"
        Places the diagonal of `causal`, `window` and `alibi_slopes`: off = seqlen_k - seqlen_q of each sequence for
        "bottom-right", off = 0 for "top-left".
    window : (left, right), optional
        Query i sees keys i + off - left <= j <= i + off + right, both ends included; None is unbounded.
    sink : int
        The number of leading keys that stay visible whatever ``left`` is. ``right`` and `causal` hide them still.
    scale : float, optional
        Default ``1 / sqrt(D)``; 0 and negative numbers are legal.
    num_splits : int, optional
        The number of pieces, 1 to 256, into which the keys of each query tile are split, at most one for each key tile.
        Different thread blocks compute the pieces. 1 splits nothing; None chooses by lengths and GPU. The number affects
        rounding only, and the same number gives the same bits. During the call pieces take memory: about `num_splits`
        times that of `out` in float32, with the rows of each sequence rounded up to whole query tiles. ValueError if the
        GPU has less memory than that. The CPU backend splits nothing.
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials of each row's scores, float32,
        (batch, nheads_q, seqlen_q) or (nheads_q, total_q).
    out : array, optional
        Array that the result is written to; it is returned. It has the shape, dtype and device of the result and unit
        stride along the last axis, is writable, and does not overlap q, k or v. Its padding rows are left untouched.
        Padding rows of arrays that the call allocates are 0, and -inf in lse.
    backend : "cuda" or "cpu", optional
        Default: the GPU where there is one, for NumPy arrays too; else the CPU.
    softcap : float, optional
        Above 0: a scaled score s becomes ``softcap * tanh(s / softcap)``.
    score_mod : ScoreMod, optional
        A function of the score and its position, compiled into the kernels; a result of -inf hides the key. A function
        written in C++ runs on GPUs only.
    bias : array, optional
        Added to the scores, never scaled; -inf hides a key. The dtype of q, or float32. Broadcasts by NumPy's rules to
        (batch, heads, seqlen_q, seqlen_k), any strides, where heads is 1, nheads_kv or nheads_q: with nheads_kv, each head
        serves all query heads of its group. In group mode the last two axes count positions inside each sequence, and are 1
        or at least as long as the longest sequence.
    alibi_slopes : array, (nheads_q,) or (batch, nheads_q), optional
        float32, or 16-bit. Adds ``-slope * abs(i + off - j)`` to the score of query i and key j, with off as in `align`.
    mask : array of bool, or BlockMask, optional
        True keeps a key. It has a shape that `bias` may have. `causal` and `window` hide further keys. A mask that many
        calls use is cheaper as a `BlockMask`, made once by `rawattn.block_mask`. On a GPU at most 2**20 query heads.
    sink_logits : array, (nheads_q,), optional
        float32, or 16-bit. A learned logit for each head. It counts in the softmax's denominator and in lse, but has no
        value, so probabilities sum to less than 1. A row that sees no key has its sink logit as lse. -inf adds nothing.
    dropout_p : float
        In [0, 1). Each probability is dropped with this chance, the others are divided by ``1 - dropout_p``; lse is that
        without dropout. Needs a seed. The random numbers have 16 bits: below 2**-17 nothing is dropped. Above 1 - 2**-16
        one probability in 65536 is still kept, so the mean of the output is too large.
    seed : int, or integer array of one element, optional
        What is dropped depends on (seed, batch, head, row, key) only, so it is the same in the backward, on every backend
        and for every tile size. An array (int32 or int64, on q's device) is read by the kernels: change it between replays
        of a captured CUDA graph, and each replay drops other probabilities. Any int is accepted; it counts modulo 2**64.

    Returns
    -------
    out : array of q's framework, on q's device, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : array, only with ``return_lse``

    These steps turn a score into the output, in this order::

        s = scale * (q . k);  softcap;  score_mod;  s += bias;  s += alibi;  hidden keys: s = -inf
        lse = log(sum(exp(s)) + exp(sink_logit));  p = exp(s - lse);  dropout of p;  out = p v

    A row that sees no key has out 0 and lse -inf. A NaN in a key or value reaches the rows that see this key and no others,
    whatever hides it from them: `causal`, `window`, `mask`, a bias of -inf, or a `score_mod` that gives -inf.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    NotImplementedError
        On the CPU, for a `score_mod` in C++, and for `dropout_p` where `seqs` has positions.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for a torch tensor that requires a gradient, which would be
        lost: call `rawattn.torch.attention`, or pass ``x.detach()``.

    Notes
    -----
    The work is enqueued on the current stream of q's framework, and the call does not wait for it. Lengths on the GPU are
    never read back, with or without ``max_seqlen_*``; only the CPU backend copies them to the host. The algorithm is that of
    FlashAttention-2 (Dao 2023, arXiv:2307.08691), on Hopper of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

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
    return CallRequest(*call, returned, memo_of(given.mask))


def first(results: Sequence[Any]) -> Any:
    """The return value of a call that does not return lse."""
    return results[0]
