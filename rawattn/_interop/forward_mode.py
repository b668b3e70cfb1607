"""Forward-mode derivatives of torch's, which no function of the library has. Torch is not imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_NONE = "there are no forward-mode derivatives"


def is_on() -> bool:
    """Whether tensors may have tangents now."""
    forward_ad = sys.modules.get("torch.autograd.forward_ad")
    return forward_ad is not None and forward_ad._current_level >= 0


def refuse_tangents(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raises RuntimeError for a tensor that has a tangent, whether or not it requires a gradient."""
    if not is_on():
        return
    torch = sys.modules["torch"]
    unpack_dual = torch.autograd.forward_ad.unpack_dual
    for name, x in zip(names, arrays, strict=True):
        if isinstance(x, torch.Tensor) and unpack_dual(x).tangent is not None:
            raise lost_tangent(name)


def lost_tangent(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: got a tensor with a tangent, which would be lost: {_NONE}; take gradients in reverse mode on "
        f"rawattn.torch.attention, or pass torch.autograd.forward_ad.unpack_dual({name}).primal"
    )


def refuse_programs() -> None:
    """Raises RuntimeError in an operator, which cannot see whether its tensors have tangents."""
    if is_on():
        raise RuntimeError(
            "rawattn.torch.attention: got a call of a program in torch.autograd.forward_ad.dual_level, where tangents would be "
            f"lost: {_NONE}; call the program outside of it"
        )
