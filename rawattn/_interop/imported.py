"""Frameworks that are imported already. Nothing is imported here."""

from __future__ import annotations

import sys
from typing import Any


def torch() -> Any:
    """torch, or None without it. None too while another thread imports it: it then lacks attributes, and no tensor exists."""
    found = sys.modules.get("torch")
    return found if hasattr(found, "compiler") else None
