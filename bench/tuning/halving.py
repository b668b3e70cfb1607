"""Successive halving: rounds of measuring that the clearly slower half leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Bursts of everybody by round; the last number is for all later ones.
REPEATS = (2, 3, 5, 7)
FINALISTS, FINAL_REPEATS = 4, 15
# Two candidates nearer than this are not told apart by a round, and this much is worth a change of a table.
CLEARLY = 0.01

# Speeds over the present choice's, by name, of those that finished the round.
Measure = Callable[[Sequence[str], int], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Round:
    """Who was measured, how often, and how fast each was."""

    repeats: int
    scores: dict[str, float]


def search(
    names: Sequence[str], present: str, measure: Measure, spent: Callable[[], bool]
) -> list[Round]:
    """Rounds until few are left, and one more, longer, among those; or until the budget is `spent`.

    The present choice is in every round, as what the others are compared with.
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
        if len(stay) == len(alive):  # nobody is clearly slower: more rounds would not part them
            stay = {*sorted(scores, key=lambda name: -scores[name])[: FINALISTS - 1], present}
        alive = [name for name in alive if name in stay]


def survivors(scores: Mapping[str, float]) -> set[str]:
    """The faster half, and of the others those who are within `CLEARLY` of the fastest."""
    order = sorted(scores, key=lambda name: -scores[name])
    half = set(order[: -(-len(order) // 2)])
    best = scores[order[0]]
    return half | {name for name in order if scores[name] >= best * (1 - CLEARLY)}


def winner(rounds: Sequence[Round], present: str) -> str:
    """The fastest of the last round, if that is clearly faster than the present choice."""
    scores = rounds[-1].scores
    if not scores:
        return present
    best = max(scores, key=lambda name: scores[name])
    clearly = scores[best] >= scores.get(present, 0.0) * (1 + CLEARLY)
    return best if clearly else present
