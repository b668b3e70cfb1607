"""examples/train.py and its model: gradients, that it learns, and what it saves."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples import load
from tests.tolerance import check

BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {"context": 24, "layers": 2, "heads": 2, "width": 16}
VOCAB = 11
train: Any = load("train")
char_gpt: Any = load("char_gpt")


def make(backend: str, *, disturb: bool = True, **sizes: Any) -> Any:
    """A model. Disturbed by noise, its gradients are all of a similar size, and no bias is 0."""
    model = train.GPT(
        VOCAB, **{**SIZES, **sizes}, xp=train.array_module(backend), backend=backend, seed=1
    )
    if disturb:
        noise = np.random.default_rng(2).normal(0, 0.2, model.flat.size)
        model.flat += model.xp.asarray(noise.astype(np.float32))
    return model


def host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def batch_of(model: Any, rows: int = 3, seqlen: int = 20) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(3).integers(0, VOCAB, (rows, seqlen + 1))
    return model.xp.asarray(tokens[:, :-1]), model.xp.asarray(tokens[:, 1:])


def torch_gradients(model: Any, dtype: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the same model in PyTorch."""
    import torch
    from torch.nn import functional

    parameters = {
        name: torch.tensor(host(x), dtype=getattr(torch, dtype), requires_grad=True)
        for name, x in model.params.items()
    }

    def linear(name: str, x: Any) -> Any:
        return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    tokens, targets = (torch.from_numpy(host(x).copy()) for x in batch_of(model))
    x = functional.embedding(tokens, parameters["tokens"])
    x = x + parameters["positions"][: tokens.shape[1]]
    for i in range(model.layers):
        qkv = linear(f"{i}.qkv", norm(f"{i}.norm_mix", x)).unflatten(-1, (3, model.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"{i}.mix", mixed.transpose(1, 2).flatten(2))
        up = functional.gelu(linear(f"{i}.up", norm(f"{i}.norm_up", x)), approximate="tanh")
        x = x + linear(f"{i}.down", up)
    logits = norm("norm", x) @ parameters["tokens"].T
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), {name: x.grad.numpy() for name, x in parameters.items()}


@pytest.mark.frameworks
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_torch(backend: str) -> None:
    pytest.importorskip("torch")
    model = make(backend)
    loss, backward = model.loss(*batch_of(model))
    backward()
    exact_loss, exact = torch_gradients(model, "float64")
    _, low = torch_gradients(model, "float32")
    assert float(loss) == pytest.approx(exact_loss, rel=1e-5)
    assert set(model.grads) == set(exact)
    for name, gradient in model.grads.items():
        check(host(gradient), exact[name], (low[name],), what=name)


@pytest.mark.parametrize("name", sorted(make("cpu").params))
def test_gradients_are_slopes(name: str) -> None:
    """Moving a parameter along its gradient changes the loss at a rate equal to the gradient's norm."""
    model = make("cpu")
    tokens, targets = batch_of(model)
    model.loss(tokens, targets)[1]()
    gradient = model.grads[name].copy()
    length, start, step = float(np.linalg.norm(gradient)), model.params[name].copy(), 0.01
    losses = []
    for sign in (1, -1):
        model.params[name][...] = start + sign * step / length * gradient
        losses.append(float(model.loss(tokens, targets)[0]))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=0.02)


def test_gradients_do_not_add_up_over_calls() -> None:
    model = make("cpu")
    _, backward = model.loss(*batch_of(model))
    backward()
    first = model.flat_grads.copy()
    backward()
    np.testing.assert_array_equal(model.flat_grads, first)


