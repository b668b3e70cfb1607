"""Lengths that the sequences of a packed batch may have, for estimates: the host knows their sum and a bound, no more."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from rawattn._call.layout import bound_of
from rawattn._call.problem import Problem

# The most different lengths that sequences are taken to have, and the largest power by which they fall.
_MOST_LENGTHS, _MOST_POWER = 8, 64.0


def as_long_as_likely(problem: Problem) -> Problem:
    """The problem with a mean length of a packed batch for the bound of its lengths, where the mean has the same bound.

    Sequences are all about as long then, and most often equally long. Bounds are rounded up (`bound_of`), which may give them
    another query tile.
    """
    if not problem.packed:
        return problem
    q, k = mean_lengths(problem)
    if bound_of(q, problem.rows_q) != problem.max_seqlen_q:
        q = problem.max_seqlen_q
    if problem.pages is not None or bound_of(k, problem.rows_k) != problem.max_seqlen_k:
        k = problem.max_seqlen_k
    return replace(problem, max_seqlen_q=q, max_seqlen_k=k)


@functools.lru_cache(maxsize=4)  # one call's tiles are chosen among many, each with an estimate
def possible_lengths(problem: Problem) -> list[tuple[Problem, list[Problem]]]:
    """Lengths that a call's sequences may have: pairs of the call, and problems of equally long sequences that make it up.

    The host knows how many rows a packed batch has, and a bound of its lengths. As many sequences as possible may be that long;
    or one is, and the others are ever shorter; or all have the mean length, and the bound says nothing. Tiles that suit one
    of these alone lose up to twice as much (docs/notes/hopper-forward.md). In pages all may have as many keys as possible.
    """
    if not problem.packed:
        return [(problem, [problem])]
    if problem.pages is not None:
        problem = replace(problem, rows_k=problem.batch * problem.max_seqlen_k)
    q, k = mean_lengths(problem)
    if (q, k) == (problem.max_seqlen_q, problem.max_seqlen_k):
        return [(problem, [replace(problem, packed=False)])]
    alike = replace(problem, max_seqlen_q=q, max_seqlen_k=k)
    return [
        (problem, _most_as_long_as_possible(problem)),
        (problem, _ever_shorter(problem)),
        (alike, [replace(alike, packed=False)]),
    ]


def _most_as_long_as_possible(problem: Problem) -> list[Problem]:
    """As many sequences of a packed batch as its rows allow are as long as they may be; the others share the other rows."""
    q = problem.rows_q, max(1, min(problem.rows_q, problem.max_seqlen_q))
    k = problem.rows_k, max(1, min(problem.rows_k, problem.max_seqlen_k))
    longest = max(1, min(problem.batch, *(rows // most for rows, most in (q, k))))
    counts, lengths = [longest], [(q[1], k[1])]
    if others := problem.batch - longest:
        counts.append(others)
        of_q, of_k = (
            min(most, max(0, -(-(rows - longest * most) // others))) for rows, most in (q, k)
        )
        lengths.append((of_q, of_k))
    return _of_lengths(problem, counts, lengths)


def _ever_shorter(problem: Problem) -> list[Problem]:
    """One sequence of a packed batch is as long as it may be; the others are ever shorter, and have the other rows."""
    others = problem.batch - 1
    groups = min(others, _MOST_LENGTHS - 1)
    counts = [1, *(others // groups + (n < others % groups) for n in range(groups))]
    of_q = _falling(counts, problem.rows_q, problem.max_seqlen_q)
    of_k = _falling(counts, problem.rows_k, problem.max_seqlen_k)
    return _of_lengths(problem, counts, list(zip(of_q, of_k, strict=True)))


def _falling(counts: Sequence[int], rows: int, most: int) -> list[int]:
    """Lengths that fall from `most` by a power of their rank and add up to about `rows`. counts: how many have each length."""
    longest = min(rows, most)
    power = min(max(0.0, longest * sum(counts) / max(rows, 1) - 1), _MOST_POWER)
    shares = [(1 - n / len(counts)) ** power for n in range(1, len(counts))]
    whole = sum(count * share for count, share in zip(counts[1:], shares, strict=True))
    return [longest, *(min(most, max(1, round((rows - longest) * x / whole))) for x in shares)]


def _of_lengths(
    problem: Problem, counts: Sequence[int], lengths: Sequence[tuple[int, int]]
) -> list[Problem]:
    return [
        replace(problem, packed=False, batch=count, max_seqlen_q=q, max_seqlen_k=k)
        for count, (q, k) in zip(counts, lengths, strict=True)
        if q > 0
    ]


def mean_lengths(problem: Problem) -> tuple[int, int]:
    """The mean lengths of queries and keys in a packed batch."""
    batch = max(problem.batch, 1)
    q, k = -(-problem.rows_q // batch), -(-problem.rows_k // batch)
    return min(q, problem.max_seqlen_q), min(k, problem.max_seqlen_k)
