"""The documentation's code runs: Python blocks of its pages, examples in docstrings, and the site itself.

Blocks of README.md and of the pages in STANDALONE run one by one, those of other pages in order in one namespace. Code that
needs a GPU is left out where there is none: blocks that import CuPy, and blocks marked <!-- gpu -->. tests/test_torch.py and
tests/test_jax.py run docs/frameworks.md.
"""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import inspect
import operator
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rawattn

ROOT = Path(__file__).resolve().parents[1]
STANDALONE = ("README.md", "docs/index.md", "docs/guides/plans.md")
IN_ORDER = (
    "docs/guides/inference.md",
    "docs/guides/training.md",
    "docs/guides/torch.md",
    "docs/guides/jax.md",
    "docs/guides/lengths.md",
    "docs/guides/scores.md",
    "docs/guides/serving.md",
    "docs/guides/limits.md",
    "docs/coming-from.md",
    "docs/how-fast.md",
    "docs/troubleshooting.md",
)
LIBRARIES = ("cupy", "torch", "jax")
# The functions of rawattn.reference.
REFERENCE = ("attention", "attention_backward", "paged_attention", "append_kv", "combine")
_BLOCK = re.compile(r"(<!-- gpu -->\n\n)?^```python\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    page: str
    code: str
    needs_gpu: bool

    @property
    def libraries(self) -> set[str]:
        """The libraries that the block needs. An import inside `try` does not count."""
        return {name for name in LIBRARIES if re.search(rf"^import {name}\b", self.code, re.M)}


def blocks(page: str) -> list[Block]:
    found = [
        Block(page, code, bool(marked))
        for marked, code in _BLOCK.findall((ROOT / page).read_text("utf-8"))
    ]
    return [b._replace(needs_gpu=b.needs_gpu or "cupy" in b.libraries) for b in found]


def run(chosen: list[Block]) -> None:
    for name in sorted(set().union(*(block.libraries for block in chosen))):
        pytest.importorskip(name)
    names: dict[str, Any] = {}
    for block in chosen:
        exec(compile(block.code, block.page, "exec"), names)


def marks(chosen: list[Block]) -> list[pytest.MarkDecorator]:
    libraries = set().union(*(block.libraries for block in chosen))
    gpu = [pytest.mark.gpu] if any(block.needs_gpu for block in chosen) else []
    return gpu + ([pytest.mark.frameworks] if libraries & {"torch", "jax"} else [])


def units() -> list[Any]:
    """The units that run in one namespace: a block, or a page. A page with GPU blocks also runs without them."""
    found: dict[str, list[Block]] = {}
    for page in STANDALONE:
        for n, block in enumerate(blocks(page)):
            found[f"{page}-{n}-{'-'.join(sorted(block.libraries)) or 'numpy'}"] = [block]
    for page in IN_ORDER:
        every = blocks(page)
        found[page] = [block for block in every if not block.needs_gpu]
        if len(found[page]) < len(every):
            found[f"{page}-gpu"] = every
    return [pytest.param(x, marks=marks(x), id=name) for name, x in found.items()]


@pytest.mark.parametrize("chosen", units())
def test_page(chosen: list[Block]) -> None:
    assert chosen
    run(chosen)


def test_every_page_with_python_is_run() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    with_python = {page for page in pages if blocks(page)}
    assert with_python - {"docs/frameworks.md"} == {*STANDALONE, *IN_ORDER} - {"README.md"}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_front_shows_every_library(page: str) -> None:
    assert set().union(*(block.libraries for block in blocks(page))) == set(LIBRARIES)
    assert any(not block.libraries for block in blocks(page))


def documented() -> list[str]:
    """The modules whose docstrings have examples, without those of frameworks, which have their own tests."""
    package = Path(rawattn.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(("rawattn", *path.relative_to(package).with_suffix("").parts))
        if re.search(r"^ *>>> (?!.*\+SKIP)", path.read_text(), re.M) and name not in (
            "rawattn.torch",
            "rawattn._torch.attention",
            "rawattn._jax.attention",
        ):
            found.append(name.removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", documented())
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), verbose=False)
    assert results.attempted > 0
    assert results.failed == 0


def public() -> list[str]:
    """All public names with documentation of their own, but for those of frameworks."""
    names = [x for x in rawattn.__all__ if x not in ("__version__", "reference")]
    return [*names, *(f"reference.{x}" for x in REFERENCE)]


@pytest.mark.parametrize(
    "name", [*public(), "SeqLayout.from_lengths", "SeqLayout.from_padding_mask"]
)
def test_examples_run_when_pasted(name: str) -> None:
    doc = inspect.getdoc(operator.attrgetter(name)(rawattn)) or ""
    assert re.search(r"^Examples\n--------\n", doc, re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0


@pytest.mark.parametrize("name", public())
def test_docstrings_of_functions_have_sections(name: str) -> None:
    documented = operator.attrgetter(name)(rawattn)
    if inspect.isfunction(documented):
        sections = set(re.findall(r"^(.+)\n-+$", inspect.getdoc(documented) or "", re.MULTILINE))
        assert sections >= {"Parameters", "Returns", "Raises"}


def hook(name: str) -> Any:
    """Load a module of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_that_leave_the_pages_lead_to_the_repository() -> None:
    text = (
        "[a](../../examples/train.py) [b](lengths.md#packed) [c](../frameworks.md) "
        "![d](../../bench/results/forward-h200.png)\n\n[e]: ../../README.md\n"
    )
    assert hook("links").rewritten(text, "guides/page.md", "https://host/us") == (
        "[a](https://host/us/blob/main/examples/train.py) [b](lengths.md#packed) "
        "[c](../frameworks.md) ![d](../plots/forward-h200.png)\n\n"
        "[e]: https://host/us/blob/main/README.md\n"
    )


def test_links_that_leave_the_pages_lead_to_files() -> None:
    for path in ROOT.glob("docs/**/*.md"):
        for link in re.findall(r"\]\((\.\./[^)\s#]+)", path.read_text("utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_remarks_behind_the_items_of_a_section_have_a_heading() -> None:
    pytest.importorskip("griffe")
    items = "Sum.\n\nReturns\n-------\nout : array\n    Its rows.\nlse : array\n\n"
    remark, rest = "A row of no keys is 0.\nNaN spreads.", "\n\nNotes\n-----\nOne.\n\nTwo."
    with_remarks = hook("signatures").with_remarks
    assert with_remarks(f"{items}{remark}{rest}") == f"{items}Remarks\n-------\n{remark}{rest}"
    assert with_remarks(f"{items.strip()}{rest}") == f"{items.strip()}{rest}"


@functools.cache
def griffe_package() -> Any:
    """The package as the API reference reads it."""
    import griffe

    extensions = griffe.load_extensions(f"{ROOT / 'docs/signatures.py'}:AsHelp")
    options: Any = {"extensions": extensions, "docstring_parser": "numpy"}
    return griffe.load("rawattn", search_paths=[ROOT], **options)


def documented_by_griffe(name: str) -> Any:
    """What the API reference shows of a public name."""
    found = griffe_package()[name.removeprefix("rawattn.")]
    return found.final_target if found.is_alias else found


def test_signatures_of_the_reference_are_those_of_help() -> None:
    pytest.importorskip("griffe")
    functions = {f"rawattn.{x}": getattr(rawattn, x) for x in rawattn.__all__}
    functions |= {f"rawattn.reference.{x}": getattr(rawattn.reference, x) for x in REFERENCE}
    functions = {name: x for name, x in functions.items() if inspect.isfunction(x)}
    assert "rawattn.attention" in functions and "rawattn.append_kv" in functions
    for name, function in functions.items():
        shown, signature = documented_by_griffe(name), inspect.signature(function)
        assert str(shown.returns) == signature.return_annotation, name
        defaults = {
            x.name: None if x.default is x.empty else repr(x.default)
            for x in signature.parameters.values()
            if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        }
        shown_defaults = {
            x.name: x.default for x in shown.parameters if "variadic" not in x.kind.value
        }
        assert shown_defaults == defaults, name


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("rawattn.attention_backward", {"causal": "bool", "dropout_p": "float"}),
        ("rawattn.paged_attention", {"sink": "int", "softcap": "float | None"}),
        ("rawattn.torch.attention", {"causal": "bool", "scale": "float | None"}),
        ("rawattn.jax.attention", {"causal": "bool", "num_splits": "int | None"}),
        ("rawattn.block_mask", {"batch": "int"}),
        ("rawattn.show_mask", {"causal": "bool", "align": "str", "sink": "int"}),
    ],
)
def test_each_parameter_of_the_reference_has_its_own_type_and_default(
    name: str, types: dict[str, str]
) -> None:
    pytest.importorskip("griffe")
    shown = documented_by_griffe(name)
    (items,) = (x.value for x in shown.docstring.parsed if x.kind.value == "parameters")
    assert {x.name: str(x.annotation) for x in items if x.name in types} == types
    for item in items:
        assert item.value == shown.parameters[item.name.lstrip("*")].default, item.name


def test_parameters_that_share_an_item_get_one_each() -> None:
    pytest.importorskip("griffe")
    before = (
        "Sum of a, b.\n\nParameters\n----------\na, b : int\n    Two.\n\n    More.\n*c, **d\n\n"
    )
    rest = "Returns\n-------\ne, f : int"
    assert hook("signatures").one_by_one(before + rest) == (
        "Sum of a, b.\n\nParameters\n----------\na : int\n    Two.\n\n    More.\nb : int\n    Two.\n\n    More.\n*c\n**d\n\n"
        + rest
    )


@pytest.mark.filterwarnings("ignore")  # warnings of MkDocs and its plugins
def test_the_site_documents_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='pip install -e ".[docs]"')
    pytest.importorskip("mkdocstrings", reason='pip install -e ".[docs]"')
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocstrings import Inventory
    from pygments.styles import get_style_by_name
    from pygments.token import Keyword

    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    with (tmp_path / "objects.inv").open("rb") as file:
        found = set(Inventory.parse_sphinx(file))
    public = {name for name in rawattn.__all__ if name not in ("__version__", "reference")}
    optional = {"torch.attention", "torch.register_transformers", "jax.attention"}
    reference = {f"reference.{name}" for name in REFERENCE}
    assert {f"rawattn.{name}" for name in public | optional | reference} <= found

    colour = get_style_by_name("default").style_for_token(Keyword)["color"]
    for name in ("index.html", "reference/rawattn.html"):
        assert f"#{colour}" in (tmp_path / name).read_text("utf-8"), f"{name}: code has no colours"
    page = (tmp_path / "how-fast.html").read_text("utf-8")
    plots = re.findall(r'src="(plots/[^"]+)"', page)
    assert len(plots) == len(list(ROOT.glob("bench/results/*.png")))
    assert all((tmp_path / plot).is_file() for plot in plots)
    assert "unknown" not in (tmp_path / "reference/rawattn.html").read_text("utf-8")


# Folders that docs/architecture.md names as a whole, because their modules' names say what they are.
WHOLE = (
    *("rawattn/_bench", "rawattn/_cli", "rawattn/_console", "rawattn/_jax", "rawattn/_torch"),
    *("kernels_cu/ptx", "kernels_cu/tile"),
)


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    quoted = {x for quote in re.findall(r"`([^`]+)`", text) for x in re.findall(r"\w+", quote)}
    files = [*(ROOT / "rawattn").rglob("*.py"), *(ROOT / "kernels_cu").rglob("*.cu*")]
    missing = [
        name
        for name in (x.relative_to(ROOT).as_posix() for x in files)
        if not name.startswith(WHOLE)
        and "/__" not in name
        and Path(name).stem not in quoted
        and f"{Path(name).name}" not in text
    ]
    assert not missing
