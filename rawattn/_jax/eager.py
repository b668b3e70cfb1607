"""A call on JAX arrays outside of `jit`: a compiled program of that one call, kept for the next one like it.

On a GPU this is the cheapest way there is in JAX: its own dispatch hands the arrays over, on its own stream, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rawattn._call.options import Options, structural
from rawattn._interop.xla import is_traced

_programs: dict[Any, Any] = {}
_MAX_PROGRAMS = 512


def takes(inputs: Sequence[Any], targets: Sequence[Any], options: Options) -> bool:
    """Whether a call is one for a program: dense JAX arrays on a GPU, with results of JAX's own.

    Lengths would be constants of the program, and other lengths another compilation. So would be a seed, and what a score
    function captures.
    """
    import jax

    return (
        options.seqs is None
        and options.score_mod is None
        and options.dropout_p == 0
        and all(x is None for x in targets)
        and all(isinstance(x, jax.Array) and not is_traced(x) for x in inputs)
        and all(device.platform == "gpu" for device in inputs[0].devices())
    )


def attention(inputs: Sequence[Any], options: Options, return_lse: bool) -> Sequence[Any]:
    """(out, lse or None)"""
    q, k, v = inputs
    key: Any = (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        structural(options),
        return_lse,
    )
    try:
        program = _programs.get(key)
    except TypeError:  # an option that no program can have: `rawattn.jax` says why
        program, key = None, None
    if program is None:
        program = _program(options, return_lse)
        if key is not None:
            if len(_programs) >= _MAX_PROGRAMS:
                _programs.clear()
            _programs[key] = program
    results = program(q, k, v)
    return results if return_lse else (results, None)


def _program(options: Options, return_lse: bool) -> Any:
    import jax

    import rawattn.jax

    given = options._asdict()

    def call(q: Any, k: Any, v: Any) -> Any:
        return rawattn.jax.attention(q, k, v, **given, return_lse=return_lse)

    return jax.jit(call)
