"""The launches of a backward, in the order of the stream: see `backward`, which has the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import attention_params, helper_params, params, score_params, structs
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import (
    backward,
    backward_options,
    backward_parts,
    backward_sections,
    fill_padding,
    mask_tiles,
    ragged_setup,
    schedule,
)
from rawattn._kernels.portable.backward_config import ROW_THREADS, DqConfig, dq_pitch
from rawattn._kernels.steps import Step, Steps, SubTask, Tiles, checked, patches
from rawattn._kernels.target import Target


def steps(
    problem: Problem,
    structure: Structure,
    operands: Operands,
    target: Target,
    *,
    deterministic: bool,
) -> Steps:
    """The launches of a call."""
    _refuse(problem)
    config = backward.choose(problem, target, operands, with_dq=not deterministic)
    shared_by = backward_parts.parts(problem, target, config)
    of_sinks = backward_parts.parts_of_sinks(problem, target, config) if shared_by == 1 else 1
    one_key_tile = backward.has_one_key_tile(problem, config)
    config = replace(
        config,
        split=max(shared_by, of_sinks) > 1,
        split_sinks=of_sinks > 1,
        one_key_tile=one_key_tile,
    )
    options = backward_options.Gradients(
        problem, operands, target, config.dbias, exact_sums=deterministic
    )
    values = {**attention_params.backward(problem, structure, operands), **options.values}
    values["parts"] = max(shared_by, of_sinks)
    values["sink_rows"] = backward_parts.sink_rows(problem, config) if of_sinks > 1 else 0
    query_waves, key_waves = (backward.row_waves(problem, target, of) for of in ("q", "k"))
    values["query_row_shift"] = query_waves.bit_length() - 1
    values["key_row_shift"] = key_waves.bit_length() - 1
    # Shared tiles of sink tokens come before all sections.
    in_sections = replace(problem, sink=0) if of_sinks > 1 else problem
    values["section_queries"] = backward_sections.section_queries(
        in_sections, target, config, values["section_queries"], shared_by
    )
    masks = mask_tiles.of_inner(problem, structure, operands, values, target)
    filled = structs.fill(params.BACKWARD, values)
    arrays = patches(
        params.BACKWARD,
        ("dout", "dlse", "dq", "dk", "dv"),
        **{f"forward__{name}": name for name in ("q", "k", "v", "out", "lse")},
    )
    arrays += attention_params.side_addresses(params.BACKWARD, "forward.", structure)
    arrays += score_params.patches(problem, params.BACKWARD, "forward.")
    arrays += options.patches
    sums_dq = not (deterministic or one_key_tile)
    # Where NaN may come of hidden keys, a launch behind all others computes it again, or main does.
    hides = config.hides_from_some
    config = replace(config, rewrites=backward.rewrites(problem, target, config, operands))
    finishes = sums_dq or (hides and not config.rewrites)
    paddings = _padding(problem, structure, operands)
    # Nothing comes before a main kernel that has all keys and queries of a sequence, if there is nothing else to prepare.
    sets_up = problem.ragged and (not structure.on_host or bool(paddings))
    if one_key_tile and not (config.split or finishes or sets_up or options.follow):
        config = replace(config, delta_rows=backward.delta_rows(problem, target, config))
    if not config.delta_rows:
        arrays += patches(params.BACKWARD, ("row_delta",))
    if sums_dq:
        arrays += patches(params.BACKWARD, ("dq_sum",))
    if finishes and hides:
        arrays += patches(params.BACKWARD, ("found_nan",))
    if config.split:
        arrays += patches(params.BACKWARD, ("part_sums",))
    rows = backward.physical_queries(problem)
    visits = checked("q", backward.row_blocks(rows, query_waves, target.wave), 1)
    scratch = {} if config.delta_rows else {"row_delta": 4 * rows * problem.nheads_q}
    schedules: list[SubTask] = []
    orders: dict[str, int] = {}

    def scheduled(of: Any, tile: int) -> tuple[tuple[int, str], ...]:
        """Asks for the order in which one side's tiles are taken; returns the patch of its address."""
        if not problem.ragged:
            return ()
        order = f"order_{of}"
        # The kernels of dQ alone and of captured gradients share one order.
        if order not in orders:
            schedules.append(schedule.sub_task(structure, tile, of=of, name=order))
            orders[order] = schedule.order_bytes(problem.batch)
        return patches(params.BACKWARD, forward__order=order)

    def step(
        source: Source,
        blocks: int | Tiles,
        threads: int,
        shared_bytes: int,
        *more: tuple[int, str],
        listed: mask_tiles.Listed = mask_tiles.NOTHING,
    ) -> Step:
        own = filled
        if listed.fields:
            lists = {f"forward.{name}": value for name, value in listed.fields.items()}
            own = structs.fill(params.BACKWARD, {**values, **lists})
        more += listed.patches(params.BACKWARD, "forward.")
        return Step(source, blocks, threads, own, (*arrays, *more), shared_bytes)

    def by_queries(alone: DqConfig) -> Step:
        return step(
            alone.source(),
            Tiles("q", alone.tile_q, problem.nheads_q),
            alone.threads,
            alone.shared_bytes,
            *scheduled("q", alone.tile_q),
            listed=masks.of_queries(alone.tile_q, alone.tile_k),
        )

    copy_bytes = operands.copy_bytes(problem)
    # One block for each part but the first of each key tile with sink tokens.
    sink_tiles = problem.batch * problem.nheads_kv * values["sink_rows"] // config.tile_k
    more_blocks = sink_tiles * (of_sinks - 1)
    launches = [
        step(
            config.source(),
            Tiles(
                "k",
                config.tile_k,
                problem.nheads_kv,
                blocks_each=shared_by,
                extra_blocks=more_blocks,
            ),
            config.threads,
            config.shared_bytes,
            *scheduled("k", config.tile_k),
            listed=masks.of_keys(config.tile_q, config.tile_k),
        ),
    ]
    if config.split:
        keys = (
            problem.batch * values["sink_rows"]
            if config.split_sinks
            else backward.physical_keys(problem)
        )
        scratch["part_sums"] = 8 * values["parts"] * keys * problem.nheads_kv * config.depth
        launches.append(
            step(
                backward.parts_source(problem, copy_bytes, config),
                checked("k", backward.row_blocks(keys, key_waves, target.wave), 1),
                ROW_THREADS,
                0,
            )
        )
    captured = []
    if options.captured:
        config_of_captured = backward.choose_captured(
            problem, target, operands, exact_sums=deterministic
        )
        captured.append(by_queries(config_of_captured))
    launches += options.steps(filled, arrays, captured)
    scratch |= options.scratch
    if deterministic:
        launches.append(by_queries(backward.choose_dq(problem, target, operands)))
    if finishes and hides:
        scratch["found_nan"] = 4
    if sums_dq:
        scratch["dq_sum"] = scratch["row_delta"] * dq_pitch(problem.headdim)
    if finishes:
        finish = backward.finish(config, copy_bytes, with_sums=sums_dq)
        blocks = visits if sums_dq else min(visits, target.multiprocessors)
        # Without sums it has nothing to do in most calls but to start.
        early = target.early_launches and not sums_dq
        launches.append(replace(step(finish.source(), blocks, finish.threads, 0), early=early))
    prepare = step(backward.prepare_source(problem, copy_bytes), visits, ROW_THREADS, 0)
    if problem.ragged:
        # Sequences with lengths on the host are ordered once (`Steps.schedules`), not at every run.
        of_device = () if structure.on_host else tuple(schedules)
        prepare = _with_setup(prepare, problem, copy_bytes, of_device, paddings)
    launches = [
        *([] if config.delta_rows else [prepare]),
        *(step(*each) for each in options.before),
        *masks.steps,
        *launches,
    ]
    scratch |= masks.scratch
    more = orders, scratch, options.counters, masks.lists
    of_host = tuple(schedules) if structure.on_host else ()
    return Steps(tuple(launches), config, of_host, (), *more)


