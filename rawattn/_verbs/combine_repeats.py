"""Calls of `combine` like earlier ones: found by the form of the partials, and launched from their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rawattn._call.checks import byte_range
from rawattn._interop import arrays, streams
from rawattn._interop.native import Native, Read, native
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._runtime import combine as runtime
from rawattn._runtime.combine import FLOAT32
from rawattn._runtime.read_lengths import ANEW
from rawattn._verbs.repeats import known, remember

known["combine"] = {}
_MOST = 2 * MAX_LISTED  # longer lists are copied

# By the type of the first array and the number of all.
_readers: dict[tuple[type, int], Callable[..., Read | None]] = {}


class Found(NamedTuple):
    """A call by its form.

    first: the first partial. repeat: gives out and lse from the addresses and the array to write, or gives `ANEW` and has
    done nothing; None for a call that is new.
    """

    first: Any
    addresses: list[int]
    key: Any
    repeat: Callable[[list[int], Any], Any] | None


def find(outs: Any, lses: Any, out: Any, dtype: Any) -> Found | None:
    """None for calls that are none on plain arrays of CuPy's or torch's on a GPU."""
    listed = type(outs) in (list, tuple)
    if listed is not (type(lses) in (list, tuple)):
        return None
    given = (*outs, *lses) if listed else (outs, lses)
    if not given or len(given) > _MOST:
        return None
    if out is not None:
        given = (*given, out)
    form = type(given[0]), len(given)
    reader = _readers.get(form)
    if reader is None:
        own = native(arrays.framework_of(given[0]))
        if own is None or form[0] not in own.kinds:
            return None
        reader = _readers[form] = own.reader(form[1])
    read = reader(*given)
    if read is None or read[2]:  # a gradient would be lost: the way of a first call refuses
        return None
    addresses, key, _ = read
    places = tuple([x & 15 for x in addresses]) if key[-1] else None
    count = len(outs) if listed else 0
    key = key, places, count, out is None, dtype, type(dtype)
    try:
        return Found(given[0], addresses, key, known["combine"].get(key))
    except TypeError:  # a dtype that cannot be hashed
        return None


def keep(found: Found, outs: Any, lses: Any, out: Any, dtype: Any) -> None:
    """Remembers a call that has been made, also that it cannot be made again from addresses alone."""
    from rawattn._runtime import combine_gpu
    from rawattn._runtime.launches import launch_of

    first = found.first
    own = native(framework := arrays.framework_of(first))
    assert own is not None
    with arrays.on_stream_of(first, framework) as stream:
        call = runtime.read(outs, lses, out, dtype, framework, stream)
        described, sides, device = call.described, call.sides, call.device
        if device != own.current_device() or streams.is_capturing(own.stream(device)):
            return
        if 0 in described.shape or any(
            combine_gpu.is_copied(views, side.listed, dense=side.name == "outs")
            for side, views in zip(sides, (call.outs, call.lses), strict=True)
        ):
            remember(known["combine"], found.key, _never)
            return
        makers = [own.maker(described.lse_shape, FLOAT32, first)]
        if out is None:
            makers.insert(0, own.maker(described.shape, described.result, first))
        made = [arrays.import_array("out", make(), stream=stream).array for make in makers]
        target = made[0] if out is None else call.target
        step, _ = combine_gpu.prepare(*call[:4], target, made[-1], device)
        views = (*call.outs, *call.lses)
        names = [f"{s.name}{n}" for s in sides for n in range(len(s.arrays))]
        slot = {name: n for n, name in enumerate([*names, "out", "lse"])}
        launch, blocks = launch_of(step, slot, device), step.blocks
        assert isinstance(blocks, int)
        bounds = []
        if out is not None:
            low, high = byte_range(target, 0)
            reach = [byte_range(x, 0) for x in views]
            bounds = [(start - high, end - low) for start, end in reach]
    repeat = _repeat(own, device, makers, bounds, lambda x, stream: launch(x, blocks, stream))
    remember(known["combine"], found.key, repeat)


def _never(addresses: list[int], out: Any) -> Any:
    return ANEW


def _repeat(
    own: Native,
    device: int,
    makers: list[Callable[[], Any]],
    bounds: list[tuple[int, int]],
    launch: Callable[[list[int], int], None],
) -> Callable[[list[int], Any], Any]:
    stream_of, current_device, address_of = own.stream, own.current_device, own.address

    def repeat(addresses: list[int], out: Any) -> Any:
        if current_device() != device:
            return ANEW
        if out is not None:
            place = addresses[-1]
            for address, (low, high) in zip(addresses, bounds):  # noqa: B905  # the last one is its own
                if low < place - address < high:
                    return ANEW
        results = [make() for make in makers]
        addresses += map(address_of, results)
        launch(addresses, stream_of(device))
        return (*results,) if out is None else (out, *results)

    return repeat
