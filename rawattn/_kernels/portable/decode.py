"""Host twin of kernels_cu/portable/decode.cu: problem -> configuration -> source and steps.

Its twin for Hopper, sm90/decode.py, takes from here what they share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import (
    attention_params,
    features,
    params,
    score_params,
    structs,
    tile_tables,
)
from rawattn._kernels.features import Features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import (
    choice,
    decode_tiles,
    fill_padding,
    forward,
    mask_tiles,
    splits,
)
from rawattn._kernels.source import dims, round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Geometry, Step, Steps, Tiles, patches
from rawattn._kernels.target import Target, shared_limit_of

ENTRY = "rawattn_decode"
TILES = "portable_decode"  # the file of its tile tables
FEATURES = features.names() - {"dropout"}

# The most query rows that share keys (queries times heads of a GQA group). With more, a sequence has many query tiles, each of
# which reads its keys again. More rows are taken where tiles have at least _HEADS_OF_TILE heads each, since other kernels read
# the keys once for each head.
MOST_ROWS = 128
_HEADS_OF_TILE = 4
# The bound of a call's scores: an int counts the units of a line, which have at least 16 keys each.
_MOST_SCORES = 16 * 2**31
_OFFSET_BYTES = 8  # of the offset of a row of a page
# The tables "many", "many_32bit" and "many_8bit" have small blocks, of which an SM runs several. They are used where there is
# more than one stream for each SM (a stream is a sequence and a tile of heads). For 16 bits up to head dim _NARROW an SM then
# runs more waves too, so on sequences of at least _LONG_NARROW keys _LONG_NARROW_STREAMS are enough.
_NARROW, _LONG_NARROW, _LONG_NARROW_STREAMS = 64, 2048, 0.45
# Bytes of shared memory besides tiles: descriptions of the query tiles that a block shares, a flag, room for cutting the line.
_KEPT_BYTES, _FLAG_BYTES, _ROOM_BYTES = 256, 16, 192


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Features):
    """The named constants of namespace `config` in the kernel."""

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset({"bias_chunks", "packed"})
    NAME: ClassVar[str] = "portable"
    ENTRY: ClassVar[str] = ENTRY
    FILE: ClassVar[str] = "portable/decode.cu"
    EARLY: ClassVar[bool] = False  # `Step.early` of its launch

    element: str
    headdim: int
    headdim_v: int
    heads: int  # query heads of a tile
    fewer_heads_last: bool = False  # the last tile of a GQA group has fewer heads
    tile_q: int  # queries of a tile
    tile_rows: int  # rows of a tile: 8, 16, 24 or 32, of which queries times heads are used
    tile_k: int
    waves: int
    stages: int
    blocks_per_sm: int
    copy_bytes: int
    key_bytes: int  # of an access to keys and values; copy_bytes: to other arrays
    tile_in_page: bool = False  # the page size is a multiple of tile_k
    # Queries have no lengths, lengths of keys and page ids have 32 bits, and the page size is a power of two.
    plain_integers: bool = False
    # An accumulator of the target's mma is an operand A as it is, so that P needs no shared memory.
    accumulator_feeds_a: bool
    wave: int = 32

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial result: for each row of a tile its output, running max and sum, in float32."""
        rows = self.tile_q * self.heads
        return round_up(4 * rows * (round_up(self.headdim_v, 16) + 2), 16)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a slot in shared memory: a tile of keys and one of values."""
        columns = round_up(self.headdim, 16), round_up(self.headdim_v, 16)
        size = 1 if self.float8 else self._size
        return self.tile_k * sum(each * size + 16 for each in columns)

    @property
    def extra_bytes_per_wave(self) -> int:
        """Bytes of shared memory for each wave besides its ring: the offsets of the rows of a tile, where it spans pages."""
        return 2 * self.tile_k * _OFFSET_BYTES if self.paged and not self.tile_in_page else 0

    @property
    def shared_bytes(self) -> int:
        wave = self.stages * self.stage_bytes
        if not self.accumulator_feeds_a:
            wave += self.tile_rows * self._pitch(self.tile_k) * self._size
        queries = self.tile_rows * self._pitch(round_up(self.headdim, 16)) * self._size
        merged = self.waves * self.partial_bytes if self.partial_bytes > self.stage_bytes else 0
        used = max(queries + self.waves * wave, merged)
        return (
            used + self.waves * self.extra_bytes_per_wave + _KEPT_BYTES + _FLAG_BYTES + _ROOM_BYTES
        )

    @property
    def _size(self) -> int:
        return 4 if self.element == "float" else 2

    def _pitch(self, columns: int) -> int:
        return columns + 16 // self._size

    def source(self) -> Source:
        derived = ("shared_bytes", "partial_bytes")
        return _source(
            self.ENTRY,
            self.FILE,
            self.summary(),
            params.FORWARD,
            element=self.element,
            constants=features.constants(self, *derived),
            score_mod=self.score_mod,
        )

    def summary(self) -> str:
        shape = f"{self.tile_rows}x{self.tile_k} waves={self.waves} stages={self.stages}"
        words = [f"{self.NAME} decode", self.element, dims(self), shape, f"{self.copy_bytes}B"]
        if self.key_bytes != self.copy_bytes:
            words.append(f"keys={self.key_bytes}B")
        heads = [f"heads={self.heads}"] if self.heads > 1 else []
        return " ".join([*words, *heads, *features.traits(self)])


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for this kernel, else None."""
    group = problem.group_heads
    rows = problem.max_seqlen_q * group
    if rows > MOST_ROWS and decode_tiles.sharing_keys(problem) * _HEADS_OF_TILE > group:
        return f"{rows} query rows share keys, more than {MOST_ROWS}"
    # A query tile of few keys, or of none, has a unit of the line too.
    keys = round_up(max(problem.max_seqlen_k, 1), 16)
    if problem.batch * problem.nheads_q * problem.max_seqlen_q * keys >= _MOST_SCORES:
        return "its key tiles are more than an int counts"
    if problem.mask is not None and problem.mask.dtype == "kept":
        return "the mask of gathered keys has lists, not bits alone"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports; operands: q, k, v and out."""

    def chosen(table: str) -> Config:
        return choose_tiles(Config, TILES, table, problem, target, operands)

    if problem.float8:
        config = chosen("wide_8bit" if decode_tiles.wide(problem) else "8bit")
    else:
        config = chosen("32bit" if problem.dtype == "float32" else "16bit")
    if (table := _many_table(problem, target, config)) is not None:
        small = chosen(table)
        # Small blocks are faster where an SM runs as many of them as it did when they were measured.
        if small.shared_bytes <= shared_limit_of(small.blocks_per_sm, target.shared_limit):
            config = small
    return replace(
        config,
        tile_in_page=problem.pages is not None and problem.pages.page_size % config.tile_k == 0,
    )


def _many_table(problem: Problem, target: Target, usual: Config) -> str | None:
    """The table of small blocks, if there are so many streams that several on an SM are faster than the usual one."""
    if decode_tiles.wide(problem):
        return None
    bits = "_8bit" if problem.float8 else "_32bit" if problem.dtype == "float32" else ""
    dim = max(problem.headdim, problem.headdim_v)
    long_and_narrow = not bits and dim <= _NARROW and problem.max_seqlen_k >= _LONG_NARROW
    least = _LONG_NARROW_STREAMS if long_and_narrow else 1
    if dim > tile_tables.serves(TILES, f"many{bits}"):
        return None
    return f"many{bits}" if streams_per_sm(problem, target, usual.heads) > least else None


def streams_per_sm(problem: Problem, target: Target, heads: int) -> float:
    """Streams for each SM: sequences times tiles of `heads` heads."""
    return problem.batch * decode_tiles.of_heads(problem, heads) / target.multiprocessors


_C = TypeVar("_C", bound=Config)


def choose_tiles(
    config: type[_C],
    tiles: str,
    table: str,
    problem: Problem,
    target: Target,
    operands: Operands,
) -> _C:
    """The configuration, apart from how key tiles are loaded.

    tiles: the file of the tile tables. table: the name of one.
    """
    eights = decode_tiles.in_blocks_of_eight(problem) if target.wave == 32 else None
    tile_rows, heads, tile_q = eights or decode_tiles.shape(problem)
    chosen = choice.choose(
        config,
        tiles,
        problem,
        target,
        operands,
        table,
        heads=heads,
        fewer_heads_last=problem.group_heads % heads > 0,
        tile_q=tile_q,
        tile_rows=tile_rows,
        key_bytes=operands.key_bytes(problem),
    )
    # If a sequence has one query, that is the last row, which sees all keys under a causal mask too.
    alone = problem.max_seqlen_q <= 1 and not (chosen.top_left or chosen.positions)
    return replace(chosen, right=chosen.right and not alone)


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call."""
    return launches(choose(problem, target, operands), problem, structure, operands, target)


