"""Reports writes into the caller's tensors to torch.

torch keeps a version counter for each tensor. Its autograd refuses a saved tensor that was written before the backward. It
counts its own writes, and other writes only if they are reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from rawattn._interop import imported

# By the type of an array: whether it is a torch tensor. To ask torch takes 0.2 us each time.
_are_tensors: dict[type, bool] = {}


def bump_versions(*arrays: Any) -> None:
    """Increments the version of each torch tensor among `arrays`, which may hold None and arrays of other frameworks."""
    for x in arrays:
        is_tensor = _are_tensors.get(type(x))
        if is_tensor is None:
            torch = imported.torch()
            is_tensor = torch is not None and isinstance(x, torch.Tensor)
            _are_tensors[type(x)] = is_tensor
        if is_tensor:
            sys.modules["torch"].autograd.graph.increment_version(x)


def version_bumper(*arrays: Any) -> Callable[[], None] | None:
    """A function that reports a write of all the torch tensors among `arrays`; None if there are none."""
    torch = imported.torch()
    tensors = [] if torch is None else [x for x in arrays if isinstance(x, torch.Tensor)]
    if len(tensors) == 1:
        return functools.partial(torch.autograd.graph.increment_version, tensors[0])
    return functools.partial(bump_versions, *tensors) if tensors else None
