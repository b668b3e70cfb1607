"""Fits a configuration of the tile tables to a call: shrinks it where shared memory is short, and adds what the call needs."""

from __future__ import annotations

from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import bias_slots, query_tiles
from rawattn._kernels.sm90.forward_config import Config
from rawattn._kernels.sm90.tile_heads import heads_per_tile, interleaves
from rawattn._kernels.target import Target, shared_limit_of

# The least scale of scores with which a ramp may be added to Q K^T: its slopes are divided by the scale and must stay finite.
_LEAST_SCALE = 2.0**-64
# The largest head dim at which a ramp pays, because consumers are short of time for scores. At larger ones its step of the
# product takes as long as the multiply-add of each score that it saves. Beside a bias there are registers for the ramp's
# descriptors only up to the second, smaller head dim.
_RAMP_COLUMNS, _BIASED_RAMP_COLUMNS = 128, 96
# Keys from which on whole query tiles that are alike have one slot of queries.
_LONG_KEYS = 8192


def with_room(config: Config, target: Target) -> Config:
    """The configuration, shrunk until 8-bit key tiles have room in shared memory beside the 16-bit tiles made of them.

    All tables but "paged_8bit" are made for 16-bit keys. The rows of "paged_8bit" have room at every head dim that they serve.
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
    """The configuration with the number of heads that share a tile. Where heads are interleaved, lanes store the output."""
    interleaved = interleaves(problem, config.tile_rows)
    return replace(
        config,
        heads_per_tile=heads_per_tile(problem, config.tile_rows),
        interleaved=interleaved,
        tensor_stores=config.tensor_stores and not interleaved,
    )


def with_bias(config: Config, problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration with slots for the bias, where its layout allows that and shared memory has room for them."""
    slot = bias_slots.slot(problem, operands, config.tile_q, config.heads_per_tile)
    # With 8-bit keys, the warp that would copy rows of the bias converts tiles instead.
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
        # Rows take more shared memory than boxes and longer to copy, so a second slot is worth more than 16 keys a tile.
        # With pages tile_k stays, so that the tile still has whole pages.
        sizes.insert(1, (config.tile_k - 16, bias_slots.STAGES))
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    for tile_k, stages in sizes:
        found = replace(brought, tile_k=tile_k, bias_stages=stages)
        if found.shared_bytes <= room:
            return found
    return config


def with_query_slots(config: Config, problem: Problem, target: Target) -> Config:
    """The configuration with a second slot of queries where shared memory has room for it.

    Not with 8-bit keys, for which queries are converted in their slot. Nor for few queries on thousands of cached keys at head
    dim 128, whose tiles are whole and alike: with two slots they take up to 5 % longer (docs/notes/hopper-forward.md).
    """
    twice = replace(config, query_slots=2)
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    alone = config.float8 or _has_long_whole_tiles(config, problem)
    return config if alone or twice.shared_bytes > room else twice


def _has_long_whole_tiles(config: Config, problem: Problem) -> bool:
    if config.stream_k or config.cluster > 1 or problem.ragged or problem.mask is not None:
        return False
    if not 96 < max(problem.headdim, problem.headdim_v) <= 128 or problem.window_right is None:
        return False
    _, longest = query_tiles.fewest_and_most_keys(problem)
    return longest >= _LONG_KEYS and query_tiles.alike(problem)


def with_ramp(config: Config, problem: Problem, target: Target) -> Config:
    """The configuration with a ramp where one is possible and pays: what ALiBi or a line adds along the keys joins Q K^T.

    That is possible where scores are otherwise Q K^T times the scale. Without a ramp, scores are scaled and added to before the
    running max, unless the kernel knows a bound of what is added for each row (`one_sided`); then late scaling may stay.
    """
    ramp = replace(config, ramp=True)
    room = shared_limit_of(config.blocks_per_sm, target.shared_limit)
    late = config.late_scaling and (config.one_sided or not config.alibi)
    # The ramp's slopes are divided by the scale, so nothing but the scale may come between Q K^T and the addition.
    remade = problem.softcap is not None or (problem.score_mod is not None and not config.mod_line)
    made = not remade and not config.float8 and problem.scale >= _LEAST_SCALE
    pays = config.headdim <= (_BIASED_RAMP_COLUMNS if config.bias else _RAMP_COLUMNS)
    added = config.alibi or config.mod_line
    if added and made and pays and ramp.shared_bytes <= room:
        return ramp
    return replace(config, late_scaling=late)
