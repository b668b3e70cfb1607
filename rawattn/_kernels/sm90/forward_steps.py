"""How Hopper's forward is launched: the steps, the tensor maps it reads and stores through, and how its work is shared out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import attention_params, params, score_params, structs
from rawattn._kernels.attention_params import KEYS
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import align_rows, fill_padding, mask_tiles, schedule
from rawattn._kernels.portable.forward import padding
from rawattn._kernels.sm90 import bias_slots, filling, forward, tma
from rawattn._kernels.sm90.forward_config import MOST_ORDERED, STORE_ROWS, Config
from rawattn._kernels.steps import Geometry, Part, Step, Steps, Tiles, patches
from rawattn._kernels.target import Target
from rawattn._strides import Strides

# How much work is kept for the end, for each cluster: this many of a head's longest tiles.
_KEPT_ROUNDS = 0.25
_LEAST_KEPT = 0.5  # tiles of each head, of which it takes whole ones

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

    inner = attention_params.forward(problem, structure, operands, config.section_bytes)
    if config.paged:
        structure = attention_params.without_pages(structure)
    clusters = target.multiprocessors * config.blocks_per_sm // config.cluster
    shared = stream_k_of(problem, config, clusters)
    tiles = Tiles(
        "q",
        config.schedule_rows,
        problem.nheads_q // config.heads_per_tile,
        most=clusters,
        times=config.cluster,
    )
    whole = -(-problem.rows_q // config.schedule_rows) * tiles.heads * problem.batch
    masks = mask_tiles.Masks(problem, structure, operands, inner, target)
    # Where each block has one tile at most, none waits for another's.
    listed = masks.of_queries(config.tile_q, config.tile_k, ordered=whole > clusters)
    launches += masks.steps
    scratch |= masks.scratch
    values = {f"forward.{name}": value for name, value in {**inner, **listed.fields}.items()}
    values |= {
        "row_bound_q": row_bound(problem.rows_q),
        "row_bound_k": 0 if config.paged else row_bound(problem.rows_k),
        # The line of what is shared out ends the schedule.
        **dict(
            zip(
                ("next_page_k", "next_page_v"),
                tma.next_pages(problem, operands) or (0, 0),
                strict=True,
            )
        ),
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
        of_mask = score_params.broadcast("mask", mask.shape, operands.of_options["mask"], "bool")
        values |= {"key_mask.batch": of_mask["mask.batch"], "key_mask.keys": mask.shape[3]}
        addresses["key_mask__data"] = "mask"
    schedules: tuple[Part, ...] = ()
    orders: dict[str, int] = {}
    if problem.ragged and problem.batch > MOST_ORDERED:
        schedules = (schedule.part(structure, config.schedule_rows, of="q", name="order"),)
        orders["order"] = schedule.order_bytes(problem.batch)
        addresses["forward__order"] = "order"
    of_padding: list[tuple[int, str]] = []
    fills: list[tuple[int, str]] = []
    for part in padding(problem, structure, operands):
        values |= part.prefixed("padding")
        of_padding += part.patches(params.SM90_FORWARD, "padding")
        fills += part.filled(params.SM90_FORWARD, "padding")
        tiles = replace(tiles, least=min(clusters, fill_padding.blocks(part)))
    # Launches before it, and what finds pages, read lengths from memory.
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
    """Whether lengths are few integers of the host, of 32 bits."""
    few = problem.ragged and problem.batch <= MOST_ORDERED
    return few and structure.on_host and max(structure.q.start, structure.k.start) <= 4


def kept_tiles(problem: Problem, config: Config, clusters: int) -> int:
    """Query tiles of each head that come after the others of all heads: the shortest, where causal tiles differ.

    They fill the gaps that the last long ones leave. More of them balance better, and read more of K and V from DRAM.
    """
    if problem.ragged or problem.window_right is None or problem.window_left is not None:
        return 0
    # Of tiles about as long as each other none fills a gap better, and the keys of those kept would be read twice.
    if filling.alike(problem):
        return 0
    tiles = -(-problem.rows_q // config.schedule_rows)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    # In rows of a tile: the n-th shortest is `before` + n long, and the longest `before` + tiles.
    before = filling.extremes(problem)[0] / config.schedule_rows
    wanted = _KEPT_ROUNDS * clusters * (before + tiles) / heads
    kept = math.sqrt(before * before + 2 * wanted) - before
    # Of very many heads the last ones fill the gaps: their keys need not be read twice for it.
    return 0 if kept < _LEAST_KEPT else min(tiles, math.ceil(kept))


@dataclass(frozen=True, slots=True)
class StreamK:
    """How the last query tiles are shared out by keys (kernels_cu/attn/schedule/stream_k.cuh).

    Of a ragged batch, whose tiles are counted on the GPU: how much may be. There `piece` and `units` say nothing.
    """

    tiles: int
    piece: int
    units: int  # of a tile
    items: int  # at most: numbers of items are below it
    partial_bytes: int  # of what all items come to
    counters: int  # of a tile's items, one for each of its waves
    # Where tiles are unlike: of each head those in the line, and all pieces. Else no rows.
    rows: int = 0
    pieces: int = 0
    least: int = 1  # key tiles of a piece
    gain: int = 0  # by how many they are done earlier

    @property
    def values(self) -> tuple[int, int, int, int, int, int, int]:
        """Of the fields of the kernel's parameter."""
        return self.tiles, self.piece, self.units, self.rows, self.pieces, self.gain, self.least


