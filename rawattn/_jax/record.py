"""`Record`: a call of a compiled program, everything but its arrays, as a text that the program holds."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from rawattn._call.dtypes import DTYPES
from rawattn._call.layout import Lengths, Side
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem, result_shapes
from rawattn._interop.integers import as_array
from rawattn._masks import layout as mask_layout
from rawattn._runtime.option_arrays import extended
from rawattn._runtime.verbs import BACKWARD, FORWARD, Verb
from rawattn._scores.program import ScoreText

ShapeDtype = tuple[tuple[int, ...], np.dtype[Any]]  # the shape and dtype of an array

_INTEGERS = ("start", "length", "position")  # the fields of a `Side` that are arrays
# The NamedTuples among the fields of a `Problem`, by name. All other fields are plain values or tuples.
_FORMS: dict[str, Any] = {form.__name__: form for form in (ArrayForm, ScoreText)}
_MASK_BYTES: dict[str, Callable[[Any], int]] = {
    "mask_bits": lambda form: mask_layout.bits_bytes(form.shape),
    "mask_map": lambda form: mask_layout.map_bytes(form.shape),
    "mask_keys": lambda form: mask_layout.keys_bytes(form.shape),
    "mask_kept": lambda form: 4 * math.prod(form.shape[:2]) * form.kept,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """An integer array of a layout that is an input of the custom call. index: its place among the call's integer arrays."""

    index: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Record:
    """A call of the forward or the backward. The integers of `lengths` are all NumPy arrays, or all `Operand`s.

    lse: for the forward, whether it returns lse; for the backward, whether it is given dlse.
    options: names of the options' arrays among the inputs. gradients: names of their gradients that the backward returns.
    seed: the seed of dropout if it is a number, else None.
    """

    problem: Problem
    lengths: Lengths
    lse: bool
    deterministic: bool
    backward: bool = False
    options: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    seed: int | None = None

    @functools.cached_property
    def text(self) -> str:
        """The record as JSON. Equal calls have equal texts."""
        problem = {x.name: getattr(self.problem, x.name) for x in fields(self.problem)}
        found = {
            "problem": {name: _encode_value(x) for name, x in problem.items()},
            "q": _encode(self.lengths.q),
            "k": None if self.lengths.k is self.lengths.q else _encode(self.lengths.k),
            "lse": self.lse,
            "deterministic": self.deterministic,
            "backward": self.backward,
            "options": self.options,
            "gradients": self.gradients,
            "seed": self.seed,
        }
        return json.dumps(found, separators=(",", ":"))

    @functools.cached_property
    def verb(self) -> Verb:
        """The verb, with the arrays of options among its inputs and their gradients among its outputs."""
        values = () if self.seed is None else ("seed_value",)
        if not (self.options or values):
            return BACKWARD if self.backward else FORWARD
        if self.backward:
            return extended(BACKWARD, self.options, values, self.gradients)
        return extended(FORWARD, self.options, values, ())

    @functools.cached_property
    def operands(self) -> list[Operand]:
        """The operands of `lengths`, each once, ordered by index."""
        sides = (self.lengths.q, self.lengths.k)
        integers = [getattr(side, name) for side in sides for name in _INTEGERS]
        found = {x for x in integers if isinstance(x, Operand)}
        return sorted(found, key=lambda operand: operand.index)

    @functools.cached_property
    def inputs(self) -> list[ShapeDtype]:
        """Forms of the inputs: q, k, v of a forward, or dout, q, k, v, out, lse and, if given, dlse of a backward. Then the
        arrays of options, then the operands.
        """
        *qkv, out, lse = self._arrays()
        found = qkv
        if self.backward:
            found = [out, *qkv, out, lse, *([lse] if self.lse else [])]
        found += [self.shape_dtype(name) for name in self.options]
        return found + [(x.shape, np.dtype(x.dtype)) for x in self.operands]

    @property
    def first_option(self) -> int:
        """The index of the first array of options among the inputs."""
        return len(self.inputs) - len(self.operands) - len(self.options)

    def form(self, option: str) -> Any:
        if option.startswith("captured"):
            return self.problem.captured[int(option.removeprefix("captured"))]
        return self.problem.mask if option in _MASK_BYTES else getattr(self.problem, option)

    def shape_dtype(self, option: str) -> ShapeDtype:
        form = self.form(option)
        if option in _MASK_BYTES:
            return (-(-_MASK_BYTES[option](form) // 4),), np.dtype(np.int32)
        return form.given, DTYPES.get(form.dtype) or np.dtype(form.dtype)

    @functools.cached_property
    def outputs(self) -> list[ShapeDtype]:
        """Forms of the results: out and perhaps lse of a forward, or dq, dk, dv and the options' gradients of a backward."""
        *qkv, out, lse = self._arrays()
        if self.backward:
            return qkv + [self.shape_dtype(name.removeprefix("d")) for name in self.gradients]
        return [out, lse] if self.lse else [out]

    def _arrays(self) -> list[ShapeDtype]:
        """Forms of q, k, v, out, lse."""
        problem = self.problem
        batch = () if problem.packed else (problem.batch,)
        shapes = [
            (*batch, problem.rows_q, problem.nheads_q, problem.headdim),
            (*batch, problem.rows_k, problem.nheads_kv, problem.headdim),
            (*batch, problem.rows_k, problem.nheads_kv, problem.headdim_v),
        ]
        out, lse = result_shapes(problem)
        dtype = DTYPES[problem.dtype]
        return [*((shape, dtype) for shape in (*shapes, out)), (lse, np.dtype(np.float32))]

    def bound(self, arrays: Sequence[Any]) -> Lengths:
        """The lengths with `arrays` in place of the operands. Lengths on the host are returned as they are."""
        if self.lengths.on_host:
            return self.lengths

        def integers(x: Operand | None) -> Any:
            return None if x is None else arrays[x.index]

        return _with_integers(self.lengths, integers)

    def folded(self, size: int, shared: Collection[str] = ()) -> Record:
        """`size` calls in batch mode as one call, whose batch holds the sequences of all, call after call.

        Cumulative lengths become plain lengths. Arrays of options get all their axes, the batch axis in full, except those in
        `shared`, which stay as they are.

        NotImplementedError, naming the option, where the one call would give other results than the separate calls.
        """
        batch = size * self.problem.batch

        def side(x: Side) -> Side:
            length, position = x.length, x.position
            if isinstance(length, np.ndarray):
                length = np.tile(np.diff(length) if x.cumulative else length, size)
            elif length is not None:
                length = replace(length, shape=(batch,))
            if isinstance(position, np.ndarray):
                position = np.tile(position, size)
            elif position is not None:
                position = replace(position, shape=(batch,))
            return replace(x, length=length, cumulative=False, position=position)

        q, on_host = side(self.lengths.q), self.lengths.on_host
        k = q if self.lengths.k is self.lengths.q else side(self.lengths.k)
        return replace(
            self,
            problem=replace(self.problem, batch=batch, **self._folded_options(batch, shared)),
            lengths=Lengths(batch=batch, packed=False, q=q, k=k, on_host=on_host),
        )

    def _folded_options(self, batch: int, shared: Collection[str]) -> dict[str, Any]:
        problem = self.problem
        text = problem.score_mod
        gradients = self.gradients if self.backward else ()
        by_batch = isinstance(text, ScoreText) and re.search(r"\bbatch\b", text.forward)
        refused = {
            "dropout_p": problem.dropout_p > 0
            and "what is dropped depends on the index in the batch",
            "sink_logits": "dsink_logits" in gradients and "their gradients would be one sum",
            "score_mod": (by_batch and "it reads `batch`")
            or (
                any(x.startswith("dcaptured") for x in gradients)
                and "gradients of what it captures would be one sum"
            ),
            "mask": problem.mask is not None
            and problem.mask.dtype == "bits"
            and "a BlockMask has a batch of its own",
        }
        for name, why in refused.items():
            if why:
                raise NotImplementedError(
                    f"{name}: jax.vmap of a call with it is not possible, since {why}; use jax.lax.map"
                )
        found = {}
        for name in ("bias", "mask", "alibi_slopes"):
            form = getattr(problem, name)
            if form is not None and name not in shared:
                shape = (batch, *form.shape[1:])
                found[name] = form._replace(shape=shape, given=shape)
        return found


@functools.lru_cache(maxsize=1024)
def read(text: str | bytes) -> Record:
    """The record of a text that `Record.text` made."""
    found = json.loads(text)
    plain = found.pop("problem")
    problem = Problem(**{name: _decode_value(x) for name, x in plain.items()})
    q, k = _decode(found.pop("q")), found.pop("k")
    k = q if k is None else _decode(k)
    for name in ("options", "gradients"):
        found[name] = tuple(found[name])
    integers = [getattr(side, name) for side in (q, k) for name in _INTEGERS]
    on_host = not any(isinstance(x, Operand) for x in integers)
    lengths = Lengths(batch=problem.batch, packed=problem.packed, q=q, k=k, on_host=on_host)
    return Record(problem, lengths, **found)


def with_operands(
    lengths: Lengths, taken: Callable[[Any], Any] = as_array
) -> tuple[Lengths, list[Any]]:
    """`lengths` with an `Operand` for each array of integers, and the arrays. One that is used several times is listed once.

    taken: turns integers into the array that is passed to the program, which may have another dtype.
    """
    given: list[Any] = []
    arrays: list[Any] = []

    def operand(x: Any) -> Operand | None:
        if x is None:
            return None
        index = next((n for n, known in enumerate(given) if known is x), len(given))
        if index == len(given):
            given.append(x)
            arrays.append(taken(x))
        array = arrays[index]
        return Operand(index, tuple(array.shape), array.dtype.name)

    return _with_integers(lengths, operand), arrays


def _with_integers(lengths: Lengths, integers: Any) -> Lengths:
    def side(x: Side) -> Side:
        found = {name: integers(getattr(x, name)) for name in _INTEGERS}
        return replace(x, **found)

    q = side(lengths.q)
    k = q if lengths.k is lengths.q else side(lengths.k)
    return Lengths(batch=lengths.batch, packed=lengths.packed, q=q, k=k, on_host=False)


def _encode(side: Side) -> dict[str, Any]:
    def integers(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return {"dtype": x.dtype.name, "values": x.tolist()}
        return x if x is None else asdict(x)

    fields = {name: getattr(side, name) for name in ("cumulative", "rows", "max_seqlen", "padded")}
    return {name: integers(getattr(side, name)) for name in _INTEGERS} | fields


def _decode(fields: dict[str, Any]) -> Side:
    def integers(x: dict[str, Any] | None) -> Any:
        if x is None:
            return None
        if "values" in x:
            return np.array(x["values"], x["dtype"])
        return Operand(x["index"], tuple(x["shape"]), x["dtype"])

    return Side(**{name: integers(fields.pop(name)) for name in _INTEGERS}, **fields)


def _encode_value(x: Any) -> Any:
    """A field of a `Problem` for JSON: a plain value, or a tuple as a list that begins with its type's name ("": plain)."""
    if not isinstance(x, tuple):
        return x
    name = "" if type(x) is tuple else type(x).__name__
    assert not name or name in _FORMS, name
    return [name, *map(_encode_value, x)]


def _decode_value(x: Any) -> Any:
    if not isinstance(x, list):
        return x
    name, *values = x
    decoded = map(_decode_value, values)
    return _FORMS[name](*decoded) if name else tuple(decoded)
