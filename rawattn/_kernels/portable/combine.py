"""Host twin of kernels_cu/portable/combine.cu: partial results over disjoint keys become one."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from rawattn._call.partials import Partials
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._kernels.operands import ITEMSIZE, Strides, access_bytes
from rawattn._kernels.source import ELEMENT
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked

ENTRY = "rawattn_combine"
THREADS = 128
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Side:
    """How the partials of one kind lie.

    strides: in bytes, of one of them, in its public shape. partial: from one to the next, None where each has an
    address of its own.
    """

    strides: Strides
    partial: int | None


@dataclass(frozen=True, slots=True)
class Config:
    """All constants of the kernel. dtype, result: of the partials and of out. load_bytes, store_bytes: of an access."""

    dtype: str
    result: str
    headdim_v: int
    load_bytes: int
    store_bytes: int

    def source(self) -> Source:
        return _source(
            ENTRY,
            "portable/combine.cu",
            f"portable combine {self.dtype} to {self.result} Dv={self.headdim_v} "
            f"{self.load_bytes}B {self.store_bytes}B",
            helper_params.COMBINE,
            element=ELEMENT[self.dtype],
            constants={
                "kResult": _KINDS[self.result],
                "kHeadDimV": self.headdim_v,
                "kLoadBytes": self.load_bytes,
                "kStoreBytes": self.store_bytes,
                "kMaxListed": MAX_LISTED,
                "kThreads": THREADS,
            },
        )

    def heads_at_once(self, wave: int) -> int:
        """Heads of a row that a wave takes side by side."""
        chunk = max(
            self.load_bytes // ITEMSIZE[self.dtype], self.store_bytes // ITEMSIZE[self.result]
        )
        lanes = 1
        while lanes < min(self.headdim_v // chunk, wave):
            lanes *= 2
        return wave // lanes

    def blocks(self, partials: Partials, wave: int) -> int:
        groups = -(-partials.nheads // self.heads_at_once(wave))
        waves = THREADS // wave
        return checked("outs", -(-partials.batch * partials.rows * groups // waves), 1)


def variants() -> list[Source]:
    """Each pair of types, and each way to read and to store a row."""
    usual = [
        Config(dtype, result, headdim_v, 16, 16)
        for dtype, result in itertools.product(_KINDS, _KINDS)
        for headdim_v in (64, 128)
    ]
    narrow = [
        Config("float32", "bfloat16", 192, 16, 16),
        Config("float32", "float32", 256, 16, 16),
        Config("bfloat16", "bfloat16", 36, 8, 8),
        Config("float16", "float32", 66, 4, 8),
        Config("float32", "float16", 33, 4, 2),
        Config("bfloat16", "bfloat16", 255, 2, 2),
        Config("bfloat16", "float32", 128, 16, 4),
    ]
    return [config.source() for config in (*usual, *narrow)]


def choose(partials: Partials, outs: Side, out: Strides, pointers: int, to: int) -> Config:
    """pointers: addresses of the partial outs OR-ed together, with strides of partials; to: the address of out."""
    dtype, result = partials.dtype.name, partials.result.name
    headdim_v = partials.headdim_v
    load = access_bytes(
        pointers, headdim_v * ITEMSIZE[dtype], *outs.strides[:-1], outs.partial or 0
    )
    store = access_bytes(to, headdim_v * ITEMSIZE[result], *out[:-1])
    return Config(dtype, result, headdim_v, load, store)


@functools.lru_cache(maxsize=512)
def step(
    partials: Partials,
    outs: Side,
    lses: Side,
    out: Strides,
    pointers: int,
    to: int,
    wave: int = 32,
) -> Step:
    """Merges "outs0", "outs1" and so on, and likewise "lses0", to "out" and "lse".

    Of what is not listed there is the first. pointers: the addresses of the outs OR-ed together; to: that of out; of both
    the place within 16 bytes.
    """
    config = choose(partials, outs, out, pointers, to)
    itemsize = ITEMSIZE[config.dtype]
    values = {
        "outs_partial": (outs.partial or 0) // itemsize,
        "lses_partial": (lses.partial or 0) // 4,
        "outs_strides": _elements(outs.strides[:-1], itemsize),
        "lses_strides": _lse_elements(lses.strides),
        "out_strides": _elements(out[:-1], ITEMSIZE[config.result]),
        "rows": partials.rows,
        "batch": partials.batch,
        "nheads": partials.nheads,
        "partials": partials.count,
        "outs_listed": int(outs.partial is None),
        "lses_listed": int(lses.partial is None),
    }
    where = [(structs.offset(helper_params.COMBINE, name), name) for name in ("out", "lse")]
    for name, side in (("outs", outs), ("lses", lses)):
        first = structs.offset(helper_params.COMBINE, name)
        count = partials.count if side.partial is None else 1
        where += [(first + 8 * n, f"{name}{n}") for n in range(count)]
    return Step(
        source=config.source(),
        blocks=config.blocks(partials, wave),
        threads=THREADS,
        params=structs.fill(helper_params.COMBINE, values),
        patches=tuple(where),
    )


def _elements(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """(batch, row, head) of out, or of a partial of it."""
    *batch, row, head = (stride // itemsize for stride in strides)
    return (batch[0] if batch else 0, row, head)


def _lse_elements(strides: Strides) -> tuple[int, int, int]:
    """The same of an lse, which has heads before rows."""
    *batch, head, row = (stride // 4 for stride in strides)
    return (batch[0] if batch else 0, row, head)