def stream_k_of(problem: Problem, config: Config, clusters: int) -> StreamK | None:
    """What so many clusters of blocks share out: what remains behind whole rounds of tiles. None where it does not pay."""
    if not config.stream_k:
        return None
    waves = config.cluster * config.consumers * 4
    # Each lane has 16 bytes twice for 16 columns of its two rows, and once for their references and sums.
    wave_bytes = 32 * 16 * (2 * -(-config.headdim_v // 16) + 1)
    rows, piece, units = 0, 0, 0
    least = forward.least_piece(problem, config.tile_k)
    worth = forward.worth_sharing(problem, config.schedule_rows, config.heads_per_tile, clusters)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    if problem.ragged:
        if clusters == 1:
            return None
        tiles, pieces = clusters - 1, clusters
    elif filling.by_length(problem):
        lengths = filling.key_tiles(problem, config.schedule_rows, config.tile_k)
        piece = max(least, -(-heads * sum(lengths) // clusters))
        rows = sum(each > piece for each in lengths)
        if lengths[0] - piece < max(1, worth):
            return None
        tiles, pieces = heads * rows, -(-heads * sum(lengths[:rows]) // piece)
    else:
        tiles = -(-problem.rows_q // config.schedule_rows) * heads % clusters
        keys = -(-filling.extremes(problem)[1] // config.tile_k)
        pieces = filling.pieces_of(tiles, keys, clusters, least)
        gain = (pieces - tiles) * keys  # in key tiles, of all pieces
        if tiles == 0 or pieces <= tiles or gain < worth * pieces:
            return None
        part = -(-keys // pieces)
        piece, units = tiles * part, pieces * part
    items = pieces + tiles - 1
    return StreamK(
        *(tiles, piece, units, items, items * waves * wave_bytes),
        counters=tiles * waves,
        rows=rows,
        pieces=pieces if rows else 0,
        least=least,
        gain=worth,
    )


def row_bound(rows: int) -> int:
    """Where the row axis of a ragged map ends: no sequence is longer."""
    return 1 << max(rows - 1, 1).bit_length()


def tensor_maps(problem: Problem, config: Config, operands: Operands) -> dict[str, Geometry]:
    """Of the operands by name, in the order of the kernel's `Maps`."""
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
        next_pages = tma.next_pages(problem, operands) if config.whole_rows else None
        keys = maps_of_keys(problem, operands, config.page_rows or config.tile_k, next_pages)
        of_keys = dict(zip("kv", (each for _, each in keys), strict=True))
        maps = {"q": maps.pop("q"), **of_keys, **maps}
    if config.bias_stages and not config.bias_by_rows:
        maps["bias"] = bias_slots.geometry(problem, operands, config.bias_slot)
    return maps


def maps_of_keys(
    problem: Problem,
    operands: Operands,
    box_rows: int,
    next_pages: tuple[int, int] | None = None,
) -> tuple[tuple[str, Geometry], ...]:
    """Of keys and of values, in rows or pages: the name of the array, its map. next_pages: where boxes bring whole rows."""
    found = []
    dims = problem.headdim, problem.headdim_v
    for n, (name, headdim) in enumerate(zip(KEYS[problem.pages is not None], dims, strict=True)):
        strides = operands.strides[name]
        if next_pages is not None:
            found.append(
                (name, whole_rows_of_pages(problem, strides, headdim, box_rows, next_pages[n]))
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
    """The map of q, k, v or out: axes (column, row, head, row again, batch).

    In a ragged map the first row axis ends at `row_bound`, where the kernel lets every sequence end, so that past the end of
    a sequence all is out of bounds: loads arrive as zeros, stores are left out. The map starts as many rows before the array,
    and the second row axis brings a sequence back to its rows.
    """
    batch_stride, row_stride, head_stride = (0, *strides[:2]) if problem.group else strides[:3]
    bound = row_bound(rows) if problem.ragged else rows
    outer = rows + 1 if problem.ragged else 1
    batch = 1 if problem.group else problem.batch
    row_stride = _legal(row_stride, rows)
    return Geometry(
        dtype=problem.dtype,
        dims=(headdim, bound, nheads, outer, batch),
        strides=(row_stride, _legal(head_stride, nheads), row_stride, _legal(batch_stride, batch)),
        box=(64, box_rows, box_heads, 1, 1),
        origin=-bound * row_stride if problem.ragged else 0,
    )


def heads_before_rows(given: Geometry) -> Geometry:
    """The same map with axes (column, head, row, row again, batch): a box has all heads of a row side by side."""
    column, row, head, *others = range(5)
    order = (column, head, row, *others)
    return replace(
        given,
        dims=tuple(given.dims[n] for n in order),
        strides=tuple(given.strides[n - 1] for n in order[1:]),
        box=tuple(given.box[n] for n in order),
    )


def geometry_of_pages(problem: Problem, strides: Strides, headdim: int, box_rows: int) -> Geometry:
    """The map of an array of pages: axes (column, row of a page, head, nothing, page). Behind the last page all is zeros."""
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
    """The same for boxes of whole rows: axes (column of a block, row of eight, block of columns, eight rows, head and page).

    Every page has `next_page` heads in the last axis, of which those behind the array's are never asked for.
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
    return stride if extent > 1 else 16  # the stride of an axis of one element says nothing
