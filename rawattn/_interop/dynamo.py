"""For torch.compile: layouts that are made while it traces, and functions that it must not trace.

A traced tensor has no values and no address, and only torch's own functions can work on it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def is_compiling() -> bool:
    """Whether torch.compile or torch.export traces the caller, so that tensors have no values. Does not import torch.

    `torch.compiler.is_compiling` is not used: during a compilation it is true also for calls on tensors with values.
    """
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is None:  # without torch, or while another thread imports it
        return False
    return bool(compiler.is_dynamo_compiling() or compiler.is_exporting())


# The length that `lengths_from_mask` gives for a row in which padding comes before a real token. The program refuses it when it
# runs. Only for masks on the host.
NO_PREFIX = -(2**62)


def tensor(integers: Any) -> Any:
    """The integers of a NumPy array or a list as a tensor; a tensor as it is."""
    torch = sys.modules["torch"]
    if isinstance(integers, np.ndarray):
        return torch.from_numpy(integers)
    if isinstance(integers, (list, tuple)):
        return torch.tensor(integers) if integers else torch.zeros(0, dtype=torch.int64)
    return integers


def starts_from_lengths(name: str, lengths: Any) -> Any:
    """The starts of sequences that lie one behind another, and the end of the last: int64, (batch + 1,)."""
    torch, given = sys.modules["torch"], tensor(lengths)
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: got {_dtype(given)}; accepted are int32 and int64 arrays and lists of int; convert it, as by "
            f"{name}.to(torch.int32)"
        )
    if given.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (batch,)")
    return torch.nn.functional.pad(given.cumsum(0), (1, 0))


def lengths_from_mask(name: str, mask: Any) -> Any:
    """The number of real tokens in each row of a bool mask (batch, seqlen): int64, (batch,)."""
    torch, given = sys.modules["torch"], tensor(mask)
    if given.dtype != torch.bool:
        raise TypeError(mask_dtype_message(name, _dtype(given)))
    if given.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (batch, seqlen)")
    lengths = given.sum(1)
    if given.device.type != "cpu":
        return lengths
    resumes = given[:, 1:] & ~given[:, :-1]
    return torch.where(resumes.any(1), NO_PREFIX, lengths)


def mask_dtype_message(name: str, dtype: Any) -> str:
    return f"{name}: got dtype {dtype}, expected bool, True for a real token; pass {name} != 0 where 0 is padding"


def _dtype(given: Any) -> str:
    return str(given.dtype).replace("torch.", "")


def untraced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, at which torch.compile breaks the graph, or with ``fullgraph=True`` raises an error that says why.

    Otherwise it would trace into the function down to calls of NumPy, which it replaces by its own.

    After a graph break torch may skip `call` itself but still trace the functions that `call` runs. So once torch.compile may
    be in use, each call runs `function` under `torch.compiler.disable`.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if "torch._dynamo" in sys.modules:
            outside: Callable[Parameters, Result] = _outside(function)
            return outside(*args, **options)
        return function(*args, **options)

    return call


_outsides: dict[Callable[..., Any], Callable[..., Any]] = {}


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    found = _outsides.get(function)
    if found is None:
        found = _outsides[function] = sys.modules["torch"].compiler.disable(function)
    return found


# The marks that `torch.compiler.disable` sets on a function, with the reason: torch then breaks the graph before the call.
vars(_outside).update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg=(
        "this function of rawattn runs outside of compiled programs; in them call rawattn.torch.attention, with masks and "
        "score functions that were made before"
    ),
)
