"""How Hopper's forward is launched: its steps, its tensor maps, and how its work is divided among blocks."""

from __future__ import annotations

import math
from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import attention_params, params, score_params, structs
from rawattn._kernels.attention_params import KEYS
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import align_rows, fill_padding, mask_tiles, schedule
from rawattn._kernels.sm90 import bias_slots, forward, query_tiles, stream_k, tma
from rawattn._kernels.sm90.forward_config import MOST_ORDERED, STORE_ROWS, Config
from rawattn._kernels.steps import Geometry, Step, Steps, SubTask, Tiles, patches
from rawattn._kernels.target import Target
from rawattn._strides import Strides

# Work that is kept for the end of a causal schedule, for each cluster, in units of a head's longest query tile.
_KEPT_ROUNDS = 0.25
# Nothing is kept where that makes fewer query tiles a head than this; else the number is rounded up.
_LEAST_KEPT = 0.5
# Calls with no more rounds of alike tiles than this have sections of at least so many rounds (`section_bytes`).
_FEW_ROUNDS = 6
_SECTION_ROUNDS = 2

_COUNTER_BYTES = 4
_SCHEDULE_COUNTERS = 2  # one of work handed out, one of blocks done


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call."""
    config = forward.choose(problem, target, operands)
    mask = problem.mask if config.key_mask else None
    if mask is not None:
        problem = replace(problem, mask=None)
    launches: list[Step] = []
    scratch: dict[str, int] = {}
    # Names of q, k, v and out as the kernel reads them, and their strides.
    names = dict(zip("qkv", tma.loaded(problem), strict=True)) | {"out": "out"}
    strides = dict(operands.strides)
    for name in tma.unaligned(problem, operands):
        copy = align_rows.copy(problem, operands, name, f"{name}_copy")
        launches.append(copy.step)
        names[name] = f"{name}_copy"
        scratch[f"{name}_copy"] = copy.nbytes
        strides[name] = copy.strides
    operands = replace(operands, strides=strides)

    clusters = target.multiprocessors * config.blocks_per_sm // config.cluster
    section = section_bytes(problem, config, clusters)
    inner = attention_params.forward(problem, structure, operands, section)
    if config.paged:
        structure = attention_params.without_pages(structure)
    as_many_queries = not (problem.packed or structure.q.start or structure.q.length)
    shared = stream_k.split(problem, config, clusters, as_many_queries)
    tiles = Tiles(
        "q",
        config.schedule_rows,
        problem.nheads_q // config.heads_per_tile,
        most=clusters,
        blocks_each=config.cluster,
    )
    whole = -(-problem.rows_q // config.schedule_rows) * tiles.heads * problem.batch
    masks = mask_tiles.Masks(problem, structure, operands, inner, target)
    # With at most one tile for each cluster, the order of tiles does not matter.
    listed = masks.of_queries(config.tile_q, config.tile_k, ordered=whole > clusters)
    launches += masks.steps
    scratch |= masks.scratch
    values = {f"forward.{name}": value for name, value in {**inner, **listed.fields}.items()}
    values |= {
        "row_bound_q": row_bound(problem.rows_q),
        "row_bound_k": 0 if config.paged else row_bound(problem.rows_k),
        **dict(
            zip(
                ("next_page_k", "next_page_v"),
                tma.page_strides_in_heads(problem, operands) or (0, 0),
                strict=True,
            )
        ),
        # Where query tiles are split by keys, their line ends the schedule, and nothing is kept for after it.
        "kept_tiles": 0 if shared else kept_tiles(problem, config, min(whole, clusters)),
    }
    addresses = {f"forward__{name}": own for name, own in names.items()} | {"forward__lse": "lse"}
    counters = {"next_work": _COUNTER_BYTES * _SCHEDULE_COUNTERS, **masks.counters}
    addresses["next_work"] = "next_work"
    if shared is not None:
        values["stream_k"] = shared.values
        counters["arrived"] = _COUNTER_BYTES * shared.counters
        scratch["partials"] = shared.partial_bytes
        addresses |= {"arrived": "arrived", "partials": "partials"}
    if mask is not None:
        of_mask = score_params.broadcast(
            "mask", mask.shape, operands.option_strides["mask"], "bool"
        )
        values |= {"key_mask.batch": of_mask["mask.batch"], "key_mask.keys": mask.shape[3]}
        addresses["key_mask__data"] = "mask"
    schedules: tuple[SubTask, ...] = ()
    orders: dict[str, int] = {}
    if problem.ragged and problem.batch > MOST_ORDERED:
        schedules = (schedule.sub_task(structure, config.schedule_rows, of="q", name="order"),)
        orders["order"] = schedule.order_bytes(problem.batch)
        addresses["forward__order"] = "order"
    of_padding: list[tuple[int, str]] = []
    fills: list[tuple[int, str]] = []
    for part in fill_padding.of_results(problem, structure, operands):
        values |= part.prefixed("padding")
        of_padding += part.patches(params.SM90_FORWARD, "padding")
        fills += part.filled(params.SM90_FORWARD, "padding")
        tiles = replace(tiles, least=min(clusters, fill_padding.blocks(part)))
    # Earlier launches, and a producer that looks up pages, read lengths from global memory.
    carried = not launches and problem.pages is None and _may_be_carried(problem, structure)
    config = replace(config, carried=carried)
    first = params.SM90_FORWARD.dtype.itemsize
    words = range(first, first + 4 * config.carried_words)
    launches.append(
        Step(
            source=config.source(),
            blocks=tiles if shared is None else clusters * config.cluster,
            threads=config.threads,
            params=structs.fill(params.SM90_FORWARD, values) + bytes(len(words)),
            patches=(
                *patches(params.SM90_FORWARD, **addresses),
                *listed.patches(params.SM90_FORWARD, "forward."),
                *attention_params.side_addresses(params.SM90_FORWARD, "forward.", structure),
                *attention_params.page_addresses(problem, params.SM90_FORWARD, "forward."),
                *score_params.patches(problem, params.SM90_FORWARD, "forward."),
                *of_padding,
            ),
            fills=tuple(fills),
            shared_bytes=config.shared_bytes,
            maps=tuple(
                (names.get(name, name), geometry)
                for name, geometry in tensor_maps(problem, config, operands).items()
            ),
            early=True,
            carried=words,
        )
    )
    more = orders, scratch, counters, masks.lists
    return Steps(tuple(launches), config, schedules, (), *more)


def _may_be_carried(problem: Problem, structure: Structure) -> bool:
    """Whether lengths may travel in the kernel's parameters: 32-bit integers of the host for few sequences, no positions."""
    few = problem.ragged and problem.batch <= MOST_ORDERED and not structure.positions
    return few and structure.on_host and max(structure.q.start, structure.k.start) <= 4


