"""`rawattn demo`: refused models, texts and options, and missing packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
# ruff: noqa: E402

from rawattn import cli
from tests.demo_model import SETTINGS, make_model, make_weights, run


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return make_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), weights)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def set_config(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**SETTINGS, **settings}))


def drop_tensor(folder: Path) -> None:
    weights = make_weights()
    del weights["encoder.layer.1.output.dense.bias"]
    safetensors_numpy.save_file(weights, folder / "model.safetensors")


def shrink_vocabulary(folder: Path) -> None:
    weights = make_weights()
    name = "embeddings.word_embeddings.weight"
    safetensors_numpy.save_file({**weights, name: weights[name][:5]}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("model.safetensors"), "no model.safetensors; expected a folder with"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (damage("model.safetensors"), "model.safetensors cannot be read"),
        (damage("tokenizer.json"), "tokenizer.json cannot be read"),
        (damage("config.json"), "config.json cannot be read"),
        (set_config(model_type="mpnet"), "model_type is 'mpnet', expected 'bert'"),
        (set_config(hidden_act="relu"), "hidden_act is 'relu', expected 'gelu'"),
        (drop_tensor, "no tensor 'encoder.layer.1.output.dense.bias'"),
        (shrink_vocabulary, "tokenizer.json knows 10 tokens, model.safetensors 5"),
    ],
    ids=[
        "no weights",
        "no tokenizer",
        "torn weights",
        "torn tokenizer",
        "torn config",
        "other model",
        "other activation",
        "missing tensor",
        "other vocabulary",
    ],
)
def test_bad_model(
    tmp_path: Path,
    weights: dict[str, np.ndarray],
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    spoil(make_model(tmp_path, weights))
    assert cli.main(["demo", "--model", str(tmp_path), "--backend", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("rawattn demo: ")
    assert message in captured.err
    assert str(tmp_path) in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text"),
        (b"\n \r\n\n", "no text"),
        (b"fine\nna\xefve\n", "line 2 is not UTF-8 (byte 0xef)"),
        ("hello".encode("utf-16"), "line 1 is not UTF-8 (byte 0xff)"),
    ],
    ids=["empty", "blank", "latin-1", "utf-16"],
)
def test_bad_text(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    message: str,
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert run("--model", folder, "--text", path) == 1
    assert message in capsys.readouterr().err


def test_missing_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", folder, "--text", tmp_path / "nowhere") == 1
    assert "nowhere" in capsys.readouterr().err


def test_missing_tokenizers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run("--model", folder, "--backend", "cpu") == 1
    assert 'pip install "rawattn[demo]"' in capsys.readouterr().err


def test_half_precision_needs_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", folder, "--backend", "cpu", "--dtype", "float16") == 1
    assert "--dtype float16" in capsys.readouterr().err


def test_backend_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rawattn._runtime.devices.gpu_available", lambda: False)
    assert run("--model", folder, "--backend", "cuda") == 1
    assert "no usable GPU" in capsys.readouterr().err
