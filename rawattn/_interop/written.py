"""Writes into arrays of the caller's, told to the framework that counts them.

torch keeps a version of each tensor. Its autograd saves tensors for the backward, and refuses one that was written since: it
knows of its own writes, and of those it is told of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def tell_written(*arrays: Any) -> None:
    """Counts a write of each tensor of torch's among `arrays`; others, and None, have no count."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for x in arrays:
        if isinstance(x, torch.Tensor):
            torch.autograd.graph.increment_version(x)


def teller(*arrays: Any) -> Callable[[], None] | None:
    """What tells of a write of all of them, as often as it is called; None where no tensor is among them."""
    torch = sys.modules.get("torch")
    tensors = [] if torch is None else [x for x in arrays if isinstance(x, torch.Tensor)]
    if len(tensors) == 1:
        return functools.partial(torch.autograd.graph.increment_version, tensors[0])  # type: ignore[union-attr]
    return functools.partial(tell_written, *tensors) if tensors else None