def section_bytes(problem: Problem, config: Config, clusters: int) -> int:
    """Bytes of K and V whose heads are scheduled next to each other: a section.

    In a section the longest tiles come first. If it has less than two rounds of tiles, some blocks have long tiles of one
    section and then of the next, others short tiles of both, and few further rounds make up for it.
    """
    chunk = problem.window_right is not None and problem.window_left is None
    if problem.packed or (problem.ragged and problem.pages is None) or not chunk:
        return config.section_bytes
    tiles = -(-problem.max_seqlen_q // config.schedule_rows)
    tiles *= problem.nheads_q // config.heads_per_tile
    rounds = tiles * problem.batch / clusters
    if not _SECTION_ROUNDS <= rounds <= _FEW_ROUNDS or not query_tiles.alike(problem):
        return config.section_bytes
    sections = max(1, tiles // (_SECTION_ROUNDS * clusters))
    keys = min(problem.nheads_kv * problem.max_seqlen_k // sections + 1, 2**31 - 1)
    return max(config.section_bytes, keys * attention_params.key_bytes(problem))


def kept_tiles(problem: Problem, config: Config, clusters: int) -> int:
    """How many query tiles of each head are kept for the end, behind all others of all heads: the shortest causal ones.

    They fill the gaps that the last long ones leave. More of them balance better, but read more of K and V from DRAM again.
    """
    if problem.ragged or problem.window_right is None or problem.window_left is not None:
        return 0
    # If tiles are about equally long, no tile fills a gap better than another, and keeping some would read their keys twice.
    if query_tiles.alike(problem):
        return 0
    tiles = -(-problem.rows_q // config.schedule_rows)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    # Lengths in units of a tile's rows: the n-th shortest tile has `before` + n, the longest `before` + tiles. So k kept tiles
    # of a head are k * before + k * k / 2 of work, and `kept` is the k for which that is `wanted`.
    before = query_tiles.fewest_and_most_keys(problem)[0] / config.schedule_rows
    wanted = _KEPT_ROUNDS * clusters * (before + tiles) / heads
    kept = math.sqrt(before * before + 2 * wanted) - before
    # With very many heads the tiles of the last ones fill the gaps, and no keys need be read twice.
    return 0 if kept < _LEAST_KEPT else min(tiles, math.ceil(kept))


def row_bound(rows: int) -> int:
    """The length of the row axis of a ragged tensor map: a power of two that no sequence exceeds."""
    return 1 << max(rows - 1, 1).bit_length()


def tensor_maps(problem: Problem, config: Config, operands: Operands) -> dict[str, Geometry]:
    """The tensor maps by the name of their array, in the order of the kernel's `Maps`."""
    box_rows = config.tile_q if config.interleaved else config.run_rows
    queries = {"q": (problem.headdim, box_rows, config.heads_per_tile)}
    if config.tensor_stores:
        queries["out"] = (problem.headdim_v, STORE_ROWS, 1)
    maps = {
        name: geometry(
            *(problem, operands.strides[name]),
            rows=problem.rows_q,
            nheads=problem.nheads_q,
            headdim=headdim,
            box_rows=box_rows,
            box_heads=box_heads,
        )
        for name, (headdim, box_rows, box_heads) in queries.items()
    }
    if config.interleaved:
        maps["q"] = heads_before_rows(maps["q"])
    if not config.copies_rows:
        page_strides = tma.page_strides_in_heads(problem, operands) if config.whole_rows else None
        keys = maps_of_keys(problem, operands, config.page_rows or config.tile_k, page_strides)
        of_keys = dict(zip("kv", (each for _, each in keys), strict=True))
        maps = {"q": maps.pop("q"), **of_keys, **maps}
    if config.bias_stages and not config.bias_by_rows:
        maps["bias"] = bias_slots.geometry(problem, operands, config.bias_slot)
    return maps


def maps_of_keys(
    problem: Problem,
    operands: Operands,
    box_rows: int,
    page_strides: tuple[int, int] | None = None,
) -> tuple[tuple[str, Geometry], ...]:
    """For keys and for values, in rows or in pages: the name of the array, and its tensor map.

    page_strides: as `tma.page_strides_in_heads` says, where boxes bring whole rows; else None.
    """
    found = []
    dims = problem.headdim, problem.headdim_v
    for n, (name, headdim) in enumerate(zip(KEYS[problem.pages is not None], dims, strict=True)):
        strides = operands.strides[name]
        if page_strides is not None:
            found.append(
                (name, whole_rows_of_pages(problem, strides, headdim, box_rows, page_strides[n]))
            )
            continue
        if problem.pages is not None:
            found.append((name, geometry_of_pages(problem, strides, headdim, box_rows)))
            continue
        rows, nheads = problem.rows_k, problem.nheads_kv
        sizes = {"rows": rows, "nheads": nheads, "headdim": headdim, "box_rows": box_rows}
        found.append((name, geometry(problem, strides, **sizes)))
    return tuple(found)


def geometry(
    problem: Problem,
    strides: Strides,
    *,
    rows: int,
    nheads: int,
    headdim: int,
    box_rows: int,
    box_heads: int = 1,
) -> Geometry:
    """The tensor map of q, k, v or out, with axes (column, row, head, row again, batch).

    In a ragged map the first row axis has `row_bound` rows. The kernel chooses coordinates so that every sequence ends where
    that axis ends. So whatever is behind the end of a sequence is out of bounds: loads give zeros, stores are dropped. For that
    the map starts `row_bound` rows before the array, and a coordinate of the second row axis leads back to the sequence's rows.
    """
    batch_stride, row_stride, head_stride = (0, *strides[:2]) if problem.packed else strides[:3]
    bound = row_bound(rows) if problem.ragged else rows
    outer = rows + 1 if problem.ragged else 1
    batch = 1 if problem.packed else problem.batch
    row_stride = _legal(row_stride, rows)
    return Geometry(
        dtype=problem.dtype,
        dims=(headdim, bound, nheads, outer, batch),
        strides=(row_stride, _legal(head_stride, nheads), row_stride, _legal(batch_stride, batch)),
        box=(64, box_rows, box_heads, 1, 1),
        origin=-bound * row_stride if problem.ragged else 0,
    )


def heads_before_rows(given: Geometry) -> Geometry:
    """The same map with axes (column, head, row, row again, batch), so that a box has all heads of a row side by side."""
    column, row, head, *others = range(5)
    order = (column, head, row, *others)
    return replace(
        given,
        dims=tuple(given.dims[n] for n in order),
        strides=tuple(given.strides[n - 1] for n in order[1:]),
        box=tuple(given.box[n] for n in order),
    )


def geometry_of_pages(problem: Problem, strides: Strides, headdim: int, box_rows: int) -> Geometry:
    """The tensor map of an array of pages, with axes (column, row of a page, head, unused, page).

    Pages behind the last one are out of bounds: loads give zeros.
    """
    form = problem.pages
    assert form is not None
    page_stride, row_stride, head_stride = strides[:3]
    row_stride = _legal(row_stride, form.page_size)
    return Geometry(
        dtype="float8_e4m3fn" if problem.float8 else problem.dtype,
        dims=(headdim, form.page_size, problem.nheads_kv, 1, form.num_pages),
        strides=(
            row_stride,
            _legal(head_stride, problem.nheads_kv),
            row_stride,
            _legal(page_stride, form.num_pages),
        ),
        box=(128 if problem.float8 else 64, box_rows, 1, 1, 1),
        origin=0,
    )


def whole_rows_of_pages(
    problem: Problem, strides: Strides, headdim: int, box_rows: int, next_page: int
) -> Geometry:
    """The same for boxes of whole rows.

    Axes: (column in a block of 64, row in a group of eight, block of columns, group of rows, head and page). In the last axis a
    page is `next_page` heads long; the kernel asks only for the first `nheads_kv` of them.
    """
    form = problem.pages
    assert form is not None
    page_stride, row_stride, head_stride = strides[:3]
    if problem.nheads_kv == 1:
        head_stride = page_stride
    row_stride = _legal(row_stride, form.page_size)
    heads = next_page * (form.num_pages - 1) + problem.nheads_kv
    return Geometry(
        dtype=problem.dtype,
        dims=(64, 8, headdim // 64, form.page_size // 8, heads),
        strides=(row_stride, 128, 8 * row_stride, _legal(head_stride, heads)),
        box=(64, 8, headdim // 64, box_rows // 8, 1),
        origin=0,
    )


def _legal(stride: int, extent: int) -> int:
    return stride if extent > 1 else 16  # an axis of one element may have any legal stride
