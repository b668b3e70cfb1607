"""`show_mask`: which tiles of a mask are dead, partial or full, as text and as a picture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call import options as _options
from rawattn._call import outputs
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.options import DEFAULTS, for_message
from rawattn._masks import host
from rawattn._masks.block_mask import BlockMask
from rawattn._verbs.block_mask import block_mask

_SIGNS = np.array([".", "+", "#"])  # by state: dead, partial, full
_WIDEST = 96  # most tiles in a line, where the tile size is chosen here
_ENDINGS = (".png", ".svg", ".pdf")


@checks_arguments("rawattn.show_mask")
def show_mask(
    mask: Any = None,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    batch: int = 0,
    head: int = 0,
    tile: tuple[int, int] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> str:
    """Show which tiles of a call are dead (``.``), partial (``+``) or full (``#``), one line of text for each row of tiles.

    Kernels skip dead tiles, in which no row sees a key. Full tiles, in which all rows see all keys, need no test of elements.

    Parameters
    ----------
    mask : BlockMask, or bool array of any framework, optional
        As in a call of `attention`.
    seqlen_q, seqlen_k : int, optional
        The lengths of the sequence. Default: those of the mask.
    causal, align, window, sink
        As in a call of `attention`.
    batch, head : int
        Which sequence and which head are shown, where the mask differs between them.
    tile : (rows, keys), optional
        Ints of at least 1. Default: 64 x 64, or the smallest square multiple of that with at most 96 tiles on either axis.
    path : str or PathLike, optional
        File that a picture is written to as well, by matplotlib: .png, .svg or .pdf.

    Returns
    -------
    str
        A title that counts the tiles of each kind, then a line for each row of tiles.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted. TypeError for a length that neither an argument nor a mask
        gives, and for a mask that is not bool.
    FileNotFoundError
        If the folder of `path` is not there.
    ImportError
        For `path` without matplotlib.

    Examples
    --------
    >>> import rawattn
    >>> print(rawattn.show_mask(seqlen_q=256, seqlen_k=256, causal=True, window=(100, None)))
    tiles of 64 x 64: 7 dead, 9 partial, 0 full of 16
    +...
    ++..
    +++.
    .+++
    """
    file = Path() if path is None else _file(path)
    found = mask
    if mask is not None and not isinstance(mask, BlockMask):
        _options.check_array("mask", mask)
        found = block_mask(mask)
    heads = (1, 1) if found is None else found.shape[:2]
    rows = _length("seqlen_q", seqlen_q, None if found is None else found.shape[2])
    keys = _length("seqlen_k", seqlen_k, None if found is None else found.shape[3])
    if 0 in heads:
        raise ValueError(
            f"mask: got a batch and heads of {heads}, expected at least one of each to show"
        )
    for name, index, extent in (("batch", batch, heads[0]), ("head", head, heads[1])):
        if _options.nonnegative_int(name, index, "an int >= 0") >= extent > 1:
            raise ValueError(f"{name}: got {index}, expected less than {extent}, that of the mask")
    tile_q, tile_k = _tile(tile, rows, keys)
    settings = DEFAULTS._replace(causal=causal, align=align, window=window, sink=sink)
    states = np.zeros((-(-rows // tile_q), -(-keys // tile_k)), np.int8)
    for n in range(len(states)):
        first = n * tile_q
        seen = _visible(first, min(first + tile_q, rows), rows, keys, settings)
        if found is not None:
            seen &= _rows_of(found, batch, head, first, len(seen), keys)
        starts = np.arange(0, keys, tile_k)
        counts = np.add.reduceat(seen.sum(axis=0), starts)
        most = len(seen) * np.minimum(tile_k, keys - starts)
        states[n] = np.where(counts == 0, host.DEAD, np.where(counts == most, host.FULL, 1))
    numbers = np.bincount(states.reshape(-1), minlength=3)
    title = f"tiles of {tile_q} x {tile_k}: " + ", ".join(
        f"{count} {name}" for count, name in zip(numbers, ("dead", "partial", "full"), strict=True)
    )
    if path is not None:
        _draw(states, title, file)
    lines = ["".join(_SIGNS[row]) for row in states]
    return "\n".join([f"{title} of {states.size}", *lines])


def _length(name: str, given: int | None, own: int | None) -> int:
    """The length of one axis: the given one, or by default the mask's. own: the mask's, None without a mask."""
    if given is None:
        if own is None:
            raise TypeError(
                f"{name}: got None, expected the length of the sequence, since there is no mask that says it"
            )
        return own
    size = _options.nonnegative_int(name, given, "an int >= 0")
    if own is not None and own != 1 and size > own:
        raise ValueError(f"{name}: got {size}, expected at most {own}, that of the mask")
    return size


def _tile(tile: tuple[int, ...] | None, rows: int, keys: int) -> tuple[int, int]:
    if tile is None:
        times = max(1, -(-max(rows, keys) // (64 * _WIDEST)))
        return 64 * times, 64 * times
    accepted = "a tuple (rows, keys) of ints >= 1"
    given: Any = tile
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"tile: got {for_message(tile)}, expected {accepted}")
    sizes = [_options.nonnegative_int("tile", n, accepted) for n in given]
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"tile: got {for_message(tile)}, expected {accepted}")
    return sizes[0], sizes[1]


def _visible(
    first: int, last: int, rows: int, keys: int, settings: _options.Options
) -> NDArray[np.bool_]:
    """Which keys the rows [first, last) may see by causal, window, sink and align: (last - first, keys)."""
    left, right = _options.window(settings)
    sink = _options.sink(settings)
    offset = 0 if _options.top_left(settings) else keys - rows
    i, j = np.arange(first, last)[:, None] + offset, np.arange(keys)
    seen = np.ones((last - first, keys), bool)
    if right is not None:
        seen &= j <= i + right
    if left is not None:
        seen &= (j >= i - left) | (j < sink)
    return seen


def _rows_of(
    found: BlockMask, batch: int, head: int, first: int, count: int, keys: int
) -> NDArray[np.bool_]:
    """The mask's bools of `count` rows from `first` on and of the first `keys` keys."""
    index = (batch if found.shape[0] > 1 else 0, head if found.shape[1] > 1 else 0)
    some = slice(0, 1) if found.shape[2] == 1 else slice(first, first + count)
    bits = host.host(found.bits[index][some])
    keep = host.to_bools(bits[None, None], (1, 1, len(bits), found.shape[3]))[0, 0]
    return np.broadcast_to(keep[:, : keys if found.shape[3] > 1 else 1], (count, keys))


def _file(path: Any) -> Path:
    """The picture's path, checked before the work begins."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"path: got {for_message(path)}, expected the name of a file, as 'mask.png'"
        )
    file = Path(path)
    outputs.check_ending("path", file, _ENDINGS)
    outputs.check("path", file)
    if not file.absolute().parent.exists():
        raise FileNotFoundError(
            f"path {file}: there is no folder {file.parent}, expected one that is there; make it first"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('path: a picture needs matplotlib: pip install "rawattn[bench]"')
    return file


def _draw(states: NDArray[np.int8], title: str, path: Path) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6 * min(2.0, max(0.3, len(states) / max(1, states.shape[1])))))
    axes = figure.subplots()
    colors = ListedColormap(["#f4f4f4", "#f0b34a", "#2f6f9f"])
    axes.imshow(states, cmap=colors, vmin=0, vmax=2, interpolation="nearest", aspect="auto")
    axes.set(title=title, xlabel="tiles of keys", ylabel="tiles of queries")
    figure.savefig(path, bbox_inches="tight")
