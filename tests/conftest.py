from __future__ import annotations

import pytest
from hypothesis import settings

from tests import gpu_report

# The same examples on every run: a change is judged by its own effect. `--hypothesis-profile=search` looks for new ones.
# No deadline, since time per example says more about the machine than about the code.
settings.register_profile("rawattn", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("rawattn")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpu_report.GpuReport(config), "gpu-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := gpu_report.why_no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
