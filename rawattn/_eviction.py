"""Bounds the size of dictionaries that cache earlier calls."""

from __future__ import annotations

from typing import Any


def evict_if_full(table: dict[Any, Any], most: int) -> None:
    """Drops the older half of `table` if it has `most` entries. Call it before an entry is added; threads need no lock."""
    if len(table) >= most:
        for old in list(table)[: most // 2]:
            table.pop(old, None)
