"""What dictionaries of earlier calls forget."""

from __future__ import annotations

from typing import Any


def make_room(table: dict[Any, Any], most: int) -> None:
    """Before one more is put into it: where it has `most` entries, the older half goes. Threads need no lock for it."""
    if len(table) >= most:
        for old in list(table)[: most // 2]:
            table.pop(old, None)
