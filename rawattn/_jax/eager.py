"""Calls of `rawattn.attention` on JAX arrays outside of `jit`: each is compiled as a program of one call, which is cached.

On a GPU this takes the least host time that JAX allows: JAX's own dispatch passes the arrays on, on its own stream, and
nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rawattn._call.options import Options, structural
from rawattn._eviction import evict_if_full
from rawattn._interop.xla import is_traced
from rawattn._runtime.verbs import FORWARD, Verb

_programs: dict[Any, Any] = {}
_MAX_PROGRAMS = 512


def is_compilable(
    verb: Verb,
    inputs: Sequence[Any],
    targets: Sequence[Any],
    options: Options,
    backend: str | None,
) -> bool:
    """Whether a call whose q is a JAX array is compiled as a program: dense JAX arrays on a GPU, and no `out` to write.

    Calls with lengths, a seed or a score function are not: these would be constants of the program, and each new value would
    need another compilation.
    """
    import jax

    return (
        (backend is None or backend == "cuda")
        and verb.name == FORWARD.name
        and not verb.extra_inputs
        and options.seqs is None
        and options.score_mod is None
        and options.dropout_p == 0
        and all(x is None for x in targets)
        and all(isinstance(x, jax.Array) and not is_traced(x) for x in inputs)
        and _are_on_gpus(inputs[0])
    )


def attention(inputs: Sequence[Any], options: Options, return_lse: bool) -> Sequence[Any]:
    """(out, lse or None)"""
    results = _program(options, return_lse)(*inputs)
    return results if return_lse else (results, None)


def _are_on_gpus(array: Any) -> bool:
    try:
        return {device.platform for device in array.devices()} == {"gpu"}
    except RuntimeError:  # the array is deleted: `import_array` refuses it and names the argument
        return False


def _program(options: Options, return_lse: bool) -> Any:
    """The jitted function for these options, cached. JAX compiles it once for each set of shapes and dtypes."""
    key: Any = (structural(options), return_lse)
    try:
        program = _programs.get(key)
    except TypeError:  # an option that cannot be hashed: `rawattn.jax.attention` refuses it
        return _made(options, return_lse)
    if program is None:
        evict_if_full(_programs, _MAX_PROGRAMS)
        program = _programs[key] = _made(options, return_lse)
    return program


def _made(options: Options, return_lse: bool) -> Any:
    import jax

    from rawattn._jax import attention as of_jax

    given = options._asdict()

    def call(q: Any, k: Any, v: Any) -> Any:
        return of_jax.attention(q, k, v, **given, return_lse=return_lse)

    return jax.jit(call)


class JaxReader:
    """Reads arrays of one JAX type for `_verbs.fast_path`, as `native.Native` does for other frameworks.

    The arrays themselves stand in for their addresses. All have one form, since JAX tells shapes and dtypes apart.
    """

    is_traced = None

    def __init__(self, kind: type) -> None:
        self.kinds = (kind,)

    def reader(self, count: int) -> Callable[..., Any]:
        (kind,) = self.kinds
        form = (kind,)

        def read(*arrays: Any) -> Any:
            for x in arrays:
                if type(x) is not kind:
                    return None
            return ([*arrays], form, False) if _are_on_gpus(arrays[0]) else None

        return read


def repeated(options: Options, return_lse: bool) -> Callable[[list[Any], Any, Any], Any]:
    """A function that makes a call of a known program again, with other arrays."""
    program = _program(options, return_lse)
    return lambda arrays, written, lengths: program(*arrays)
