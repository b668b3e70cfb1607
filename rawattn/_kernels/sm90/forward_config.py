"""The configuration that kernels_cu/sm90/forward.cu is compiled with, and what follows from it. `forward` chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rawattn._compile.compiler import Source
from rawattn._kernels import features, params
from rawattn._kernels.features import Features
from rawattn._kernels.sm90 import bias_slots
from rawattn._kernels.source import dims, round_up
from rawattn._kernels.source import source as _source

ENTRY = "rawattn_sm90_forward"

# Bytes of K and V whose tiles are scheduled next to each other (a section of heads). They are a fraction of the L2 cache:
# reads from DRAM cost power, and power bounds the speed of long calls (docs/notes/hopper-forward.md).
SECTION_BYTES = 9 << 20

# Rows of the output in one TMA store: those of a warp.
STORE_ROWS = 16

# The largest ragged batch, in sequences, that each block orders for itself. Larger ones are ordered by a launch of their own.
MOST_ORDERED = 64

# The most keys of a mask that the kernel reads as bools (`forward.masks_keys`): 32 for each lane of a warp.
MOST_MASKED_KEYS = 1024

# Slots for 8-bit key tiles that wait to be converted, and as many for values (kStoredSlots in the kernel); bytes of a row of
# the swizzle, in which they lie.
_STORED_SLOTS, _STORED_ROW_BYTES = 2, 128

# The fewest keys of a query tile, or of its part, for which sharing them saves more than merging takes (`Config.shares_keys`).
_LEAST_SHARED_KEYS, _LEAST_SHARED_KEYS_PAGED = 448, 1280

# Registers of an SM; the multiple of registers a thread that setmaxnreg takes.
_REGISTERS, _REGISTER_STEP = 65536, 8
_LEAST_REGISTERS = 24  # of a producer's thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """The named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks"})

    element: str
    headdim: int
    headdim_v: int
    tile_k: int
    consumers: int
    stages: int
    cluster: int  # blocks of a cluster, which share keys and values by TMA multicast
    ping_pong: bool
    late_scaling: bool  # scores are scaled beside their exponentials, not before the running max
    consumer_registers: int  # of a consumer's thread; the producer's threads have the rest
    store_bytes: int  # of one store of a lane to the output
    tensor_stores: bool  # the output is stored by TMA, through a buffer in shared memory
    stream_k: bool  # the keys of the last query tiles are split among all blocks
    page_rows: int = (
        0  # rows of a box of keys or values in pages: 1 where lanes copy rows, 0 without pages
    )
    whole_rows: bool = False  # such a box has all columns of its rows, else 64
    # The slots in shared memory for a bias: 0 where lanes read it from global memory.
    bias_rows: int = 0  # rows of each head in a slot
    bias_heads: int = 0  # heads in a slot
    bias_stages: int = 0  # slots
    bias_by_rows: bool = False  # rows are copied one by one, else boxes of 64 keys come by TMA
    heads_per_tile: int = 1  # query heads of one kv head whose rows share a tile
    interleaved: bool = False  # a tile's rows are in the order of queries, then of heads
    query_slots: int = 1  # with two, the next tile's queries come while this one's are still read
    ramp: bool = False  # Q K^T includes what ALiBi or a score function's line adds along the keys
    key_mask: bool = False  # the kernel reads a mask of one bool for each key
    carried: bool = False  # the lengths of few sequences are in the kernel's parameters

    @property
    def tile_rows(self) -> int:
        return rows_of(self.consumers)

    @property
    def tile_q(self) -> int:
        """Query rows of each head in a tile."""
        return self.tile_rows // self.heads_per_tile

    @property
    def copies_rows(self) -> bool:
        """Whether lanes of the producer copy the rows of keys and values, without tensor maps."""
        return self.page_rows == 1

    @property
    def run_rows(self) -> int:
        return run_rows(self.consumers, self.heads_per_tile)

    @property
    def schedule_rows(self) -> int:
        """Query rows of each head that the schedule hands out at once: those of all tiles of a cluster."""
        return self.tile_q * self.cluster

    @property
    def section_bytes(self) -> int:
        return SECTION_BYTES

    @property
    def shares_keys(self) -> bool:
        """Whether all consumers work on a query tile that has rows for one of them alone, each on other keys.

        They do not where more than their products depends on whose rows they are: masks with lists or bits of a tile, a bias in
        slots, queries that are converted for float8.
        """
        if self.bias_stages or self.key_mask or self.block_mask or self.float8:
            return False
        if 2 * round_up(self.headdim_v, 16) > self.consumers * round_up(self.headdim, 64):
            return False  # where the queries were is no room for the output
        heads = 1 if self.interleaved else self.heads_per_tile
        return shares_keys(self.consumers, self.stages, self.cluster, heads)

    @property
    def least_shared_keys(self) -> int:
        return least_shared_keys(self.paged)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def blocks_per_sm(self) -> int:
        return blocks_per_sm(self.consumers, self.consumer_registers)

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread: what consumers leave. Before setmaxnreg all threads have equally many."""
        each = _REGISTERS // self.blocks_per_sm // self.threads // _REGISTER_STEP * _REGISTER_STEP
        return each * (1 + self.consumers) - self.consumer_registers * self.consumers

    @property
    def most_ordered(self) -> int:
        return MOST_ORDERED

    @property
    def most_masked_keys(self) -> int:
        return MOST_MASKED_KEYS

    @property
    def carried_words(self) -> int:
        """Words of 32 bits for carried lengths: starts and lengths of up to `MOST_ORDERED` sequences of q and of k."""
        return 4 * (MOST_ORDERED + 1) if self.carried else 0

    @property
    def bias_slot(self) -> bias_slots.Slot:
        return bias_slots.Slot(self.bias_rows, self.bias_heads, self.bias_by_rows)

    @property
    def shared_bytes(self) -> int:
        row_bytes_qk = 128 * -(-self.headdim // 64)
        row_bytes_v = 128 * -(-self.headdim_v // 64)
        tiles = self.query_slots * self.tile_rows * row_bytes_qk
        tiles += self.stages * self.tile_k * (row_bytes_qk + row_bytes_v)
        outputs = self.tile_rows * row_bytes_v if self.tensor_stores else 0
        biases = bias_slots.nbytes(self.bias_slot, self.bias_stages, self.tile_k)
        sides = 2 if self.alibi and not self.one_sided else 1
        ramp = -(-16 * (self.tile_rows + sides * self.tile_k) // 1024) * 1024 if self.ramp else 0
        # The last 1024 bytes are for mbarriers, two slots of work, the order of few sequences and the bits of a mask of keys.
        return tiles + outputs + biases + self._stored_bytes + ramp + 1024

    @property
    def _stored_bytes(self) -> int:
        """Bytes of the slots for keys and values of 8 bits."""
        if not self.float8:
            return 0
        blocks = sum(-(-columns // _STORED_ROW_BYTES) for columns in (self.headdim, self.headdim_v))
        return _STORED_SLOTS * self.tile_k * blocks * _STORED_ROW_BYTES

    def source(self) -> Source:
        return _source(
            ENTRY,
            "sm90/forward.cu",
            self.summary(),
            params.SM90_FORWARD,
            element=self.element,
            constants=features.constants(
                self,
                *("blocks_per_sm", "producer_registers", "shared_bytes", "most_ordered"),
                *("most_masked_keys", "carried_words", "shares_keys", "least_shared_keys"),
            ),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        # A packed batch is a ragged one.
        traits = features.traits(self, leave_out=("ragged",) if self.packed else ())
        tile = f"{self.tile_rows}x{self.tile_k}"
        if self.heads_per_tile > 1:
            tile += f" heads={self.heads_per_tile}" + " interleaved" * self.interleaved
        if self.cluster > 1:
            tile += f" cluster={self.cluster}"
        if self.blocks_per_sm > 1:
            tile += f" blocks={self.blocks_per_sm}"
        if self.bias_stages:
            form = "rows" if self.bias_by_rows else "boxes"
            traits.append(f"bias_{form}={self.bias_rows}x{self.bias_heads}s{self.bias_stages}")
        if self.page_rows:
            traits.append(f"page_rows={self.page_rows}" + " whole" * self.whole_rows)
        if self.tensor_stores:
            traits.append("tensor_stores")
        if self.ramp:
            traits.append("ramp")
        if self.key_mask:
            traits.append("key_mask")
        if self.stream_k:
            traits.append("stream_k")
        if self.carried:
            traits.append("carried")
        if self.store_bytes < 16:
            traits.append(f"{self.store_bytes}B")
        return " ".join(["sm90 forward", self.element, dims(self), tile, *traits])


def rows_of(consumers: int) -> int:
    """Rows of a tile, over all its heads."""
    return 64 * consumers


def shares_keys(consumers: int, stages: int, cluster: int, heads: int) -> bool:
    """Whether the consumers of a block may share key tiles, by the shape of the block: each has slots of its own then.

    heads: as of `first_has_first_rows`.
    """
    apart = consumers > 1 and stages % consumers == 0 and cluster == 1
    return apart and first_has_first_rows(consumers, heads)


def least_shared_keys(paged: bool) -> int:
    return _LEAST_SHARED_KEYS_PAGED if paged else _LEAST_SHARED_KEYS


def first_has_first_rows(consumers: int, heads: int) -> bool:
    """Whether a tile's first consumer has its first query rows of all heads, not all rows of some heads.

    heads: those whose rows share a tile, 1 if they are interleaved.
    """
    return heads == 1 or run_rows(consumers, heads) * heads <= 64


def run_rows(consumers: int, heads: int) -> int:
    """Consecutive rows of a tile that belong to one of its heads (kernels_cu/sm90/rows.cuh)."""
    tile_q = rows_of(consumers) // heads
    return tile_q if tile_q % 64 == 0 or 64 % tile_q == 0 else STORE_ROWS


def blocks_per_sm(consumers: int, consumer_registers: int) -> int:
    """Blocks that an SM runs at once, by their registers. Tiles of which several run are small enough in shared memory too."""
    return _REGISTERS // (128 * (consumers * consumer_registers + _LEAST_REGISTERS))