def _plain_integers(problem: Problem, structure: Structure) -> bool:
    q, k, pages = structure.q, structure.k, problem.pages
    if not structure.ragged or structure.packed or q.start or q.length:
        return False
    if k.start or k.cumulative or k.length == 8:
        return False
    return pages is None or (
        pages.dtype == "int32" and pages.page_size & (pages.page_size - 1) == 0
    )


def launches(
    config: Config,
    problem: Problem,
    structure: Structure,
    operands: Operands,
    target: Target,
    maps: tuple[tuple[str, Geometry], ...] = (),
) -> Steps:
    """The launches of a call with a configuration. maps: the tensor maps of the main kernel (`Step.maps`)."""
    config = replace(config, plain_integers=_plain_integers(problem, structure))
    values = attention_params.forward(problem, structure, operands, forward.SECTION_BYTES)
    masks = mask_tiles.Masks(problem, structure, operands, values, target)
    keys = dict(zip("kv", attention_params.KEYS[config.paged], strict=True))
    if config.paged:
        structure = attention_params.without_pages(structure)
    tiles = Tiles("q", config.tile_q, decode_tiles.of_heads(problem, config.heads))
    line = splits.line(problem, structure, config, target, tiles, config.waves)
    main = Step(
        source=config.source(),
        blocks=line.blocks,
        threads=config.threads,
        params=structs.fill(params.FORWARD, {**values, **line.fields(problem.nheads_kv)}),
        patches=(
            *patches(params.FORWARD, ("q", "out", "lse"), **keys),
            *attention_params.side_addresses(params.FORWARD, "", structure),
            *attention_params.page_addresses(problem, params.FORWARD),
            *score_params.patches(problem, params.FORWARD),
            *line.patches(params.FORWARD),
        ),
        shared_bytes=config.shared_bytes,
        maps=maps,
        early=config.EARLY,
    )
    padding = fill_padding.of_results(problem, structure, operands)
    scratch = splits.affordable(problem, target, line.scratch(config.partial_bytes))
    return Steps(
        (*masks.steps, main),
        config,
        paddings=padding,
        scratch={**masks.scratch, **scratch},
        counters=line.counters(),
    )
