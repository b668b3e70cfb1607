"""What captured CUDA graphs need: memory that a replay uses, held for as long as the process lives.

Nobody tells when a graph dies. So this is for calls that are captured as they are: memory of torch's is torch's to keep, and
a `Plan` owns its own.
"""

from __future__ import annotations

from typing import Any

_held: list[Any] = []


def hold(*owners: Any) -> None:
    """Keeps them for good."""
    _held.append(owners)
