"""A call of a compiled program: all of it but its arrays, as a text that the program holds."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.problem import Problem, result_shapes

Like = tuple[tuple[int, ...], np.dtype[Any]]  # the shape and dtype of an array

_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """Integers of a layout that the program is given or computes: their place among those of the call, and what they are."""

    place: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Record:
    """A call of the forward or the backward. The integers of `lengths` are all NumPy arrays, or all an `Operand`.

    lse: of the forward, whether it returns that; of the backward, whether it is given dlse.
    """

    problem: Problem
    lengths: Lengths
    lse: bool
    deterministic: bool
    backward: bool = False

    @functools.cached_property
    def text(self) -> str:
        """Equal for equal calls."""
        fields = {
            "problem": asdict(self.problem),
            "q": _encode(self.lengths.q),
            "k": _encode(self.lengths.k),
            "lse": self.lse,
            "deterministic": self.deterministic,
            "backward": self.backward,
        }
        return json.dumps(fields, separators=(",", ":"))

    @functools.cached_property
    def operands(self) -> list[Operand]:
        """Each once, in their order."""
        sides = (self.lengths.q, self.lengths.k)
        found = {x for side in sides for x in (side.start, side.length) if isinstance(x, Operand)}
        return sorted(found, key=lambda operand: operand.place)

    @functools.cached_property
    def inputs(self) -> list[Like]:
        """q, k, v; or dout, q, k, v, out, lse and perhaps dlse. Then the operands."""
        *qkv, out, lse = self._arrays()
        found = qkv
        if self.backward:
            found = [out, *qkv, out, lse, *([lse] if self.lse else [])]
        return found + [(x.shape, np.dtype(x.dtype)) for x in self.operands]

    @functools.cached_property
    def outputs(self) -> list[Like]:
        """out and perhaps lse; or dq, dk, dv."""
        *qkv, out, lse = self._arrays()
        return qkv if self.backward else [out, lse] if self.lse else [out]

    def _arrays(self) -> list[Like]:
        """q, k, v, out, lse."""
        problem = self.problem
        batch = () if problem.group else (problem.batch,)
        shapes = [
            (*batch, problem.rows_q, problem.nheads_q, problem.headdim),
            (*batch, problem.rows_k, problem.nheads_kv, problem.headdim),
            (*batch, problem.rows_k, problem.nheads_kv, problem.headdim_v),
        ]
        out, lse = result_shapes(problem)
        dtype = _DTYPES[problem.dtype]
        return [*((shape, dtype) for shape in (*shapes, out)), (lse, np.dtype(np.float32))]

    def bound(self, arrays: Sequence[Any]) -> Lengths:
        """The sequences of a run whose operands are these arrays."""
        if self.lengths.on_host:
            return self.lengths

        def integers(x: Operand | None) -> Any:
            return None if x is None else arrays[x.place]

        return _with_integers(self.lengths, integers)

    def folded(self, size: int) -> Record:
        """`size` calls in batch mode as one, whose batch has the sequences of all, call after call.

        Cumulative lengths are none any more.
        """
        batch = size * self.problem.batch

        def side(x: Side) -> Side:
            length = x.length
            if isinstance(length, np.ndarray):
                length = np.tile(np.diff(length) if x.cumulative else length, size)
            elif length is not None:
                length = replace(length, shape=(batch,))
            return replace(x, length=length, cumulative=False)

        q, k, on_host = side(self.lengths.q), side(self.lengths.k), self.lengths.on_host
        return replace(
            self,
            problem=replace(self.problem, batch=batch),
            lengths=Lengths(batch=batch, group=False, q=q, k=k, on_host=on_host),
        )


@functools.lru_cache(maxsize=1024)
def read(text: str | bytes) -> Record:
    """The record that has this text."""
    fields = json.loads(text)
    problem = Problem(**fields.pop("problem"))
    q, k = _decode(fields.pop("q")), _decode(fields.pop("k"))
    integers = (q.start, q.length, k.start, k.length)
    on_host = not any(isinstance(x, Operand) for x in integers)
    lengths = Lengths(batch=problem.batch, group=problem.group, q=q, k=k, on_host=on_host)
    return Record(problem, lengths, **fields)


def with_operands(lengths: Lengths) -> tuple[Lengths, list[Any]]:
    """`lengths` with an `Operand` for each array of integers, and the arrays: each once, whatever it is of."""
    arrays: list[Any] = []

    def operand(x: Any) -> Operand | None:
        if x is None:
            return None
        place = next((n for n, array in enumerate(arrays) if array is x), len(arrays))
        if place == len(arrays):
            arrays.append(x)
        return Operand(place, tuple(x.shape), x.dtype.name)

    return _with_integers(lengths, operand), arrays


def _with_integers(lengths: Lengths, integers: Any) -> Lengths:
    def side(x: Side) -> Side:
        return replace(x, start=integers(x.start), length=integers(x.length))

    q, k = side(lengths.q), side(lengths.k)
    return Lengths(batch=lengths.batch, group=lengths.group, q=q, k=k, on_host=False)


def _encode(side: Side) -> dict[str, Any]:
    def integers(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return {"dtype": x.dtype.name, "values": x.tolist()}
        return x if x is None else asdict(x)

    fields = {name: getattr(side, name) for name in ("cumulative", "rows", "max_seqlen", "padded")}
    return {"start": integers(side.start), "length": integers(side.length), **fields}


def _decode(fields: dict[str, Any]) -> Side:
    def integers(x: dict[str, Any] | None) -> Any:
        if x is None:
            return None
        if "values" in x:
            return np.array(x["values"], x["dtype"])
        return Operand(x["place"], tuple(x["shape"]), x["dtype"])

    start, length = integers(fields.pop("start")), integers(fields.pop("length"))
    return Side(start=start, length=length, **fields)
