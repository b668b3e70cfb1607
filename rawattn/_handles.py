"""Handles: texts by which torch operators of a compiled program find an object, since operators take no Python objects.

Programs are cached on disk and may run in other processes. So equal handles mean equal objects in every process.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Kept = TypeVar("Kept")

_lock = threading.RLock()  # reentrant, since a signal handler may register an object too
_objects: WeakValueDictionary[str, Any] = WeakValueDictionary()


def unique_handle() -> str:
    """A handle for an object that equals no other, in any process."""
    return secrets.token_hex(16)


def handle_of(*values: object) -> str:
    """The handle of an object that these values of built-in types determine. Equal values give it in every process."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def register(handle: str, new: Kept) -> Kept:
    """The object that already has this handle, else `new`, which gets it. Neither is kept alive."""
    with _lock:
        found: Kept = _objects.setdefault(handle, new)
    return found


def find(handle: str) -> Any:
    """The object with this handle. RuntimeError if it is gone, or was never made in this process."""
    found = _objects.get(handle)
    if found is None:
        raise RuntimeError(
            "a compiled program was made with a rawattn.ScoreMod or rawattn.BlockMask that is gone, or in another process; "
            "keep it as long as the program, and before a program from a file runs, make a ScoreMod equal to that of the "
            "program (a BlockMask is of its own process alone)"
        )
    return found
