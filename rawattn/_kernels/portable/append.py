"""Host twin of kernels_cu/portable/append.cu, which writes new keys and values into pages and applies rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.attention_params import page_addresses, page_fields, without_pages
from rawattn._kernels.operands import ITEMSIZE, Operands, access_bytes
from rawattn._kernels.score_params import scale_fields, scale_patches
from rawattn._kernels.source import ELEMENT, dims
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, Steps, checked, patches, side_fields, side_patches
from rawattn._kernels.target import Target

FEATURES = frozenset({"ragged", "packed", "paged", "float8"})
THREADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The constants of the kernel.

    copy_bytes, angle_bytes: of one access to rows, and to the cosines and sines that belong to the columns of that access.
    """

    dtype: str
    headdim: int
    headdim_v: int
    rotary_dim: int = 0
    interleaved: bool = False
    float_angles: bool = False
    copy_bytes: int = 16
    angle_bytes: int = 16
    float8: bool = False  # pages hold 8-bit elements

    def source(self) -> Source:
        rotary = ""
        if self.rotary_dim:
            style = "interleaved" if self.interleaved else "halves"
            rotary = (
                f" rotary={self.rotary_dim} {style}{'' if self.float_angles else ' angles=16b'}"
            )
        return _source(
            "rawattn_append",
            "portable/append.cu",
            f"portable append {self.dtype} {dims(self)}{rotary} {self.copy_bytes}B{' float8' * self.float8}",
            helper_params.APPEND,
            element=ELEMENT[self.dtype],
            constants={
                "kHeadDim": self.headdim,
                "kHeadDimV": self.headdim_v,
                "kRotaryDim": self.rotary_dim,
                "kInterleaved": self.interleaved,
                "kFloatAngles": self.float_angles,
                "kCopyBytes": self.copy_bytes,
                "kAngleBytes": self.angle_bytes,
                "kThreads": THREADS,
                "kFloat8": self.float8,
            },
        )

    def blocks(self, heads: int, wave: int) -> int:
        """heads: rows times heads of q, k and v together."""
        chunk = self.copy_bytes // ITEMSIZE[self.dtype]
        lanes = 1 << (max(self.headdim, self.headdim_v) // chunk - 1).bit_length()
        return -(-heads // (THREADS // min(lanes, wave)))


def supports(problem: Problem, target: Target, operands: Operands) -> None:
    """None: this kernel serves every call."""


def choose(problem: Problem, operands: Operands) -> Config:
    rotary = problem.rotary
    width = operands.copy_bytes(problem)
    itemsize = ITEMSIZE[problem.dtype]
    common: dict[str, Any] = {
        "dtype": problem.dtype,
        "headdim": problem.headdim,
        "headdim_v": problem.headdim_v,
        "float8": problem.float8,
    }
    if problem.float8:  # an access to pages must have at least as many elements
        width = min(width, itemsize * operands.key_bytes(problem))
    if rotary is None:
        if not problem.float8:
            # Bits are copied as they are, so both 16-bit dtypes share a kernel.
            common["dtype"] = "float32" if itemsize == 4 else "float16"
        return Config(**common, copy_bytes=width)
    width = access_bytes(width, rotary.dim // 2 * itemsize)
    angle = ITEMSIZE[rotary.dtype]
    alignments = (operands.alignments[name] for name in ("cos", "sin"))
    between = (operands.option_strides[name][0] for name in ("cos", "sin"))
    return Config(
        **common,
        rotary_dim=rotary.dim,
        interleaved=rotary.interleaved,
        float_angles=rotary.dtype == "float32",
        copy_bytes=width,
        angle_bytes=access_bytes(width // itemsize * angle, *alignments, *between),
    )


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    config = choose(problem, operands)
    struct, rotary = helper_params.APPEND, problem.rotary
    names = [
        name for name in ("q", "k", "v", "k_pages", "v_pages", "out") if name in operands.strides
    ]
    nheads_q = problem.nheads_q if "q" in names else 0
    rows = problem.rows_q * (1 if problem.packed else problem.batch)
    values: dict[str, Any] = {
        **{f"{name}_strides": operands.elements(problem, name) for name in names},
        **side_fields("side", structure.q),
        "seqlen_k.is_64bit": int(structure.k.length == 8),
        **page_fields(problem, structure, operands),
        **scale_fields(problem, operands),
        "rows": rows,
        "batch": problem.batch,
        "nheads_q": nheads_q,
        "nheads_kv": problem.nheads_kv,
        "fill": int("out" in operands.library_owned),
    }
    if rotary is not None:
        itemsize = ITEMSIZE[rotary.dtype]
        for name in ("cos", "sin"):
            values[f"{name}_row"] = operands.option_strides[name][0] // itemsize
        values["positions"] = rotary.positions
        names += ("cos", "sin")
    blocks = config.blocks(rows * (nheads_q + 2 * problem.nheads_kv), target.wave)
    step = Step(
        source=config.source(),
        blocks=checked("k", blocks, 1),
        threads=THREADS,
        params=structs.fill(struct, values),
        patches=(
            *patches(struct, names, seqlen_k__data="length_k"),
            *side_patches(struct, "side", without_pages(structure).q, "q"),
            *page_addresses(problem, struct),
            *scale_patches(problem, struct),
        ),
    )
    return Steps((step,), config)


def variants(*, every: bool = False) -> list[Source]:
    """Sources worth compiling ahead: the usual head dims, with angles in float32. every: other widths and dtypes too."""
    usual = [
        Config(
            dtype=dtype,
            headdim=headdim,
            headdim_v=headdim,
            rotary_dim=headdim,
            interleaved=interleaved,
            float_angles=True,
        ).source()
        for dtype in ("bfloat16", "float16")
        for headdim in (64, 128)
        for interleaved in (False, True)
    ] + [
        Config(dtype="float16", headdim=headdim, headdim_v=headdim).source()
        for headdim in (64, 128)
    ]
    if not every:
        return usual
    others = (
        Config(dtype="float32", headdim=64, headdim_v=64, rotary_dim=64, float_angles=True),
        Config(dtype="bfloat16", headdim=64, headdim_v=64, rotary_dim=32),
        Config(
            dtype="bfloat16",
            headdim=7,
            headdim_v=1,
            rotary_dim=6,
            float_angles=True,
            copy_bytes=2,
            angle_bytes=4,
        ),
        Config(dtype="float32", headdim=7, headdim_v=9, copy_bytes=4),
        *(
            Config(
                dtype=dtype,
                headdim=128,
                headdim_v=128,
                rotary_dim=turns,
                float_angles=True,
                float8=True,
            )
            for dtype in ("bfloat16", "float16", "float32")
            for turns in (0, 128)
        ),
        Config(dtype="float16", headdim=7, headdim_v=1, copy_bytes=2, float8=True),
    )
    return [*usual, *(config.source() for config in others)]
