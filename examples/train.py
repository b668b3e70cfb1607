"""Train a character-level GPT in NumPy or CuPy, without a framework: the model is in char_gpt.py.

    pip install "rawattn[cuda13,demo]"
    python examples/train.py                                  # learns this project's documentation
    python examples/train.py --save gpt.npz                   # for generate.py
    python examples/train.py --text shakespeare.txt --steps 5000 --width 384 --layers 6 --heads 6

The model computes the gradients of its parameters, all of them views of one vector. This file has
the optimiser (AdamW), the text, and the command line.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from char_gpt import GPT, Array, array_module, integer, save

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


def train(
    model: GPT, text: Array, *, steps: int, batch: int = 16, rate: float = 1e-3, seed: int = 0
) -> Iterator[float]:
    """Train by AdamW on `text`, a NumPy array of tokens; yields the loss of each step."""
    xp, p, rng = model.xp, model.flat, np.random.default_rng(seed)
    mean, square = xp.zeros_like(p), xp.zeros_like(p)
    a, b, decay = 0.9, 0.99, 0.1
    for n in range(1, steps + 1):
        starts = rng.integers(0, len(text) - model.context, batch)
        loss, backward = model.loss(*windows(model, text, starts))
        backward()
        g = model.flat_grads
        g *= xp.minimum(1, 1 / xp.sqrt((g * g).sum() + 1e-12))  # clipped to a norm of 1
        mean += (1 - a) * (g - mean)
        square += (1 - b) * (g * g - square)
        warmup = min(1, n / 100)
        now = rate * warmup * (0.55 + 0.45 * math.cos(math.pi * n / steps))
        p[: model.matrices] *= 1 - now * decay
        p -= now / (1 - a**n) * mean / (xp.sqrt(square / (1 - b**n)) + 1e-8)
        yield float(loss)


def windows(model: GPT, text: Array, starts: Array) -> tuple[Array, Array]:
    """Tokens (len(starts), context) from each start on, and those that come next."""
    picked = model.xp.asarray(text[starts[:, None] + np.arange(model.context + 1)])
    return picked[:, :-1], picked[:, 1:]


def evaluate(model: GPT, text: Array, count: int = 32) -> float:
    """The loss at `count` positions spread evenly over a text."""
    starts = np.linspace(0, len(text) - model.context - 1, count).astype(np.int64)
    return float(model.loss(*windows(model, text, starts))[0])


def generate(model: GPT, tokens: list[int], count: int, seed: int = 0) -> list[int]:
    """`tokens` and `count` more, each sampled from the model at a temperature of 0.8."""
    rng, tokens = np.random.default_rng(seed), list(tokens)
    for _ in range(count):
        logits, _ = model.logits(model.xp.asarray([tokens[-model.context :]]))
        last = np.array(logits[-1].tolist()) / 0.8
        p = np.exp(last - last.max())
        tokens.append(int(rng.choice(model.vocab, p=p / p.sum())))
    return tokens


def documentation() -> str:
    """The documentation of this project."""
    root = Path(__file__).resolve().parents[1]
    files = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    return "\n".join(path.read_text("utf-8") for path in files)


def check_plot(path: Path) -> None:
    """Raise an error if the loss curve cannot be written: before the training, not after it."""
    from matplotlib.figure import Figure

    endings = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in endings:
        got = path.suffix or "no ending"
        raise ValueError(f"--plot {path}: got {got}, expected one of .{', .'.join(endings)}")
    check_file("--plot", path)


def check_file(option: str, path: Path) -> None:
    """Raise an error if a file cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} {path}: expected the name of a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written")


def read(path: Path) -> str:
    """The text of a file. An error names the option."""
    expected = "expected a file of UTF-8 text"
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise OSError(f"--text {path}: {error.strerror}; {expected}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: {error}; {expected}") from None


