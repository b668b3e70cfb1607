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
    """The part of a `BlockMask` that is in the key of a prepared call: its shape, not its bits.

    kept: the length of each list of kept keys, 0 if it has no lists.
    """

    shape: Shape
    kept: int = 0


class LocatedMask(NamedTuple):
    """Addresses of a mask's arrays. key: its form and the addresses modulo 16, a part of the key of a repeated call."""

    addresses: tuple[int, ...]
    key: tuple[MaskForm, tuple[int, ...]]


class BlockMask:
    """Which keys each query sees: a bit for each pair, and a map by which kernels skip tiles.

    `rawattn.block_mask` and `rawattn.topk_mask` make it. Pass it as `mask=` to any number of calls, forward and backward. q
    may be on any device: a mask that lies elsewhere is copied there once, and the copy is kept. A dense call on a GPU makes
    lists of the tiles in which some key is seen. The mask keeps them for later calls of the same kind on the same stream.

    Attributes
    ----------
    shape : (batch, nheads, seqlen_q, seqlen_k)
        An axis is 1 if the mask is the same along it.
    device : int or None
        The CUDA ordinal of the GPU on which it was made; None for the host.
    kept : array or None
        For a mask of `topk_mask` in which all rows of a head see the same keys: those keys, (batch, nheads, 1, k), ascending,
        padded with -1. None for any other mask.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> mask = rawattn.block_mask(np.arange(4) < [[2], [2], [3]])  # (seqlen_q, seqlen_k)
    >>> mask.shape, mask.to_bool()[0, 0].sum(axis=1)
    ((1, 1, 3, 4), array([2, 2, 3]))
    >>> q, k, v = (np.ones((1, n, 2, 8), np.float32) for n in (3, 4, 4))
    >>> rawattn.attention(q, k, v, mask=mask).shape
    (1, 3, 2, 8)
    """

    __slots__ = (
        "__weakref__",
        "_copies",
        "_located",
        "buffers",
        "device",
        "handle",
        "kept",
        "memo",
        "shape",
    )

    def __new__(cls, *args: Any, **named: Any) -> BlockMask:
        if not (args and isinstance(args[0], tuple)):
            raise TypeError(
                "BlockMask: got a call, but a mask is made by rawattn.block_mask(mask), of a predicate or of ranges, or by "
                "rawattn.topk_mask(scores, k); call one of them"
            )
        return super().__new__(cls)

    def __init__(
        self,
        buffers: tuple[Any, Any, Any],
        shape: Shape,
        kept: Any = None,
        replayed: bool = False,
    ) -> None:
        """buffers: memory from `zeroed_buffers`, filled. replayed: whether a captured graph fills it anew at each replay."""
        self.shape: Shape = shape
        bits = buffers[0]
        self.device: int | None = None if isinstance(bits, np.ndarray) else bits.data.device_id
        self.kept = kept
        self.buffers = buffers
        # The arrays on other devices or as torch tensors, by framework ("torch" or "") and device.
        self._copies: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._located: dict[tuple[type, int], LocatedMask] = {}  # by the type of q, and device
        # What calls derive from the buffers, as lists of tiles; None if the buffers may change.
        self.memo: dict[Any, Any] | None = None if replayed else {}
        self.handle = _handles.unique_handle()
        _handles.register(self.handle, self)

    @property
    def form(self) -> MaskForm:
        return MaskForm(self.shape, 0 if self.kept is None else self.kept.shape[-1])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that calls read: `buffers`, and the lists of kept keys, (batch * nheads * k,), if there are any."""
        if not self.form.kept:
            return self.buffers
        return (*self.buffers, self.kept.reshape(-1))

    @property
    def bits(self) -> Any:
        """uint16 (batch, nheads, rows, words): bit n of word w is key 16 * w + n, set if the key is seen."""
        return bits_view(self.buffers[0], self.shape)

    @property
    def map(self) -> Any:
        """uint8 (batch, nheads, bands, granules): for each 64 rows x 64 keys, 0 if no key is seen, 2 if all are, else 1."""
        return host.granules(map_view(self.buffers[1], self.shape), self.shape)

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self.buffers))

    def to_bool(self) -> Any:
        """The mask as a bool array of `shape`, a NumPy or CuPy array, for tests and inspection."""
        if self.device is None:
            return host.to_bools(self.bits, self.shape)
        import cupy

        with cupy.cuda.Device(self.device):
            flat = cupy.unpackbits(self.bits.view(cupy.uint8).reshape(-1), bitorder="little")
            whole = flat.reshape(*self.shape[:3], -1)[..., : self.shape[3]]
            return cupy.ascontiguousarray(whole).view(cupy.bool_)

    def on_device_of(self, q: Any) -> tuple[Any, ...]:
        """`arrays` on q's device, copied there once if needed. If q is a torch tensor on a GPU they are torch tensors too,
        which saves host time.
        """
        framework = arrays.framework_of(q)
        try:
            device = arrays.device_of(q, framework)
        except Exception:  # q cannot be read; the call itself raises for that
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

    def located(self, q: Any, device: int, address: Callable[[Any], int]) -> LocatedMask:
        """The addresses of `on_device_of(q)`, cached for q's type and device. address: gives that of q's framework's arrays."""
        found = self._located.get((type(q), device))
        if found is None:
            addresses = tuple(map(address, self.on_device_of(q)))
            alignments = tuple(each % 16 for each in addresses)
            found = self._located[type(q), device] = LocatedMask(addresses, (self.form, alignments))
        return found

    def _moved(self, device: int) -> tuple[Any, ...]:
        if device == (HOST if self.device is None else self.device):
            return self.arrays
        buffers = tuple(map(host.host, self.arrays))
        if device == HOST:
            return buffers
        import cupy

        with cupy.cuda.Device(device):
            moved = tuple(map(cupy.asarray, buffers))
            cupy.cuda.get_current_stream().synchronize()  # other streams may use the copy
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles get a handle and a memo of their own, and no copies on other devices."""
        return BlockMask, (self.buffers, self.shape, self.kept, self.memo is None)

    def __repr__(self) -> str:
        where = "the host" if self.device is None else f"GPU {self.device}"
        return f"<rawattn.BlockMask {self.shape} on {where}, {self.nbytes} bytes>"


def memo_of(mask: Any) -> dict[Any, Any] | None:
    """The dict in which calls may keep what they derive from this mask; None for an array, and for a mask that may change."""
    return mask.memo if isinstance(mask, BlockMask) else None


def zeroed_buffers(shape: Shape, module: Any = np) -> tuple[Any, Any, Any]:
    """Zeroed memory for the bits, the map and the seen keys of a mask, as int32, a dtype that every framework can exchange.

    module: NumPy or CuPy.
    """
    sizes = layout.bits_bytes(shape), layout.map_bytes(shape), layout.keys_bytes(shape)
    bits, found, keys = (module.zeros(-(-nbytes // 4), np.int32) for nbytes in sizes)
    return bits, found, keys


def from_filled(buffers: tuple[Any, Any, Any], shape: Shape) -> BlockMask:
    """A mask from memory on the host whose bits and map are filled. The keys that any row sees are derived from the bits."""
    keys = buffers[2].view(np.uint16).reshape(layout.keys_shape(shape))
    np.bitwise_or.reduce(bits_view(buffers[0], shape), axis=2, out=keys)
    return BlockMask(buffers, shape)


def bits_view(array: Any, shape: Shape) -> Any:
    """A view of the bits in the first array of `zeroed_buffers`."""
    return array.view(np.uint16).reshape(layout.bits_shape(shape))


def map_view(array: Any, shape: Shape) -> Any:
    """A view of the map in the second array of `zeroed_buffers`."""
    own = layout.map_shape(shape)
    return array.view(np.uint8)[: math.prod(own)].reshape(own)


def bools_of(array: NDArray[np.int32], shape: Shape) -> NDArray[np.bool_]:
    """The mask as bools of four axes, from its bits on the host."""
    return host.to_bools(bits_view(array, shape), shape)
