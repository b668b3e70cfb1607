"""The calls that decide between candidates for a row of a table."""

from __future__ import annotations

import numpy as np

from bench.tuning.kernels import Kernel
from rawattn import SeqLayout
from rawattn._bench.cases import Case
from rawattn._bench.grids import CUDNN, FA2, FA4
from rawattn._call.problem import Problem, describe
from rawattn._kernels.sm90.tile_choice import LONG_SEQLEN

# Sizes of the dense cases: batch x seqlen, and heads x D.
_TOKENS, _COLUMNS = 16384, 2048
_WINDOW = 1024
# The sequence lengths of the dense cases, by table; _ALL_SEQLENS for tables that are not named.
_SEQLENS = {"any": (1024, 4096), "long": (8192, _TOKENS)}
_ALL_SEQLENS = (4096, _TOKENS)
# The ragged case: (number of sequences, largest possible length). The second pair is for the table "long".
_RAGGED = (8, 4096), (4, _TOKENS)


def cases(kernel: Kernel, table: str, headdim: int) -> list[Case]:
    """Return causal and full cases at two lengths of the table, and a ragged batch.

    For the table "left", all cases are causal and have a window.
    """
    left = _WINDOW if table == "left" else None
    heads = max(1, _COLUMNS // headdim)
    count, longest = _RAGGED[table == "long"]
    lengths = tuple(map(int, np.random.default_rng(2).integers(64, longest + 1, size=count)))
    shapes = [
        (f"S{seqlen}", (seqlen,) * (_TOKENS // seqlen), False)
        for seqlen in _SEQLENS.get(table, _ALL_SEQLENS)
    ]
    shapes.append(("ragged", lengths, True))
    found = []
    for label, seqlens, packed in shapes:
        for causal in (True,) if packed or left is not None else (True, False):
            if left is not None:
                peers: tuple[str, ...] = (FA4,)
            elif packed:
                peers = (FA4,) if kernel.verb == "forward" else (FA2, FA4)
            else:
                peers = (CUDNN, FA2, FA4)
            found.append(
                Case(
                    "ragged" if packed else "dense",
                    label if left is None else f"{label} left{left}",
                    seqlens,
                    nheads_q=heads,
                    nheads_kv=heads,
                    headdim=headdim,
                    causal=causal,
                    packed=packed,
                    window_left=left,
                    backward=kernel.verb == "backward",
                    peers=peers,
                    deterministic=kernel.deterministic,
                )
            )
    return found


def problem(case: Case, dtype: str) -> Problem:
    """Describe a case as far as compilation depends on it, without arrays of its size."""
    # Only two facts about lengths matter: whether they reach LONG_SEQLEN, and for a backward, that they are not short.
    usual = 2048 if case.backward else 1
    seqlen = LONG_SEQLEN if max(case.seqlens) >= LONG_SEQLEN else usual
    rows = (seqlen,) if case.packed else (1, seqlen)
    operand = np.broadcast_to(np.zeros((), np.dtype(dtype)), (*rows, 1, case.headdim))
    seqs = SeqLayout(seqstart_q=[0, seqlen]) if case.packed else None
    described, _ = describe(
        operand, operand, operand, seqs=seqs, causal=case.causal, window=case.window
    )
    return described
