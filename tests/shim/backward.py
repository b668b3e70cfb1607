"""The kernels that a backward launches on a GPU, run on the simulator with parameters that the tests fill in."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.problem import Problem, result_shapes
from rawattn._call.structure import structure
from rawattn._kernels import attention_params, helper_params, params, structs
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import ragged_setup
from rawattn._kernels.portable.backward_config import ROW_THREADS, Config, DqConfig, dq_pitch
from tests.memory import Strided
from tests.shim.launch import (
    Machine,
    Operand,
    blocks_of,
    new_order,
    order_of,
    padding,
    set_up,
    setup_of,
    tiles_of,
)
from tests.shim.shim import Memory

ROW_WAVES = 4  # waves that share a row: also more than the row's heads can keep busy


class Backward:
    """The arrays of one call, in the struct of the kernels."""

    def __init__(
        self,
        problem: Problem,
        lengths: Lengths,
        operands: dict[str, Strided],
        lse: np.ndarray,
        dlse: np.ndarray | None,
        gradients: dict[str, Strided],
    ) -> None:
        """operands: q, k, v, out, dout; gradients: dq, dk, dv."""
        self.problem = problem
        self.operands = {name: Operand(name, x) for name, x in operands.items()}
        self.gradients = {name: Operand(name, x, readonly=False) for name, x in gradients.items()}
        self._memory = [x.memory for x in (*self.operands.values(), *self.gradients.values())]
        filled = params.BACKWARD.zeros()
        fields = filled[0]
        forward = fields["forward"]
        every = {**self.operands, **self.gradients}
        strides = Operands({name: operand.strides for name, operand in every.items()})
        self.lengths = lengths
        values = attention_params.backward(problem, structure(lengths), strides)
        for path, value in values.items():
            if "side" not in path:
                into = forward if path.startswith("forward.") else fields
                structs.put(into, path.removeprefix("forward."), value)
        for name, operand in every.items():
            into = forward if name in ("q", "k", "v", "out") else fields
            into[name] = operand.address
        forward["lse"] = self._keep(Memory("lse", lse))
        if dlse is not None:
            fields["dlse"] = self._keep(Memory("dlse", dlse))
        shape = result_shapes(problem)[1]
        fields["row_delta"] = self._keep(
            Memory("row_delta", np.full(shape, np.nan, np.float32), readonly=False)
        )
        fields["found_nan"] = self._keep(
            Memory("found_nan", np.full(1, -1, np.int32), readonly=False)
        )
        self.q_side, self.k_side = self._side("q", lengths.q), self._side("k", lengths.k)
        # Lengths and starts keep the form that the case gives them. Launch code would convert those of the host.
        forward["q_side"], forward["k_side"] = self.q_side, self.k_side
        self.filled = filled

    def _keep(self, memory: Memory) -> int:
        self._memory.append(memory)
        return memory.address

    def _side(self, name: str, side: Side) -> Any:
        filled = np.zeros((), params.SIDE_STRUCT.dtype)
        for what in ("start", "length", "position"):
            integers = getattr(side, what)
            if integers is not None:
                filled[what]["data"] = self._keep(Memory(f"{what}_{name}", integers))
                filled[what]["is_64bit"] = integers.dtype.itemsize == 8
        filled["cumulative"], filled["rows"] = side.cumulative, side.rows
        return filled

    def run(
        self,
        machine: Machine,
        config: Config,
        dq_config: DqConfig,
        *,
        exact_grid: bool = True,
        section_queries: int = 1 << 20,
        fill: bool = False,
    ) -> dict[str, np.ndarray]:
        """Returns the whole buffers of dq, dk and dv."""
        problem, filled = self.problem, self.filled
        fields = filled[0]
        rows = problem.rows_q * (1 if problem.packed else problem.batch)
        pitch = dq_pitch(problem.headdim)
        dq_sum = Memory(
            "dq_sum", np.full((rows, problem.nheads_q, pitch), np.nan, np.float32), readonly=False
        )
        fields["dq_sum"] = self._keep(dq_sum)
        fields["section_queries"] = section_queries
        fields["query_row_shift"] = ROW_WAVES.bit_length() - 1
        row_grid = portable_backward.row_blocks(rows, ROW_WAVES, machine.wave)
        tiles = problem.batch * -(-problem.rows_k // config.tile_k)
        if problem.ragged:
            order = self._schedule(machine, self.k_side, self.q_side, config.tile_k)
            if problem.packed:
                tiles = problem.rows_k // config.tile_k + problem.batch
            if exact_grid:
                tiles = tiles_of(order)
        copy = config.copy_bytes
        rows_of = {"threads": ROW_THREADS, "memory": self._memory}
        if problem.ragged:
            self._set_up(machine, copy, row_grid, fill=fill)
        else:
            prepare = portable_backward.prepare_source(problem, copy)
            machine.run(prepare, filled, grid=row_grid, **rows_of)
        machine.run(
            config.source(),
            filled,
            grid=tiles * problem.nheads_kv,
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            memory=self._memory,
        )
        if config.with_dq:
            finish = portable_backward.finish(config, copy, with_sums=True).source()
            machine.run(finish, filled, grid=row_grid, **rows_of)
        else:
            self._run_dq(machine, dq_config)
        return {name: operand.buffer() for name, operand in self.gradients.items()}

    def _run_dq(self, machine: Machine, config: DqConfig) -> None:
        problem = self.problem
        tiles = problem.batch * -(-problem.rows_q // config.tile_q)
        if problem.ragged:
            tiles = tiles_of(self._schedule(machine, self.q_side, self.k_side, config.tile_q))
        self.filled[0]["dq_sum"] = 0
        self.filled[0]["forward"]["section_keys"] = 100
        machine.run(
            config.source(),
            self.filled,
            grid=tiles * problem.nheads_q,
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            memory=self._memory,
        )

    def _schedule(self, machine: Machine, tiled: Any, longest: Any, tile: int) -> Memory:
        """The order of one side's tiles: first those of the sequence that is longest on the other side."""
        batch = self.problem.batch
        order = new_order(batch)
        self._memory.append(order)
        fields = order_of(tiled, longest, batch, tile, order)
        set_up(machine, self._memory, schedules=[fields])
        self.ordered = fields
        self.filled[0]["forward"]["order"] = order.address
        return order

    def _set_up(self, machine: Machine, copy: int, row_grid: int, *, fill: bool) -> None:
        """The launch of `prepare`, with the order made before it and, if asked to, padding rows to fill."""
        problem, whole = self.problem, helper_params.BACKWARD_SETUP.zeros()
        fields = whole[0]
        fields["backward"] = self.filled[0]
        setup = setup_of([self.ordered], self._paddings() if fill else [])
        fields["setup"] = setup[0]
        fields["setup_blocks"] = blocks_of(setup)
        machine.run(
            portable_backward.setup_source(problem, copy),
            whole,
            grid=row_grid + blocks_of(setup),
            threads=ROW_THREADS,
            shared_bytes=ragged_setup.SHARED_BYTES,
            memory=self._memory,
        )

    def _paddings(self) -> list[np.ndarray]:
        problem, paddings = self.problem, []
        for name, of, side, nheads, headdim in (
            ("dq", "q", self.q_side, problem.nheads_q, problem.headdim),
            ("dk", "k", self.k_side, problem.nheads_kv, problem.headdim),
            ("dv", "k", self.k_side, problem.nheads_kv, problem.headdim_v),
        ):
            operand = self.gradients[name]
            filled = padding(problem, self.lengths, of, side, operand, nheads, headdim)
            filled[0]["out"] = operand.address
            paddings.append(filled)
        return paddings
