"""Tensors captured by a score function. To autograd and to compiled programs they are inputs of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rawattn import ScoreMod


def tensors_of(score_mod: ScoreMod) -> dict[str, Any]:
    """Its captured arrays that are torch tensors, by name."""
    return {name: x for name, x in score_mod.arrays.items() if isinstance(x, torch.Tensor)}


def with_tensors(score_mod: ScoreMod, tensors: Sequence[Any]) -> ScoreMod:
    """The same score function with `tensors` in place of its own, in the order of `tensors_of`."""
    names = tensors_of(score_mod)
    moved = dict(zip(names, tensors, strict=True))
    if all(moved[name] is x for name, x in names.items()):
        return score_mod
    return score_mod.with_arrays({**score_mod.arrays, **moved})


def checked(score_mod: ScoreMod) -> tuple[Any, ...]:
    """The tensors that it captures. RuntimeError for one that requires grad and is not in `wrt`, if grad mode is on."""
    tensors = tensors_of(score_mod)
    for name, x in tensors.items():
        if x.requires_grad and name not in score_mod.text.wrt and torch.is_grad_enabled():
            raise RuntimeError(
                f"score_mod: captured {name} requires a gradient, which would be lost; name it in wrt={(name,)}, or pass "
                f"{name}.detach()"
            )
    return tuple(tensors.values())
