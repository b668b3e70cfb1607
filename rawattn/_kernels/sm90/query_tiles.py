"""How many query tiles a call of Hopper's forward has, and how many keys they see."""

from __future__ import annotations

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
    begin, end = _seen(problem, first, behind)
    return end - begin + min(problem.sink, begin)


def key_tiles_of(problem: Problem, first: int, behind: int, tile_k: int) -> int:
    """The number of key tiles with such keys."""
    begin, end = _seen(problem, first, behind)
    begin //= tile_k
    return -(-end // tile_k) - begin + min(-(-problem.sink // tile_k), begin)


def _seen(problem: Problem, first: int, behind: int) -> tuple[int, int]:
    """The keys in a window of the query rows [first, behind): the first, and the one behind the last."""
    keys = problem.max_seqlen_k
    offset = 0 if problem.top_left else keys - problem.max_seqlen_q
    begin, end = 0, keys
    if problem.window_right is not None:
        end = min(keys, max(0, behind + offset + problem.window_right))
    if problem.window_left is not None:
        begin = min(end, max(0, first + offset - problem.window_left))
    return begin, end
