"""Advice in error messages about arrays, in the terms of the array's own framework. Imports no framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, ValuesView
from typing import Any

import numpy as np

from rawattn._interop.xla import is_traced

_LISTS = ("outs", "lses")  # arguments that take lists of arrays
_TORCH_CASTS = {"float16": "half", "bfloat16": "bfloat16", "float32": "float"}


def cast(framework: str | None, name: str, dtype: Any) -> str:
    """Code that converts an array called `name` to `dtype`, a name or a NumPy dtype, in its own framework.

    For an unknown framework (None): the code for NumPy and for torch.
    """
    if framework is None:
        return f"{cast('numpy', name, dtype)}, in torch {cast('torch', name, dtype)}"
    library, wanted = framework.partition(".")[0], str(dtype)
    if library == "torch":
        method = _TORCH_CASTS.get(wanted)
        return f"{name}.{method}()" if method else f"{name}.to(torch.{wanted})"
    if library == "tensorflow":
        return f"tf.cast({name}, tf.{wanted})"
    if library == "jax":
        return f"{name}.astype(jnp.{wanted})"
    if library in ("numpy", "cupy"):
        prefix = "np" if library == "numpy" else library
        return f"{name}.astype({'ml_dtypes' if wanted == 'bfloat16' else prefix}.{wanted})"
    return f"{name} converted to {wanted}"


def array_advice(obj: object, name: str = "x") -> str:
    """What to pass or call in place of an object that is no array of values: "pass ..." or "call ..."; "" if not known."""
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(obj).__mro__}
    library = type(obj).__module__.partition(".")[0]
    if is_traced(obj):
        return (
            "call rawattn.jax.attention, the one function that works inside jit, grad, vmap and scan: a tracer holds no "
            "values"
        )
    if "jaxlib.ArrayImpl" in bases and (advice := _jax_advice(obj, name)):
        return advice
    if "torch.FakeTensor" in bases or "torch.FunctionalTensor" in bases:
        return "call rawattn.torch.attention, which works under torch.compile and FakeTensorMode: this tensor holds no values"
    if getattr(obj, "is_meta", False) is True:
        return "call rawattn.torch.attention under FakeTensorMode for shapes alone: a meta tensor holds no values"
    if "torch.Tensor" in bases and _functorch_says("is_functorch_wrapped_tensor", obj):
        return (
            "torch.func's transformations cannot see into the call: take gradients with autograd on rawattn.torch.attention, "
            "and put what vmap maps into the batch axis"
        )
    if "torch.Tensor" in bases and _functorch_says("is_legacy_batchedtensor", obj):
        return (
            "gradients cannot be taken in batches: leave out is_grads_batched=True of torch.autograd.grad, or vectorize=True "
            "of torch.autograd.functional"
        )
    if "torch.DTensor" in bases:
        return f"pass {name}.to_local(), this process's own part"
    if getattr(obj, "is_nested", False) is True:
        return (
            f"pass a packed batch: {name}.values() of a jagged one, with "
            f"seqs=SeqLayout(seqstart_q={name}.offsets()); another one first as torch.jagged"
        )
    if getattr(obj, "is_sparse", False) is True or getattr(obj, "is_sparse_csr", False) is True:
        return f"pass {name}.to_dense()"
    if isinstance(obj, np.ma.MaskedArray):
        filled = f"pass {name}.filled(0)"
        if name not in ("q", "k", "v"):
            return filled
        return (
            f"{filled}, and what its mask hides as padding: seqs=SeqLayout.from_padding_mask(...), or for keys in pages "
            "SeqLayout(seqlen_q=...); to attention also as mask= (True = keep)"
        )
    if library in ("scipy", "cupyx") and hasattr(obj, "toarray"):
        return f"pass {name}.toarray()"
    if library == "pandas" and hasattr(obj, "to_numpy"):
        return f"pass {name}.to_numpy() in the dtype that is meant"
    if isinstance(obj, (list, tuple)):
        return _sequence_advice(obj, name)
    if is_lazy(obj):
        listed = f"list({name})"
        return f"pass a list, {listed}" if name in _LISTS else f"pass an array, np.stack({listed})"
    return ""


def is_lazy(obj: object) -> bool:
    """Whether an object gives its items one by one, as a generator or the values of a dict, and is no list of them."""
    return isinstance(obj, (Iterator, ValuesView))


def _jax_advice(obj: Any, name: str) -> str:
    """Advice for a JAX array that is deleted, or spread over several devices; else ""."""
    if obj.is_deleted():
        return f"pass an array that JAX has not deleted: what {name} was donated to, as by donate_argnums, returns one"
    if len(obj.sharding.device_set) > 1:
        return (
            f"pass jax.device_put({name}, device), on one device, or call rawattn.jax.attention in jax.shard_map, where each "
            "device has its own shard"
        )
    return ""


def _functorch_says(test: str, obj: object) -> bool:
    """Whether a transformation of torch.func has wrapped this tensor, which then holds no values. test: functorch's test."""
    functorch = getattr(getattr(sys.modules.get("torch"), "_C", None), "_functorch", None)
    is_wrapped = getattr(functorch, test, None)
    return is_wrapped is not None and bool(is_wrapped(obj))


def _sequence_advice(obj: Sequence[object], name: str) -> str:
    if name == "out":  # of which an array made of it would be lost
        return "pass one array to write, or leave it out; an lse is a new array in any case"
    shapes = [getattr(each, "shape", None) for each in obj]
    if obj and all(isinstance(shape, tuple) and len(shape) == 3 for shape in shapes):
        return (
            f"pass one packed array: the items of {name} joined along their first axis, with "
            f"seqs=SeqLayout.from_lengths([len(item) for item in {name}])"
        )
    dtype = "bool" if name == "mask" else "np.float32"
    return (
        f"pass numpy.asarray({name}) in the dtype that is meant, as by np.asarray({name}, {dtype})"
    )
