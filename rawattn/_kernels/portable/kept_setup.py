"""Host twin of kernels_cu/portable/kept_setup.cu and scatter_keys.cu.

Where all rows share a list of keys, `kept_setup` gathers those keys and values before attention, and `scatter_keys` writes
their gradients to the rows of dk and dv behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.operands import ITEMSIZE, Operands, access_bytes
from rawattn._kernels.source import round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, SubTask, checked
from rawattn._kernels.target import Target
from rawattn._masks import layout
from rawattn._masks.layout import Shape
from rawattn._strides import Strides

THREADS = 256
_MASK_WORDS, _MASK_ROWS = 16, 256  # words and rows of the mask's bits that a block writes
_MOST_LISTS = 2  # for which the kernel's parameters have room

# A limit that no row and key reach.
_FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept rows of the array `name`, which is k, v or a gradient of them, and the scratch `copy` that holds those rows."""

    problem: Problem
    operands: Operands
    name: str
    copy: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of one head."""
        wide = self.name.endswith("v")
        return (self.problem.headdim_v if wide else self.problem.headdim) * self._itemsize

    @property
    def copy_bytes(self) -> int:
        """The widest access that the array of all keys allows."""
        between = self.operands.strides[self.name][:-1]
        return access_bytes(self.row_bytes, self.operands.pointers, *between)

    @property
    def strides(self) -> Strides:
        """Of the copy, in bytes: (batch, row, head, column) as the array with all keys."""
        row = round_up(self.row_bytes, 16)
        head = row * self.problem.mask.kept
        return head * self.problem.nheads_kv, row, head, self._itemsize

    @property
    def nbytes(self) -> int:
        return self.problem.batch * self.strides[0]

    @property
    def _itemsize(self) -> int:
        return ITEMSIZE[self.problem.dtype]


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of kept keys of this shape, which the setup writes to "kept_bits" and "kept_keys".

    lists: the lists of tiles to make, each with the fields and addresses of a `KeptListsParams` (`helper_params`).
    """

    shape: Shape
    lists: Sequence[SubTask]


def limits(problem: Problem) -> tuple[int, int] | None:
    """The keys that window and diagonal leave each row: (first, last) of a `KeptLimits`, or None where they leave all."""
    offset = 0 if problem.top_left else problem.rows_k - problem.rows_q
    left, right = problem.window_left, problem.window_right
    first = -_FAR if left is None else offset - left
    last = _FAR if right is None else offset + right
    # The first row sees the fewest keys on its right, the last row on its left.
    whole = last >= problem.rows_k - 1 and problem.rows_q - 1 + first <= problem.sink
    return None if whole else (first, last)


