"""Arrays of a call, as XLA gets them: their dtypes, their shardings, and which are refused. Imports JAX."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rawattn._call.options import Options
from rawattn._interop.arrays import import_array
from rawattn._interop.integers import as_array
from rawattn._runtime.option_arrays import told
from rawattn._runtime.verbs import Verb
from rawattn._strides import contiguous

INT64 = np.dtype(np.int64)


class Form:
    """What a description asks of an array of an option: that of a tracer has no strides."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.strides = contiguous(self.shape, self.dtype.itemsize)


def check_numpy(name: str, array: Any, accepted: str) -> None:
    """TypeError for what is no array of NumPy's, and for those of its kinds whose values are not what they hold."""
    if not isinstance(array, np.ndarray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind}; accepted are {accepted}")
    import_array(name, array)


def refuse_symbolic_shapes(arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if not all(isinstance(n, int) for n in array.shape):
            raise ValueError(
                f"{name}: got the symbolic shape {array.shape}, expected one of constants, for which kernels are chosen; "
                "export a program for each shape"
            ) from None


def as_jax(integers: Any) -> Any:
    """Those of a layout or of a BlockMask, in the dtype that XLA gets."""
    if not isinstance(integers, (jax.Array, np.ndarray)):
        # CuPy's, which a layout makes of what lies on a GPU. JAX narrows those unseen, and kernels clamp them.
        integers = jax.dlpack.from_dlpack(as_array(integers))
    found = _narrowed("seqs", integers)
    return jnp.asarray(found) if isinstance(found, np.ndarray) else found


def narrowed_options(
    verb: Verb, arrays: tuple[Any, ...], options: Options
) -> tuple[tuple[Any, ...], Options]:
    """Arrays of options as XLA gets them, and the options with the text of a score function that says so.

    Integers alone: floats and masks of int64 are refused as what they are.
    """
    names = told(verb, options)[-len(arrays) :]
    arrays = tuple(
        _narrowed(name, x) if extra.startswith(("captured", "seed")) else x
        for extra, name, x in zip(verb.extras, names, arrays, strict=True)
    )
    if options.score_mod is not None:
        text, scalars = options.score_mod
        dtypes = {name: x.dtype.name for name, x in zip(verb.extras, arrays, strict=True)}
        captured = tuple(
            (name, dtypes[f"captured{n}"], rank) for n, (name, _, rank) in enumerate(text.arrays)
        )
        options = options._replace(score_mod=(text._replace(arrays=captured), scalars))
    return arrays, options


def without_constants(options: Options, gradients: Set[str]) -> Options:
    """The options with the text of a score function whose `wrt` names arrays with one of these gradients alone: kernels sum up
    what it names.
    """
    if options.score_mod is None:
        return options
    text, scalars = options.score_mod
    indices = {name: n for n, (name, _, _) in enumerate(text.arrays)}
    wrt = tuple(name for name in text.wrt if f"dcaptured{indices[name]}" in gradients)
    return options._replace(score_mod=(text._replace(wrt=wrt), scalars))


def _narrowed(name: str, array: Any) -> Any:
    """As XLA gets it: without its 64-bit mode JAX makes int32 of int64, whatever the values are."""
    if array.dtype != INT64 or jax.config.jax_enable_x64:
        return array
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name}: got a JAX array of int64, expected int32, all that JAX holds without its 64-bit mode; convert it "
            "by .astype('int32'), or set jax_enable_x64"
        )
    for value in (array.min(initial=0), array.max(initial=0)):
        if not -(2**31) <= value < 2**31:
            of_seeds = "pass a Python int, which is a constant of the program, or "
            fix = of_seeds if name == "seed" else ""
            raise ValueError(
                f"{name}: got {value} in an array, expected -2**31 to 2**31 - 1, all that JAX holds without its 64-bit "
                f"mode; {fix}set jax_enable_x64"
            )
    return array.astype(np.int32)


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Under jax.shard_map: arrays that all vary along the mesh axes along which one does.

    So keys that are the same on every device get the sum of the devices' gradients.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return arrays
    axes = [_varying(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*axes)
    return tuple(
        x if each == every else jax.lax.pcast(x, tuple(every - each), to="varying")
        for x, each in zip(arrays, axes, strict=True)
    )


def _varying(type_of_array: Any) -> frozenset[str]:
    """The mesh axes along which it varies."""
    manual = getattr(type_of_array, "manual_axis_type", None)  # since JAX 0.10
    axes: frozenset[str] = type_of_array.vma if manual is None else manual.varying
    return axes


def sharded_as(array: Any, gradient: Any) -> Any:
    """A gradient with the sharding of its array, which types have on an explicit mesh, and results of custom calls do not."""
    wanted = jax.typeof(array).sharding
    if jax.typeof(gradient).sharding.spec == wanted.spec:
        return gradient
    return jax.sharding.reshard(gradient, wanted)
