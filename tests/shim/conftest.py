"""Kernels on the CPU: their own source, compiled by g++ and run on a machine made of fibers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.shim.shim import Builder


@pytest.fixture(scope="session")
def builder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builder]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile kernels for the CPU with")
    builder = Builder(tmp_path_factory.mktemp("shim"))
    # What the selected tests need is compiled while the first of them run.
    for item in request.session.items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for parameter in parameters:
            for build in getattr(parameter, "builds", ()):
                builder.start(build)
    yield builder
    builder.close()
