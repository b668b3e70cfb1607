"""Kernels of calls whose options change scores: each option by itself, and all of them together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from rawattn._call.binding import bind
from rawattn._call.options import ARRAYS, ArrayForm
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem, result_shapes
from rawattn._call.structure import structure
from rawattn._compile.compiler import Source
from rawattn._kernels import registry
from rawattn._kernels.operands import ITEMSIZE, Operands, strides_of_pages
from rawattn._kernels.portable import decode as portable_decode
from rawattn._kernels.sm90 import decode as sm90_decode
from rawattn._kernels.target import Target
from rawattn._scores.program import ScoreText
from rawattn._strides import contiguous

_ROWS, _HEADS, _HEADS_KV = 256, 4, 2
_MANY_KEYS = 8192
_MOD = ScoreText(
    language="expression",
    forward="score - slope[head] * abs(q_idx - kv_idx)",
    backward=None,
    wrt=("slope",),
    arrays=(("slope", "float32", 1),),
    scalars=(),
)

_LINE = _MOD._replace(forward="score - slope[head] * (q_idx - kv_idx)")


def _form(dtype: str, *shape: int) -> ArrayForm:
    return ArrayForm(dtype, shape, shape)


def _options(dtype: str) -> list[dict[str, Any]]:
    pairs = (1, _HEADS, _ROWS, _ROWS)
    each: list[dict[str, Any]] = [
        {"softcap": 30.0},
        {"score_mod": _MOD, "captured": (_form("float32", _HEADS),)},
        {"bias": _form(dtype, *pairs)},
        {"alibi_slopes": _form("float32", 1, _HEADS)},
        {"mask": _form("bool", *pairs)},
        {"sink_logits": _form("float32", _HEADS)},
        {"dropout_p": 0.1},
    ]
    together: dict[str, Any] = {}
    for options in each:
        together |= options
    listed = _form("bits", 1, 1, 1, _ROWS)._replace(kept=_ROWS // 4)
    return [
        *each,
        {"mask": listed},
        together,
        {"bias": _form("float32", 1, 1, 1, _ROWS)},
        {"bias": _form(dtype, 1, 1, _ROWS, _ROWS)},
        {"mask": _form("bool", 1, 1, 1, _ROWS)},
    ]


def score_variants(target: Target) -> list[Source]:
    """Sources of all families, forward and backward, in bfloat16 at head dim 128; all options together also in float32 at 64.

    Every second call is causal and has a deterministic backward.
    """
    *_, together, _, _, _ = _options("float32")
    sources = _sources(_problem("float32", 64, causal=False, **together), target, False)
    for n, each in enumerate(_options("bfloat16")):
        odd = n % 2 == 1
        sources += _sources(_problem("bfloat16", 128, causal=odd, **each), target, odd)
    # A bias whose rows are not aligned: one for each head, and one that heads share.
    for nheads in (_HEADS, 1):
        bias = _form("bfloat16", 1, nheads, _ROWS, _ROWS)
        sources += _sources(_problem("bfloat16", 128, causal=True, bias=bias), target, False, at=2)
    return sources + _decoded(target)


def _decoded(target: Target) -> list[Source]:
    """Sources of decoding with the options that it has code for, keys in rows and in pages, one query and several in a tile."""
    pages = PageForm(page_size=16, num_pages=1, entries=1, has_indptr=False, dtype="int32")
    each: list[tuple[int, dict[str, Any]]] = [
        (1, {"mask": _form("bool", 1, 1, 1, _MANY_KEYS)}),
        (1, {"bias": _form("bfloat16", 1, _HEADS, 1, _MANY_KEYS)}),
        (1, {"alibi_slopes": _form("float32", 1, _HEADS)}),
        (1, {"score_mod": _MOD, "captured": (_form("float32", _HEADS),)}),
        (16, {"score_mod": _LINE, "captured": (_form("float32", _HEADS),)}),
        (
            16,
            {
                "mask": _form("bool", 1, 1, 1, _MANY_KEYS),
                "bias": _form("bfloat16", 1, _HEADS, 16, _MANY_KEYS),
            },
        ),
    ]
    found = []
    for (rows, options), paged in itertools.product(each, (False, True)):
        problem = replace(
            _problem("bfloat16", 128, causal=False, **options),
            rows_q=rows,
            max_seqlen_q=rows,
            rows_k=_MANY_KEYS,
            max_seqlen_k=_MANY_KEYS,
        )
        if paged:
            problem = replace(problem, ragged=True, pages=pages)
        of_options = {name: contiguous(*x) for name, x in _arrays(problem).items()}
        operands = Operands(
            strides_of_pages(problem),
            option_strides=of_options,
            alignments=dict.fromkeys(of_options, 0),
        )
        for kernel in (portable_decode, sm90_decode):
            if kernel.supports(problem, target, operands) is None:
                config = kernel.choose(problem, target, operands)
                found.append(replace(config, plain_integers=paged).source())
    return found


def _problem(dtype: str, headdim: int, *, causal: bool, **options: Any) -> Problem:
    return Problem(
        dtype=dtype,
        batch=1,
        nheads_q=_HEADS,
        nheads_kv=_HEADS_KV,
        headdim=headdim,
        headdim_v=headdim,
        packed=False,
        rows_q=_ROWS,
        rows_k=_ROWS,
        max_seqlen_q=_ROWS,
        max_seqlen_k=_ROWS,
        ragged=False,
        window_left=None,
        window_right=0 if causal else None,
        sink=0,
        top_left=False,
        scale=1.0,
        **options,
    )


def _sources(problem: Problem, target: Target, deterministic: bool, *, at: int = 0) -> list[Source]:
    """at: the addresses of the options' arrays modulo 16. Other than 0, their gradients are the caller's arrays."""
    form = structure(bind(None, batch=1, rows_q=_ROWS, rows_k=_ROWS))
    queries, keys = (
        (1, _ROWS, nheads, problem.headdim) for nheads in (problem.nheads_q, problem.nheads_kv)
    )
    out, _ = result_shapes(problem)
    shapes = {"q": queries, "k": keys, "v": keys, "out": out}
    backward = {"dout": out, "dq": queries, "dk": keys, "dv": keys}
    arrays = _arrays(problem)
    gradients = {
        f"d{name}": x
        for name, x in arrays.items()
        if name in ("bias", "sink_logits") or name.startswith("captured")
    }
    flag = {"deterministic": deterministic}
    found: list[Source] = []
    for verb, more, of_options, flags in (
        ("attention", {}, arrays, {}),
        ("attention_backward", backward, arrays | gradients, flag),
    ):
        operands = Operands(
            {
                name: contiguous(shape, ITEMSIZE[problem.dtype])
                for name, shape in (shapes | more).items()
            },
            library_owned=frozenset() if at else frozenset(gradients),
            option_strides={name: contiguous(*x) for name, x in of_options.items()},
            alignments=dict.fromkeys(arrays, at),
        )
        for family in registry.supporting(verb, problem, target, operands):
            steps = family.steps(problem, form, operands, target, **flags)
            found += [step.source for step in steps.launches]
    return found


def _arrays(problem: Problem) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shape and the bytes of an element of each option's array, by name."""
    forms = {name: getattr(problem, name) for name in ARRAYS}
    forms |= {f"captured{n}": form for n, form in enumerate(problem.captured)}
    return {
        name: (form.given, ITEMSIZE.get(form.dtype, 1))
        for name, form in forms.items()
        if form is not None
    }
