"""examples/generate.py: its steps give what the model computes for the whole text at once; and its command line."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.examples import load

char_gpt: Any = load("char_gpt")
train: Any = load("train")
generate: Any = load("generate")

BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES: dict[str, Any] = {"context": 40, "layers": 2, "heads": 2, "width": 16}
LETTERS = "0123456789 "
PROMPTS = ([3, 1, 4], [1] * 17, [5], [9, 2, 6, 5, 3, 5, 8, 9])
WINDOWS: dict[str, dict[str, Any]] = {"all": {}, "window": {"window": 6, "sink": 3}}


def trained(backend: str, path: Path, dtype: str = "float32") -> Any:
    """A model that was trained for some steps, disturbed, saved and loaded."""
    text = np.tile([3, 1, 4, 1, 5, 9, 2, 6], 60)
    model = char_gpt.GPT(len(LETTERS), **SIZES, dtype=dtype, backend="cpu", seed=1)
    list(train.train(model, text, steps=8, batch=4, rate=3e-2))
    # Weights this large make the logits depend clearly on the keys that attention sees.
    model.flat += np.random.default_rng(2).normal(0, 0.3, model.flat.size).astype(np.float32)
    char_gpt.save(path / "model.npz", model, LETTERS)
    loaded, letters = char_gpt.load(
        path / "model.npz", xp=char_gpt.array_module(backend), backend=backend
    )
    assert "".join(letters) == LETTERS and loaded.dtype == model.dtype
    return loaded


def at_once(model: Any, tokens: list[int]) -> Any:
    """Logits after the last token, without a cache."""
    logits, _ = model.logits(model.xp.asarray([tokens]))
    return model.xp.asarray(logits[-1]).tolist()


def verify(
    model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, captured: bool
) -> None:
    """Checks that the logits of the prefill and of all steps are those of the model without a cache."""
    count = SIZES["context"] - max(map(len, PROMPTS))
    generation = generate.Generation(model, PROMPTS, count, **options, page_size=4)
    with generation.stream:
        # NaN in any dtype: cache slots that no text has written must not reach the logits.
        generation.cache.view(np.uint8)[...] = 255
    generation.prefill()
    if captured:
        generation.capture()
    found = []
    while True:
        with generation.stream:
            found.append(generation.logits.tolist())
        if generation.made == count:
            break
        generation.step()
    texts = generation.texts()
    if options:
        window = {"window": (options["window"], 0), "sink": options["sink"]}
        vjp = partial(rawattn.attention_vjp, **window)
        monkeypatch.setattr(char_gpt.rawattn, "attention_vjp", vjp)
    wanted = [
        [at_once(model, prompt + text[:n]) for prompt, text in zip(PROMPTS, texts, strict=True)]
        for n in range(count)
    ]
    # In bfloat16 the kernels round probabilities at different points.
    tolerance = 2e-5 if model.dtype == np.float32 else 0.15
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
    assert np.std(wanted) > 1
    # Each token is the one with the largest logit.
    assert np.argmax(found, axis=2).T.tolist() == texts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("visible", WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_step_is_what_the_model_computes_at_once(
    backend: str, visible: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(backend, tmp_path, dtype)
    verify(model, WINDOWS[visible], monkeypatch, captured=backend == "cuda")


class Stream(contextlib.nullcontext[None]):
    """Stands for CuPy's stream: a captured step runs, is undone when the capture ends, and runs again at each launch."""

    generation: Any
    captured: Any

    def __init__(self, *, non_blocking: bool) -> None:
        super().__init__()
        assert non_blocking

    def begin_capture(self) -> None:
        arrays = [x for x in vars(self.generation).values() if isinstance(x, np.ndarray)]
        self.before = [(x, x.copy()) for x in arrays]

    def end_capture(self) -> Any:
        for x, old in self.before:
            x[...] = old
        return SimpleNamespace(launch=lambda stream: self.captured())


class Product:
    """Stands for `cupy.ReductionKernel`."""

    def __init__(self, *expressions: str) -> None:
        assert expressions[2:6] == ("x * w", "a + b", "y = a", "0")

    def __call__(self, x: Any, w: Any, *, axis: int) -> Any:
        return (x * w).sum(axis=axis)


