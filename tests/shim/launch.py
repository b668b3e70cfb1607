"""The kernels that a forward launches on a GPU, run on the simulator with parameters that the tests fill in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.problem import Problem, result_shapes
from rawattn._call.structure import structure
from rawattn._kernels import attention_params, helper_params, params, structs
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import fill_padding, ragged_setup
from rawattn._kernels.portable.forward import Config
from rawattn._kernels.portable.schedule import order_bytes
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import forward_steps, stream_k
from tests.memory import CANARY, Strided
from tests.shim.shim import POISON, Build, Builder, Memory
from tests.shim.tensor_map import encode


@dataclass(frozen=True)
class Machine:
    """A simulated GPU: how its kernels are built and run."""

    builder: Builder
    wave: int = 32
    checked: bool = False
    fibers: str = "own"
    seed: int = 1

    def run(self, source: Any, *params: Any, **launch: Any) -> None:
        """params: the kernel's parameters, each an array of one element."""
        build = Build(source, self.wave, self.checked, self.fibers)
        values = [each[0] for each in params]
        self.builder.kernel(build).run(*values, seed=self.seed, **launch)


class Operand:
    """A strided array in memory that holds exactly the bytes it spans, so that an access outside faults."""

    def __init__(self, name: str, array: Strided, *, readonly: bool = True) -> None:
        itemsize = array.buffer.itemsize
        reach = [
            stride * (extent - 1) for extent, stride in zip(array.shape, array.strides, strict=True)
        ]
        first = array.offset + sum(x for x in reach if x < 0)
        last = array.offset + sum(x for x in reach if x > 0)
        end = last + 1 if 0 not in array.shape else first
        self._array, self._first, self._end = array, first, end
        self.memory = Memory(
            name, array.buffer[first:end], phase=first * itemsize % 16, readonly=readonly
        )
        self.address = self.memory.address + (array.offset - first) * itemsize
        self.strides = tuple(itemsize * stride for stride in array.strides)

    def buffer(self) -> np.ndarray:
        """The whole buffer that the array is a view of, with the memory's present content."""
        buffer = self._array.buffer.copy()
        buffer[self._first : self._end] = self.memory.array()
        return buffer


def operands_of(arrays: Mapping[str, Strided]) -> Operands:
    """The strides and the alignment of arrays, by which a kernel is chosen."""
    pointers = 0
    strides = {}
    for name, array in arrays.items():
        itemsize = array.buffer.itemsize
        pointers |= array.offset * itemsize
        strides[name] = tuple(stride * itemsize for stride in array.strides)
    return Operands(strides, pointers)


