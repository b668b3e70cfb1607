"""Refuses torch's forward-mode derivatives, which no function of the library supports. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_NONE = "there are no forward-mode derivatives"


def is_on() -> bool:
    """Whether a forward-mode level is open, so that tensors may have tangents."""
    forward_ad = sys.modules.get("torch.autograd.forward_ad")
    # The attribute is missing while another thread imports torch.
    return forward_ad is not None and getattr(forward_ad, "_current_level", -1) >= 0


def refuse_tangents(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """RuntimeError for a tensor that has a tangent, whether or not it requires a gradient."""
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
    """RuntimeError, for use in a torch operator, if a forward-mode level is open: an operator cannot see tangents."""
    if is_on():
        raise RuntimeError(
            "rawattn.torch.attention: got a call of a program in torch.autograd.forward_ad.dual_level, where tangents would be "
            f"lost: {_NONE}; call the program outside of it"
        )
