"""What a call launches, before any address is known: plain data that a kernel family makes and the runtime carries out.

An address is patched by name. Known names are the call's arrays (q, k, v, out, lse, ...), the integers of its lengths
(start_q, length_q, start_k, length_k, position_q, position_k), and the scratch that the steps ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.structure import SideStructure
from rawattn._compile.compiler import Source
from rawattn._kernels import structs
from rawattn._kernels.structs import Struct

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """All of a tensor map but its address. Axes are in order from the innermost; the innermost one has no stride. In bytes."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    origin: int  # bytes from the array's address to the map's


@dataclass(frozen=True, slots=True)
class Tiles:
    """A number of blocks that follows from the lengths: `heads` for each tile of `rows` rows of one side's sequences.

    blocks_each: blocks for each of those, such as the blocks of a cluster.
    most, least: limits before `blocks_each` applies. Most is for blocks that take one tile after the other, least for blocks
    that do other work, too.
    extra_blocks: blocks added to the result.
    """

    side: Literal["q", "k"]
    rows: int
    heads: int = 1
    most: int = MAX_BLOCKS
    blocks_each: int = 1
    extra_blocks: int = 0
    least: int = 0

    def blocks(self, lengths: Lengths) -> int:
        """The number for these lengths, at least the tiles that there are. ValueError when one launch cannot hold it."""
        side = lengths.q if self.side == "q" else lengths.k
        tiles = tile_count(side, lengths.batch, self.rows, packed=lengths.packed)
        count = min(checked(self.side, tiles * self.heads, self.rows), self.most)
        blocks = max(count, self.least) * self.blocks_each + self.extra_blocks
        return checked(self.side, blocks, self.rows)


def checked(argument: str, blocks: int, rows: int) -> int:
    """Returns `blocks`. ValueError when one launch cannot hold as many."""
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"{argument}: {blocks} tiles of {rows} rows over all heads and sequences, but one launch holds "
            f"{MAX_BLOCKS}; split the batch"
        )
    return blocks


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    params: the bytes of the kernel's first parameter, without addresses.
    patches: (offset in params, name of the address to put there).
    fills: the same for outputs whose padding rows the kernel fills. It leaves those rows as they are where the address is 0.
    maps: of the kernel's second parameter, where it has one: (name of the array, its tensor map).
    early: the kernel may start before earlier kernels of the stream are done, since it waits for them itself
    (`wait_for_prior_kernels` in kernels_cu/target/cuda.cuh).
    carried: the bytes of params that have room for lengths of the host (kernels_cu/attn/carried.cuh).
    """

    source: Source
    blocks: int | Tiles
    threads: int
    params: bytes
    patches: tuple[tuple[int, str], ...]
    shared_bytes: int = 0
    maps: tuple[tuple[str, Geometry], ...] = ()
    early: bool = False
    fills: tuple[tuple[int, str], ...] = ()
    carried: range = range(0)


@dataclass(frozen=True, slots=True)
class SubTask:
    """One of several tasks of a launch, which has a struct of its own: the struct's fields and its addresses, by path.

    fills: the addresses of outputs whose padding rows it fills.
    """

    fields: Mapping[str, Any]
    addresses: Mapping[str, str]
    fills: Mapping[str, str] = field(default_factory=dict)

    def prefixed(self, path: str) -> dict[str, Any]:
        """The fields by their paths in a struct that has this one at `path`."""
        return {f"{path}.{name}": value for name, value in self.fields.items()}

    def patches(self, struct: Struct, path: str) -> tuple[tuple[int, str], ...]:
        """Where the addresses belong in `struct`, which has this one at `path`."""
        return _at(struct, path, self.addresses)

    def filled(self, struct: Struct, path: str) -> tuple[tuple[int, str], ...]:
        """The same for the addresses of `fills`."""
        return _at(struct, path, self.fills)


def _at(struct: Struct, path: str, names: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    return tuple((structs.offset(struct, f"{path}.{at}"), name) for at, name in names.items())


@dataclass(frozen=True, slots=True)
class Lists:
    """Launches that make lists of tiles from nothing but a mask's bits and the call, and the names of their scratch.

    A later run with the same bits may leave these launches out, where the scratch still holds what they wrote.

    sub_tasks: lists of a mask whose bits another launch makes, together with these lists. Each has the fields and addresses of
    a `KeptListsParams` (`helper_params`).
    """

    launches: tuple[Step, ...] = ()
    scratch: tuple[str, ...] = ()
    sub_tasks: tuple[SubTask, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """The launches of a call, in order.

    schedules: orders of the sequences to be made before the launches, for lengths on the host only once.
    paddings: padding rows to be filled before them, which no launch fills.
    orders: bytes of what each of `schedules` writes, by name.
    scratch: bytes of memory that one run uses, by name.
    counters: bytes of memory, by name, that is zero before and after every run.
    lists: those launches, and that scratch, that later runs may keep; empty for a ragged call.
    config: of the main kernel, for people and tests.
    """

    launches: tuple[Step, ...]
    config: object
    schedules: tuple[SubTask, ...] = ()
    paddings: tuple[SubTask, ...] = ()
    orders: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    lists: Lists = Lists()


def patches(
    struct: Struct, names: Iterable[str] = (), **renamed: str
) -> tuple[tuple[int, str], ...]:
    """Pairs of offset and name. names: fields called like their addresses. renamed: fields by path, with `__` for a dot."""
    own = {name: name for name in names}
    other = {path.replace("__", "."): name for path, name in renamed.items()}
    return tuple((structs.offset(struct, path), name) for path, name in {**own, **other}.items())


def side_fields(path: str, side: SideStructure) -> dict[str, int]:
    """The fields of a `Side` struct at `path`, without its addresses."""
    return {
        f"{path}.cumulative": int(side.cumulative),
        f"{path}.rows": side.rows,
        f"{path}.start.is_64bit": int(side.start == 8),
        f"{path}.length.is_64bit": int(side.length == 8),
        f"{path}.position.is_64bit": int(side.position == 8),
    }


def side_names(path: str, side: SideStructure, of: Literal["q", "k"]) -> dict[str, str]:
    """The names of the addresses of a side's integers, by their fields in a `Side` struct at `path`."""
    given = (("start", side.start), ("length", side.length), ("position", side.position))
    return {f"{path}.{name}.data": f"{name}_{of}" for name, nbytes in given if nbytes}


def side_patches(
    struct: Struct, path: str, side: SideStructure, of: Literal["q", "k"]
) -> tuple[tuple[int, str], ...]:
    """Where the addresses of a side's integers belong."""
    names = side_names(path, side, of)
    return tuple((structs.offset(struct, where), name) for where, name in names.items())


def tile_count(side: Side, batch: int, tile: int, *, packed: bool) -> int:
    """Tiles of `tile` rows over all sequences, or a bound: blocks that find no tile end at once.

    In group mode there are at most `batch` too many. In batch mode, where there could be many times as many, lengths on
    the host are counted.
    """
    most = batch * -(-side.max_seqlen // tile)
    if packed:
        return min(most, side.rows // tile + batch)
    if side.length is not None and isinstance(side.length, np.ndarray):
        return int(np.sum(-(-logical_lengths(side, batch) // tile)))
    return most


def logical_lengths(side: Side, batch: int) -> Any:
    """Logical lengths of a side whose integers are host data, (batch,) int64."""
    if side.start is None and side.length is None:
        return np.full(batch, side.rows)
    integers = side.start if side.length is None else side.length
    differences = side.length is None or side.cumulative
    return (np.diff(integers) if differences else integers).astype(np.int64)
