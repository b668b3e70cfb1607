"""What a row of the tile tables becomes for a call: less of it where room is short, and what is brought beside it."""

from __future__ import annotations

from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import bias_slots
from rawattn._kernels.sm90.forward_config import Config
from rawattn._kernels.sm90.tile_heads import heads_per_tile, interleaves
from rawattn._kernels.target import Target, shared_limit_of

# Of products to which slopes are added: those are divided by it, and must stay numbers.
_LEAST_SCALE = 2.0**-64
# Columns of keys up to which consumers are short of time for scores: beyond, products take what a multiply-add of each score
# does. Beside a bias the descriptors of a ramp have registers up to fewer.
_RAMP_COLUMNS, _BIASED_RAMP_COLUMNS = 128, 96


def with_room(config: Config, target: Target) -> Config:
    """The same with less of its row, until tiles of 8 bits have room beside those that they become.

    The tables are made for 16 bits, but for "paged_8bit", whose rows have room at every head dim that they serve.
    """
    while config.float8 and config.shared_bytes > target.shared_limit:
        if config.tensor_stores:
            config = replace(config, tensor_stores=False)
        elif config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        else:
            config = replace(config, tile_k=config.tile_k - 16)
    return config


def with_heads(config: Config, problem: Problem) -> Config:
    """The same, whose tiles hold so many heads as they should. Of interleaved ones lanes store the output."""
    interleaved = interleaves(problem, config.tile_rows)
    return replace(
        config,
        heads_per_tile=heads_per_tile(problem, config.tile_rows),
        interleaved=interleaved,
        tensor_stores=config.tensor_stores and not interleaved,
    )


def with_bias(config: Config, problem: Problem, target: Target, operands: Operands) -> Config:
    """The same, with the bias brought beside the keys where it lies so and there is room for it."""
    slot = bias_slots.slot(problem, operands, config.tile_q, config.heads_per_tile)
    # The warp that would bring rows converts tiles of 8 bits.
    if slot == bias_slots.NONE or (slot.by_rows and config.float8):
        return config
    brought = replace(
        config,
        bias_rows=slot.rows,
        bias_heads=slot.heads,
        bias_by_rows=slot.by_rows,
        bias_pairs=config.bias_pairs and slot.by_rows,
    )
    sizes = [(config.tile_k, bias_slots.STAGES), (config.tile_k, 1)]
    if slot.by_rows and problem.pages is None:
        # Rows take more room than boxes, and to copy them longer: a second slot is worth more than so many keys. Not more
        # than whole pages in a tile.
        sizes.insert(1, (config.tile_k - 16, bias_slots.STAGES))
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    for tile_k, stages in sizes:
        found = replace(brought, tile_k=tile_k, bias_stages=stages)
        if found.shared_bytes <= room:
            return found
    return config


def with_query_slots(config: Config, target: Target) -> Config:
    """The same, with room for the next tile's queries where there is some. Those for tiles of 8 bits are converted in place."""
    twice = replace(config, query_slots=2)
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    return config if config.float8 or twice.shared_bytes > room else twice


def with_ramp(config: Config, problem: Problem, target: Target) -> Config:
    """The same, whose products have what ALiBi or a line adds along the keys, where scores are products but for the scale.

    What is added to scores must else be there before they are compared, unless it has a bound by rows.
    """
    ramp = replace(config, ramp=True)
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    late = config.late_scaling and (config.one_sided or not config.alibi)
    # A slope is divided by the scale.
    remade = problem.softcap is not None or (problem.score_mod is not None and not config.mod_line)
    made = not remade and not config.float8 and problem.scale >= _LEAST_SCALE
    pays = config.headdim <= (_BIASED_RAMP_COLUMNS if config.bias else _RAMP_COLUMNS)
    added = config.alibi or config.mod_line
    if added and made and pays and ramp.shared_bytes <= room:
        return ramp
    return replace(config, late_scaling=late)
