"""The call as two operators of torch, for graphs: torch.compile sees their shapes and not what is inside.

An operator takes tensors, numbers and strings. So a `SeqLayout` travels as its integer arrays, a window as its two
ends, and a seed as an int or as a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from rawattn import SeqLayout, attention, attention_backward
from rawattn._handles import find
from rawattn._torch.captured import tensors_of, with_tensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_LAYOUT = (
    "Tensor? seqstart_q, Tensor? seqstart_k, Tensor? seqlen_q, Tensor? seqlen_k, "
    "Tensor? cu_seqlen_q, Tensor? cu_seqlen_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
_OPTIONS = (
    "Tensor? bias, Tensor? sink_logits, Tensor? mask, Tensor? alibi_slopes, bool causal, str align, "
    "SymInt? window_left, SymInt? window_right, SymInt sink, float? scale, float? softcap, float dropout_p, "
    "SymInt? seed, Tensor? seed_array, SymInt? num_splits, bool deterministic, str? backend, "
    "int? block_mask, int? score_mod, Tensor[] captured"
)


class Layout(NamedTuple):
    """A `SeqLayout` in tensors: torch can trace it, and it can be made while torch traces."""

    seqstart_q: Any = None
    seqstart_k: Any = None
    seqlen_q: Any = None
    seqlen_k: Any = None
    cu_seqlen_q: Any = None
    cu_seqlen_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


class Options(NamedTuple):
    """The other options, as the operators take them."""

    bias: Any = None
    sink_logits: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    causal: bool = False
    align: str = "bottom-right"
    window_left: int | None = None
    window_right: int | None = None
    sink: int = 0
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    seed_array: Any = None
    num_splits: int | None = None
    deterministic: bool = False
    backend: str | None = None
    # By their handles, and the tensors that the latter captures.
    block_mask: int | None = None
    score_mod: int | None = None
    captured: Any = ()


_LAYOUT_AT = 3
_OPTIONS_AT = _LAYOUT_AT + len(Layout._fields)
_NOTHING = (None,) * (len(Layout._fields) + len(Options._fields))
_SAVED = ("bias", "sink_logits", "mask", "alibi_slopes", "seed_array")


def layout_of(seqs: SeqLayout | Layout | None) -> Layout:
    """The arrays of `seqs` as tensors, while torch traces."""
    if seqs is None:
        return Layout()
    if isinstance(seqs, Layout):
        return seqs
    return Layout(
        _tensor("seqstart_q", seqs.seqstart_q),
        _tensor("seqstart_k", seqs.seqstart_k),
        _tensor("seqlen_q", seqs.seqlen_q),
        _tensor("seqlen_k", seqs.seqlen_k),
        _tensor("cu_seqlen_q", seqs.cu_seqlen_q),
        _tensor("cu_seqlen_k", seqs.cu_seqlen_k),
        seqs.max_seqlen_q,
        seqs.max_seqlen_k,
    )


def check(arrays: dict[str, Any], causal: Any, sink: Any, seqs: Any) -> None:
    """TypeError for what the operator's schema would refuse in words of its own, while torch traces.

    arrays: options that are tensors. NumPy's arrays are tensors there.
    """
    for name, x in arrays.items():
        if isinstance(x, (bool, int, float, str, list, tuple)):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor or None")
    if not isinstance(causal, bool):
        raise TypeError(
            "causal: expected True or False; a bool of NumPy is a tensor under torch.compile: pass bool(causal)"
        )
    if not _is_int(sink):
        raise TypeError(f"sink: got {sink}, expected an int >= 0")
    if seqs is not None and not isinstance(seqs, (SeqLayout, Layout)):
        raise TypeError(f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None")


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer, torch.SymInt)) and not isinstance(x, bool)


def ends_of(window: Any) -> tuple[Any, Any]:
    if window is None:
        return None, None
    accepted = "expected a tuple (left, right) of ints >= 0, or None for an unbounded side"
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window: got {window!r}, {accepted}")
    for end in window:
        if end is not None and not _is_int(end):
            raise TypeError(f"window: got {end}, {accepted}")
    return window


def seed_of(seed: Any) -> tuple[int | None, Any]:
    """The seed as an int that the operator takes, or as a tensor."""
    if seed is None or isinstance(seed, torch.Tensor):
        return None, seed
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, torch.SymInt)):
        raise TypeError(
            f"seed: got {type(seed).__name__}, expected an int, or an integer tensor of one element"
        )
    if not -(2**63) <= seed < 2**63:  # 64 bits of it count
        seed = (seed + 2**63) % 2**64 - 2**63
    return seed, None


def _tensor(name: str, array: Any) -> Any:
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    raise NotImplementedError(
        f"seqs: {name} is on a GPU, where torch.compile cannot follow it; expected host integers, as by "
        f"SeqLayout({name}={name}.cpu()), or a call outside of the compiled function"
    )


def run(q: Any, k: Any, v: Any, layout: Layout, options: Options) -> tuple[Any, Any]:
    """(out, lse) by way of the operator."""
    results: tuple[Any, Any] = _attention(q, k, v, *layout, *options)
    return results


def _keywords(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of `rawattn.attention` in the arguments of an operator from `layout` on."""
    layout = Layout(*arguments[: len(Layout._fields)])
    keywords = Options(*arguments[len(Layout._fields) :])._asdict()
    del keywords["deterministic"]
    window = keywords.pop("window_left"), keywords.pop("window_right")
    block_mask, score_mod = keywords.pop("block_mask"), keywords["score_mod"]
    captured = keywords.pop("captured")
    if block_mask is not None:
        keywords["mask"] = find(block_mask)
    if score_mod is not None:
        keywords["score_mod"] = with_tensors(find(score_mod), captured)
    seed_array = keywords.pop("seed_array")
    if seed_array is not None:
        keywords["seed"] = seed_array
    given = any(x is not None for x in layout)
    seqs = SeqLayout(**layout._asdict()) if given else None
    return {**keywords, "window": None if window == (None, None) else window, "seqs": seqs}


