"""Host twin of kernels_cu/sm90/forward.cu: problem -> configuration -> source, and the tensor maps it goes through."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import source as _source
from rawattn._kernels import tile_tables
from rawattn._runtime.tensor_map import Geometry

ENTRY = "rawattn_sm90_forward"
TILES = "sm90_forward"  # the file of its tile tables
ARCH = "sm_90a"
SHARED_LIMIT = 232448

# K and V of this much are scheduled together. A fraction of the L2 cache: what is read from DRAM costs power, and power is
# what bounds long calls (docs/notes/hopper-forward.md).
SECTION_BYTES = 9 << 20

# How much work is kept for the end, for each cluster: this many of a head's longest tiles.
_KEPT_ROUNDS = 0.25

# Keys of a sequence from which on the tiles of the table "long" are the faster ones: more work a tile, less often begun.
LONG_SEQLEN = 8192

# Keys of a sequence from which on the last query tiles may be shared out by keys, and by how many key tiles they must be
# done earlier for it (docs/notes/hopper-forward.md).
SHARED_SEQLEN = LONG_SEQLEN
WORTH_SHARING = 8

# Keys of a sequence from which on it pays to copy q, k and v where this kernel cannot read them as they lie
# (docs/notes/hopper-forward.md).
REPACK_SEQLEN = 1024

# Rows of the output that the copy engine stores at a time: a warp's.
STORE_ROWS = 16

# Registers of a multiprocessor, and of a thread what setmaxnreg counts in.
_REGISTERS, _REGISTER_STEP = 65536, 8


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the compiler is told: the named constants of namespace `config` in the kernel."""

    element: str
    headdim: int
    headdim_v: int
    tile_k: int
    consumers: int
    stages: int
    cluster: int  # blocks that load keys and values for each other
    ping_pong: bool
    late_scaling: bool  # of scores, beside their exponentials
    consumer_registers: int  # of a thread; the producer's have the rest
    heads_per_tile: int  # query heads of one kv head whose rows share a tile
    ragged: bool
    packed: bool  # group mode: the arrays have no batch axis
    left: bool
    right: bool
    top_left: bool
    scale_first: bool
    store_bytes: int  # of an access to the output
    tensor_stores: bool  # by the copy engine, through a place in shared memory
    shares_out: bool  # the keys of the last query tiles, among all blocks

    @property
    def tile_rows(self) -> int:
        return rows_of(self.consumers)

    @property
    def tile_q(self) -> int:
        """Query rows of each head."""
        return self.tile_rows // self.heads_per_tile

    @property
    def schedule_rows(self) -> int:
        """Query rows of each head that the schedule hands out together: the tiles of a cluster."""
        return self.tile_q * self.cluster

    @property
    def section_bytes(self) -> int:
        return SECTION_BYTES

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def producer_registers(self) -> int:
        """Of a thread. A block begins with as many for each thread and shares them out anew."""
        each = _REGISTERS // self.threads // _REGISTER_STEP * _REGISTER_STEP
        return each * (1 + self.consumers) - self.consumer_registers * self.consumers

    @property
    def shared_bytes(self) -> int:
        row_bytes_qk = 128 * -(-self.headdim // 64)
        row_bytes_v = 128 * -(-self.headdim_v // 64)
        tiles = self.tile_rows * row_bytes_qk + self.stages * self.tile_k * (
            row_bytes_qk + row_bytes_v
        )
        outputs = self.tile_rows * row_bytes_v if self.tensor_stores else 0
        return tiles + outputs + 1024  # barriers and two slots of work

    def source(self) -> Source:
        constants = {
            "kHeadDim": self.headdim,
            "kHeadDimV": self.headdim_v,
            "kTileK": self.tile_k,
            "kConsumers": self.consumers,
            "kHeadsPerTile": self.heads_per_tile,
            "kStages": self.stages,
            "kCluster": self.cluster,
            "kPingPong": self.ping_pong,
            "kLateScaling": self.late_scaling,
            "kRagged": self.ragged,
            "kPacked": self.packed,
            "kLeft": self.left,
            "kRight": self.right,
            "kTopLeft": self.top_left,
            "kScaleFirst": self.scale_first,
            "kStoreBytes": self.store_bytes,
            "kTensorStores": self.tensor_stores,
            "kSharesOut": self.shares_out,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
            "kSharedBytes": self.shared_bytes,
        }
        text = _source.text(self.element, constants, "sm90/forward.cu")
        return Source(entry=ENTRY, text=text, summary=self.summary())

    def summary(self) -> str:
        traits = _source.traits(
            packed=self.packed,
            ragged=self.ragged and not self.packed,
            left=self.left,
            right=self.right,
            top_left=self.top_left,
            scale_first=self.scale_first,
        )
        tile = f"{self.tile_rows}x{self.tile_k}"
        if self.heads_per_tile > 1:
            tile += f" heads={self.heads_per_tile}"
        if self.cluster > 1:
            tile += f" cluster={self.cluster}"
        if self.tensor_stores:
            traits.append("tensor_stores")
        if self.shares_out:
            traits.append("shares_out")
        if self.store_bytes < 16:
            traits.append(f"{self.store_bytes}B")
        return " ".join(["sm90 forward", self.element, _source.dims(self), tile, *traits])


def rows_of(consumers: int) -> int:
    """Of a tile, over all its heads."""
    return 64 * consumers


def choose(
    problem: Problem,
    *,
    arch: str,
    strides: Mapping[str, tuple[int, ...]],
    pointers: int,
) -> Config | None:
    """The configuration for `problem`, or None where this kernel does not apply: the portable one does then.

    It applies on compute capability 9.0, in 16 bits; where `repacked` names arrays, only if their copies pay.
    strides: of q, k, v and out, in bytes; pointers: all addresses OR-ed together.
    """
    if arch != ARCH or problem.dtype == "float32":
        return None
    if repacked(problem, strides, pointers) and not _repacking_pays(problem, strides, pointers):
        return None
    if (
        min(problem.batch, problem.rows_q, problem.rows_k) == 0
        or max(problem.rows_q, problem.rows_k) > 2**29
    ):
        return None
    if not all(_mappable(problem, name, each) for name, each in strides.items() if name != "out"):
        return None
    wide = max(problem.headdim, problem.headdim_v)
    for row in tile_tables.table(TILES, _table(problem)):
        if wide <= row.headdim:
            fields = row.fields
            out = strides.get("out")
            store_bytes = _source.access_bytes(problem.headdim_v * 2, pointers, *(out or ())[:-1])
            if problem.max_seqlen_q < LONG_SEQLEN:
                # Of few queries a cluster's last block has none, and takes a multiprocessor all the same.
                fields["cluster"] = 1
            # Of ragged batches alone: others gain nothing by it.
            mappable = store_bytes == 16 and (out is None or _mappable(problem, "out", out))
            fields["tensor_stores"] &= problem.ragged and mappable
            masks = _source.masks(problem)
            # Of equal tiles alone.
            shares_out = not (problem.ragged or masks["left"] or masks["right"])
            shares_out &= problem.max_seqlen_k >= SHARED_SEQLEN
            return Config(
                element=problem.dtype,
                headdim=problem.headdim,
                headdim_v=problem.headdim_v,
                **fields,
                heads_per_tile=heads_per_tile(problem, rows_of(row.fields["consumers"])),
                ragged=problem.ragged,
                packed=problem.group,
                **masks,
                scale_first=not problem.scale > 0,
                store_bytes=store_bytes,
                shares_out=shares_out,
            )
    raise AssertionError(f"no tile of the table holds headdim {wide}")


def repacked(
    problem: Problem, strides: Mapping[str, tuple[int, ...]], pointers: int
) -> tuple[str, ...]:
    """Those of q, k and v that must be copied first: the copy engine reads rows that begin at multiples of 16 bytes."""
    return tuple(
        name
        for name, each in strides.items()
        if name != "out"
        and (pointers % 16 or any(stride % 16 for stride in _real(problem, name, each)))
    )


def _repacking_pays(
    problem: Problem, strides: Mapping[str, tuple[int, ...]], pointers: int
) -> bool:
    # Copies 2 bytes wide, which the portable kernel would make of every tile, cost it most of its speed.
    together = functools.reduce(operator.or_, (x for each in strides.values() for x in each[:-1]))
    return (
        problem.max_seqlen_k >= REPACK_SEQLEN
        or _source.copy_bytes(problem, together, pointers) == 2
    )


def _mappable(problem: Problem, name: str, strides: tuple[int, ...]) -> bool:
    """Whether a tensor map can have these strides, in multiples of 16 as they are."""
    return all(0 < stride < 2**40 for stride in _real(problem, name, strides))


def _real(problem: Problem, name: str, strides: tuple[int, ...]) -> Iterator[int]:
    """Strides of the axes before the last one that have more than one element."""
    queries = name in ("q", "out")
    rows = problem.rows_q if queries else problem.rows_k
    nheads = problem.nheads_q if queries else problem.nheads_kv
    extents = (rows, nheads) if problem.group else (problem.batch, rows, nheads)
    return (stride for stride, extent in zip(strides[:-1], extents, strict=True) if extent > 1)


def _table(problem: Problem) -> str:
    # With a limit on the left a thread has more to remember, and a window is better met by small key tiles.
    if problem.window_left is not None:
        return "left"
    return "long" if problem.max_seqlen_k >= LONG_SEQLEN else "any"


def heads_per_tile(problem: Problem, tile_rows: int) -> int:
    """Query heads of a kv head whose rows share a tile: as many as fit.

    Fewer query rows a tile waste fewer products at the edges of masks and at the ends of sequences, and fewer tiles read the
    same keys. A warp's 16 rows must be those of one head. And a consumer's 64 must not be parts of two heads with other rows
    between: it would visit the key tiles of all (docs/notes/hopper-forward.md).
    """
    group = problem.nheads_q // problem.nheads_kv

    def fits(heads: int) -> bool:
        rows = tile_rows // heads
        whole = group % heads == 0 and tile_rows % (16 * heads) == 0
        return whole and (rows <= 64 or rows % 64 == 0)

    return max(heads for heads in range(1, tile_rows // 16 + 1) if heads == 1 or fits(heads))


def kept_tiles(problem: Problem, config: Config, clusters: int) -> int:
    """Query tiles of each head that come after the others of all heads: the shortest, where causal tiles differ.

    They fill the gaps that the last long ones leave. More of them balance better, and read more of K and V from DRAM.
    """
    if problem.ragged or problem.window_right is None or problem.window_left is not None:
        return 0
    tiles = -(-problem.rows_q // config.schedule_rows)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    # The longest tile of a head is as long as it has tiles, the first n together are n^2 / 2 long.
    return min(tiles, math.ceil(math.sqrt(2 * _KEPT_ROUNDS * clusters * tiles / heads)))


@dataclass(frozen=True, slots=True)
class SharedOut:
    """How the last query tiles are shared out by keys (kernels_cu/attn/partial_work.cuh)."""

    tiles: int
    piece: int  # key tiles
    items: int  # at most: numbers of items are below it
    partial_bytes: int  # of what all items come to
    counters: int  # of a tile's items, one for each of its waves


def shared_out(problem: Problem, config: Config, clusters: int) -> SharedOut | None:
    """What so many clusters of blocks share out: what remains behind whole rounds of tiles. None where it does not pay."""
    if not config.shares_out:
        return None
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    tiles = -(-problem.rows_q // config.schedule_rows) * heads % clusters
    keys = -(-problem.rows_k // config.tile_k)
    piece = -(-tiles * keys // clusters)
    if tiles == 0 or keys - piece < WORTH_SHARING:
        return None
    pieces = -(-tiles * keys // piece)
    items = pieces + tiles - 1
    waves = config.cluster * config.consumers * 4
    # Each lane has 16 bytes twice for 16 columns of its two rows, and once for their references and sums.
    wave_bytes = 32 * 16 * (2 * -(-config.headdim_v // 16) + 1)
    return SharedOut(tiles, piece, items, items * waves * wave_bytes, tiles * waves)


def row_bound(rows: int) -> int:
    """Where the row axis of a ragged map ends: no sequence is longer."""
    return 1 << max(rows - 1, 1).bit_length()


def geometry(
    problem: Problem,
    strides: tuple[int, ...],
    *,
    rows: int,
    nheads: int,
    headdim: int,
    box_rows: int,
    box_heads: int = 1,
) -> Geometry:
    """The map of q, k, v or out: axes (column, row, head, row again, batch).

    In a ragged map the first row axis ends at `row_bound`, where the kernel lets every sequence end, so that past the end of
    a sequence all is out of bounds: loads arrive as zeros, stores are left out. The map starts as many rows before the array,
    and the second row axis brings a sequence back to its place.
    """
    batch_stride, row_stride, head_stride = (0, *strides[:2]) if problem.group else strides[:3]
    bound = row_bound(rows) if problem.ragged else rows
    outer = rows + 1 if problem.ragged else 1
    batch = 1 if problem.group else problem.batch

    def legal(stride: int, extent: int) -> int:
        return stride if extent > 1 else 16  # the stride of an axis of one element says nothing

    row_stride = legal(row_stride, rows)
    return Geometry(
        dtype=problem.dtype,
        dims=(headdim, bound, nheads, outer, batch),
        strides=(row_stride, legal(head_stride, nheads), row_stride, legal(batch_stride, batch)),
        box=(64, box_rows, box_heads, 1, 1),
        origin=-bound * row_stride if problem.ragged else 0,
    )
