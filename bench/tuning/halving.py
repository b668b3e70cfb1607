"""Successive halving: after each round of measurements, the clearly slower half of the candidates leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Bursts of each candidate in round 1, 2, ...; the last entry holds for all later rounds.
REPEATS = (2, 3, 5, 7)
FINALISTS, FINAL_REPEATS = 4, 15
# Relative difference in speed. Candidates closer than this are not told apart, and a table changes only for a gain of at least
# this.
CLEARLY = 0.01

# Measures candidates (names, repeats): the speed relative to the present choice of each that finished the round.
Measure = Callable[[Sequence[str], int], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the bursts of each candidate, and the speeds relative to the present choice."""

    repeats: int
    scores: dict[str, float]


def search(
    names: Sequence[str], present: str, measure: Measure, spent: Callable[[], bool]
) -> list[Round]:
    """Run rounds until few candidates are left and a longer final round is done, or until the budget is `spent`.

    The present choice takes part in every round, as the baseline.
    """
    alive = list(dict.fromkeys((present, *names)))
    rounds: list[Round] = []
    while True:
        final = len(alive) <= FINALISTS
        repeats = FINAL_REPEATS if final else REPEATS[min(len(rounds), len(REPEATS) - 1)]
        scores = dict(measure(alive, repeats))
        rounds.append(Round(repeats, scores))
        if final or present not in scores or spent():
            return rounds
        stay = survivors(scores)
        stay.add(present)
        if len(stay) == len(alive):  # no candidate is clearly slower
            stay = {*sorted(scores, key=lambda name: -scores[name])[: FINALISTS - 1], present}
        alive = [name for name in alive if name in stay]


def survivors(scores: Mapping[str, float]) -> set[str]:
    """Return the faster half, and those of the others that are within `CLEARLY` of the fastest."""
    order = sorted(scores, key=lambda name: -scores[name])
    half = set(order[: -(-len(order) // 2)])
    best = scores[order[0]]
    return half | {name for name in order if scores[name] >= best * (1 - CLEARLY)}


def winner(rounds: Sequence[Round], present: str) -> str:
    """Return the fastest candidate of the last round, or the present choice if none is clearly faster than it."""
    scores = rounds[-1].scores
    if not scores:
        return present
    best = max(scores, key=lambda name: scores[name])
    clearly = scores[best] >= scores.get(present, 0.0) * (1 + CLEARLY)
    return best if clearly else present
