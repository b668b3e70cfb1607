"""Texts that say what an object is, by which the operators of a compiled program find it: those take no objects.

Programs are kept on disk and run in other processes, so a handle never means something else there.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Kept = TypeVar("Kept")

_objects: WeakValueDictionary[str, Any] = WeakValueDictionary()


def unique() -> str:
    """Of what is equal to nothing else, in any process."""
    return secrets.token_hex(16)


def handle_of(*said: object) -> str:
    """Of what these values, of Python's own types, say all of: equal ones have the same in every process."""
    return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()


def register(handle: str, new: Kept) -> Kept:
    """What has this handle already, else the new object. It is not kept alive."""
    found: Kept = _objects.setdefault(handle, new)
    return found


def find(handle: str) -> Any:
    """What has this handle. RuntimeError where it is gone, or was never in this process."""
    found = _objects.get(handle)
    if found is None:
        raise RuntimeError(
            "a compiled program was made with a rawattn.ScoreMod or rawattn.BlockMask that is gone, or in another process; "
            "keep it as long as the program, and before a program from a file runs, make a ScoreMod equal to that of the "
            "program (a BlockMask is of its own process alone)"
        )
    return found
