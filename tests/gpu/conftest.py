from __future__ import annotations

import os
from typing import Any

import pytest

from tests import gpu_report

# Otherwise each process of a parallel run would preallocate most of the GPU's memory for JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(autouse=True)
def first_gpu() -> None:
    """Makes GPU 0 current before each test, because the first use of JAX leaves the last GPU current."""
    if gpu_report.why_no_gpu() is None:
        import cupy

        cupy.cuda.Device(0).use()


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return module


@pytest.fixture
def jax() -> Any:
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return module


@pytest.fixture
def stream() -> Any:
    """A non-blocking CuPy stream: the legacy default stream does not wait for it."""
    cupy = pytest.importorskip("cupy")
    return cupy.cuda.Stream(non_blocking=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
