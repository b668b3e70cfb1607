"""Fixtures for kernels on the CPU: their source is compiled by g++ and runs on a simulated GPU with a fiber per thread."""

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
# For files whose kernels take long to compile: every run has about one case in this many. .ci/gpu runs the kernels on a GPU.
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
# How many tests ahead kernels are compiled in the background. Few, since other processes run most of the tests that follow.
_AHEAD = 8


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as exhaustive all but the first case of each test and a pseudo-random choice, the same in each run."""
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
    """Makes a device with waves of 32 or 64 threads. checked: with the undefined-behaviour sanitizer."""

    def make(wave: int = 32, checked: bool = False, arch: str = "sm_80") -> Device:
        device = Device(Machine(builder, wave, checked), arch)
        device.install(monkeypatch)
        return device

    return make


@pytest.fixture
def hopper(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    """Makes a device for Hopper's kernels. seed: of the order in which threads run and copies arrive."""

    def make(seed: int = 1, checked: bool = False) -> Device:
        device = Device(Machine(builder, seed=seed, checked=checked), sm90_forward.ARCH)
        device.install(monkeypatch)
        return device

    return make


@pytest.fixture
def put(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts arrays on a device with waves of 32 threads."""
    return Put(Device(Machine(builder, 32)), monkeypatch)
