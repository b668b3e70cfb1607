"""How a kernel's launch reaches the driver, with a stand-in for CuPy and the driver."""

from __future__ import annotations

import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rawattn._runtime import driver, kernel
from rawattn._runtime.kernel import Arguments, Kernel

NO_CONTEXT, OUT_OF_RESOURCES = 201, 701


class DriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Driver:
    """errors: what the next launches return, in order. Later launches succeed."""

    def __init__(self) -> None:
        self.errors: list[int] = []
        self.launched: list[dict[str, Any]] = []
        self.contexts_made = 0

    def launch(self, handle: int, *arguments: int) -> None:
        if self.errors and (status := self.errors.pop(0)):
            raise DriverError(status)
        *grid, shared_bytes, stream, packed, _ = arguments
        self.launched.append(
            {"handle": handle, "grid": grid, "shared": shared_bytes, "stream": stream, "at": packed}
        )

    def launch_early(self, config: int, handle: int, packed: int, extra: None) -> int:
        if self.errors and (status := self.errors.pop(0)):
            return status
        *grid, shared_bytes, stream, attributes, count = struct.unpack(
            "<7I4xQQI4x", ctypes.string_at(config, 56)
        )
        told = [
            struct.unpack("<I4xi60x", ctypes.string_at(attributes + 72 * n, 72))
            for n in range(count)
        ]
        self.launched.append(
            {
                "handle": handle,
                "grid": grid,
                "shared": shared_bytes,
                "stream": stream,
                "at": packed,
                "attributes": told,
            }
        )
        return 0

    def make_context(self) -> None:
        self.contexts_made += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    of_driver = SimpleNamespace(launchKernel=fake.launch, CUDADriverError=DriverError)
    runtime = SimpleNamespace(memGetInfo=fake.make_context)
    cuda = SimpleNamespace(driver=of_driver, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver, "early_launcher", lambda: fake.launch_early)
    return fake


@pytest.fixture
def loaded(fake: Driver) -> Kernel:
    return Kernel(SimpleNamespace(kernel=SimpleNamespace(ptr=77)))


@pytest.mark.parametrize("early", [False, True])
def test_what_is_launched(early: bool, fake: Driver, loaded: Kernel) -> None:
    arguments = Arguments((b"12345678", b"abcdefgh"))
    for blocks, stream in ((132, 5), (132, 5), (7, 5), (7, 1 << 45)):
        loaded.launch(blocks, 384, 200_000, stream, arguments, early)
        launched = fake.launched[-1]
        assert launched["grid"] == [blocks, 1, 1, 384, 1, 1]
        assert (launched["shared"], launched["stream"]) == (200_000, stream)
        assert (launched["handle"], launched["at"]) == (77, arguments.address)
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
        assert launched.get("attributes") == ([(6, 1)] if early else None)


@pytest.mark.parametrize("early", [False, True])
def test_a_thread_without_a_context(early: bool, fake: Driver, loaded: Kernel) -> None:
    fake.errors = [NO_CONTEXT]
    loaded.launch(1, 32, 0, 0, Arguments((b"",)), early)
    assert (len(fake.launched), fake.contexts_made) == (1, 1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("errors", [[OUT_OF_RESOURCES], [NO_CONTEXT, NO_CONTEXT]])
def test_errors_of_the_driver(errors: list[int], early: bool, fake: Driver, loaded: Kernel) -> None:
    fake.errors = [*errors]
    with pytest.raises(DriverError) as caught:
        loaded.launch(1, 32, 0, 0, Arguments((b"",)), early)
    assert caught.value.status == errors[-1]
    assert fake.launched == []


def test_arguments_that_stay_where_they_are() -> None:
    launches = [kernel.Arguments((b"x" * 64,)) for _ in range(8)]
    for each in launches:
        first = struct.unpack_from("<Q", each.data)[0]
        assert ctypes.string_at(first, 64) == b"x" * 64
