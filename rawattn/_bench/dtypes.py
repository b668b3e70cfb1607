"""Speed of float16 over bfloat16, in one race, so that changes of clocks or temperature affect both alike.

Ours also runs on float16 arrays that hold the values of the bfloat16 arrays: float16 instructions on mantissas as short as
bfloat16's. The loss that remains there is the cost of the instructions; the rest is due to the power of longer mantissas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn._bench import grids, machine, measure, ours, peers
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.grids import CUDNN, FA2, FA4
from rawattn._bench.report import Figure
from rawattn._bench.timing import Clock, Entrant, EventClock, Timing, race

BFLOAT16, FLOAT16, SAME_VALUES = "bfloat16", "float16", "float16 of bfloat16 values"

_GRIDS = {"forward": grids.forward, "backward": grids.backward}
_HEADDIMS = {"forward": (64, 128, 256), "backward": (64, 128)}
_PEERS = {"forward": (CUDNN, FA4), "backward": (FA2,)}


def figures(verb: str, dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Ratios for ours and for some peers, case by case, whatever the dtype of the run. verb: forward or backward."""
    events = EventClock()
    l2_bytes = machine.facts(machine.Sensors())["l2_bytes"]
    contenders = _contenders(verb, set(peers).intersection(_PEERS[verb]))
    found = []
    for case in cases(verb):
        found += case_figures(case, contenders, make_inputs(case, l2_bytes), events)
    return found


def _contenders(verb: str, names: Set[str]) -> list[Contender]:
    return [ours.ours(verb)[0], *(peer for peer in peers.peers(verb) if peer.name in names)]


def cases(verb: str) -> list[Case]:
    """The dense cases of the suite with seqlen 4096."""
    return [
        case
        for case in _GRIDS[verb]()
        if (case.kind, case.label) == ("dense", "S4096") and case.headdim in _HEADDIMS[verb]
    ]


def make_inputs(case: Case, l2_bytes: int) -> dict[str, list[Inputs]]:
    """The sets of inputs, by kind: bfloat16, float16, and float16 arrays of bfloat16 values."""
    sets = {kind: measure.make_inputs(case, kind, l2_bytes) for kind in (BFLOAT16, FLOAT16)}
    return {**sets, SAME_VALUES: [_float16(inputs) for inputs in sets[BFLOAT16]]}


def _float16(inputs: Inputs) -> Inputs:
    def convert(x: Any) -> Any:
        # By way of float32, which CuPy converts both from and to.
        return None if x is None else x.astype(np.float32).astype(np.float16)

    return replace(inputs, qkv=tuple(map(convert, inputs.qkv)), dout=convert(inputs.dout))


def case_figures(
    case: Case,
    contenders: Sequence[Contender],
    inputs: Mapping[str, Sequence[Inputs]],
    events: Clock,
) -> list[Figure]:
    """Ratios from one race. A peer that raises is left out; an error of ours is raised."""
    sides = [
        (contender, kind)
        for contender in contenders
        for kind in (inputs if contender.ours else (BFLOAT16, FLOAT16))
    ]
    entrants: dict[str, Entrant] = {}
    for contender, kind in sides:
        try:
            entrant = measure.enter(case, contender, inputs[kind], events)[0]
        except Exception:  # a peer that is missing or does not support the case is left out
            if contender.ours:
                raise
        else:
            entrants[f"{contender.name}, {kind}"] = entrant
    outcome = race(entrants)
    ratios = []
    for contender, kind in sides:
        name = contender.name
        timing, base = (outcome.get(f"{name}, {one}") for one in (kind, BFLOAT16))
        if isinstance(timing, Exception) and contender.ours:
            raise timing
        if kind != BFLOAT16 and isinstance(timing, Timing) and isinstance(base, Timing):
            what = f"{name}, FLOP/s: {kind} / {BFLOAT16}, {case.name}"
            ratios.append(Figure(what, base.seconds / timing.seconds, "x"))
    return ratios