@pytest.mark.parametrize("visible", WINDOWS)
def test_a_capture_leaves_the_text_as_it_was(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code around a capture leaves the text as it was. NumPy stands for CuPy, so this runs without a GPU."""

    def planned(verb: Any, *args: Any, **options: Any) -> Any:
        options |= {"backend": "cpu"}
        return lambda *others: verb(*others, *args[len(others) :], **options)

    def begin(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.stream.generation = self

    def decode(self: Any, model: Any) -> None:
        self.stream.captured = partial(step, self, model)
        step(self, model)

    init, step = generate.Generation.__init__, generate.Generation.decode
    monkeypatch.setattr(generate.Generation, "__init__", begin)
    monkeypatch.setattr(generate.Generation, "decode", decode)
    monkeypatch.setattr(generate.rawattn, "plan", planned)
    model = trained("cpu", tmp_path)
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=Stream,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        using_allocator=lambda malloc: contextlib.nullcontext(),
    )
    model.xp = SimpleNamespace(**{**vars(np), "cuda": cuda, "ReductionKernel": Product})
    verify(model, WINDOWS[visible], monkeypatch, captured=True)


def test_a_window_changes_what_is_written(tmp_path: Path) -> None:
    model = trained("cpu", tmp_path)
    logits = []
    for options in ({}, {"window": 6}, {"window": 6, "sink": 3}):
        generation = generate.Generation(model, PROMPTS, 1, **options)
        generation.prefill()
        logits.append(generation.logits.copy())
    # The last token of a prompt sees 7 tokens in the window, and 10 with the sinks.
    for a, b, seen in ((0, 1, 7), (0, 2, 10), (1, 2, 7)):
        far = [len(prompt) > seen for prompt in PROMPTS]
        assert (np.abs(logits[a] - logits[b]).max(axis=1) > 1e-4).tolist() == far


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_follow_the_softmax(backend: str, tmp_path: Path) -> None:
    model = trained(backend, tmp_path)
    draws, temperature = 4000, 1.5
    generation = generate.Generation(model, [[3]] * draws, 1, temperature=temperature)
    generation.prefill()
    drawn = [tokens[0] for tokens in generation.texts()]
    p = np.exp(np.array(at_once(model, [3])) / temperature)
    p /= p.sum()
    deviation = np.sqrt(p * (1 - p) / draws)
    counted = np.bincount(drawn, minlength=len(p)) / draws
    assert np.all(np.abs(counted - p) < 4 * deviation)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_decides(backend: str, tmp_path: Path) -> None:
    model = trained(backend, tmp_path)

    def written(seed: int) -> Any:
        generation = generate.Generation(model, PROMPTS, 20, temperature=1.0, seed=seed)
        generation.prefill()
        if backend == "cuda":
            generation.capture()
        for _ in range(19):
            generation.step()
        return generation.texts()

    assert written(5) == written(5) != written(6)


def test_pages_are_dealt_once_each() -> None:
    table = generate.page_table([3, 1, 2])
    assert table.tolist() == [[0, 3, 5], [1, -1, -1], [2, 4, -1]]


def test_a_text_ends_where_its_tokens_do(tmp_path: Path) -> None:
    generation = generate.Generation(trained("cpu", tmp_path), PROMPTS, 2)
    with pytest.raises(RuntimeError, match=r"^step: got 0 of 2 tokens; expected a call after"):
        generation.step()
    generation.prefill()
    generation.step()
    with pytest.raises(RuntimeError, match=r"^step: got 2 of 2 tokens"):
        generation.step()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": []}, r"^prompts: got none"),
        ({"prompts": [[1], []]}, r"^prompts: got none or an empty one"),
        ({"prompts": [[1] * 40]}, r"^prompts: got one of 40 tokens, expected fewer than the 40"),
        ({"count": 24}, r"^count: got 24 after a prompt of 17 tokens, expected 1 to 23"),
        ({"count": 0}, r"^count: got 0"),
        ({"temperature": -1.0}, r"^temperature: got -1"),
        ({"temperature": float("nan")}, r"^temperature: got nan"),
    ],
)
def test_wrong_calls(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    call = {"prompts": PROMPTS, "count": 3, **change}
    with pytest.raises(ValueError, match=says):
        generate.Generation(trained("cpu", tmp_path), **call)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [[], ["--window", "6", "--sink", "2", "--temperature", "0"]])
def test_command(
    options: list[str], backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a text to its continuation, by both programs."""
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    text, model = tmp_path / "text.txt", tmp_path / "model.npz"
    text.write_text("Ein Löwe, zwei Löwen. " * 30, "utf-8")
    sizes = {"steps": 3, "batch": 2, "context": 24, "layers": 1, "heads": 2, "width": 8}
    small = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    plot = ["--plot", str(tmp_path / "loss.png"), "--backend", backend]
    assert train.main(["--text", str(text), "--save", str(model), *plot, *small]) == 0
    assert f"weights: {model}\n" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))
    common = ["--model", str(model), "--backend", backend, *options]
    assert generate.main([*common, "Ein Löwe", "zwei"]) == 0
    printed = capsys.readouterr().out
    assert f"; {backend}; " in printed and "prefill: 12 tokens, " in printed
    assert "decode: 30 tokens in 15 steps, " in printed and " tokens/s\n" in printed
    first, second = printed.split("\n--- ")[1:]
    assert first.startswith("'Ein Löwe'\nEin Löwe") and second.startswith("'zwei'\nzwei")
    assert len(first) - len("'Ein Löwe'\nEin Löwe\n") == 16
    assert generate.main([*common, "--count", "1", "Ein", "zwei"]) == 0
    assert "tokens/s" not in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test. It holds a model and files that are no models."""
    model = trained("cpu", tmp_path)
    (tmp_path / "text.npz").write_text("no weights\n" * 9)
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "others.npz", weights=np.zeros(3))
    arrays = dict(np.load(tmp_path / "model.npz"))
    arrays["tokens"] = np.zeros((5, 5), np.float32)
    np.savez(tmp_path / "shapes.npz", **arrays)
    arrays.pop("config")
    np.savez(tmp_path / "config.npz", **arrays, config="{")
    assert model.context == 40
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "missing.npz", "1"], "missing.npz"),
        (["--model", "text.npz", "1"], "text.npz: got no archive of arrays, expected a file that"),
        (["--model", "empty.npz", "1"], "empty.npz: got no archive of arrays"),
        (["--model", "array.npy", "1"], "array.npy: got other contents ("),
        (["--model", "others.npz", "1"], "others.npz: got other contents ("),
        (["--model", "shapes.npz", "1"], "tokens has shape (5, 5), not (11, 16)"),
        (["--model", "config.npz", "1"], "config.npz: got other contents ("),
        (["--model", "model.npz", "1 x é 2"], "TEXT '1 x é 2': the model has not learnt 'x', 'é'"),
        (["--model", "model.npz", "1", ""], "TEXT: got an empty one"),
        (["--model", "model.npz", "--count", "40", "1"], "count: got 40 after a prompt of 1"),
        (["--model", "model.npz", "1" * 40], "prompts: got one of 40 tokens"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    assert generate.main(["--backend", "cpu", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("generate.py: ") and says in message
    assert message.count("\n") == 1


def test_without_a_model_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    assert generate.main(["--backend", "cpu", "The "]) == 1
    said = capsys.readouterr().err
    assert said.startswith("generate.py: no model: give one with --model FILE;")
    assert said.endswith("    python examples/train.py --save gpt.npz\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--sink", "4", "1"],
        ["--window", "-1", "1"],
        ["--count", "0", "1"],
        ["--page-size", "1025", "1"],
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_the_parser(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        generate.main(arguments)
    assert stop.value.code == 2


def test_interruption_prints_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    step = generate.Generation.step

    def interrupted(self: Any) -> None:
        if self.made == 3:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(generate.Generation, "step", interrupted)
    assert generate.main(["--model", "model.npz", "--backend", "cpu", "31", "4"]) == 130
    printed = capsys.readouterr().out
    assert "decode: 4 tokens in 2 steps, " in printed
    first, second = printed.split("\n--- ")[1:]
    assert len(first) == len("'31'\n31\n") + 3 and len(second) == len("'4'\n4\n") + 3


def test_interruption_before_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupt)
    assert generate.main(["1"]) == 130


def test_help_says_what_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        generate.main(["--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Some seconds on a CPU" in said
    for name in ("model", "backend", "count", "window", "sink", "temperature", "page-size", "seed"):
        assert f"--{name} " in said


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("seed", "-1", ", at least 0"),
        ("count", "few", ", at least 1"),
        ("page-size", "1025", " from 1 to 1024"),
    ],
)
def test_a_number_out_of_range_is_told(
    name: str, wrong: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        generate.main([f"--{name}", wrong, "text"])
    assert stop.value.code == 2
    message = f"argument --{name}: got {wrong}, expected a whole number{expected}"
    assert message in capsys.readouterr().err
