"""An array on another device than the rest of its call: which argument the error message names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rawattn import SeqLayout
from rawattn._call import integers
from rawattn._call.pages import PagedLayout
from rawattn._interop.arrays import HOST
from rawattn._runtime import calls
from tests.layout.on_device import OnDevice


def test_the_caller_s_words() -> None:
    expected = "k: on GPU 1, but q is on GPU 0; move them to one device"
    assert calls.elsewhere("k", 1, 0, "q") == expected
    assert calls.elsewhere("v", HOST, 0, "k").startswith("v: on the host, but k is on GPU 0;")


def test_integers_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "import_integers", lambda name, value: value)
    here, there = OnDevice([3, 4]), OnDevice([0, 1, 2])
    here.data, there.data = SimpleNamespace(device_id=0), SimpleNamespace(device_id=1)  # type: ignore[attr-defined]
    layout = PagedLayout(None, here, there)
    assert calls.of_layout(layout, 0) == "seqlen_k"
    assert calls.of_layout(layout, 1) == "block_table"
    assert calls.of_layout(PagedLayout(SeqLayout(seqstart_q=there), [3, 4]), 1) == "seqs"
    assert calls.of_layout(SeqLayout(seqstart_q=there), 1) == "seqs"
