"""A user's mistake and the message it gets: the argument, the value passed, what is accepted, and how to fix it.

The expected message is given as the pieces between ellipses, in order. The message begins with the first piece.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import rawattn


class Mistake(NamedTuple):
    code: str  # the user's code
    error: type[Exception]
    says: str

    def __str__(self) -> str:
        return self.code


def names() -> dict[str, Any]:
    """The names that the code of a mistake can use."""
    shapes = {
        "q": (2, 5, 4, 8),
        "k": (2, 7, 2, 8),
        "v": (2, 7, 2, 16),
        "heads_first": (2, 8, 128, 64),
        "keys_heads_first": (2, 8, 100, 64),
        "packed": (10, 4, 8),
        "longer": (14, 4, 8),
        "packed_heads_first": (4, 10, 8),
        "longer_heads_first": (4, 14, 8),
    }
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    out, lse = rawattn.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True)
    public = {name: getattr(rawattn, name) for name in rawattn.__all__}
    return {**public, **arrays, "out": out, "lse": lse, "np": np, "rawattn": rawattn}


def pattern(says: str) -> str:
    return "^" + ".*".join(map(re.escape, says.split("...")))


def check(mistake: Mistake, names: dict[str, Any]) -> None:
    with pytest.raises(mistake.error) as caught:
        eval(mistake.code, names)
    message = str(caught.value)
    assert re.search(pattern(mistake.says), message)
    assert "\n" not in message
    assert len(message) < 450
