"""One step of a call as a function, with its kernel loaded and its parameters written, except for the addresses."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rawattn._kernels.steps import Step
from rawattn._runtime import kernel
from rawattn._runtime.kernel import Arguments
from rawattn._runtime.lengths import CARRIED, NAMES
from rawattn._runtime.tensor_map import MAP_BYTES, TensorMaps

# Launches a step. Arguments: what each slot holds (addresses, and the bytes of carried integers), the number of blocks, and
# the stream.
Launch = Callable[[Sequence[Any], int, int], None]


class BoundLaunch(NamedTuple):
    """A launch whose parameters are its own, for calls that follow each other and seldom change addresses.

    write: writes addresses into the parameters. The launch is ``enqueue(blocks, stream, arguments)``.
    """

    write: Callable[[Sequence[Any]], None]
    enqueue: Callable[[int, int, Arguments], None]
    blocks: int
    arguments: Arguments


def bound_launch(step: Step, slot: dict[str, int], device: int, blocks: int) -> BoundLaunch:
    """A `BoundLaunch` of a step in `blocks` blocks, with its kernel loaded. slot: as in `launch_of`."""
    parts = _Parts(step, slot, device)
    arguments, pick, patch = Arguments(parts.parameters), parts.pick, parts.patch

    def write(addresses: Sequence[Any]) -> None:
        picked = pick(addresses)
        if picked != arguments.patched:
            patch(arguments, picked)

    return BoundLaunch(write, parts.enqueue, blocks, arguments)


def launch_of(step: Step, slot: dict[str, int], device: int) -> Launch:
    """A function that launches a step, whose kernel is loaded now.

    The arguments are written once. A launch rewrites them only if addresses differ from those of the last one.

    slot: the index of each address among those that a launch is given, by name.
    """
    parts = _Parts(step, slot, device)
    enqueue, pick, patch, parameters = parts.enqueue, parts.pick, parts.patch, parts.parameters
    free = [Arguments(parameters)]  # arguments that no launch is using

    def launch(addresses: Sequence[int], blocks: int, stream: int) -> None:
        if not blocks:
            return
        try:
            arguments = free.pop()
        except IndexError:  # another thread is launching it
            arguments = Arguments(parameters)
        picked = pick(addresses)
        if picked != arguments.patched:
            patch(arguments, picked)
        enqueue(blocks, stream, arguments)
        free.append(arguments)

    return launch


class _Parts:
    """What a step's launch consists of.

    enqueue: launches the loaded kernel with arguments made of `parameters`. pick: what of all addresses these hold.
    patch: writes what `pick` returns into arguments.
    """

    def __init__(self, step: Step, slot: dict[str, int], device: int) -> None:
        loaded = kernel.load(step.source, device)
        if step.shared_bytes:
            loaded.allow_shared_memory(step.shared_bytes)
        self.enqueue = loaded.launcher(step.threads, step.shared_bytes, step.early)
        self.parameters: tuple[bytes, ...] = (step.params,)
        if step.maps:
            self.parameters += (bytes(MAP_BYTES * len(step.maps)),)
        at, *maps_from = Arguments(self.parameters).at
        assert all((at + offset) % 8 == 0 for offset, _ in (*step.patches, *step.fills))
        if CARRIED in slot and not step.carried and {name for _, name in step.patches} & {*NAMES}:
            raise AssertionError(
                f"{step.source.summary}: finds no lengths, which another launch carries"
            )
        patched = sorted((at + offset, slot[name]) for offset, name in (*step.patches, *step.fills))
        order = [n for _, n in patched] + [slot[name] for name, _ in step.maps]
        words = [(offset // 8, n) for n, (offset, _) in enumerate(patched)]
        carries = CARRIED in slot and len(step.carried) > 0
        carried, carried_at = len(order), at + step.carried.start
        if carries:
            order.append(slot[CARRIED])
        # The last index twice, since `itemgetter` returns a tuple for two indices and more.
        self.pick = operator.itemgetter(*order, order[-1])
        maps_at = [first + MAP_BYTES * n for first in maps_from for n in range(len(step.maps))]
        tensor_maps = [
            (slice(at, at + MAP_BYTES), n, TensorMaps(geometry))
            for n, at, (_, geometry) in zip(itertools.count(len(words)), maps_at, step.maps)
        ]

        def patch(arguments: Arguments, picked: tuple[Any, ...]) -> None:
            # Memory views take a third of the time of `struct.pack_into` and of slices of a bytearray.
            data, view, before = arguments.words, arguments.view, arguments.patched
            arguments.patched = None  # until everything is written, in case of an exception
            for at, n in words:
                data[at] = picked[n]
            if carries and (before is None or before[carried] != picked[carried]):
                integers = picked[carried]
                view[carried_at : carried_at + len(integers)] = integers
            for where, n, maps in tensor_maps:
                # Copying a map takes as long as writing four addresses, so it is copied only if its address has changed.
                if before is None or before[n] != picked[n]:
                    view[where] = maps.at(picked[n])
            arguments.patched = picked

        self.patch = patch
