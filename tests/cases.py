"""Calls of the contract as data: each `Case` names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.score_arrays import OPTIONS, Pairs


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths are logical, rooms physical; by default they are equal."""

    name: str = ""
    dtype: str = "bfloat16"
    nheads_q: int = 2
    nheads_kv: int = 2
    headdim: int = 64
    headdim_v: int | None = None
    group: bool = False
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    room_q: tuple[int, ...] | None = None
    room_k: tuple[int, ...] | None = None
    lead: int = 0  # group mode: rows before the first sequence
    tail: int = 0  # and after the last
    by_q: str = "room"  # where lengths come from: room (physical), seqlen, cu_seqlen, both
    by_k: str = "room"
    integers: str = "int32"  # or int64, list
    on_device: bool = False  # the integers
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
    values: str = "normal"  # or uniform, large, constant, negative (scores, rising with the key)
    softcap: float | None = None
    bias: Pairs | None = None
    mask: Pairs | None = None
    alibi_slopes: str = ""  # or heads, batch: what they have an axis for; or negative
    sink_logits: str = ""  # or normal, hidden (-inf in some heads)
    score_mod: str = ""  # or a name of SCORE_MODS
    dropout_p: float = 0.0
    drawn_by: str = "int"  # or int32, int64: the seed of the dropout in an array
    num_splits: int | None = None  # of the forward
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.lens_q) == len(self.lens_k), self
        for by, lens, rooms in ((self.by_q, *self.side_q), (self.by_k, *self.side_k)):
            assert len(rooms) == len(lens), self
            assert self.group or len(set(rooms)) <= 1, self
            assert all(0 <= n <= room for n, room in zip(lens, rooms, strict=True)), self
            assert by != "room" or lens == rooms, self

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
        """Score elements of the call: what a check in NumPy costs."""
        return self.nheads_q * sum(a * b for a, b in zip(self.lens_q, self.lens_k, strict=True))

    @property
    def score_options(self) -> tuple[str, ...]:
        """Of those that change scores or probabilities, the ones it has."""
        return tuple(name for name in OPTIONS if getattr(self, name))

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


def dense(name: str, batch: int, seqlen_q: int, seqlen_k: int, **knobs: Any) -> Case:
    return Case(name=name, lens_q=(seqlen_q,) * batch, lens_k=(seqlen_k,) * batch, **knobs)


def padded(name: str, lens_q: Any, lens_k: Any, room_q: int, room_k: int, **knobs: Any) -> Case:
    """Batch mode with logical lengths."""
    rooms = {"room_q": (room_q,) * len(lens_q), "room_k": (room_k,) * len(lens_k)}
    knobs = {"by_q": "seqlen", "by_k": "seqlen", **knobs}
    return Case(name=name, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **rooms, **knobs)


def ragged(name: str, lens_q: Any, lens_k: Any, **knobs: Any) -> Case:
    """Group mode; without rooms the sequences lie back to back."""
    return Case(name=name, group=True, lens_q=tuple(lens_q), lens_k=tuple(lens_k), **knobs)
