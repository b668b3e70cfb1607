"""Our time over that of the fastest peer for one shape, with all calls in CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rawattn._bench import graphs, measure, paged_peers
from rawattn._bench.grids import CUDNN, FA2, FA4
from rawattn._bench.paged_peers import Pages
from rawattn._bench.peers import first_of, flash4_splits, tensors
from rawattn._bench.report import Figure
from rawattn._bench.timing import REPEATS, Call, Entrant, race

OURS = "rawattn"


class Sides(NamedTuple):
    """The same attention for all sides, on several sets of inputs.

    ours: our call on each set. rows: for peers that read no pages, the CuPy arrays q, k and v of each set. causal: aligned
    so that the last row sees every key. masks: for each set, the bool mask of the keys that a single row sees, or a bias, or
    None; may be empty. pages: for peers that read pages, the same keys in pages; may be empty.
    """

    ours: Sequence[Call]
    rows: Sequence[tuple[Any, Any, Any]]
    causal: bool
    masks: Sequence[Any] = ()
    pages: Sequence[Pages] = ()


def over_fastest(
    name: str, nbytes: int, prepare: Callable[[], Sides], peers: Iterable[str], most: float
) -> Figure:
    """The figure of a shape, with the time of each side or the reason why it has none.

    nbytes: the bytes that one call reads and writes. A peer whose result differs from ours is not timed.
    """
    line = f"{name}: over the fastest peer"
    try:
        sides = prepare()
    except Exception as error:  # the other figures are still shown
        return ratio(line, None, None, most, measure.describe(error))
    times, reasons = seconds(sides, nbytes, peers)
    shown = [f"{side} {1e6 * time:.1f} us" for side, time in times.items()]
    ours = times.pop(OURS, None)
    best = min(times.values(), default=None)
    return ratio(line, ours, best, most, ", ".join([*shown, *reasons]))


def seconds(
    sides: Sides, nbytes: int, peers: Iterable[str], repeats: int = REPEATS
) -> tuple[dict[str, float], list[str]]:
    """The time of each side by its name, ours by `OURS`, and the reasons why other sides have none.

    nbytes: the bytes that one call reads and writes. A peer whose result differs from ours is not timed.
    """
    ready, reasons = _ready(sides, nbytes, peers)
    times: dict[str, float] = {}
    for side, timing in race(ready, repeats=repeats).items():
        if isinstance(timing, Exception):
            reasons.append(f"{side}: {measure.describe(timing)}")
        else:
            times[side] = timing.seconds
    return times, reasons


def ratio(name: str, top: float | None, bottom: float | None, most: float, of: str = "") -> Figure:
    """The figure of one time over another, which should be at most `most`."""
    value = None if top is None or bottom is None else top / bottom
    return Figure(name, value, "x", most, at_most=True, of=of)


def _ready(sides: Sides, nbytes: int, peers: Iterable[str]) -> tuple[dict[str, Entrant], list[str]]:
    """The entrants whose results agree, ours first, and the reasons why other sides are left out."""
    ready: dict[str, Entrant] = {}
    reasons: list[str] = []
    first: tuple[str, Sequence[Any]] | None = None
    measured = {*_PEERS, *paged_peers.PEERS} if sides.pages else {*_PEERS}
    for side in (OURS, *(name for name in peers if name in measured)):
        try:
            entrant = _entrant(side, sides, nbytes)
            results = entrant.call()
            differs = measure.disagreement(results, first)
        except Exception as error:  # a side that does not support the shape is left out
            reasons.append(f"{side}: {measure.describe(error)}")
            continue
        if differs:
            reasons.append(f"{side}: {differs}")
            continue
        first = first or (side, results)
        ready[side] = entrant
    return ready, reasons


def _entrant(side: str, sides: Sides, nbytes: int) -> Entrant:
    if side == OURS:
        return graphs.entrant(graphs.of_cupy, sides.ours, nbytes)
    if side in paged_peers.PEERS:
        calls = [paged_peers.PEERS[side](pages) for pages in sides.pages]
        return graphs.entrant(graphs.of_torch, calls, nbytes)
    masks = sides.masks or (None,) * len(sides.rows)
    calls = [
        _PEERS[side](*qkv, sides.causal, mask) for qkv, mask in zip(sides.rows, masks, strict=True)
    ]
    return graphs.entrant(graphs.of_torch, calls, nbytes)


def sdpa(backend: str, q: Any, k: Any, v: Any, causal: bool, mask: Any = None) -> Call:
    """torch's scaled_dot_product_attention, restricted to one of its backends."""
    import torch
    from torch.nn import attention
    from torch.nn.attention.bias import causal_lower_right

    options: dict[str, Any] = {"enable_gqa": q.shape[2] != k.shape[2]}
    rows, keys = q.shape[1], k.shape[1]
    if mask is not None:
        options["attn_mask"] = torch.from_dlpack(mask)
    elif causal and rows == keys:
        options["is_causal"] = True
    elif causal and rows > 1:
        options["attn_mask"] = causal_lower_right(rows, keys)
    q, k, v = (x.transpose(1, 2) for x in tensors(q, k, v))  # (batch, heads, rows, D)

    def call() -> Any:
        with attention.sdpa_kernel([getattr(attention.SDPBackend, backend)]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2)

    return call


def _flash4(q: Any, k: Any, v: Any, causal: bool, mask: Any = None) -> Call:
    if mask is not None:
        raise ValueError("it takes no mask")
    from flash_attn.cute.interface import flash_attn_func

    qkv = tensors(q, k, v)
    options = {"causal": causal, **flash4_splits()}

    def call() -> Any:
        return first_of(flash_attn_func(*qkv, **options))

    return call


_PEERS: dict[str, Callable[[Any, Any, Any, bool, Any], Call]] = {
    CUDNN: functools.partial(sdpa, "CUDNN_ATTENTION"),
    FA2: functools.partial(sdpa, "FLASH_ATTENTION"),
    FA4: _flash4,
}
