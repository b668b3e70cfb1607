"""Host twin of kernels_cu/attn/kept_rows.cuh: rows of kept keys, gathered from arrays of all keys and scattered to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.operands import ITEMSIZE, Operands, Strides, access_bytes
from rawattn._kernels.source import round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked, patches

THREADS = 256


def source(
    kind: Literal["gather", "scatter"], row_bytes: int, itemsize: int, copy_bytes: int
) -> Source:
    """copy_bytes: the widest access that the array of all keys allows."""
    return _source(
        f"rawattn_{kind}_keys",
        f"portable/{kind}_keys.cu",
        f"portable {kind}_keys {row_bytes}B by {copy_bytes}B",
        helper_params.KEPT_ROWS,
        constants={
            "kRowBytes": row_bytes,
            "kElementBytes": itemsize,
            "kCopyBytes": copy_bytes,
            "kThreads": THREADS,
        },
    )


def kept(problem: Problem) -> dict[str, int]:
    """Fields of a `KeptKeys`."""
    batch, nheads = problem.mask.shape[:2]
    count = problem.mask.kept
    return {
        "kept.batch": nheads * count if batch > 1 else 0,
        "kept.head": count if nheads > 1 else 0,
        "kept.count": count,
        "kept.rows": problem.rows_k,
    }


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept rows of k, v or a gradient of them, called `name`, in memory called `copy`."""

    problem: Problem
    operands: Operands
    name: str
    copy: str

    @property
    def row_bytes(self) -> int:
        wide = self.name.endswith("v")
        return (self.problem.headdim_v if wide else self.problem.headdim) * self._itemsize

    @property
    def strides(self) -> Strides:
        """In bytes, in the shape of the array with all keys."""
        head = round_up(self.row_bytes, 16)
        row = head * self.problem.nheads_kv
        return row * self.problem.mask.kept, row, head, self._itemsize

    @property
    def nbytes(self) -> int:
        return self.problem.batch * self.strides[0]

    def gather(self, wave: int) -> Step:
        return self._step(
            "gather", self.problem.mask.kept, wave, **{"from": self.name, "to": self.copy}
        )

    def scatter(self, wave: int) -> Step:
        """Every row of the array is written."""
        return self._step(
            "scatter", self.problem.rows_k, wave, **{"from": self.copy, "to": self.name}
        )

    @property
    def _itemsize(self) -> int:
        return ITEMSIZE[self.problem.dtype]

    def _step(
        self, kind: Literal["gather", "scatter"], rows: int, wave: int, **addresses: str
    ) -> Step:
        problem, operands = self.problem, self.operands
        between = operands.strides[self.name][:-1]
        copy_bytes = access_bytes(self.row_bytes, operands.pointers, *between)
        values: dict[str, Any] = {
            **kept(problem),
            "strides": operands.elements(problem, self.name),
            "batch": problem.batch,
            "nheads": problem.nheads_kv,
        }
        return Step(
            source=source(kind, self.row_bytes, self._itemsize, copy_bytes),
            blocks=checked(self.name, -(-problem.batch * rows // (THREADS // wave)), 1),
            threads=THREADS,
            params=structs.fill(helper_params.KEPT_ROWS, values),
            patches=patches(helper_params.KEPT_ROWS, kept__data="mask_kept", **addresses),
        )
