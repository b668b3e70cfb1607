"""Advice for a value that an option does not accept, as the end of an error message: "; ..." or ""."""

from __future__ import annotations

import numpy as np

from rawattn._interop.advice import array_advice, cast
from rawattn._interop.xla import is_traced

# By option: what to write instead of a traced number to get a gradient with respect to it.
_DIFFERENTIATED = {
    "scale": ", or multiply q by it and pass scale=1.0",
    "softcap": ", or write it as ScoreMod('cap[0] * tanh(score / cap[0])', wrt='cap', cap=jnp.reshape(softcap, 1))",
}
_TEXT = "pass a text, as in mask=rawattn.block_mask(predicate='q_idx >= kv_idx', seqlen_q=..., seqlen_k=...)"


def array_option(name: str, given: object) -> str:
    """For an option that takes an array, a mask or a ScoreMod."""
    if name == "mask" and isinstance(given, str):
        return "; write causal=True" if "causal" in given.lower() else f"; {_TEXT}"
    if name == "mask" and callable(given):
        return f"; {_TEXT}"
    if name == "mask" and type(given).__name__ == "ScoreMod":
        return "; write score_mod="
    if name == "score_mod" and isinstance(given, str):
        return "; write score_mod=rawattn.ScoreMod(text)"
    if name == "score_mod" and callable(given):
        return "; write what it returns as a text, as in rawattn.ScoreMod('score - abs(q_idx - kv_idx)')"
    if name == "alibi_slopes" and isinstance(given, bool):
        return "; pass the slopes, an array of one for each head"
    if name == "mask" and isinstance(given, (bool, np.bool_)):
        return "; pass an array of bool, True for a key that is seen, or leave it out where all are"
    if name == "bias" and type(given).__name__ == "BlockMask":
        return "; write mask="
    if name == "bias" and isinstance(given, str):
        return (
            "; pass the numbers that are added to scores, and the slopes of ALiBi as alibi_slopes="
        )
    if name == "score_mod" and isinstance(given, (list, tuple)):
        return "; a call has one: write what all of them do as one text"
    if isinstance(given, (float, int, np.number)) and name in (
        "bias",
        "alibi_slopes",
        "sink_logits",
    ):
        return f"; pass an array, as by np.full({'1' if name == 'bias' else 'nheads_q'}, {name}, np.float32)"
    if isinstance(given, (list, tuple)):
        dtype = "bool" if name == "mask" else "np.float32"
        return f"; pass np.asarray({name}, {dtype})"
    advice = array_advice(given, name)
    return f"; {advice}" if advice else ""


def learned_slopes(align: str) -> str:
    """The text of a ScoreMod that computes ALiBi with slopes that have gradients."""
    row = "q_idx" if align == "top-left" else "q_idx + seqlen_k - seqlen_q"
    return f'rawattn.ScoreMod("score - slope[head] * abs({row} - kv_idx)", wrt="slope", slope=...)'


def seed(given: object, framework: str | None = None) -> str:
    """For a `seed` that is a random generator or a JAX key. framework: of the caller's array, if `given` is a view of it."""
    library = type(given).__module__.partition(".")[0]
    dtype = str(getattr(given, "dtype", ""))
    if dtype == "uint32" and framework is not None and framework.partition(".")[0] != "jax":
        return f"; convert it, as by {cast(framework, 'seed', 'int64')}"
    if library == "torch":
        return "; draw an int of it, as by int(torch.randint(2**31, (), generator=seed))"
    if library == "numpy" and hasattr(given, "integers"):
        return "; draw an int of it, as by int(seed.integers(2**31))"
    if dtype.startswith(("key<", "uint32")):
        return "; of a JAX key pass jax.random.randint(key, (), 0, 2**31 - 1)"
    return ""


def number(name: str, given: object) -> str:
    """For an option that takes a Python value and was given an array or a JAX tracer."""
    if is_traced(given):
        other = _DIFFERENTIATED.get(name, "")
        return f"; it is a constant of a compiled program: name it in static_argnames={name!r} of jax.jit{other}"
    if name == "sink" and getattr(given, "shape", ()) not in ((), (1,)):
        return "; logits of the heads that join the softmax are sink_logits="
    if hasattr(given, "__dlpack__"):
        return f"; of an array pass one value, as by {name}.item()"
    return ""
