"""How many query tiles a call of Hopper's forward has, and how many keys they see."""

from __future__ import annotations

from collections.abc import Callable

from rawattn._call.problem import Problem

# Query tiles are alike if the shortest has at least this fraction of the longest one's keys.
ALIKE = 0.75


def alike(problem: Problem) -> bool:
    """Whether query tiles have about as many keys as each other. If not, equal parts of tiles would not be equally long."""
    shortest, longest = fewest_and_most_keys(problem)
    return shortest >= ALIKE * longest


def splits_by_length(problem: Problem) -> bool:
    """Whether query tiles that are split are as long in the line as they have keys: unlike ones of dense causal batches."""
    left, right = problem.window_left, problem.window_right
    return not problem.ragged and left is None and right is not None and not alike(problem)


def fewest_and_most_keys(problem: Problem) -> tuple[int, int]:
    """The fewest and the most keys of a query tile, as if tiles had one row: those that the first and the last row see."""
    last = max(problem.max_seqlen_q - 1, 0)
    found = [visible(problem, row, row + 1) for row in (0, last)]
    return min(found), max(found)


def most_key_tiles(problem: Problem, tile_k: int) -> int:
    """The number of key tiles of the longest query tile."""
    return -(-fewest_and_most_keys(problem)[1] // tile_k)


def key_tiles(problem: Problem, rows: int, tile_k: int) -> list[int]:
    """The number of key tiles of each query tile of `rows` rows, at least 1, from the last query tile to the first."""
    last = problem.max_seqlen_q
    seen = (visible(problem, n, min(n + rows, last)) for n in range(0, last, rows))
    return [max(1, -(-keys // tile_k)) for keys in seen][::-1]


def count(problem: Problem, rows: int, heads: int) -> int:
    """The number of query tiles of a call, for tiles of `rows` rows that `heads` query heads share."""
    each = -(-problem.max_seqlen_q // (rows // heads))
    if problem.packed:
        each = min(problem.batch * each, problem.rows_q // (rows // heads) + problem.batch)
    return each * (1 if problem.packed else problem.batch) * (problem.nheads_q // heads)


def visible(problem: Problem, first: int, behind: int) -> int:
    """The number of keys that at least one of the query rows [first, behind) sees."""
    begin, end = _limits(problem)(first, behind)
    return end - begin + min(problem.sink, begin)


def key_tiles_met(problem: Problem, tile_k: int) -> Callable[[int, int], int]:
    """A function of `first` and `behind`: the number of key tiles with such keys."""
    seen, sink_tiles = _limits(problem), -(-problem.sink // tile_k)

    def met(first: int, behind: int) -> int:
        begin, end = seen(first, behind)
        begin //= tile_k
        return -(-end // tile_k) - begin + min(sink_tiles, begin)

    return met


def _limits(problem: Problem) -> Callable[[int, int], tuple[int, int]]:
    """A function of `first` and `behind`: the keys in a window of these rows, the first and the one behind the last."""
    keys, left, right = problem.max_seqlen_k, problem.window_left, problem.window_right
    offset = 0 if problem.top_left else keys - problem.max_seqlen_q

    def seen(first: int, behind: int) -> tuple[int, int]:
        end = keys if right is None else min(keys, max(0, behind + offset + right))
        begin = 0 if left is None else min(end, max(0, first + offset - left))
        return begin, end

    return seen
