"""Calls of a plan on the arrays of planning time: a straight-line function, for frameworks whose arrays never move.

Such arrays are known by their identity. Nothing about them can have changed but the shape, which may be set. The function
compares both, and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rawattn._runtime.plan_launches import LaunchAll

Repeat = Callable[[Sequence[Any]], Any]


_TEXT = """\
def make(inputs, shapes, launch, result, otherwise, current_device, device, stream_of, streams):
    {inputs}, = inputs
    {shapes}, = shapes
    def repeat(args):
        count = len(args)
        if (
            ({given})
            and {alike}
            and current_device() == device
            and (stream := stream_of(device)) in streams
        ):
            launch(stream)
            return result
        return otherwise(args)
    return repeat
"""


def on_same_arrays(
    inputs: Sequence[Any],
    counts: Collection[int],
    launch: LaunchAll,
    result: Any,
    otherwise: Repeat,
    current_device: Callable[[], int],
    device: int,
    stream_of: Callable[[int], int],
    streams: Collection[int],
) -> Repeat:
    """A function that repeats calls which give the first of `inputs` as they are, as many as one of `counts`, or nothing.

    launch: launches on `inputs`. otherwise: makes all other calls, and those on a stream that is not among `streams`.
    """
    make = _maker(len(inputs), tuple(sorted(counts)))
    shapes = [x.shape for x in inputs]
    repeat: Repeat = make(
        *(inputs, shapes, launch, result, otherwise, current_device, device, stream_of, streams)
    )
    return repeat


@functools.lru_cache(maxsize=64)
def _maker(inputs: int, counts: tuple[int, ...]) -> Callable[..., Repeat]:
    def same(count: int) -> str:
        each = [f"args[{n}] is x{n}" for n in range(count)]
        return " and ".join([f"count == {count}", *each])

    text = _TEXT.format(
        inputs=", ".join(f"x{n}" for n in range(inputs)),
        shapes=", ".join(f"shape{n}" for n in range(inputs)),
        given=" or ".join([*(same(count) for count in counts if count), "not count"]),
        alike=" and ".join(f"x{n}.shape == shape{n}" for n in range(inputs)),
    )
    found: dict[str, Any] = {}
    exec(text, found)  # made of numbers alone
    make: Callable[..., Repeat] = found["make"]
    return make
