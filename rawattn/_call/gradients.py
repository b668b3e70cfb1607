"""The result of every backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """Gradients of an attention call, each in the shape of the input that it belongs to.

    A gradient that was not asked for, or whose input was not given, is None.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink_logits: Any = None
    captured: Any = None