def run(args: argparse.Namespace) -> int:
    """Train on nine tenths of the text, print what the model writes, plot the losses."""
    from matplotlib.figure import Figure
    from tqdm import tqdm

    check_plot(args.plot)
    if args.save:
        check_file("--save", args.save)
    text = read(args.text) if args.text else documentation()
    letters = sorted(set(text))
    tokens = np.searchsorted(letters, list(text))
    learnt, held_out = np.split(tokens, [len(tokens) * 9 // 10])
    if len(held_out) <= args.context:
        enough = 10 * (args.context + 2)
        raise ValueError(f"text: got {len(text)} characters, expected more than {enough}")
    xp = array_module(args.backend)
    sizes = {name: getattr(args, name) for name in ("context", "layers", "heads", "width", "dtype")}
    backend = "cpu" if xp is np else "cuda"
    model = GPT(len(letters), **sizes, xp=xp, backend=backend, seed=args.seed)
    print(f"{len(text)} characters, {len(letters)} different; {model.flat.size} weights; {backend}")

    losses: list[float] = []
    curve = {0: evaluate(model, held_out)}
    rate = 0.4 / args.width
    steps = train(model, learnt, steps=args.steps, batch=args.batch, rate=rate, seed=args.seed)
    status, begin = 0, time.perf_counter()
    with tqdm(steps, total=args.steps, unit="step") as bar:
        try:
            for loss in bar:
                losses.append(loss)
                if len(losses) % max(1, args.steps // 20) == 0:
                    curve[len(losses)] = evaluate(model, held_out)
                    bar.set_postfix_str(f"loss {loss:.3f}, held out {curve[len(losses)]:.3f}")
        except KeyboardInterrupt:
            status = INTERRUPTED
    ended = "interrupted" if status else "trained"
    print(f"{ended} after {len(losses)} steps, {time.perf_counter() - begin:.0f} s")
    if args.save:
        save(args.save, model, letters)
        print(f"weights: {args.save}")

    if not status:
        written = generate(model, held_out[:32].tolist(), 400, args.seed)
        print("\n" + "".join(letters[token] for token in written) + "\n")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy of a character")
    axes.plot(range(1, len(losses) + 1), losses, lw=0.8, label="training")
    axes.plot(list(curve), list(curve.values()), "o-", ms=3, label="held out")
    axes.legend()
    figure.savefig(args.plot, dpi=150)
    print(f"loss curve: {args.plot}")
    return status


def main(argv: list[str] | None = None) -> int:
    """The command line; an error is one line, and exit status 1."""
    parser = argparse.ArgumentParser(
        description="Train a character-level GPT, show what it writes, and plot its losses.",
        epilog="The default takes about three minutes on two CPU cores. "
        "A bar tells how long the rest takes. Ctrl-C ends the training; what was learnt up to there is "
        "saved and plotted.",
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text to learn (default: the documentation)"
    )
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        default=Path("loss.png"),
        help="the loss curve, as PNG, SVG, PDF or what else matplotlib writes (default: %(default)s)",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        help="keep the weights in this file, for generate.py (default: they are not kept)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of attention; all else is float32 (default: %(default)s)",
    )
    for name, default, told in (
        ("steps", 600, "times that the weights are changed"),
        ("batch", 16, "pieces of text in a step"),
        ("context", 128, "characters in a piece: the farthest that attention looks back"),
        ("layers", 4, "blocks of attention and perceptron"),
        ("heads", 4, "heads of attention; they divide the width"),
        ("width", 128, "numbers that stand for a character between layers"),
    ):
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=integer(1),
            default=default,
            help=f"{told} (default: {default})",
        )
    parser.add_argument(
        "--seed", metavar="N", type=integer(0), default=0, help="of all that is random (default: 0)"
    )
    try:
        return run(parser.parse_args(argv))
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        hint = f'{name} is not installed; get it with: pip install "rawattn[demo]"'
        print(f"train.py: {hint}", file=sys.stderr)
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
