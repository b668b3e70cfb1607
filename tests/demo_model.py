"""A small embedding model with random weights, and the command lines that take it: `rawattn demo`, examples/embed.py."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
import tokenizers

import rawattn
from rawattn import cli
from rawattn._cli import demo

embed = demo.example()
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NHEADS, WIDTH, HIDDEN, LAYERS, POSITIONS = 3, 24, 40, 2, 12
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "dog", "sleep", "##s", "the", "."]
TEXTS = ("the cat sleeps.", "the", "dog", "The dog sleeps the sleep.", "the cat " * 20, "zebra", "")
# Token counts with [CLS] and [SEP]; the fifth is truncated to POSITIONS.
LENGTHS = [7, 3, 3, 9, 12, 3, 2]
SETTINGS = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "num_attention_heads": NHEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": POSITIONS,
    "layer_norm_eps": 1e-12,
}


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 0.3, (rows, columns)).astype(np.float32)

    def vector(n: int, mean: float = 0.0) -> np.ndarray:
        return rng.normal(mean, 0.3, n).astype(np.float32)

    weights = {
        "embeddings.word_embeddings.weight": matrix(len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": matrix(POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": matrix(2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    shapes = {
        "attention.self.query": (WIDTH, WIDTH),
        "attention.self.key": (WIDTH, WIDTH),
        "attention.self.value": (WIDTH, WIDTH),
        "attention.output.dense": (WIDTH, WIDTH),
        "intermediate.dense": (HIDDEN, WIDTH),
        "output.dense": (WIDTH, HIDDEN),
    }
    for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"] = matrix(*shape)
            weights[f"{layer}.{name}.bias"] = vector(shape[0])
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = vector(WIDTH, 1.0), vector(WIDTH)
    return weights


def make_model(folder: Path, weights: dict[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    # The published tokenizer pads and truncates to 128 tokens. Loading must turn off both.
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **settings}), "utf-8")
    safetensors_numpy.save_file(weights, folder / "model.safetensors")
    return folder


def machine(backend: str) -> dict[str, Any]:
    """Return the arguments with which a MiniLM computes on this backend."""
    if backend == "cuda":
        return {"xp": pytest.importorskip("cupy")}
    return {"attention": functools.partial(rawattn.attention, backend="cpu")}


def to_host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array)


def run(*arguments: object) -> int:
    return cli.main(["demo", *map(str, arguments)])


def example(*arguments: object) -> int:
    """Run examples/embed.py with these arguments."""
    return int(embed.main(list(map(str, arguments))))