def _with_setup(
    prepare: Step,
    problem: Problem,
    copy_bytes: int,
    schedules: tuple[SubTask, ...],
    paddings: tuple[SubTask, ...],
) -> Step:
    """`prepare` with the setup in the same launch, which orders sequences and fills padding rows."""
    struct, path = helper_params.BACKWARD_SETUP, "setup."
    setup = ragged_setup.fields(struct, path, problem.batch, schedules, paddings)
    if not setup.blocks:
        return prepare
    assert isinstance(prepare.blocks, int)
    values = structs.fill(struct, {**setup.values, "setup_blocks": setup.blocks})
    return replace(
        prepare,
        source=backward.setup_source(problem, copy_bytes),
        blocks=prepare.blocks + setup.blocks,
        params=prepare.params + values[len(prepare.params) :],
        patches=prepare.patches + setup.patches,
        fills=setup.fills,
        shared_bytes=ragged_setup.SHARED_BYTES,
    )


def _refuse(problem: Problem) -> None:
    """Raises NotImplementedError for a score function without a derivative."""
    if problem.score_mod is None:
        return
    from rawattn._scores.program import ScoreText
    from rawattn._scores.score_mod import require_gradient

    assert isinstance(problem.score_mod, ScoreText)
    require_gradient(problem.score_mod)


def _padding(problem: Problem, structure: Structure, operands: Operands) -> tuple[SubTask, ...]:
    """Parts that fill the padding rows of those gradients that are the library's own arrays."""
    heads_q, heads_kv = problem.nheads_q, problem.nheads_kv
    shapes: dict[str, tuple[Any, int, int]] = {
        "dq": ("q", heads_q, problem.headdim),
        "dk": ("k", heads_kv, problem.headdim),
        "dv": ("k", heads_kv, problem.headdim_v),
    }
    found = []
    for name, (of, nheads, headdim) in shapes.items():
        side = structure.side(of)
        if name in operands.library_owned and side.padded and side.rows:
            strides = operands.elements(problem, name)
            shape = nheads, headdim
            found.append(
                fill_padding.sub_task(problem, structure, of, shape, strides, {"out": name})
            )
    return tuple(found)
