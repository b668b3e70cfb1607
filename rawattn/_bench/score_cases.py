"""The cases of the suite `scores`, each with its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rawattn._bench.cases import Case
from rawattn._bench.grids import CUDNN, EFFICIENT, FA2, FA4, FLEX, FSA
from rawattn._bench.report import Bound
from rawattn._bench.score_features import (
    PLAIN,
    Alibi,
    AlibiText,
    Bias,
    Documents,
    Dropout,
    Feature,
    Sinks,
    Softcap,
    Tiles,
    TopK,
)

# Cases with an additive bias. Columns: batch, heads of q, heads of k and v, heads of the bias, seqlen, D.
_BIASES = (
    (1, 2, 1, 1, 4096, 64),
    (1, 2, 1, 1, 16384, 64),
    (2, 16, 16, 16, 4096, 128),
    (2, 16, 4, 1, 4096, 128),
    (8, 16, 16, 16, 2048, 64),
)
_SWEEP = (256, 1024, 4096, 8192, 16384, 32768)


def cases(quick: bool = False) -> list[Case]:
    """All cases, forward and backward. quick: only the forward with D 128."""
    forward = [*_bias(), *_masks(), *_functions(), *_sweep(_SWEEP), *_decode()]
    backward = [*_bias(True), *_masks(True), *_functions(True), *_sweep((8192, 32768), True)]
    found = [*forward, *backward]
    return [c for c in found if c.headdim == 128 and not c.backward] if quick else found


def _case(
    kind: str,
    label: str,
    sizes: tuple[int, int, int, int, int],  # batch, heads of q, of k and v, length, D
    causal: bool,
    backward: bool,
    feature: Feature = PLAIN,
    **more: Any,
) -> Case:
    batch, nheads_q, nheads_kv, seqlen, headdim = sizes
    verb = "backward" if backward else "forward"
    label = f"B{batch} H{nheads_q}/{nheads_kv} S{seqlen} {label} {verb}".replace("  ", " ")
    return Case(
        *(kind, label, (seqlen,) * batch, nheads_q, nheads_kv, headdim, causal),
        backward=backward,
        feature=feature,
        **more,
    )


def _with_base(case: Case, base: Case, *bounds: Bound) -> list[Case]:
    """A case with `base` as its `over`, compared by time, and that base."""
    base = replace(base, panel=case.panel, priority=case.priority)
    return [replace(case, over=base.name, by_time=True, bounds=(*bounds, *case.bounds)), base]


def _either(
    backward: bool, what: str, forward_limit: float, backward_limit: float, **more: Any
) -> Bound:
    return Bound(what, backward_limit if backward else forward_limit, **more)


def _bias(backward: bool = False) -> list[Case]:
    found = []
    for batch, nheads_q, nheads_kv, heads, seqlen, headdim in _BIASES:
        shape = (1 if heads == 1 else batch, heads, seqlen, seqlen)
        if backward:
            peers = (EFFICIENT, FSA)
            bound = Bound("speed over the better of those with dbias", 3.0, peers=peers)
        else:
            limit = 2.5 if headdim == 128 else 2.0
            bound = Bound("speed over cuDNN, bias as a mask", limit, peers=(CUDNN,))
        found.append(
            _case(
                *("bias", f"heads{heads}", (batch, nheads_q, nheads_kv, seqlen, headdim)),
                *(True, backward, Bias(shape)),
                bounds=(bound,),
                peers=(CUDNN, EFFICIENT, FSA),
                panel="bias",
            )
        )
    sizes = (4, 16, 16, 4096, 128)
    what = "time over no bias, with dbias" if backward else "time over no bias"
    shared = _case("broadcast", "", sizes, False, backward, Bias((1, 1, 4096, 4096)), panel="bias")
    base = _case("broadcast-ref", "", sizes, False, backward)
    bound = _either(backward, what, 1.2, 1.4, at_most=True)
    return found + _with_base(shared, base, bound)


def _masks(backward: bool = False) -> list[Case]:
    sizes = (1, 16, 16, 16384, 128)
    live = _case("blocks", "live10%", sizes, False, backward, Tiles(0.1), panel="masks")
    full = _case("blocks-ref", "", sizes, False, backward)
    found = _with_base(
        live, full, _either(backward, "time over dense full", 0.13, 0.18, at_most=True)
    )
    found.append(
        _case(
            *("documents", "1024", (2, 16, 16, 8192, 128), False, backward, Documents(1024)),
            peers=(FLEX,),
            bounds=(_either(backward, "speed over FlexAttention", 1.7, 1.2, peers=(FLEX,)),),
            panel="masks",
        )
    )
    sizes = (1, 16, 16, 32768, 128)
    kept = _case("topk", "kept1024", sizes, False, backward, TopK(1024), panel="masks")
    few = _case("topk-ref", "keys1024", sizes, False, backward, seqlen_k=1024)
    found += _with_base(kept, few, Bound("time over dense attention to 1024 keys", 1.3, True))
    sizes = (1, 64, 8, 8192, 64)  # those of gpt-oss
    sinks = _case("sinks", "left128", sizes, True, backward, Sinks(), panel="masks", priority=1)
    sinks = replace(sinks, window_left=128, peers=(FA4,))
    window = _case("sinks-ref", "left128", sizes, True, backward, window_left=128)
    return found + _with_base(sinks, window)


def _functions(backward: bool = False) -> list[Case]:
    """Cases with functions of single scores, and with dropout, whose backward has no bound."""
    sizes = (2, 16, 16, 8192, 128)
    panel = "score functions"
    alibi = _case("alibi", "", sizes, True, backward, Alibi(), peers=(FLEX,), panel=panel)
    plain = _case("causal", "", sizes, True, backward)
    found = _with_base(alibi, plain, Bound("speed over our own causal", 0.93))
    text = _case("scoremod", "alibi", sizes, True, backward, AlibiText(), panel=panel)
    bound = Bound("speed over built-in ALiBi", 0.95)
    found.append(replace(text, over=found[0].name, by_time=True, bounds=(bound,)))
    what = "speed over the better of FlexAttention and FlashAttention-4"
    bounds = [Bound(what, 1.3, peers=(FLEX, FA4))]
    if not backward:
        bounds.append(Bound("speed over FlexAttention", 2.2, peers=(FLEX,)))
    found.append(
        _case(
            *("softcap", "30", sizes, True, backward, Softcap()),
            peers=(FLEX, FA4),
            bounds=tuple(bounds),
            panel=panel,
        )
    )
    if not backward:
        sizes = (4, 16, 16, 4096, 128)
        dropout = _case("dropout", "0.1", sizes, True, False, Dropout(), peers=(FA2,), panel=panel)
        found += _with_base(
            replace(dropout, bounds=(Bound("speed over FlashAttention-2", 1.3, peers=(FA2,)),)),
            _case("dropout-ref", "", sizes, True, False),
            Bound("speed over our own without", 0.6),
        )
    return found


def _sweep(lengths: tuple[int, ...], backward: bool = False) -> list[Case]:
    """1024 keys kept of a growing number, beside dense attention to all keys."""
    found = []
    for seqlen in lengths:
        sizes = (1, 2, 1, seqlen, 64)
        more: dict[str, Any] = {"priority": 2}
        kept = _case("sweep", "kept1024", sizes, True, backward, TopK(1024), **more)
        found += _with_base(kept, _case("sweep-ref", "", sizes, True, backward))
    return found


def _decode() -> list[Case]:
    sizes, keys = (1, 2, 1, 1, 64), 524288
    more: dict[str, Any] = {"priority": 2, "seqlen_k": keys}
    kept = _case("sweep", f"keys{keys} kept1024", sizes, True, False, TopK(1024), **more)
    return _with_base(kept, _case("sweep-ref", f"keys{keys}", sizes, True, False, seqlen_k=keys))