class Forward:
    """The arrays of one call, in the struct of the kernels."""

    def __init__(
        self,
        problem: Problem,
        lengths: Lengths,
        q: Strided,
        k: Strided,
        v: Strided,
        out: Strided,
        *,
        return_lse: bool = True,
    ) -> None:
        self.problem, self.lengths = problem, lengths
        inputs = {name: Operand(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
        self.out = Operand("out", out, readonly=False)
        self.operands = {**inputs, "out": self.out}
        self.lse = None
        if return_lse:
            lse = np.empty(result_shapes(problem)[1], np.float32)
            lse.reshape(-1).view(np.uint8)[:] = CANARY
            self.lse_shape = lse.shape
            self.lse = Memory("lse", lse, readonly=False)
        self._memory = [*(operand.memory for operand in self.operands.values())]
        self._memory += [] if self.lse is None else [self.lse]
        self.strides = {name: operand.strides for name, operand in self.operands.items()}
        self.q_side, self.k_side = self._side("q", lengths.q), self._side("k", lengths.k)

    def run(
        self,
        machine: Machine,
        config: Config,
        *,
        exact_grid: bool = True,
        section_keys: int | None = None,
        fill: bool = False,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the whole buffer of `out`, and lse.

        exact_grid: launch one block per tile and head, else as many as launch code would from the bounds that it knows.
        fill: write the padding rows as well.
        """
        filled, memory, tiles = self._describe(machine, config, exact_grid, section_keys)
        machine.run(
            config.source(),
            filled,
            grid=tiles * self.problem.nheads_q,
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            memory=memory,
        )
        if fill:
            self.fill_padding(machine)
        return self._results()

    def run_sm90(
        self,
        machine: Machine,
        config: sm90_forward_config.Config,
        *,
        blocks: int,
        exact_grid: bool = True,
        section_keys: int | None = None,
        kept_tiles: int | None = None,
        own_order: bool = False,
        fill: bool = False,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """As `run`, by Hopper's kernel, on a GPU that runs `blocks` blocks at once.

        own_order: each block orders the sequences of a ragged batch itself, instead of reading an order from memory.
        """
        problem = self.problem
        filled, memory, tiles = self._describe(
            machine, config, exact_grid, section_keys, own_order=own_order
        )
        heads = problem.nheads_q // config.heads_per_tile
        clusters = max(blocks // config.cluster, 1)
        shared = stream_k.split(problem, config, clusters)
        if shared is None:
            clusters = min(tiles * heads, clusters)
        whole = params.SM90_FORWARD.zeros()
        fields = whole[0]
        fields["forward"] = filled[0]
        next_work = Memory("next_work", np.zeros(2, np.uint32), readonly=False)
        fields["next_work"] = next_work.address
        counters = [next_work]
        if shared is not None:
            fields["stream_k"] = shared.values
            arrived = np.zeros(shared.counters, np.uint32)
            counters.append(Memory("arrived", arrived, readonly=False))
            fields["arrived"] = counters[-1].address
            poison = np.full(shared.partial_bytes, POISON, np.uint8)
            partials = Memory("partials", poison, readonly=False)
            fields["partials"] = partials.address
            memory.append(partials)
        if fill:
            fields["padding"] = self._padding()[0]
        fields["row_bound_q"] = forward_steps.row_bound(problem.rows_q)
        fields["row_bound_k"] = forward_steps.row_bound(problem.rows_k)
        if shared is not None:
            kept_tiles = 0
        elif kept_tiles is None:
            kept_tiles = forward_steps.kept_tiles(problem, config, clusters)
        fields["kept_tiles"] = kept_tiles
        maps = [
            encode(geometry, self.operands[name].address)
            for name, geometry in forward_steps.tensor_maps(
                problem, config, Operands(self.strides)
            ).items()
        ]
        together = np.concatenate([np.frombuffer(each.tobytes(), np.uint8) for each in maps])
        machine.run(
            config.source(),
            whole,
            together.view((np.void, together.size)),
            grid=clusters * config.cluster,
            cluster=config.cluster,
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            memory=[*memory, *counters],
        )
        for each in counters:
            assert not each.array().any(), f"{each.name} is not zero for the next launch"
        return self._results()

    def _describe(
        self,
        machine: Machine,
        config: Config | sm90_forward_config.Config,
        exact_grid: bool,
        section_keys: int | None,
        *,
        own_order: bool = False,
    ) -> tuple[np.ndarray, list[Memory], int]:
        """The parameters that both kernels have, all memory that they may touch, and the number of tiles of a head."""
        problem = self.problem
        filled = params.FORWARD.zeros()
        fields = filled[0]
        form, operands = structure(self.lengths), Operands(self.strides)
        values = attention_params.forward(problem, form, operands, config.section_bytes)
        for name, value in values.items():
            if "side" not in name:
                structs.put(fields, name, value)
        # Lengths and starts keep the form that the case gives them. Launch code would convert those of the host.
        fields["q_side"], fields["k_side"] = self.q_side, self.k_side
        for name, operand in self.operands.items():
            fields[name] = operand.address
        fields["lse"] = 0 if self.lse is None else self.lse.address
        if section_keys is not None:
            fields["section_keys"] = section_keys

        memory = list(self._memory)
        rows = config.schedule_rows
        tiles = problem.batch * -(-problem.rows_q // rows)
        if problem.ragged:
            order = self.schedule(machine, rows)
            if problem.packed:
                tiles = problem.rows_q // rows + problem.batch
            if exact_grid:
                tiles = tiles_of(order)
            if not own_order:
                memory.append(order)
                fields["order"] = order.address
        return filled, memory, tiles

    def _results(self) -> tuple[np.ndarray, np.ndarray | None]:
        return self.out.buffer(), self.lse and self.lse.array().reshape(self.lse_shape)

    def schedule(self, machine: Machine, tile_q: int) -> Memory:
        order = new_order(self.problem.batch)
        fields = order_of(self.q_side, self.k_side, self.problem.batch, tile_q, order)
        set_up(machine, [*self._memory, order], schedules=[fields])
        return order

    def fill_padding(self, machine: Machine, *, fill_out: bool = True) -> None:
        set_up(machine, self._memory, paddings=[self._padding(fill_out=fill_out)])

    def _padding(self, *, fill_out: bool = True) -> np.ndarray:
        problem = self.problem
        filled = padding(
            problem, self.lengths, "q", self.q_side, self.out, problem.nheads_q, problem.headdim_v
        )
        fields = filled[0]
        fields["out"] = self.out.address if fill_out else 0
        fields["lse"] = 0 if self.lse is None else self.lse.address
        return filled

    def _side(self, name: str, side: Side) -> Any:
        filled = np.zeros((), params.SIDE_STRUCT.dtype)
        for what in ("start", "length", "position"):
            integers = getattr(side, what)
            if integers is not None:
                memory = Memory(f"{what}_{name}", integers)
                self._memory.append(memory)
                filled[what]["data"] = memory.address
                filled[what]["is_64bit"] = integers.dtype.itemsize == 8
        filled["cumulative"], filled["rows"] = side.cumulative, side.rows
        return filled


def new_order(batch: int) -> Memory:
    """Memory for the order of `batch` sequences."""
    return Memory("order", np.full(order_bytes(batch), POISON, np.uint8), readonly=False)


def ordered(order: Memory) -> np.ndarray:
    """The content: one `OrderedSequence` for each sequence, and one that marks the end."""
    return order.array().view(params.ORDERED_SEQUENCE.dtype)


def tiles_of(order: Memory) -> int:
    """The number of tiles of all sequences."""
    return int(ordered(order)["first_tile"][-1])


def order_of(tiled: Any, longest: Any, batch: int, tile: int, order: Memory) -> np.ndarray:
    """Parameters that order the tiles of one side: first those of the sequence that is longest on the other side."""
    filled = helper_params.SCHEDULE.zeros()
    fields = filled[0]
    fields["tiled"], fields["other"], fields["order"] = tiled, longest, order.address
    fields["batch"], fields["tile"] = batch, tile
    return filled


def set_up(
    machine: Machine,
    memory: list[Memory],
    *,
    schedules: Sequence[np.ndarray] = (),
    paddings: Sequence[np.ndarray] = (),
    words: np.ndarray | None = None,
    to: int = 0,
) -> None:
    """Runs the setup launch that comes before all others. words: 32-bit words that it stores from the address `to` on."""
    whole = setup_of(schedules, paddings)
    blocks = blocks_of(whole)
    source = ragged_setup.source()
    if words is not None:
        source, blocks = ragged_setup.carrying_source(), max(blocks, 1)
        carrying = helper_params.CARRYING_SETUP.zeros()
        carrying[0]["setup"], carrying[0]["to"], carrying[0]["count"] = whole[0], to, words.size
        carrying[0]["words"][: words.size] = words
        whole = carrying
    machine.run(
        source,
        whole,
        grid=blocks,
        threads=ragged_setup.THREADS,
        shared_bytes=ragged_setup.SHARED_BYTES,
        memory=memory,
    )


def setup_of(
    schedules: Sequence[np.ndarray], paddings: Sequence[np.ndarray], padding_blocks: int = 2
) -> np.ndarray:
    """Parameters of a setup launch. padding_blocks: few, since the simulator runs blocks one after the other."""
    whole = helper_params.SETUP.zeros()
    fields = whole[0]
    for n, each in enumerate(schedules):
        fields[f"schedule{n}"] = each[0]
        fields["schedule_blocks"] = ragged_setup.schedule_blocks(int(each[0]["batch"]))
    for n, each in enumerate(paddings):
        fields[f"padding{n}"] = each[0]
        fields["padding_blocks"] = padding_blocks
    fields["schedules"], fields["paddings"] = len(schedules), len(paddings)
    return whole


def blocks_of(setup: np.ndarray) -> int:
    fields = setup[0]
    blocks = fields["schedules"] * fields["schedule_blocks"]
    return int(blocks + fields["paddings"] * fields["padding_blocks"])


def padding(
    problem: Problem,
    lengths: Lengths,
    of: str,
    side: Any,
    array: Operand,
    nheads: int,
    headdim: int,
) -> np.ndarray:
    """Parameters that fill an array's padding rows, all but its address. side: the kernel's struct of that side."""
    filled = helper_params.PADDING.zeros()
    fields = filled[0]
    strides = Operands({"array": array.strides}).elements(problem, "array")
    form = structure(lengths).side(of)
    for name, value in fill_padding.fields(problem, form, (nheads, headdim), strides).items():
        if not name.startswith("side"):
            structs.put(fields, name, value)
    fields["side"] = side
    return filled
