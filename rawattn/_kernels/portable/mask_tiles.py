"""Host twin of kernels_cu/portable/mask_tiles.cu, which lists the tiles that a mask leaves each query tile or key tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import attention_params, helper_params, structs
from rawattn._kernels.features import features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import mask_writing
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Lists, Step, SubTask, checked, patches
from rawattn._kernels.target import Target
from rawattn._masks import layout

THREADS = 256
MAX_HEADS = 2**20  # the division of kernels_cu/attn/mask_bits.cuh is exact below
_ORDER_BYTES = 1536  # of shared memory that a wave needs to order lists


class Config(NamedTuple):
    """The constants of the kernel. of_keys: it lists the query tiles of key tiles. ordered: it orders lists by length, too."""

    left: bool
    right: bool
    top_left: bool
    positions: bool
    tile_q: int
    tile_k: int
    of_keys: bool
    paged: bool
    ordered: bool
    wave: int

    @property
    def shared_bytes(self) -> int:
        return THREADS // self.wave * _ORDER_BYTES if self.ordered else 0

    def source(self) -> Source:
        sides = [name for name in ("left", "right") if getattr(self, name)]
        words = ["portable mask_tiles", f"{self.tile_q}x{self.tile_k}", *sides]
        words += ["top-left"] * self.top_left + ["positions"] * self.positions
        words += ["of-keys"] * self.of_keys
        words += ["paged"] * self.paged + ["ordered"] * self.ordered
        return _source(
            "rawattn_mask_tiles",
            "portable/mask_tiles.cu",
            " ".join(words),
            helper_params.MASK_TILES,
            constants={
                "kLeft": self.left,
                "kRight": self.right,
                "kTopLeft": self.top_left,
                "kPositions": self.positions,
                "kTileQ": self.tile_q,
                "kTileK": self.tile_k,
                "kOfKeys": self.of_keys,
                "kPaged": self.paged,
                "kOrdered": self.ordered,
                "kThreads": THREADS,
                "kSharedBytes": self.shared_bytes,
            },
        )


@dataclass(frozen=True, slots=True)
class Listed:
    """A kernel's lists of tiles: how they are made, their memory, and what the kernel's parameters say of them.

    step: the launch that makes them. None for kept keys, whose lists are made by the launch that gathers keys: `sub_task` is
    what that launch needs (`Lists.sub_tasks`).
    scratch, counters: as in `Steps`.
    fields: of `BlockMask` in the kernel's parameters. names: of the addresses of `TileLists` there, by field.
    """

    step: Step | None = None
    sub_task: SubTask | None = None
    scratch: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def patches(self, struct: structs.Struct, prefix: str = "") -> tuple[tuple[int, str], ...]:
        """Where the addresses of the lists belong. prefix: the path of the `params.FORWARD` in `struct`."""
        path = f"{prefix}block_mask.lists"
        return tuple(
            (structs.offset(struct, f"{path}.{each}"), name) for each, name in self.names.items()
        )


NOTHING = Listed()


class Masks:
    """What a call launches for its mask before the kernels that read it, and the scratch for that. Nothing without a mask.

    lists: as in `Steps`; empty for a mask of bools, whose bits are made at every run.
    """

    def __init__(
        self,
        problem: Problem,
        structure: Structure,
        operands: Operands,
        values: Mapping[str, Any],
        target: Target,
    ) -> None:
        """values: fields of `params.FORWARD`."""
        self.steps: list[Step] = []
        self.scratch: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self.lists = Lists()
        self._call = problem, structure, values
        self._target = target
        form = problem.mask
        if form is None:
            return
        if problem.nheads_q > MAX_HEADS:
            raise ValueError(
                f"mask: got {problem.nheads_q} query heads, but on a GPU calls with a mask have {MAX_HEADS} at most; make some "
                "of the heads' axis part of the batch"
            )
        if form.dtype != "bool":
            return
        strides, alignment = operands.option_strides["mask"], operands.alignments.get("mask", 0)
        early = target.early_launches
        written = mask_writing.step(form.shape, strides, alignment)
        self.steps.append(replace(written, early=early))
        self.scratch["mask_bits"] = layout.bits_bytes(form.shape)
        self.scratch["mask_map"] = layout.map_bytes(form.shape)
        self.scratch["mask_keys"] = layout.keys_bytes(form.shape)
        gathered = mask_writing.keys_step(form.shape)
        if gathered is not None:
            self.steps.append(replace(gathered, early=early))
            self.scratch["mask_bands"] = mask_writing.band_bytes(form.shape)

    def of_queries(self, tile_q: int, tile_k: int, *, ordered: bool = False) -> Listed:
        """Lists the key tiles that each query tile meets. ordered: also orders query tiles by the lengths of their lists."""
        return self._listed("q", tile_q, tile_k, ordered=ordered)

    def of_keys(self, tile_q: int, tile_k: int) -> Listed:
        """Lists the query tiles that each key tile meets, over all heads that share the keys."""
        return self._listed("k", tile_q, tile_k)

    def _listed(
        self, of: Literal["q", "k"], tile_q: int, tile_k: int, *, ordered: bool = False
    ) -> Listed:
        problem, structure, values = self._call
        if problem.mask is None:
            return NOTHING
        name = f"mask_tiles_{of}"
        sizes = {"tile_q": tile_q, "tile_k": tile_k}
        listed = lists(
            problem, structure, values, self._target, of=of, name=name, ordered=ordered, **sizes
        )
        self.scratch |= listed.scratch
        self.counters |= listed.counters
        if listed.sub_task is not None:
            self.lists = replace(self.lists, sub_tasks=(*self.lists.sub_tasks, listed.sub_task))
            return listed
        assert listed.step is not None
        self.steps.append(listed.step)
        # Only these lists may be kept for later calls: lengths and page ids on a device may change, and bools are read anew.
        if problem.mask.dtype != "bool" and not problem.ragged and problem.pages is None:
            launches, names = self.lists.launches, self.lists.scratch
            self.lists = Lists((*launches, listed.step), (*names, *listed.scratch))
        return listed


def of_inner(
    problem: Problem,
    structure: Structure,
    operands: Operands,
    values: Mapping[str, Any],
    target: Target,
) -> Masks:
    """The `Masks` of a kernel whose parameters have a `params.FORWARD` called "forward". values: the fields of all of them."""
    start = "forward."
    inner = {name.removeprefix(start): x for name, x in values.items() if name.startswith(start)}
    return Masks(problem, structure, operands, inner, target)


def lists(
    problem: Problem,
    structure: Structure,
    values: Mapping[str, Any],
    target: Target,
    *,
    of: Literal["q", "k"],
    tile_q: int,
    tile_k: int,
    name: str,
    ordered: bool = False,
) -> Listed:
    """The lists of one side's tiles, called `name`. Lists of key tiles count query tiles over all heads that share the keys.

    values: fields of `params.FORWARD`. of: "q" for the key tiles of each query tile, "k" for the query tiles of each key tile.
    ordered: query tiles are also ordered by the lengths of their lists.
    """
    mask = problem.mask.shape
    of_keys = of == "k"
    group = problem.group_heads
    heads = min(mask[1], problem.nheads_kv) if of_keys else mask[1]
    parts = group if of_keys else 1
    rows, tile = (problem.rows_k, tile_k) if of_keys else (problem.rows_q, tile_q)
    most = problem.max_seqlen_k if of_keys else problem.max_seqlen_q
    # In batch mode, lengths on the device may exceed the bound that the host was given, but not the array's rows.
    tiles = -(-(min(most, rows) if problem.packed else rows) // tile)
    others = -(-problem.rows_q // tile_q) if of_keys else -(-problem.rows_k // tile_k)
    if problem.packed:
        bound = problem.max_seqlen_q if of_keys else problem.max_seqlen_k
        others = min(others, -(-bound // (tile_q if of_keys else tile_k)))
    shared = mask[0] == 1 and not problem.ragged
    sequences = 1 if shared else problem.batch
    count = rows // tile + problem.batch if problem.packed else tiles * sequences
    capacity = checked("mask", others * parts, tile_q if of_keys else tile_k)
    found = {
        "block_mask.lists.sequence": 0 if shared else 1 if problem.packed else tiles,
        "block_mask.lists.nheads": heads,
        "block_mask.lists.group": (problem.nheads_kv if of_keys else problem.nheads_q) // heads,
        "block_mask.lists.capacity": capacity,
    }
    names = {"data": name}
    scratch = {name: 4 * count * heads * (1 + capacity * (2 if of_keys else 1))}
    if ordered:
        names["order"] = f"{name}_order"
        scratch[names["order"]] = 4 * count * heads
    if problem.mask.dtype == "kept":
        fields = {path.removeprefix("block_mask."): value for path, value in found.items()}
        fields |= {
            "of_keys": int(of_keys),
            "tile_q": tile_q,
            "tile_k": tile_k,
            "sequences": sequences,
            "tiles": tiles,
        }
        fields |= {"others": others, "parts": parts}
        addresses = {f"lists.{each}": own for each, own in names.items()}
        sub_task = SubTask(fields, addresses)
        return Listed(sub_task=sub_task, scratch=scratch, fields=found, names=names)
    of_map = layout.map_shape(mask)
    own = {
        **{f"forward.{path}": value for path, value in {**values, **found}.items()},
        "map_batch": of_map[1] * of_map[2] * of_map[3] if mask[0] > 1 else 0,
        "map_head": of_map[2] * of_map[3],
        "map_row": of_map[3],
        "map_rows": of_map[2],
        "map_keys": layout.granule_keys(mask),
        "sequences": sequences,
        "tiles": max(tiles, 1),
        "parts": parts,
        # Each head of the mask has its own lists for query tiles.
        "group": problem.nheads_q // mask[1] if of_keys else 1,
    }
    used = features(problem)
    limits = used.left, used.right, used.top_left, used.positions
    config = Config(*limits, tile_q, tile_k, of_keys, used.paged, ordered, target.wave)
    counters = {}
    addresses = {"map": "mask_map"}
    if ordered:
        addresses["listed"] = "mask_listed"
        counters["mask_listed"] = 4 * sequences * heads
    addresses |= {f"forward__block_mask__lists__{each}": own for each, own in names.items()}
    step = Step(
        source=config.source(),
        blocks=checked("mask", -(-heads * sequences * tiles // (THREADS // target.wave)), tile),
        threads=THREADS,
        shared_bytes=config.shared_bytes,
        params=structs.fill(helper_params.MASK_TILES, own),
        patches=(
            *patches(helper_params.MASK_TILES, **addresses),
            *attention_params.side_addresses(helper_params.MASK_TILES, "forward.", structure),
            *attention_params.page_addresses(problem, helper_params.MASK_TILES, "forward."),
        ),
        early=target.early_launches,
    )
    return Listed(step, None, scratch, counters, found, names)
