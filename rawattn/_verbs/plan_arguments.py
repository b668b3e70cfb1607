"""What a call of a plan is given, by position and in the words of the planned function, as the arrays of its verb."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._call import pages
from rawattn._call.options import shown
from rawattn._interop.integers import import_integers
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime.option_arrays import told
from rawattn._runtime.verbs import Verb

# Integers of a layout that a call may be given again.
_LENGTHS = ("seqstart_q", "seqlen_q", "cu_seqlen_q", "seqstart_k", "seqlen_k", "cu_seqlen_k")


class Complete(NamedTuple):
    """All arrays of a call, those not given being the ones of planning time, and integers on the GPU by their names in the
    layout."""

    inputs: list[Any]
    integers: dict[str, Any]


class Arguments:
    """How calls of one plan are read.

    inputs: the arrays of planning time. options: what is left of the options, without arrays. table: the page ids, where the
    host has those of planning time.
    """

    def __init__(self, verb: Verb, inputs: Sequence[Any], options: Any, table: Any = None) -> None:
        self._verb, self._inputs, self._options = verb, tuple(inputs), options
        self._table = table
        self._told = told(verb, options)
        # What the planned function calls them.
        self._indices = {x: n for n, x in enumerate(verb.inputs)}
        for n, name in enumerate(self._told):
            self._indices.setdefault(name, n)

    def complete(self, args: Sequence[Any], named: Mapping[str, Any]) -> Complete:
        """TypeError or ValueError, naming the argument, for what this plan does not take."""
        if len(args) > len(self._inputs):
            raise TypeError(
                f"plan: got {len(args)} arrays, expected {self._names()}, in this order or by name"
            )
        inputs = [*args, *self._inputs[len(args) :]]
        integers: dict[str, Any] = {}
        for name, value in named.items():
            index = self._indices.get(name, -1)
            if index >= len(args):
                if name == "mask" and (self._options.mask or isinstance(value, BlockMask)):
                    self._put_mask(inputs, index, value)
                else:
                    inputs[index] = value
            elif name in _LENGTHS and name not in self._indices:
                self._put_integers(integers, name, value)
            else:
                raise TypeError(
                    f"{name}: this plan takes {self._names()} once each, lengths on the GPU, and arrays to write; whatever "
                    "else the call has is that of planning time"
                )
        if "block_table" in self._indices:
            self._read_table(inputs, integers)
        return Complete(inputs, integers)

    def places(self, count: int, names: Iterable[str]) -> list[int | str]:
        """Of so many arrays by position and of those with these names: their indices among all inputs, or the name itself
        of lengths."""
        return [*range(count), *(self._indices.get(name, name) for name in names)]

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(name.partition("[")[0] for name in self._told))

    def _put_mask(self, inputs: list[Any], index: int, mask: Any) -> None:
        planned = self._options.mask
        if planned is None or not isinstance(mask, BlockMask) or mask.form != planned:
            got = f"a BlockMask {mask.shape}" if isinstance(mask, BlockMask) else shown(mask)
            expected = f"a BlockMask {planned.shape}" if planned else "an array of bools"
            raise ValueError(f"mask: got {got}, expected {expected}, as when the call was planned")
        found = mask.beside(inputs[self._verb.q])
        inputs[index : index + len(found)] = found

    def _put_integers(self, integers: dict[str, Any], name: str, value: Any) -> None:
        planned = getattr(self._options.seqs, name, None)
        if planned is None:
            raise ValueError(f"{name}: the call was not planned with {name}")
        told_as = pages.told(self._options.seqs, name)
        given = import_integers(told_as, value)
        if not isinstance(planned, np.ndarray):
            integers[name] = given
        elif not isinstance(given, np.ndarray):
            raise ValueError(
                f"{told_as}: got an array on a GPU, but the call was planned with it on the host, whose values stay those "
                "of planning time"
            )
        elif not np.array_equal(given, planned):
            raise _changed(told_as)

    def _read_table(self, inputs: list[Any], integers: dict[str, Any]) -> None:
        at = self._indices["block_table"]
        table = inputs[at]
        if table is self._inputs[at]:
            return
        indptr, table = pages.split(table)
        if indptr is not None:
            if self._options.seqs.indptr is None:
                raise ValueError(
                    "block_table: got a pair, expected a table of two axes, as when the call was planned"
                )
            self._put_integers(integers, "seqstart_k", indptr)
        if isinstance(table, (list, range)):
            table = import_integers("block_table", table)
            if isinstance(self._inputs[at], np.ndarray):
                table = _as_planned(table, self._inputs[at].dtype)
        if self._table is not None and isinstance(table, np.ndarray):
            if not np.array_equal(table, self._table):
                raise _changed("block_table")
            table = self._inputs[at]
        if isinstance(self._inputs[at], np.ndarray):
            table = import_integers("block_table", table)
        inputs[at] = table


def host_table(given: Any, table: Any) -> Any:
    """The page ids of planning time, where they are on the host and the call's own are not; else None.

    given: a block table as the caller has it. table: its page ids beside the rows.
    """
    _, ids = pages.split(given)
    if isinstance(table, np.ndarray) or not isinstance(ids, (list, range, np.ndarray)):
        return None
    return np.array(import_integers("block_table", ids))


def _as_planned(ids: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Page ids of a list in the dtype of planning time. ValueError for those that it does not hold."""
    found = ids.astype(dtype)
    changed = ids[found != ids]
    if changed.size:
        raise ValueError(
            f"block_table: got page id {changed[0]}, expected ids that fit {dtype}, the dtype of planning time; unused "
            "entries may be -1"
        )
    return found


def _changed(name: str) -> ValueError:
    return ValueError(
        f"{name}: got other values than when the call was planned, but values of the host are those of planning time; plan "
        "with an array on the GPU, which may change"
    )


class Form(NamedTuple):
    """What an array that an ordinary call is made with has in common with that of planning time."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"shape {self.shape}, dtype {self.dtype}"


def form_of(array: Any) -> Form | None:
    """By its attributes; None of what has none of them."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        return None
    return Form(tuple(array.shape), str(array.dtype).rpartition(".")[2])


def check_form(name: str, array: Any, planned: Any) -> None:
    """ValueError for an array that is not like that of planning time."""
    if (array is None) != (planned is None):
        raise ValueError(f"{name}: given now or when the call was planned, but not both times")
    got, expected = form_of(array), form_of(planned)
    if got is not None and expected is not None and got != expected:
        raise ValueError(f"{name}: got {got}; the plan is for {expected}")
