"""Kernels of plain calls of usual shapes, as the usual GPU of an architecture takes them, for compiling ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rawattn._call.binding import bind
from rawattn._call.problem import Problem, result_shapes
from rawattn._call.structure import structure
from rawattn._compile.compiler import Source
from rawattn._kernels import registry
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.target import SHARED_LIMIT, Target
from rawattn._strides import contiguous

# SMs of the GPU that an architecture is known by: A100, A40, Orin, RTX 4090, H100 and H200, B200, B300, RTX 5090.
_MULTIPROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_87": 16,
    "sm_89": 128,
    "sm_90": 132,
    "sm_90a": 132,
    "sm_100": 148,
    "sm_103": 160,
    "sm_120": 170,
}
_HEADDIMS = (64, 128)
# Batch, rows of queries and of keys: prompts, tokens, chunks on cached keys.
_PROMPTS = [(batch, rows, rows) for batch, rows in ((1, 512), (1, 1024), (1, 2048), (1, 4096))]
_PROMPTS += [(4, 1024, 1024), (4, 2048, 2048), (8, 512, 512), (16, 1024, 1024), (1, 16384, 16384)]
_TOKENS = [(batch, 1, keys) for batch, keys in itertools.product((1, 8, 64), (2048, 8192))]
_CHUNKS = [(batch, 256, 8192) for batch in (1, 8)]
_HEADS = ((16, 16), (32, 8))  # of queries and of keys


def sources(arch: str, dtypes: Sequence[str]) -> list[Source]:
    """The forward kernels of dense calls, causal and full."""
    found: list[Source] = []
    shapes = _PROMPTS + _TOKENS + _CHUNKS
    for dtype, headdim, (batch, rows_q, rows_k), (nheads_q, nheads_kv), right in itertools.product(
        dtypes, _HEADDIMS, shapes, _HEADS, (None, 0)
    ):
        problem = Problem(
            dtype=dtype,
            batch=batch,
            nheads_q=nheads_q,
            nheads_kv=nheads_kv,
            headdim=headdim,
            headdim_v=headdim,
            packed=False,
            rows_q=rows_q,
            rows_k=rows_k,
            max_seqlen_q=rows_q,
            max_seqlen_k=rows_k,
            ragged=False,
            window_left=None,
            window_right=right,
            sink=0,
            top_left=False,
            positions=False,
            scale=1.0,
            pages=None,
            float8=False,
        )
        found += _of_forward(problem, Target(arch, SHARED_LIMIT[arch], _MULTIPROCESSORS[arch]))
    return list(dict.fromkeys(found))


def _of_forward(problem: Problem, target: Target) -> list[Source]:
    out, _ = result_shapes(problem)
    keys = (problem.batch, problem.rows_k, problem.nheads_kv, problem.headdim)
    queries = (problem.batch, problem.rows_q, problem.nheads_q, problem.headdim)
    shapes = {"q": queries, "k": keys, "v": keys, "out": out}
    itemsize = ITEMSIZE[problem.dtype]
    operands = Operands({name: contiguous(shape, itemsize) for name, shape in shapes.items()})
    form = structure(bind(None, batch=problem.batch, rows_q=problem.rows_q, rows_k=problem.rows_k))
    family = registry.choose("attention", problem, target, operands)
    return [each.source for each in family.steps(problem, form, operands, target).launches]
