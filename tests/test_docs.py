"""What the documentation shows runs: the README's Python, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
MARKS = {"cupy": pytest.mark.gpu, "torch": pytest.mark.frameworks, "jax": pytest.mark.frameworks}


def library(block: str) -> str:
    return next((name for name in MARKS if f"import {name}" in block), "numpy")


def parameters() -> list[object]:
    return [
        pytest.param(block, marks=MARKS.get(library(block), ()), id=f"{n}-{library(block)}")
        for n, block in enumerate(BLOCKS)
    ]


@pytest.mark.parametrize("block", parameters())
def test_readme(block: str) -> None:
    pytest.importorskip(library(block))
    exec(compile(block, "README.md", "exec"), {})


def test_readme_shows_every_library() -> None:
    assert {library(block) for block in BLOCKS} == {"numpy", *MARKS}


@pytest.mark.parametrize(
    "name", ["rawattn._verbs.attention", "rawattn._call.layout", "rawattn.reference"]
)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), verbose=False)
    assert results.attempted > 0
    assert results.failed == 0
