"""The arguments of a plan's call, by position or by the planned function's names, matched to the arrays of its verb."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._call import pages
from rawattn._call.options import for_message
from rawattn._interop.integers import import_integers
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime.option_arrays import caller_names
from rawattn._runtime.verbs import Verb

# Arguments of a layout that a plan's call may give again.
_LENGTHS = (
    *("seqstart_q", "seqlen_q", "cu_seqlen_q", "position_q"),
    *("seqstart_k", "seqlen_k", "cu_seqlen_k", "position_k"),
)


class Complete(NamedTuple):
    """The arguments of a call. inputs: all arrays of the verb, those of planning time where the call gives none.

    integers: lengths on the GPU, by their names in the layout.
    """

    inputs: list[Any]
    integers: dict[str, Any]


class Arguments:
    """Reads the arguments of one plan's calls.

    inputs: the arrays of planning time. options: the options without their arrays.
    table: the page ids of planning time if they were on the host and the inputs are on a GPU, else None.
    """

    def __init__(self, verb: Verb, inputs: Sequence[Any], options: Any, table: Any = None) -> None:
        self._verb, self._inputs, self._options = verb, tuple(inputs), options
        self._table = table
        self._caller_names = caller_names(verb, options)
        # Indices of inputs, by the verb's names and by the names that the caller knows.
        self._indices = {x: n for n, x in enumerate(verb.inputs)}
        for n, name in enumerate(self._caller_names):
            self._indices.setdefault(name, n)

    def complete(self, args: Sequence[Any], named: Mapping[str, Any]) -> Complete:
        """The arrays of a call. TypeError or ValueError, naming the argument, for an argument that this plan does not take."""
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
        """Where the arguments of a call belong: `count` arrays by position, then arguments by name.

        An index among all inputs for each array; lengths keep their name.
        """
        return [*range(count), *(self._indices.get(name, name) for name in names)]

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(name.partition("[")[0] for name in self._caller_names))

    def _put_mask(self, inputs: list[Any], index: int, mask: Any) -> None:
        planned = self._options.mask
        if planned is None or not isinstance(mask, BlockMask) or mask.form != planned:
            got = f"a BlockMask {mask.shape}" if isinstance(mask, BlockMask) else for_message(mask)
            expected = f"a BlockMask {planned.shape}" if planned else "an array of bools"
            raise ValueError(f"mask: got {got}, expected {expected}, as when the call was planned")
        found = mask.on_device_of(inputs[self._verb.lead_index])
        inputs[index : index + len(found)] = found

    def _put_integers(self, integers: dict[str, Any], name: str, value: Any) -> None:
        planned = getattr(self._options.seqs, name, None)
        if planned is None:
            raise ValueError(f"{name}: the call was not planned with {name}")
        shown_name = pages.caller_name(self._options.seqs, name)
        given = import_integers(shown_name, value)
        if not isinstance(planned, np.ndarray):
            integers[name] = given
        elif not isinstance(given, np.ndarray):
            raise ValueError(
                f"{shown_name}: got an array on a GPU, but the call was planned with it on the host, whose values stay those "
                "of planning time"
            )
        elif not np.array_equal(given, planned):
            raise _changed(shown_name)

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
    """The page ids of planning time as a host array if the caller gave them on the host and `table` is on a GPU; else None.

    given: the caller's block table. table: its page ids on the device of the rows.
    """
    _, ids = pages.split(given)
    if isinstance(table, np.ndarray) or not isinstance(ids, (list, range, np.ndarray)):
        return None
    return np.array(import_integers("block_table", ids))


def _as_planned(ids: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Page ids of a list, in the dtype of planning time. ValueError for ids that do not fit this dtype."""
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
        "with an array on the GPU, which may change; in a call on the CPU leave the plan out"
    )


class Form(NamedTuple):
    """The properties in which an array of an ordinary call must equal that of planning time."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"shape {self.shape}, dtype {self.dtype}"


def form_of(array: Any) -> Form | None:
    """The form of an array, by its attributes; None for an object without shape and dtype."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        return None
    return Form(tuple(array.shape), str(array.dtype).rpartition(".")[2])


def description(function: str, named: Iterable[tuple[str, Any]]) -> str:
    """A plan for its repr: the planned function, and the forms of its arrays.

    named: all inputs. Of those in a list, as ``outs[0]``, the first one and their number are shown, of a mask's arrays nothing.
    """
    groups: dict[str, list[Any]] = {}
    for name, array in named:
        if array is not None:
            groups.setdefault(name.partition("[")[0], []).append(array)
    shown = []
    for name, arrays in groups.items():
        form = form_of(arrays[0])
        count = f"{len(arrays)} x " if len(arrays) > 1 else ""
        if name == "mask" and count:
            shown.append("mask BlockMask")
        elif form is not None:
            shown.append(f"{name} {count}{form.dtype}{list(form.shape)}")
    return f"<rawattn.Plan of {function}: {', '.join(shown)}>"


def check_form(name: str, array: Any, planned: Any) -> None:
    """ValueError for an array whose form is not that of planning time, TypeError for what is no array."""
    if (array is None) != (planned is None):
        raise ValueError(f"{name}: given now or when the call was planned, but not both times")
    got, expected = form_of(array), form_of(planned)
    if got is None and expected is not None and not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name}: got {for_message(array)}, expected an array: the plan is for {expected}"
        )
    if got is not None and expected is not None and got != expected:
        raise ValueError(f"{name}: got {got}; the plan is for {expected}")
