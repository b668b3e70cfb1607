"""Tile shapes of the forward kernel, also those that only GPUs with less shared memory choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from rawattn import _backends
from rawattn._kernels import SHARED_LIMIT, only, portable_forward
from rawattn._problem import describe
from tests.cases import DTYPES


@dataclass(frozen=True)
class TileShape:
    """What makes the kernel take a tile shape: the dtype, D and bytes of shared memory a block."""

    dtype: str
    headdim: int
    shared_limit: int
    tile: str

    def __str__(self) -> str:
        return f"{self.dtype}-d{self.headdim}-{self.tile}"


def tile_shapes() -> list[TileShape]:
    """One of each, of every GPU that the kernel is for."""
    shapes: dict[Any, TileShape] = {}
    for dtype in ("bfloat16", "float32"):
        for headdim in (64, 96, 128, 192, 256):
            q = np.broadcast_to(np.zeros((), DTYPES[dtype]), (1, 1, 1, headdim))
            problem, _ = describe(q, q, q)
            for limit in sorted(set(SHARED_LIMIT.values()), reverse=True):
                config = portable_forward.choose(problem, copy_bytes=16, shared_limit=limit)
                tile = f"{config.tile_q}x{config.tile_k}x{config.waves}x{config.stages}"
                shape = TileShape(dtype, headdim, limit, tile)
                shapes.setdefault((dtype, headdim, tile), shape)
    return list(shapes.values())


@contextmanager
def shared_limit(limit: int | None) -> Iterator[None]:
    """Makes launches choose tiles as a GPU does that has `limit` bytes of shared memory a block."""
    choose = portable_forward.choose

    def pretend(*args: Any, **keywords: Any) -> Any:
        return choose(*args, **{**keywords, "shared_limit": limit})

    if limit is None:
        yield
        return
    with (
        only("portable"),
        mock.patch.object(portable_forward, "choose", pretend),
        mock.patch.object(_backends, "_prepared", {}),
    ):
        yield
