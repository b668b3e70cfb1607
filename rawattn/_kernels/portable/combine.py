"""Host twin of kernels_cu/portable/combine.cu, which merges partial results over disjoint keys into one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from rawattn._call.problem import Problem, result_shapes
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._kernels.operands import ITEMSIZE, Operands, access_bytes
from rawattn._kernels.score_params import KINDS
from rawattn._kernels.source import ELEMENT
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, Steps, checked
from rawattn._kernels.target import Target
from rawattn._strides import Strides, ignoring_unit_axes

FEATURES = frozenset({"packed"})
ENTRY = "rawattn_combine"
THREADS = 128


@dataclass(frozen=True, slots=True)
class Side:
    """How the outs, or the lses, of all partial results lie in memory.

    names: of their arrays. strides: of one partial, in bytes, in its public shape. partial: bytes from one partial to the next,
    None where each has an address of its own.
    """

    name: str
    names: tuple[str, ...]
    strides: Strides
    partial: int | None


@dataclass(frozen=True, slots=True)
class Config:
    """All constants of the kernel.

    dtype, result: the dtypes of the partials and of out. load_bytes, store_bytes: of one access to them.
    """

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
                "kResult": KINDS[self.result],
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

    def blocks(self, problem: Problem, wave: int) -> int:
        groups = -(-problem.nheads_q // self.heads_at_once(wave))
        waves = THREADS // wave
        return checked("outs", -(-problem.batch * problem.rows_q * groups // waves), 1)


def variants() -> list[Source]:
    """Sources for each pair of dtypes, and for each width of loads and stores."""
    usual = [
        Config(dtype, result, headdim_v, 16, 16)
        for dtype, result in itertools.product(KINDS, KINDS)
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


def choose(problem: Problem, outs: Side, out: Strides, pointers: int) -> Config:
    """pointers: the addresses of the outs and of out OR-ed together."""
    assert problem.partials is not None
    dtype, result = problem.dtype, problem.partials.result
    headdim_v = problem.headdim_v
    load = access_bytes(
        pointers, headdim_v * ITEMSIZE[dtype], *outs.strides[:-1], outs.partial or 0
    )
    store = access_bytes(pointers, headdim_v * ITEMSIZE[result], *out[:-1])
    return Config(dtype, result, headdim_v, load, store)


def supports(problem: Problem, target: Target, operands: Operands) -> None:
    """None: this kernel serves every call."""


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """One launch, which merges partial results to "out" and "lse".

    Their arrays are called "outs[0]", "outs[1]" and so on where each has an address of its own, else "outs". The lses are
    called in the same way.
    """
    form = problem.partials
    assert form is not None
    shape, lse_shape = result_shapes(problem)
    outs = _side("outs", shape, form.parts, form.listed[0], operands.strides)
    lses = _side("lses", lse_shape, form.parts, form.listed[1], operands.option_strides)
    out = ignoring_unit_axes(shape, operands.strides["out"])
    config = choose(problem, outs, out, operands.pointers)
    itemsize = ITEMSIZE[config.dtype]
    values = {
        "outs_partial": (outs.partial or 0) // itemsize,
        "lses_partial": (lses.partial or 0) // 4,
        "outs_strides": _elements(outs.strides[:-1], itemsize),
        "lses_strides": _lse_elements(lses.strides),
        "out_strides": _elements(out[:-1], ITEMSIZE[config.result]),
        "rows": problem.rows_q,
        "batch": problem.batch,
        "nheads": problem.nheads_q,
        "partials": form.parts,
        "outs_listed": int(outs.partial is None),
        "lses_listed": int(lses.partial is None),
    }
    where = [(structs.offset(helper_params.COMBINE, name), name) for name in ("out", "lse")]
    for side in (outs, lses):
        first = structs.offset(helper_params.COMBINE, side.name)
        where += [(first + 8 * n, name) for n, name in enumerate(side.names)]
    step = Step(
        source=config.source(),
        blocks=config.blocks(problem, target.wave),
        threads=THREADS,
        params=structs.fill(helper_params.COMBINE, values),
        patches=tuple(where),
    )
    return Steps((step,), config)


def _side(
    name: str, shape: tuple[int, ...], count: int, listed: bool, strides: Mapping[str, Strides]
) -> Side:
    """shape: of one partial. count: of partials. listed: whether each has an address of its own."""
    if listed:
        names = tuple(f"{name}[{n}]" for n in range(count))
        return Side(name, names, ignoring_unit_axes(shape, strides[names[0]]), None)
    partial, *own = ignoring_unit_axes((count, *shape), strides[name])
    return Side(name, (name,), tuple(own), partial)


def _elements(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """Strides of (batch, row, head) in elements, of out or of a partial of it. Packed arrays have no batch axis."""
    *batch, row, head = (stride // itemsize for stride in strides)
    return (batch[0] if batch else 0, row, head)


def _lse_elements(strides: Strides) -> tuple[int, int, int]:
    """The same for an lse, whose axes are (batch, head, row): the result is (batch, row, head)."""
    *batch, head, row = (stride // 4 for stride in strides)
    return (batch[0] if batch else 0, row, head)
