from __future__ import annotations

import os

import pytest

from tests import gpu_report

# JAX would otherwise take most of the GPU's memory for each process of a parallel run.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(autouse=True)
def first_gpu() -> None:
    """Tests begin on GPU 0: JAX, where it is used for the first time, leaves the last one current."""
    if gpu_report.why_no_gpu() is None:
        import cupy

        cupy.cuda.Device(0).use()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
