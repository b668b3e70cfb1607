"""Kernels on the CPU: their own source, compiled by g++ and run on a machine made of fibers."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rawattn._kernels.sm90 import forward as sm90_forward
from tests.shim import store
from tests.shim.device import Device, MakeDevice
from tests.shim.launch import Machine
from tests.shim.on_device import Put
from tests.shim.shim import Builder

_HERE = Path(__file__).parent
# Of how many cases every run has one, in files whose kernels take long to compile. GPUs run Hopper's by themselves, which this
# machine imitates.
_STEPS = {
    **{
        f"test_sm90_{name}": 16
        for name in ("bias", "decode", "float8", "folded", "paged", "scores")
    },
    **{
        f"test_{name}": 16
        for name in (
            *(
                "append",
                "backward_parts",
                "bias_backward",
                "decode",
                "decode_mask",
                "float8",
                "gather",
                "jax_launch",
            ),
            *("launches", "mask_calls", "paged", "paged_calls", "score_lines", "scores"),
            *("scores_backward", "splits"),
        )
    },
    **{
        f"test_{name}": 6
        for name in (
            *("backward", "backward_one_key_tile", "bounds", "forward", "kept_lists", "kept_setup"),
            *("ragged_setup", "sm90_forward", "tensor_store"),
        )
    },
}
# Tests whose kernels are compiled while those before them run. Not all: most are another process's to run.
_AHEAD = 8


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first case of each test, and of the others some by chance, the same ones each time."""
    shown: set[str] = set()
    for item in items:
        step = _STEPS.get(item.path.stem, 1) if item.path.parent == _HERE else 1
        if step == 1 or item.get_closest_marker("exhaustive"):
            continue
        function = item.nodeid.partition("[")[0]
        if function in shown and zlib.crc32(item.nodeid.encode()) % step:
            item.add_marker(pytest.mark.exhaustive)
        shown.add(function)


@pytest.fixture(scope="session")
def _builder(request: pytest.FixtureRequest) -> Iterator[tuple[Builder, dict[str, int]]]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile kernels for the CPU with")
    builder = Builder(store.directory())
    yield builder, {item.nodeid: n for n, item in enumerate(request.session.items)}
    builder.close()


@pytest.fixture
def builder(request: pytest.FixtureRequest, _builder: tuple[Builder, dict[str, int]]) -> Builder:
    builder, indices = _builder
    first = indices[request.node.nodeid]
    for item in request.session.items[first : first + _AHEAD]:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for parameter in parameters:
            for build in getattr(parameter, "builds", ()):
                builder.start(build)
    return builder


@pytest.fixture
def machine(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    """Makes a device with waves of 32 or 64 threads, `checked` for undefined behaviour, as of an architecture."""

    def make(wave: int = 32, checked: bool = False, arch: str = "sm_80") -> Device:
        device = Device(Machine(builder, wave, checked), arch)
        device.install(monkeypatch)
        return device

    return make


@pytest.fixture
def hopper(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    """Makes a device for kernels of Hopper's own; seed: in which order what is asynchronous is done."""

    def make(seed: int = 1, checked: bool = False) -> Device:
        device = Device(Machine(builder, seed=seed, checked=checked), sm90_forward.ARCH)
        device.install(monkeypatch)
        return device

    return make


@pytest.fixture
def put(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Put:
    """To a device with waves of 32 threads."""
    return Put(Device(Machine(builder, 32)), monkeypatch)
