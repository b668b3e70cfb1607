"""`BlockMask`: which keys each query sees, made once and used by many calls."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn import _handles
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST
from rawattn._masks import host, layout
from rawattn._masks.layout import Shape


class MaskForm(NamedTuple):
    """What of a `BlockMask` tells calls apart: its shape, not its bits. kept: entries of each list of its kept keys, if any."""

    shape: Shape
    kept: int = 0


class Located(NamedTuple):
    """Addresses of a mask's arrays, and what of them tells calls apart."""

    addresses: tuple[int, ...]
    told: tuple[MaskForm, tuple[int, ...]]


class BlockMask:
    """Which keys each query sees: bits, and a map that tells kernels which tiles they need not visit.

    It is made by `rawattn.block_mask` or `rawattn.topk_mask`, and given to any number of calls as `mask=`, forward and
    backward, of q on any device: where it does not lie yet, it is copied once and kept. A dense call on a GPU makes lists of
    the tiles that the mask leaves, and the mask keeps them for later calls like that one on the same stream.

    Attributes
    ----------
    shape : (batch, nheads, seqlen_q, seqlen_k)
        Each axis is 1 where it is the same for all.
    device : int or None
        The GPU where it was made; None: the host.
    kept : array or None
        Of a mask of `topk_mask` whose rows share their keys: those keys, ascending, (batch, nheads, 1, k), -1 behind the
        last one.
    """

    __slots__ = (
        "__weakref__",
        "_copies",
        "_located",
        "device",
        "handle",
        "kept",
        "memo",
        "shape",
        "words",
    )

    def __init__(
        self,
        words: tuple[Any, Any, Any],
        shape: Shape,
        kept: Any = None,
        replayed: bool = False,
    ) -> None:
        """words: what `buffers` makes, filled. replayed: by a graph, anew at each replay."""
        self.shape: Shape = shape
        bits = words[0]
        self.device: int | None = None if isinstance(bits, np.ndarray) else bits.data.device_id
        self.kept = kept
        self.words = words
        # By framework and device.
        self._copies: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._located: dict[tuple[type, int], Located] = {}  # by the type of q, and device
        # What calls find out about the words; None where these may change.
        self.memo: dict[Any, Any] | None = None if replayed else {}
        self.handle = _handles.unique()
        _handles.register(self.handle, self)

    @property
    def form(self) -> MaskForm:
        return MaskForm(self.shape, 0 if self.kept is None else self.kept.shape[-1])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What calls are given: `words`, and where rows share their keys the lists of those, (batch * nheads * k,)."""
        if not self.form.kept:
            return self.words
        return (*self.words, self.kept.reshape(-1))

    @property
    def bits(self) -> Any:
        """uint16 (batch, nheads, rows, words): bit n of a word is the key n of its 16."""
        return shaped(self.words[0], self.shape)

    @property
    def map(self) -> Any:
        """uint8 (batch, nheads, bands, granules): of each 64 x 64, 0 where no key is seen, 2 where all are, else 1."""
        return host.granules(map_of(self.words[1], self.shape), self.shape)

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self.words))

    def to_bool(self) -> Any:
        """The mask as a bool array of `shape`, NumPy's or CuPy's: for tests, and to look at."""
        if self.device is None:
            return host.to_bools(self.bits, self.shape)
        import cupy

        with cupy.cuda.Device(self.device):
            flat = cupy.unpackbits(self.bits.view(cupy.uint8).reshape(-1), bitorder="little")
            whole = flat.reshape(*self.shape[:3], -1)[..., : self.shape[3]]
            return cupy.ascontiguousarray(whole).view(cupy.bool_)

    def beside(self, q: Any) -> tuple[Any, ...]:
        """`arrays` where q lies, of q's framework if that may save time."""
        framework = arrays.framework_of(q)
        try:
            device = arrays.device_of(q, framework)
        except Exception:  # q cannot be read, which the call says
            device = HOST
        key = (framework if framework == "torch" and device != HOST else "", device)
        found = self._copies.get(key)
        if found is None:
            found = self._moved(device)
            if key[0]:
                torch = sys.modules["torch"]
                found = tuple(map(torch.from_dlpack, found))
            self._copies[key] = found
        return found

    def located(self, q: Any, device: int, address: Callable[[Any], int]) -> Located:
        """`beside`, for q on that device: found once. address: of an array of q's framework."""
        found = self._located.get((type(q), device))
        if found is None:
            addresses = tuple(map(address, self.beside(q)))
            alignments = tuple(each % 16 for each in addresses)
            found = self._located[type(q), device] = Located(addresses, (self.form, alignments))
        return found

    def _moved(self, device: int) -> tuple[Any, ...]:
        if device == (HOST if self.device is None else self.device):
            return self.arrays
        words = tuple(map(host.host, self.arrays))
        if device == HOST:
            return words
        import cupy

        with cupy.cuda.Device(device):
            moved = tuple(map(cupy.asarray, words))
            cupy.cuda.get_current_stream().synchronize()  # it may be used on another stream
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have a handle and a memo of their own, and what lies on other devices is moved there anew."""
        return BlockMask, (self.words, self.shape, self.kept, self.memo is None)

    def __repr__(self) -> str:
        where = "the host" if self.device is None else f"GPU {self.device}"
        return f"<rawattn.BlockMask {self.shape} on {where}, {self.nbytes} bytes>"


def memo_of(mask: Any) -> dict[Any, Any] | None:
    """What calls with this mask may keep with it, if anything."""
    return mask.memo if isinstance(mask, BlockMask) else None


def buffers(shape: Shape, module: Any = np) -> tuple[Any, Any, Any]:
    """Memory for the bits, the map and the keys of a mask, int32 words: what every framework can pass on.

    module: NumPy or CuPy.
    """
    sizes = layout.bits_bytes(shape), layout.map_bytes(shape), layout.keys_bytes(shape)
    bits, found, keys = (module.zeros(-(-nbytes // 4), np.int32) for nbytes in sizes)
    return bits, found, keys


def finished(words: tuple[Any, Any, Any], shape: Shape) -> BlockMask:
    """Of memory on the host whose bits and map are filled."""
    keys = words[2].view(np.uint16).reshape(layout.keys_shape(shape))
    np.bitwise_or.reduce(shaped(words[0], shape), axis=2, out=keys)
    return BlockMask(words, shape)


def shaped(words: Any, shape: Shape) -> Any:
    """The bits in such memory."""
    return words.view(np.uint16).reshape(layout.bits_shape(shape))


def map_of(words: Any, shape: Shape) -> Any:
    """The map in such memory."""
    own = layout.map_shape(shape)
    return words.view(np.uint8)[: math.prod(own)].reshape(own)


def bools_of(words: NDArray[np.int32], shape: Shape) -> NDArray[np.bool_]:
    """The mask of four axes that words on the host hold the bits of."""
    return host.to_bools(shaped(words, shape), shape)
