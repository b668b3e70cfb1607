"""What the compiler is told about kernels_cu/sm90/forward.cu, and what follows from it; `forward` chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rawattn._compile.compiler import Source
from rawattn._kernels import features, params
from rawattn._kernels.features import Features
from rawattn._kernels.sm90 import bias_slots
from rawattn._kernels.source import dims
from rawattn._kernels.source import source as _source

ENTRY = "rawattn_sm90_forward"

# K and V of this much are scheduled together. A fraction of the L2 cache: what is read from DRAM costs power, and power is
# what bounds long calls (docs/notes/hopper-forward.md).
SECTION_BYTES = 9 << 20

# Rows of the output that TMA stores at a time: a warp's.
STORE_ROWS = 16

# Sequences of a ragged batch, up to which each block orders them for itself.
MOST_ORDERED = 64

# Keys of a sequence, up to which a mask of keys is read as it comes: 32 of each lane of a warp.
MOST_MASKED_KEYS = 1024

# Tiles of 8 bits that wait to be converted, of keys and of values (kStoredSlots in the kernel), in rows of so many bytes.
_STORED_SLOTS, _STORED_ROW_BYTES = 2, 128

# Registers of a multiprocessor, and of a thread what setmaxnreg counts in.
_REGISTERS, _REGISTER_STEP = 65536, 8
_LEAST_REGISTERS = 24  # of a thread, the producer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """Everything the compiler is told: the named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks"})

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
    store_bytes: int  # of an access to the output
    tensor_stores: bool  # by TMA, through a buffer in shared memory
    stream_k: bool  # the keys of the last query tiles, among all blocks
    page_rows: int = (
        0  # of a box of keys or values, where those are in pages; 1 where lanes copy rows
    )
    whole_rows: bool = False  # in it, else 64 columns of each
    # Of a bias that comes to slots: 0 where lanes read it from memory.
    bias_rows: int = 0  # of each head in a slot
    bias_heads: int = 0
    bias_stages: int = 0
    bias_by_rows: bool = False  # copied one by one, else in boxes of 64 keys by TMA
    heads_per_tile: int = 1  # query heads of one kv head whose rows share a tile
    interleaved: bool = False  # those: query by query, head by head
    query_slots: int = 1  # with two, the next tile's queries come while this one's are still read
    ramp: bool = False  # what ALiBi or a line adds along the keys is part of the products
    key_mask: bool = False  # a bool of each key, read as it comes
    carried: bool = False  # lengths of few sequences in the kernel's parameters

    @property
    def tile_rows(self) -> int:
        return rows_of(self.consumers)

    @property
    def tile_q(self) -> int:
        """Query rows of each head."""
        return self.tile_rows // self.heads_per_tile

    @property
    def copies_rows(self) -> bool:
        """Of keys and values: lanes of the producer do, which needs no tensor maps."""
        return self.page_rows == 1

    @property
    def run_rows(self) -> int:
        """Query rows of a head that follow each other in a tile: see kernels_cu/sm90/rows.cuh."""
        return self.tile_q if self.tile_q % 64 == 0 or 64 % self.tile_q == 0 else STORE_ROWS

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
    def blocks_per_sm(self) -> int:
        return blocks_per_sm(self.consumers, self.consumer_registers)

    @property
    def producer_registers(self) -> int:
        """Of a thread. A block begins with as many for each thread and shares them out anew."""
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
        """Of 32 bits: starts and lengths of as many sequences as a block orders, on both sides."""
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
        # Barriers, two slots of work, the order of a few sequences and the bits of a mask of keys have 1024.
        return tiles + outputs + biases + self._stored_bytes + ramp + 1024

    @property
    def _stored_bytes(self) -> int:
        """Of keys and values as pages of 8 bits hold them."""
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
                *("most_masked_keys", "carried_words"),
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
    """Of a tile, over all its heads."""
    return 64 * consumers


def blocks_per_sm(consumers: int, consumer_registers: int) -> int:
    """How many run at once, by their registers. Tiles of more than one leave each other shared memory too."""
    return _REGISTERS // (128 * (consumers * consumer_registers + _LEAST_REGISTERS))
