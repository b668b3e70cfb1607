"""Calls of `attention`, as data: a `Case` describes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.score_arrays import OPTIONS, Pairs


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    lens are logical lengths, room physical ones; they are equal by default.
    """

    name: str = ""
    dtype: str = "bfloat16"
    nheads_q: int = 2
    nheads_kv: int = 2
    headdim: int = 64
    headdim_v: int | None = None
    packed: bool = False
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    room_q: tuple[int, ...] | None = None
    room_k: tuple[int, ...] | None = None
    lead: int = 0  # group mode: rows before the first sequence
    tail: int = 0  # group mode: rows after the last sequence
    by_q: str = "room"  # source of the lengths: room (physical), seqlen, cu_seqlen, both
    by_k: str = "room"
    positions_q: tuple[int, ...] = ()  # of the sequences in longer ones; () for none
    positions_k: tuple[int, ...] = ()
    integers: str = "int32"  # of lengths, offsets and positions: int32, int64, or list
    on_device: bool = False  # lengths and offsets lie on the GPU
    max_seqlen: bool = False
    share_starts: bool = False  # leave seqstart_k to its default
    causal: bool = False
    align: str = "bottom-right"
    window: tuple[int | None, int | None] | None = None
    sink: int = 0
    scale: float | None = None
    layout: str = "dense"
    give_out: bool = False
    return_lse: bool = True
    values: str = "normal"  # distribution of q, k, v; or uniform, large, constant, negative (scores < 0 that rise with the key)
    softcap: float | None = None
    bias: Pairs | None = None
    mask: Pairs | None = None
    alibi_slopes: str = ""  # or heads, batch: shape (heads,) or (batch, heads); or negative
    sink_logits: str = ""  # or normal, hidden (-inf in every other head)
    score_mod: str = ""  # or a key of SCORE_MODS
    dropout_p: float = 0.0
    drawn_by: str = "int"  # the dropout seed: an int, or (int32, int64) an array of that dtype
    num_splits: int | None = None  # for the forward
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.lens_q) == len(self.lens_k), self
        for by, lens, rooms in ((self.by_q, *self.side_q), (self.by_k, *self.side_k)):
            assert len(rooms) == len(lens), self
            assert self.packed or len(set(rooms)) <= 1, self
            assert all(0 <= n <= room for n, room in zip(lens, rooms, strict=True)), self
            assert by != "room" or lens == rooms, self
        for positions in (self.positions_q, self.positions_k):
            assert len(positions) in (0, len(self.lens_q)), self

    @property
    def side_q(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lens_q, self.lens_q if self.room_q is None else self.room_q

    @property
    def side_k(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lens_k, self.lens_k if self.room_k is None else self.room_k

    @property
    def batch(self) -> int:
        return len(self.lens_q)

    @property
    def scores(self) -> int:
        """The number of scores of the call, which decides what a check in NumPy costs."""
        return self.nheads_q * sum(a * b for a, b in zip(self.lens_q, self.lens_k, strict=True))

    @property
    def score_options(self) -> tuple[str, ...]:
        """The options of this case that change scores or probabilities."""
        return tuple(name for name in OPTIONS if getattr(self, name))

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


def dense(name: str, batch: int, seqlen_q: int, seqlen_k: int, **knobs: Any) -> Case:
    return Case(name=name, lens_q=(seqlen_q,) * batch, lens_k=(seqlen_k,) * batch, **knobs)


def padded(name: str, lens_q: Any, lens_k: Any, room_q: int, room_k: int, **knobs: Any) -> Case:
    """A batch-mode case with logical lengths below the physical ones."""
    rooms = {"room_q": (room_q,) * len(lens_q), "room_k": (room_k,) * len(lens_k)}
    knobs = {"by_q": "seqlen", "by_k": "seqlen", **knobs}
    return Case(name=name, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **rooms, **knobs)


def ragged(name: str, lens_q: Any, lens_k: Any, **knobs: Any) -> Case:
    """A group-mode case. Without room_q and room_k the sequences lie back to back."""
    return Case(name=name, packed=True, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **knobs)
