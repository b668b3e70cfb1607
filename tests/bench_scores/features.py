"""A case with a feature of scores, its arrays, and what it means by the reference."""

from __future__ import annotations

import dataclasses

import numpy as np

from rawattn import reference
from rawattn._bench import cases, contender
from rawattn._bench import score_features as features


def _draw(shape, dtype):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def _case(feature, *, causal=True, heads=(4, 2), rows=256, keys=None, backward=False, batch=2):
    lengths = (rows,) * batch
    return cases.Case(
        *("kind", "label", lengths, *heads, 16, causal),
        backward=backward,
        seqlen_k=keys,
        feature=feature,
    )


def _inputs(case):
    q, k, v, *dout = (_draw(shape, np.float32) for shape in case.shapes)
    extras = case.feature.arrays(case, "float32")
    inputs = contender.Inputs((q, k + 1, v[::-1].copy()), *dout, max_seqlen=case.rows)
    return dataclasses.replace(inputs, extras=extras)


def _expected(case, inputs, options):
    """out, or dq, dk, dv and dbias, by the reference."""
    options = {"causal": case.causal, **options}
    if not case.backward:
        return (reference.attention(*inputs.qkv, **options),)
    out, lse = reference.attention(*inputs.qkv, **options, return_lse=True)
    gradients = reference.attention_backward(inputs.dout, *inputs.qkv, out, lse, **options)
    return gradients[: case.ngradients]


_FEATURES = {
    "bias": (features.Bias((2, 4, 256, 256)), lambda extras: {"bias": extras["bias"]}),
    "shared bias": (features.Bias((1, 1, 256, 256)), lambda extras: {"bias": extras["bias"]}),
    "alibi": (features.Alibi(), lambda extras: {"alibi_slopes": extras["slopes"]}),
    "softcap": (features.Softcap(1.5), lambda extras: {"softcap": 1.5}),
    "documents": (
        features.Documents(64),
        lambda extras: {"mask": extras["document"][:, None] == extras["document"]},
    ),
}
