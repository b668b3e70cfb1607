"""What to write for a value that an option cannot have: the end of a message, "; ..." or ""."""

from __future__ import annotations

from rawattn._call.hints import array_advice
from rawattn._interop.xla import is_traced

_TEXT = "pass a text, as in mask=rawattn.block_mask(predicate='q_idx >= kv_idx', seqlen_q=..., seqlen_k=...)"


def array_option(name: str, given: object) -> str:
    """Of an option that is an array, or a ScoreMod."""
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
    if isinstance(given, (list, tuple)):
        dtype = "bool" if name == "mask" else "np.float32"
        return f"; pass np.asarray({name}, {dtype})"
    advice = array_advice(given, name)
    return f"; {advice}" if advice else ""


def seed(given: object) -> str:
    """Of a generator, or of a key of JAX, whose numbers a call would not draw."""
    library = type(given).__module__.partition(".")[0]
    dtype = str(getattr(given, "dtype", ""))
    if library == "torch":
        return "; draw an int of it, as by int(torch.randint(2**31, (), generator=seed))"
    if library == "numpy" and hasattr(given, "integers"):
        return "; draw an int of it, as by int(seed.integers(2**31))"
    if dtype.startswith(("key<", "uint32")):
        return "; of a JAX key pass jax.random.randint(key, (), 0, 2**31 - 1)"
    return ""


def number(name: str, given: object) -> str:
    """Of an option that is a Python value and was given as an array, or as a bool that JAX traces."""
    if is_traced(given):
        return f"; it is a constant of a compiled program: name it in static_argnames={name!r} of jax.jit"
    if hasattr(given, "__dlpack__"):
        return f"; of an array pass one value, as by {name}.item()"
    return ""