def test_every_parameter_is_used_and_starts_as_told() -> None:
    model = make("cpu", disturb=False)
    assert sum(x.size for x in model.params.values()) == model.flat.size
    matrices = [x for x in model.params.values() if x.ndim == 2]
    assert sum(x.size for x in matrices) == model.matrices
    assert all(np.shares_memory(x, model.flat[: model.matrices]) for x in matrices)
    loss = float(model.loss(*batch_of(model))[0])
    assert loss == pytest.approx(math.log(VOCAB), abs=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_learns(backend: str) -> None:
    text = np.tile([3, 1, 4, 1, 5, 9, 2, 6], 60)
    model = make(backend, disturb=False)
    losses = list(train.train(model, text, steps=150, batch=8, rate=1e-2))
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert np.mean(losses[-10:]) < 0.1
    assert train.evaluate(model, text) < 0.1
    # The token after 1 depends on the tokens before it, so only attention can predict it.
    assert train.generate(model, text[:8].tolist(), 24) == text[:32].tolist()


@pytest.mark.gpu
def test_learns_with_attention_in_bfloat16() -> None:
    text = np.tile([3, 1, 4, 1, 5, 9, 2, 6], 60)
    model = make("cuda", disturb=False, dtype="bfloat16")
    losses = list(train.train(model, text, steps=150, batch=8, rate=1e-2))
    assert np.mean(losses[-10:]) < 0.1


def test_same_seed_gives_the_same_losses() -> None:
    text = np.random.default_rng(0).integers(0, VOCAB, 500)
    runs = [list(train.train(make("cpu"), text, steps=4, seed=seed)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


def test_weights_decay_and_biases_do_not() -> None:
    """Without a gradient weights decay and biases stay."""
    model = make("cpu")
    model.loss = lambda tokens, targets: (np.float32(0), lambda: None)
    before = {name: x.copy() for name, x in model.params.items()}
    list(train.train(model, np.zeros(100, np.int64), steps=3, rate=0.1))
    for name, x in model.params.items():
        changed = np.all(np.abs(x) < np.abs(before[name])) if x.ndim == 2 else False
        assert changed or (x.ndim == 1 and np.array_equal(x, before[name])), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_command(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    text, plot = tmp_path / "text.txt", tmp_path / "loss.png"
    text.write_text("Ein Löwe, zwei Löwen. " * 30, "utf-8")
    sizes = {"steps": 3, "batch": 2, "context": 16, "layers": 1, "heads": 2, "width": 8}
    small = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    command = ["--text", str(text), "--plot", str(plot), "--backend", backend, *small]
    assert train.main(command) == 0
    printed = capsys.readouterr().out
    assert f"{22 * 30} characters, " in printed and f"; {backend}" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "missing.txt"], "--text missing.txt: No such file or directory; expected a"),
        (["--text", "short.txt"], "9 characters, expected more than 1300"),
        (["--text", "latin.txt"], "--text latin.txt: 'utf-8' codec can't decode byte"),
        (["--heads", "3"], "width: got 128, expected a multiple of heads = 3"),
    ],
    ids=["missing", "short", "not-utf-8", "heads"],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes(b"\xe4" * 2000)
    monkeypatch.chdir(tmp_path)
    assert train.main(["--backend", "cpu", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("train.py: ") and says in message
    assert message.count("\n") == 1


SMALL = [
    *("--backend", "cpu", "--batch", "2", "--context", "16"),
    *("--layers", "1", "--heads", "2", "--width", "8"),
]


@pytest.mark.parametrize(
    ("plot", "says"),
    [
        ("loss.docx", "got .docx, expected one of ."),
        ("loss", "got no ending, expected one of ."),
        ("nowhere/loss.png", "in a folder that exists"),
        ("folder.png", "expected the name of a file"),
        ("kept.png", "cannot be written"),
    ],
)
def test_plot_is_checked_before_the_work(
    plot: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "kept.png").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "GPT", lambda *_, **__: pytest.fail("the work began"))
    if plot == "kept.png":  # permissions alone protect this file, and root ignores them
        monkeypatch.setattr(train.os, "access", lambda path, mode: False)
    assert train.main([*SMALL, "--plot", plot]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"train.py: --plot {plot}: ")
    assert says in said


def test_weights_are_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "GPT", lambda *_, **__: pytest.fail("the work began"))
    assert train.main([*SMALL, "--save", "nowhere/gpt.npz"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("train.py: --save nowhere/gpt.npz: ")
    assert "in a folder that exists" in said


def test_weights_come_back_as_they_were_saved(tmp_path: Path) -> None:
    model = make("cpu", dtype="bfloat16")
    letters = [chr(code) for code in (0, 34, 92, *range(0xE4, 0xEC))]
    char_gpt.save(tmp_path / "gpt.npz", model, letters)
    loaded, found = char_gpt.load(tmp_path / "gpt.npz", backend="cpu")
    assert found == letters
    np.testing.assert_array_equal(loaded.flat, model.flat)
    for name in ("vocab", "context", "layers", "heads", "width", "dtype"):
        assert getattr(loaded, name) == getattr(model, name)


@pytest.mark.parametrize("name", ["matplotlib", "tqdm"])
def test_what_is_not_installed_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert train.main(SMALL) == 1
    hint = f'train.py: {name} is not installed; get it with: pip install "rawattn[demo]"\n'
    assert capsys.readouterr().err == hint


def test_interruption_ends_the_training_and_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")

    def interrupted(*_: Any, **__: Any) -> Any:
        yield from (3.0, 2.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    plot, weights = tmp_path / "loss.svg", tmp_path / "weights.npz"
    assert train.main([*SMALL, "--plot", str(plot), "--save", str(weights)]) == 130
    out = capsys.readouterr().out
    assert "interrupted after 2 steps, 0 s" in out
    assert f"weights: {weights}\n" in out
    assert weights.is_file()
    assert out.endswith(f"loss curve: {plot}\n")
    assert plot.read_text().startswith("<?xml")


def test_interruption_before_the_training_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupt)
    assert train.main([]) == 130


def test_help_says_what_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "minutes on two CPU cores" in said
    for name in ("text", "backend", "plot", "save", "dtype", "seed", "steps", "batch", "context"):
        assert f"--{name} " in said
    assert "(default: 600)" in said
    for name, wrong, least in (
        *(("steps", x, 1) for x in ("0", "-3", "few")),
        ("seed", "-1", 0),
    ):
        with pytest.raises(SystemExit) as stop:
            train.main([f"--{name}", wrong])
        assert stop.value.code == 2
        message = f"argument --{name}: got {wrong}, expected a whole number, at least {least}"
        assert message in capsys.readouterr().err


def test_documentation_is_a_text() -> None:
    assert "rawattn.attention" in train.documentation()
