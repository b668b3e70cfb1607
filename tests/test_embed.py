"""examples/embed.py: its embeddings against the BERT paper and sentence-transformers, and its command line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors.numpy")

from rawattn._cli import demo
from tests.demo_model import (
    BACKENDS,
    LAYERS,
    LENGTHS,
    NHEADS,
    POSITIONS,
    TEXTS,
    WIDTH,
    WORDS,
    embed,
    example,
    machine,
    make_model,
    make_weights,
    to_host,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return make_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), weights)


def bert(weights: dict[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """The embedding of one document as the BERT paper writes it: float64, a loop over heads."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for at in (f"encoder.layer.{i}" for i in range(LAYERS)):
        q, k, v = (dense(x, f"{at}.attention.self.{name}") for name in ("query", "key", "value"))
        mixed = []
        for head in np.split(np.arange(WIDTH), NHEADS):
            p = np.exp(q[:, head] @ k[:, head].T / math.sqrt(WIDTH / NHEADS))
            mixed.append(p / p.sum(axis=1, keepdims=True) @ v[:, head])
        x = x + dense(np.concatenate(mixed, axis=1), f"{at}.attention.output.dense")
        x = norm(x, f"{at}.attention.output.LayerNorm")
        h = dense(x, f"{at}.intermediate.dense")
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(x + dense(h, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


def distance(got: Any, exact: np.ndarray) -> float:
    """The largest distance of a computed unit vector from its exact one; NaN if any element is NaN."""
    return float(np.max(np.linalg.norm(to_host(got).astype(np.float64) - exact, axis=1)))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "float16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("stored", ["float32", "float16", ml_dtypes.bfloat16])
def test_model_against_the_paper(
    tmp_path: Path, weights: dict[str, np.ndarray], backend: str, dtype: str, stored: Any
) -> None:
    weights = {name: tensor.astype(stored) for name, tensor in weights.items()}
    model = embed.MiniLM(make_model(tmp_path, weights), dtype=dtype, **machine(backend))
    documents = model.tokenize(TEXTS)
    assert [len(ids) for ids in documents] == LENGTHS
    exact = np.stack([bert(weights, ids) for ids in documents])
    # Each rounding to the I/O dtype moves a unit vector by about that dtype's eps.
    assert distance(model.embed(TEXTS), exact) <= 16 * np.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_do_not_see_each_other(folder: Path, backend: str) -> None:
    model = embed.MiniLM(folder, **machine(backend))
    alone = np.concatenate([to_host(model.embed([text])) for text in TEXTS])
    assert distance(model.embed(TEXTS), alone) <= 16 * np.finfo(np.float32).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_documents(folder: Path, backend: str) -> None:
    vectors = to_host(embed.MiniLM(folder, **machine(backend)).embed([]))
    assert vectors.shape == (0, WIDTH)
    assert vectors.dtype == np.float32


def test_gelu_is_exact_to_a_float32_rounding() -> None:
    x = np.linspace(-12, 12, 100_001).astype(np.float32)
    exact = np.array([t * 0.5 * (1 + math.erf(t / math.sqrt(2))) for t in x.tolist()])
    assert np.all(np.abs(embed.gelu(np, x) - exact) <= 3e-7 * np.maximum(np.abs(x), 1))


@pytest.mark.parametrize(
    ("sentence_bert", "expected"),
    [(None, POSITIONS), ({"max_seq_length": 5}, 5), ({"max_seq_length": 99}, POSITIONS), ({}, 12)],
)
def test_documents_are_cut_where_sentence_transformers_cuts(
    tmp_path: Path,
    weights: dict[str, np.ndarray],
    sentence_bert: dict[str, int] | None,
    expected: int,
) -> None:
    folder = make_model(tmp_path, weights)
    if sentence_bert is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(sentence_bert), "utf-8")
    [ids] = embed.MiniLM(folder).tokenize(["the cat " * 20])
    assert len(ids) == expected
    assert ids[0] == WORDS.index("[CLS]")
    assert ids[-1] == WORDS.index("[SEP]")


def test_weights_saved_with_a_head(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    prefixed = {f"bert.{name}": tensor for name, tensor in weights.items()}
    model = embed.MiniLM(make_model(tmp_path, prefixed), **machine("cpu"))
    exact = np.stack([bert(weights, ids) for ids in model.tokenize(TEXTS)])
    assert distance(model.embed(TEXTS), exact) <= 16 * np.finfo(np.float32).eps


def test_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("--model", folder, "the cat", "the cat", "dog") == 0
    rows = capsys.readouterr().out.strip("[] \n").split("\n")
    similarity = np.array([row.strip(" []").split() for row in rows], float)
    assert similarity.shape == (3, 3)
    assert similarity[0, 1] == pytest.approx(1, abs=0.01)
    assert similarity[0, 2] < 0.99
    with pytest.raises(SystemExit) as stop:
        example("--help")
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "--model DIR" in said
    assert "second" in said  # the time that it took
    with pytest.raises(SystemExit):
        example("--model", folder)
    assert "TEXT" in capsys.readouterr().err


def test_example_that_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embed.MiniLM, "embed", interrupt)
    assert example("--model", folder, "a text") == 130


@pytest.mark.frameworks
@pytest.mark.parametrize("backend", BACKENDS)
def test_real_model_agrees_with_sentence_transformers(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        model_folder = demo.find_model(embed, None)
    except FileNotFoundError as error:
        pytest.skip(str(error).splitlines()[0])
    texts = [
        *demo.SENTENCES,
        "Yes.",
        "SHOUTING, with punctuation?! (and 3.14 numbers)",
        "Déjà vu: naïve Zürich façade — 東京で猫が眠る 🐈",
        "A long text is cut. " * 200,
        "  surrounded by space\t",
    ]
    theirs = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    expected = theirs.float().encode(texts, normalize_embeddings=True).astype(np.float64)
    model = embed.MiniLM(model_folder, **machine(backend))
    vectors = to_host(model.embed(texts)).astype(np.float64)
    cosine = np.sum(vectors * expected, axis=1)
    assert np.all(cosine >= 0.9999), dict(zip(texts, cosine.tolist(), strict=True))
