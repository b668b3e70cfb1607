"""Arrays of a call as they are passed to XLA: their dtypes and shardings, and checks of them. Imports JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rawattn._call import option_advice
from rawattn._call.options import Options
from rawattn._interop.arrays import import_array
from rawattn._interop.integers import as_array
from rawattn._runtime.option_arrays import caller_names
from rawattn._runtime.verbs import Verb
from rawattn._strides import contiguous

INT64 = np.dtype(np.int64)


class Form:
    """Shape, dtype and C-order strides of an option's array, as `describe` reads them: a tracer has no strides."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.strides = contiguous(self.shape, self.dtype.itemsize)


def check_numpy(name: str, array: Any, accepted: str) -> None:
    """TypeError for what is no NumPy array, and for masked arrays, matrices and arrays of foreign byte order."""
    if not isinstance(array, np.ndarray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name}: got {kind}; accepted are {accepted}")
    import_array(name, array)


def no_numbers(name: str, array: Any) -> TypeError:
    """The error for an array whose dtype is none of NumPy's, as that of JAX's random keys."""
    advice = option_advice.seed(array) if name == "seed" else ""
    return TypeError(f"{name}: got dtype {array.dtype}, expected numbers{advice}")


def refuse_symbolic_shapes(arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if not all(isinstance(n, int) for n in array.shape):
            raise ValueError(
                f"{name}: got the symbolic shape {array.shape}, expected one of constants, for which kernels are chosen; "
                "export a program for each shape"
            ) from None


def as_jax(integers: Any) -> Any:
    """The integers of a layout or of a BlockMask as a JAX array, in the dtype that is passed to XLA."""
    if not isinstance(integers, (jax.Array, np.ndarray)):
        # CuPy's, which a layout makes of arrays on a GPU. JAX narrows int64 without a check of the values; kernels clamp them.
        integers = jax.dlpack.from_dlpack(as_array(integers))
    found = _narrowed("seqs", integers)
    return jnp.asarray(found) if isinstance(found, np.ndarray) else found


def narrowed_options(
    verb: Verb, arrays: tuple[Any, ...], options: Options
) -> tuple[tuple[Any, ...], Options]:
    """Arrays of options with the dtypes that are passed to XLA, and the options with a score text of these dtypes.

    Only captured arrays and seeds are narrowed: int64 where a float or a bool is expected is refused later, as int64.
    """
    names = caller_names(verb, options)[-len(arrays) :]
    arrays = tuple(
        _narrowed(name, x) if extra.startswith(("captured", "seed")) else x
        for extra, name, x in zip(verb.extra_inputs, names, arrays, strict=True)
    )
    if options.score_mod is not None:
        text, scalars = options.score_mod
        dtypes = {name: x.dtype.name for name, x in zip(verb.extra_inputs, arrays, strict=True)}
        captured = tuple(
            (name, dtypes[f"captured{n}"], rank) for n, (name, _, rank) in enumerate(text.arrays)
        )
        options = options._replace(score_mod=(text._replace(arrays=captured), scalars))
    return arrays, options


def with_wrt_limited_to(options: Options, gradients: Set[str]) -> Options:
    """The options with the `wrt` of a score function reduced to the arrays whose gradients are in `gradients`, by names like
    "dcaptured0": the backward computes a gradient for each array that `wrt` names.
    """
    if options.score_mod is None:
        return options
    text, scalars = options.score_mod
    indices = {name: n for n, (name, _, _) in enumerate(text.arrays)}
    wrt = tuple(name for name in text.wrt if f"dcaptured{indices[name]}" in gradients)
    return options._replace(score_mod=(text._replace(wrt=wrt), scalars))


def _narrowed(name: str, array: Any) -> Any:
    """The array in the dtype that is passed to XLA. Without its 64-bit mode JAX turns int64 into int32 without a check, so
    values that int32 does not hold are a ValueError here.
    """
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


def vary_over_same_axes(*arrays: Any) -> tuple[Any, ...]:
    """Under jax.shard_map: the arrays, each marked as varying along every mesh axis along which one of them varies.

    So the gradient of keys that are the same on every device is summed over the devices.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return arrays
    axes = [_varying(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*axes)
    return tuple(
        x if each == every else _vary(x, tuple(every - each))
        for x, each in zip(arrays, axes, strict=True)
    )


def _vary(array: Any, axes: tuple[str, ...]) -> Any:
    if not hasattr(jax.lax, "pcast"):  # JAX 0.8.0
        return jax.lax.pvary(array, axes)
    return jax.lax.pcast(array, axes, to="varying")


def _varying(type_of_array: Any) -> frozenset[str]:
    """The mesh axes along which an array of this type varies."""
    manual = getattr(type_of_array, "manual_axis_type", None)  # since JAX 0.10
    axes: frozenset[str] = type_of_array.vma if manual is None else manual.varying
    return axes


def sharded_as(array: Any, gradient: Any) -> Any:
    """The gradient with the sharding of its array: on an explicit mesh shardings are part of the types, but results of custom
    calls do not have them.
    """
    wanted = jax.typeof(array).sharding
    if jax.typeof(gradient).sharding.spec == wanted.spec:
        return gradient
    return jax.sharding.reshard(gradient, wanted)


def unsharded(array: Any) -> Any:
    """The array, whole on every device.

    On an explicit mesh JAX refuses to reshape an axis that is sharded. A custom call gathers its arrays anyway.
    """
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def sharding_of_mapped(arrays: Sequence[Any], is_mapped: Sequence[bool]) -> Callable[[Any], Any]:
    """On an explicit mesh: a function that shards the first axis of a result as jax.vmap's axis is sharded in its arrays."""
    for array, mapped in zip(arrays, is_mapped, strict=True):
        sharding = jax.typeof(array).sharding
        if mapped and sharding.spec[0] is not None:
            wanted = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
            return lambda result: jax.sharding.reshard(result, wanted)
    return lambda result: result
