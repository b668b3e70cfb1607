"""rawattn as a contender: its default kernels, its other families, its deterministic backward."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import rawattn
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.grids import DETERMINISTIC
from rawattn._bench.timing import Call
from rawattn._compile.compiler import device_arch
from rawattn._kernels.selection import only
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._runtime.devices import gpu_available


class Ours(Contender):
    """rawattn. The lengths of packed batches are on the GPU, as in a training loop."""

    ours = True
    called = "eager, from CuPy"

    def __init__(
        self,
        name: str,
        scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(name)
        self._scope, self._deterministic = scope, deterministic

    def takes(self, case: Case) -> bool:
        return case.deterministic or not self._deterministic

    def scope(self) -> AbstractContextManager[Any]:
        return self._scope()

    def forward(self, case: Case, inputs: Inputs) -> Call:
        return functools.partial(rawattn.attention, *inputs.qkv, **_options(case, inputs))

    def backward(self, case: Case, inputs: Inputs) -> Call:
        options = _options(case, inputs)
        out, lse = rawattn.attention(*inputs.qkv, **options, return_lse=True)
        return functools.partial(
            rawattn.attention_backward,
            *(inputs.dout, *inputs.qkv, out, lse),
            **options,
            deterministic=self._deterministic,
        )


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    seqs = None
    if case.packed:
        longest = inputs.max_seqlen
        seqs = rawattn.SeqLayout(
            seqstart_q=inputs.seqstart, max_seqlen_q=longest, max_seqlen_k=longest
        )
    more = case.feature.options(case, inputs.extras)
    return {"seqs": seqs, "causal": case.causal, "window": case.window, **more}


def families(verb: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Scopes that select our kernels, by the name to show. verb: forward or backward.

    The first one selects nothing: a caller gets these kernels. If they are Hopper's, the portable ones are second.
    """
    ours: dict[str, Callable[[], AbstractContextManager[Any]]] = {"rawattn": contextlib.nullcontext}
    hopper = importlib.util.find_spec(f"rawattn._kernels.sm90.{verb}") is not None
    if hopper and gpu_available() and device_arch(0) == sm90_forward.ARCH:
        ours["portable"] = lambda: only("portable")
    return ours


def ours(verb: str) -> list[Contender]:
    """Our contenders for a verb. The first has the kernels that a caller gets."""
    found: list[Contender] = [Ours(name, scope) for name, scope in families(verb).items()]
    if verb == "backward":
        found.append(Ours(DETERMINISTIC, deterministic=True))
    return found