def _forward(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, Any]:
    result: tuple[Any, Any] = attention(q, k, v, **_keywords(arguments), return_lse=True)
    return result


def _backward(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    want_dbias: bool,
    *arguments: Any,
) -> list[Any]:
    keywords = _keywords(arguments)
    keywords.pop("num_splits")
    deterministic = Options(*arguments[len(Layout._fields) :]).deterministic
    gradients = attention_backward(
        dout, q, k, v, out, lse, **keywords, dlse=dlse, deterministic=deterministic,
        want_dbias=None if keywords["bias"] is None else want_dbias,
    )  # fmt: skip
    *found, of_captured = gradients
    if of_captured is not None:
        found += (of_captured[name] for name in keywords["score_mod"].text.wrt)
    return [x for x in found if x is not None]


def _forward_shapes(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, Any]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got dtype {x.dtype}, expected float16, bfloat16 or float32; convert it, as by "
                f"{name}.float()"
            )
    heads, rows = q.shape[-2], q.shape[-3]
    lse = q.new_empty((*q.shape[:-3], heads, rows), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _backward_shapes(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    want_dbias: bool,
    *arguments: Any,
) -> list[Any]:
    options = Options(*arguments[len(Layout._fields) :])
    inputs = [q, k, v]
    if options.bias is not None and want_dbias:
        inputs.append(options.bias)
    if options.sink_logits is not None:
        inputs.append(options.sink_logits)
    inputs += _differentiated(options).values()
    return [x.new_empty(x.shape) for x in inputs]


def _differentiated(options: Options) -> dict[str, Any]:
    """The captured tensors whose gradients a backward gives, by name."""
    if options.score_mod is None:
        return {}
    score_mod = find(options.score_mod)
    named = dict(zip(tensors_of(score_mod), options.captured, strict=True))
    return {name: named[name] for name in score_mod.text.wrt}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    ctx.set_materialize_grads(False)
    options = Options(*inputs[_OPTIONS_AT:])
    tensors = (*inputs[:3], *output, *inputs[_LAYOUT_AT : _LAYOUT_AT + 6])
    ctx.save_for_backward(*tensors, *(getattr(options, name) for name in _SAVED), *options.captured)
    ctx.maxima = inputs[_LAYOUT_AT + 6 : _OPTIONS_AT]
    ctx.options = options._replace(
        bias=None, sink_logits=None, mask=None, alibi_slopes=None, seed_array=None, captured=()
    )


def _pull(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    layout = (*others[:6], *ctx.maxima)
    saved, captured = others[6 : 6 + len(_SAVED)], others[6 + len(_SAVED) :]
    options: Options = ctx.options._replace(
        **dict(zip(_SAVED, saved, strict=True)), captured=captured
    )
    wanted = dict(zip(("bias", "sink_logits"), ctx.needs_input_grad[_OPTIONS_AT:], strict=False))
    if dout is None:
        dout = torch.zeros_like(out)
    found = _attention_backward(dout, dlse, q, k, v, out, lse, wanted["bias"], *layout, *options)
    gradients = [*found[:3], *_NOTHING]
    rest = iter(found[3:])
    if options.bias is not None and wanted["bias"]:
        gradients[_OPTIONS_AT] = next(rest)
    if options.sink_logits is not None:
        gradients[_OPTIONS_AT + 1] = next(rest)
    gradients[-1] = _in_their_places(options, rest)
    return tuple(gradients)


def _in_their_places(options: Options, found: Iterator[Any]) -> list[Any]:
    """Gradients of captured tensors, None for those that have none."""
    if options.score_mod is None:
        return []
    named = dict(zip(_differentiated(options), found, strict=True))
    return [named.get(name) for name in tensors_of(find(options.score_mod))]


_attention = torch.library.custom_op(
    "rawattn::attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_LAYOUT}, {_OPTIONS}) -> (Tensor, Tensor)",
)
_attention.register_fake(_forward_shapes)
_attention_backward = torch.library.custom_op(
    "rawattn::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool want_dbias, "
    f"{_LAYOUT}, {_OPTIONS}) -> Tensor[]",
)
_attention_backward.register_fake(_backward_shapes)
_attention.register_autograd(_pull, setup_context=_save)
