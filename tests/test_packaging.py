"""What a package index and `pip` show: links and extras; and the hints that name extras."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/rawattn/rawattn"
# Packages that no module imports, and what each is for.
TOOLS = {
    "nvidia-cuda-nvrtc": "loaded by CuPy",
    "nvidia-cuda-runtime": "its headers are compiled by CuPy",
    "nvidia-cublas": "loaded by CuPy",
    "pytest-xdist": "plugin",
    "nvidia-cuda-nvdisasm": "command",
    "mypy": "command",
    "ruff": "command",
    "clang-format": "command",
    "pre-commit": "command",
    "pre-commit-hooks": "commands",
}
MODULES = {"cupy-cuda13x": "cupy", "cupy-cuda12x": "cupy"}


@pytest.fixture(scope="module")
def project() -> Any:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def sources() -> list[Path]:
    folders = ("rawattn", "examples", "bench", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None
    return match[0]


def links() -> list[str]:
    text = (ROOT / "README.md").read_text("utf-8")
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    labels = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.M))
    used = set(re.findall(r"\[([^\]\n]+)\]\[\]", text))
    assert used == set(labels), "labels of links without a definition, or the other way round"
    return inline + list(labels.values())


def test_links_of_the_readme_work_on_an_index_page() -> None:
    found = links()
    assert len(found) > 10
    for link in found:
        assert link.startswith(("https://", "#")), link
        if link.startswith(REPOSITORY):
            path = link.removeprefix(f"{REPOSITORY}/blob/main/")
            assert (ROOT / path).is_file(), link


def test_the_front_page_has_one_picture_that_an_index_page_shows() -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    root_url = "https://raw.githubusercontent.com/rawattn/rawattn/main/"
    assert picture.startswith(root_url)
    assert (ROOT / picture.removeprefix(root_url)).read_bytes()[:4] == b"\x89PNG"


def test_the_front_page_says_that_tensors_on_a_gpu_need_cupy() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "**CUDA tensors of PyTorch and JAX need CuPy, too.**" in text


def test_the_project_has_its_addresses(project: Any) -> None:
    urls = project["urls"]
    assert {"Homepage", "Source", "Issues", "Changelog"} <= set(urls)
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    assert (ROOT / urls["Changelog"].removeprefix(f"{REPOSITORY}/blob/main/")).is_file()


def test_classifiers_name_every_python(project: Any) -> None:
    first = int(project["requires-python"].removeprefix(">=3."))
    named = {
        int(one.rpartition(".")[2])
        for one in project["classifiers"]
        if one.startswith("Programming Language :: Python :: 3.")
    }
    assert named == set(range(first, 15))
    extras = {name for name in project["optional-dependencies"] if name.startswith("cuda")}
    for extra in extras:
        version = extra.removeprefix("cuda")
        assert f"Environment :: GPU :: NVIDIA CUDA :: {version}" in project["classifiers"]


def test_extras_hold_what_is_imported(project: Any) -> None:
    text = "\n".join(path.read_text("utf-8") for path in sources())
    unused = set()
    for requirements in project["optional-dependencies"].values():
        for requirement in requirements:
            name = distribution(requirement)
            module = MODULES.get(name, name).replace("-", "_")
            imported = re.search(rf"^\s*(import|from) {module}\b", text, re.M)
            if name != "rawattn" and not imported:
                unused.add(name.removesuffix("-cu12"))
    assert unused == set(TOOLS)


def test_hints_name_an_extra_that_exists(project: Any) -> None:
    texts = [*sources(), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    found = set()
    for path in texts:
        for extras in re.findall(r"(?:rawattn|\.)\[([a-z0-9,]+)\]", path.read_text("utf-8")):
            if "pip install" in path.read_text("utf-8"):
                found |= {(extra, path.name) for extra in extras.split(",")}
    named = {extra for extra, _ in found}
    assert {"cuda13", "demo", "bench", "test", "dev"} <= named
    assert named <= set(project["optional-dependencies"]), found


def test_no_hint_installs_cupy_alone() -> None:
    """No hint tells to install CuPy alone, which would leave out the compiler and the headers."""
    hints = []
    for path in sorted((ROOT / "rawattn").rglob("*.py")):
        hints += re.findall(r"pip install (?:--\S+ )*[\"']?(\S+)", path.read_text("utf-8"))
    assert any(hint.startswith("rawattn[cuda13]") for hint in hints)
    assert not [hint for hint in hints if hint.startswith("cupy")]
