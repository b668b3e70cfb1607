from __future__ import annotations

from typing import Any

import pytest

from rawattn._call import integers
from tests.layout.on_device import OnDevice


@pytest.fixture(autouse=True)
def _pass_device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    importer = integers.import_integers

    def imported(name: str, value: Any) -> Any:
        return value if isinstance(value, OnDevice) else importer(name, value)

    monkeypatch.setattr(integers, "import_integers", imported)
