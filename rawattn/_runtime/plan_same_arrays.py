"""Calls of a plan on the arrays of planning time: a straight-line function, for frameworks whose arrays never move.

Such arrays are known by their identity. Nothing about them can have changed but the shape, which may be set. The function
compares both, and launches with the parameters that the last call left, if they hold these arrays' addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rawattn._runtime.launches import BoundLaunch

Repeat = Callable[[Sequence[Any]], Any]


_TEXT = """\
def make(inputs, shapes, launches, written, own, result, otherwise, current_device, device, stream_of, streams):
    {inputs}, = inputs
    {shapes}, = shapes
    {launches}, = launches
    def repeat(args):
        count = len(args)
        if (
            ({given})
            and {alike}
            and written[0] is own
            and current_device() == device
            and (stream := stream_of(device)) in streams
        ):
            {enqueue}
            return result
        return otherwise(args)
    return repeat
"""


def on_same_arrays(
    inputs: Sequence[Any],
    counts: Collection[int],
    written: Sequence[Any],
    own: Sequence[int],
    launches: Sequence[BoundLaunch],
    result: Any,
    otherwise: Repeat,
    current_device: Callable[[], int],
    device: int,
    stream_of: Callable[[int], int],
    streams: Collection[int],
) -> Repeat:
    """A function that repeats calls which give the first of `inputs` as they are, as many as one of `counts`, or nothing.

    written: one item, the addresses that the launches' parameters hold, which is `own` if they are those of `inputs`.
    otherwise: makes all other calls, and those on a stream that is not among `streams`. It sets `written`.
    """
    make = _maker(len(inputs), tuple(sorted(counts)), len(launches))
    enqueues = [(each.enqueue, each.blocks, each.arguments) for each in launches]
    shapes = [x.shape for x in inputs]
    repeat: Repeat = make(
        *(inputs, shapes, enqueues, written, own, result, otherwise),
        *(current_device, device, stream_of, streams),
    )
    return repeat


@functools.lru_cache(maxsize=64)
def _maker(inputs: int, counts: tuple[int, ...], launches: int) -> Callable[..., Repeat]:
    def same(count: int) -> str:
        each = [f"args[{n}] is x{n}" for n in range(count)]
        return " and ".join([f"count == {count}", *each])

    text = _TEXT.format(
        inputs=", ".join(f"x{n}" for n in range(inputs)),
        shapes=", ".join(f"shape{n}" for n in range(inputs)),
        launches=", ".join(f"(enqueue{n}, blocks{n}, arguments{n})" for n in range(launches)),
        given=" or ".join([*(same(count) for count in counts if count), "not count"]),
        alike=" and ".join(f"x{n}.shape == shape{n}" for n in range(inputs)),
        enqueue="; ".join(f"enqueue{n}(blocks{n}, stream, arguments{n})" for n in range(launches)),
    )
    found: dict[str, Any] = {}
    exec(text, found)  # made of numbers alone
    make: Callable[..., Repeat] = found["make"]
    return make