def by_mask(keys: KeptRows, values: KeptRows, mask: Mask, target: Target) -> Step:
    """A launch that gathers keys and values, writes which of them each row sees, and makes the lists of tiles."""
    assert len(mask.lists) <= _MOST_LISTS
    problem = keys.problem
    batch, nheads, rows, _ = mask.shape
    first, last = limits(problem) or (-_FAR, _FAR)
    words = layout.words_of_row(mask.shape[3])
    blocks = batch * nheads * -(-words // _MASK_WORDS) * -(-rows // _MASK_ROWS)
    fields = {
        "limits.first": first,
        "limits.last": last,
        "limits.sink": problem.sink,
        "limits.rows": rows,
        "mask.nheads": nheads,
        "mask.words": words,
        "mask.blocks": blocks,
    }
    addresses = {"mask.bits": "kept_bits", "mask.keys": "kept_keys"}
    for n, task in enumerate(mask.lists):
        made = task.fields["sequences"] * task.fields["tiles"] * task.fields["lists.nheads"]
        own = -(-made // (THREADS // target.wave))
        fields |= {f"lists{n}.{path}": value for path, value in task.fields.items()}
        fields[f"lists{n}.blocks"] = own
        addresses |= {f"lists{n}.{path}": name for path, name in task.addresses.items()}
        blocks += own
    return _setup(keys, values, target, blocks, fields, addresses)


def by_lengths(keys: KeptRows, values: KeptRows, nheads: int, target: Target) -> Step:
    """A launch that gathers keys and values, and counts those of each list in "kept_lengths", (batch, nheads) integers."""
    lists = keys.problem.batch * nheads
    blocks = -(-lists // THREADS)
    fields = {"lengths.lists": lists, "lengths.nheads": nheads, "lengths.blocks": blocks}
    addresses = {"lengths.lengths": "kept_lengths"}
    return _setup(keys, values, target, blocks, fields, addresses)


def _setup(
    keys: KeptRows,
    values: KeptRows,
    target: Target,
    blocks: int,
    fields: dict[str, Any],
    addresses: dict[str, str],
) -> Step:
    """blocks: those that do anything but gather rows."""
    problem = keys.problem
    gather = -(-problem.batch * problem.mask.kept // (THREADS // target.wave))
    own = {f"rows.{path}": value for path, value in _row_fields(keys, values).items()}
    named = {f"rows.{path}": name for path, name in _row_addresses(keys, values).items()}
    return Step(
        source=source("kept_setup", keys, values),
        blocks=checked("mask", blocks + 2 * gather, 1),
        threads=THREADS,
        params=structs.fill(helper_params.KEPT_SETUP, {**own, **fields, "gather_blocks": gather}),
        patches=_patches(helper_params.KEPT_SETUP, {**named, **addresses}),
        early=target.early_launches,
    )


def scatter(keys: KeptRows, values: KeptRows, wave: int) -> Step:
    """A launch that writes every row of dK and dV: gradients of kept keys, and zeros."""
    problem = keys.problem
    return Step(
        source=source("scatter_keys", keys, values),
        blocks=checked("k", -(-problem.batch * problem.rows_k // (THREADS // wave)), 1),
        threads=THREADS,
        params=structs.fill(helper_params.KEPT_ROWS, _row_fields(keys, values)),
        patches=_patches(helper_params.KEPT_ROWS, _row_addresses(keys, values)),
    )


def source(kind: Literal["kept_setup", "scatter_keys"], keys: KeptRows, values: KeptRows) -> Source:
    each = [f"{rows.row_bytes}B by {rows.copy_bytes}B" for rows in (keys, values)]
    constants = {
        "kKeyBytes": keys.row_bytes,
        "kKeyCopyBytes": keys.copy_bytes,
        "kValueBytes": values.row_bytes,
        "kValueCopyBytes": values.copy_bytes,
        "kElementBytes": ITEMSIZE[keys.problem.dtype],
        "kThreads": THREADS,
    }
    gathers = kind == "kept_setup"
    return _source(
        f"rawattn_{kind}",
        f"portable/{kind}.cu",
        f"portable {kind} {', '.join(each)}",
        helper_params.KEPT_SETUP if gathers else helper_params.KEPT_ROWS,
        constants=constants | ({"kMaskRows": _MASK_ROWS} if gathers else {}),
    )


def _row_fields(keys: KeptRows, values: KeptRows) -> dict[str, Any]:
    """Fields of a `helper_params.KEPT_ROWS`."""
    problem = keys.problem
    batch, nheads = problem.mask.shape[:2]
    count = problem.mask.kept
    return {
        "kept.batch": nheads * count if batch > 1 else 0,
        "kept.head": count if nheads > 1 else 0,
        "kept.count": count,
        "kept.rows": problem.rows_k,
        "k.strides": keys.operands.elements(problem, keys.name),
        "v.strides": values.operands.elements(problem, values.name),
        "batch": problem.batch,
        "nheads": problem.nheads_kv,
    }


def _row_addresses(keys: KeptRows, values: KeptRows) -> dict[str, str]:
    found = {"kept.data": "mask_kept"}
    for path, rows in (("k", keys), ("v", values)):
        found |= {f"{path}.all": rows.name, f"{path}.kept": rows.copy}
    return found


def _patches(struct: structs.Struct, addresses: dict[str, str]) -> tuple[tuple[int, str], ...]:
    return tuple((structs.offset(struct, path), name) for path, name in addresses.items())
