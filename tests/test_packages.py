"""Imports between the packages of rawattn have no cycles, direct or through other packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def package_of(name: str) -> str:
    """The package or module in rawattn/ that a name belongs to; "rawattn" for names that rawattn itself exports."""
    path = ROOT.joinpath(*name.split(".")[:2])
    return path.stem if path.is_dir() or path.with_suffix(".py").exists() else "rawattn"


def imported(path: Path) -> Iterator[str]:
    """What a file imports, including imports in functions and those for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "it is imported by its whole name"
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_packages_import_each_other_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "rawattn").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        own = package_of(name.removesuffix(".__init__"))
        others = {package_of(name) for name in imported(path) if name.split(".")[0] == "rawattn"}
        graph.setdefault(own, set()).update(others - {own})
    assert {"_call", "_kernels"} <= graph["_runtime"]
    TopologicalSorter(graph).prepare()  # raises an error that names the packages of a cycle
