from __future__ import annotations

import os

import pytest

# JAX would otherwise take most of the GPU's memory for each process of a parallel run.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
