"""A fake framework and GPU, in place of CuPy, for the tests of the fast path of repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._interop.native import View, _GeneratedReaders
from rawattn._interop.readers import Attributes
from rawattn._runtime import on_gpu
from rawattn._runtime.calls import describe
from rawattn._runtime.verbs import Verb
from rawattn._verbs import fast_path
from tests import tiles

SHAPE = (1, 4, 2, 8)
NBYTES = 128


class Array:
    """A dense fake array on a GPU."""

    def __init__(self, address: int, shape: tuple[int, ...] = SHAPE, device: int = 0) -> None:
        self.address, self.shape, self.device = address, shape, device
        self.tracked = False
        self.dtype = np.dtype(np.float16)

    __dlpack__ = None  # marks the class as an array type
    strides = property(lambda self: np.empty(self.shape, self.dtype).strides)
    requires_grad = property(lambda self: self.tracked)


class Framework(_GeneratedReaders):
    """Reads `Array` as `Native` does for a framework, and records calls and launches instead of making them."""

    kinds = (Array,)

    def __init__(self) -> None:
        super().__init__(
            Attributes(
                typed="type({x}) is kind",
                plain="True",
                address="{x}.address",
                form="True, {x}.dtype, {x}.device",
                tracked="{x}.tracked",
                names={"kind": Array},
            )
        )
        self.current = 0
        self.asked: list[Options] = []
        self.launched: list[list[int]] = []
        self.lengths: list[Any] = []
        self.next = 1 << 20

    def view(self, x: Array) -> View:
        return View(x.address, x.shape, x.strides, x.dtype, x.device)

    def address(self, x: Array) -> int:
        return x.address

    def empty(self, shape: tuple[int, ...], dtype: Any, beside: Any) -> Array:
        self.next += 1 << 10
        return Array(self.next, shape)

    def allocator_like(
        self, shape: tuple[int, ...], dtype: Any, beside: Any
    ) -> Callable[[], Array]:
        return lambda: self.empty(shape, dtype, beside)

    def current_device(self) -> int:
        return self.current

    def stream(self, device: int) -> int:
        return 0

    def run(self, verb: Verb, inputs: Sequence[Any], targets: Sequence[Any], options: Options, flag: bool,
            backend: Any, values: tuple[int, ...], memo: Any) -> Any:  # fmt: skip
        """Stand in for the dispatcher, and record that a call reached it."""
        self.asked.append(options)
        read = self.read((*inputs, *targets), verb.required_count)
        assert read is not None
        self.current = read[1][3]
        return on_gpu.run(verb, self, read, inputs, targets, options, flag, "numpy", values, memo)  # type: ignore[arg-type]

    def prepare(
        self, verb: Verb, views: Sequence[View | None], options: Options, flag: bool, *_: Any
    ) -> on_gpu.Call:
        named = dict(zip(verb.inputs + verb.outputs, views, strict=True))
        arrays = {name: SimpleNamespace(**x._asdict()) if x else None for name, x in named.items()}
        problem, lengths, results = describe(verb, arrays, options, flag, "numpy")
        targets = views[len(verb.inputs) :]
        made = tuple(
            (n, *x)
            for n, (x, target) in enumerate(zip(results, targets, strict=True))
            if x and target is None
        )
        reach = tuple((0, NBYTES) if x else (0, 0) for x in views)
        masked = any(name.startswith("mask") for name in verb.extra_inputs)
        launches: Any = SimpleNamespace(
            run=self.launch,
            run_keeping=self.launch if masked else None,
            launches=(),
            run_memory=None,
            with_starts=lambda bound: (self.launch, lambda seqs: ((), bound(seqs))),
        )
        return on_gpu.Call(launches, problem, lengths, results, made, None, reach)

    def launch(self, addresses: list[int], stream: int, memory: Any, lengths: Lengths) -> None:
        self.launched.append(addresses)
        self.lengths.append(lengths)


@contextmanager
def fake_gpu() -> Iterator[Framework]:
    """Install a fake GPU that has not seen any call yet."""
    found = Framework()
    with pytest.MonkeyPatch.context() as patch, tiles.nothing_prepared():
        patch.setattr(fast_path, "native_of", lambda framework: found)
        patch.setattr(fast_path.dispatch, "run", found.run)
        patch.setattr(on_gpu, "prepare", found.prepare)
        yield found


def arrays(first: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Array]:
    return [Array((1 << 12) * (n + 1) + first, shape) for n in range(3)]


def called_anew(gpu: Framework, call: Callable[[], Any]) -> bool:
    """Tell whether a call goes through the dispatcher, as a first call does. It must launch exactly once in either case."""
    asked, launched = len(gpu.asked), len(gpu.launched)
    call()
    assert len(gpu.launched) == launched + 1
    return len(gpu.asked) > asked


def known(gpu: Framework, call: Callable[[], Any]) -> None:
    """Repeat a call until the fast path handles it."""
    for _ in range(3):
        call()
    assert not called_anew(gpu, call)


def of_backward() -> list[Array]:
    dout, out, lse = Array(1 << 16), Array(1 << 17), Array(1 << 18, (1, 2, 4))
    lse.dtype = np.dtype(np.float32)
    return [dout, *arrays(), out, lse]


def bias(address: int = 1 << 16, shape: tuple[int, ...] = (2, 4, 4)) -> Array:
    return Array(address, shape)
