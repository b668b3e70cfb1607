"""Train a character-level GPT in NumPy or CuPy: model, gradients and optimiser in one file.

    pip install "rawattn[cuda13,demo]"
    python examples/train.py                                  # learns this project's documentation
    python examples/train.py --text shakespeare.txt --steps 5000 --width 384 --layers 6 --heads 6

Nothing differentiates by itself here. A layer is a function that returns its output and a second
function, which pulls the gradient of the output back to the input, as `rawattn.attention_vjp` does;
`chain` makes one layer of several. On the way back each adds to the gradients of its parameters.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rawattn

Array = Any  # a NumPy or CuPy array: the module `xp` of a model decides which
Pull = Callable[[Array], Array]
Layer = Callable[[Array], tuple[Array, Pull]]
INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


def chain(*layers: Layer) -> Layer:
    """The layers one after another, their gradients in reverse."""

    def layer(x: Array) -> tuple[Array, Pull]:
        pulls: list[Pull] = []
        for each in layers:
            x, pull = each(x)
            pulls.append(pull)

        def backward(dy: Array) -> Array:
            for pull in reversed(pulls):
                dy = pull(dy)
            return dy

        return x, backward

    return layer


def residual(*layers: Layer) -> Layer:
    """x + layers(x)"""

    def layer(x: Array) -> tuple[Array, Pull]:
        y, pull = chain(*layers)(x)
        return x + y, lambda dy: dy + pull(dy)

    return layer


class GPT:
    """A small GPT-2: learned positions, norms first, output weights tied to the embedding.

    Between layers are float32 arrays (batch * seqlen, width). The parameters are views of one
    vector, `flat`, matrices first, and their gradients views of `flat_grads`. `dtype` is that of
    attention, `xp` NumPy or CuPy, `backend` as for `rawattn.attention`.
    """

    def __init__(
        self,
        vocab: int,
        *,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dtype: str = "float32",
        xp: Any = np,
        backend: Any = None,
        seed: int = 0,
    ) -> None:
        if width % heads:
            raise ValueError(f"width: got {width}, expected a multiple of heads = {heads}")
        self.vocab, self.context, self.layers, self.heads = vocab, context, layers, heads
        self.dtype, self.xp, self.backend = np.dtype(dtype), xp, backend
        shapes: dict[str, tuple[int, ...]] = {"tokens": (vocab, width), "places": (context, width)}
        for i in range(layers):
            for name, rows, columns in (("qkv", 1, 3), ("mix", 1, 1), ("up", 1, 4), ("down", 4, 1)):
                shapes[f"{i}.{name}.weight"] = (rows * width, columns * width)
                shapes[f"{i}.{name}.bias"] = (columns * width,)
        for name in ("norm", *(f"{i}.norm_{x}" for i in range(layers) for x in ("mix", "up"))):
            shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
        shapes = dict(sorted(shapes.items(), key=lambda item: -len(item[1])))
        self.matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        self.flat = xp.zeros(sum(map(math.prod, shapes.values())), np.float32)
        self.flat_grads = xp.zeros_like(self.flat)

        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}
        rng, end = np.random.default_rng(seed), 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape)
            self.params[name] = self.flat[start:end].reshape(shape)
            self.grads[name] = self.flat_grads[start:end].reshape(shape)
            if len(shape) == 2:  # those that end in a sum over all layers are smaller
                spread = 0.02 / math.sqrt(2 * layers if "mix" in name or "down" in name else 1)
                self.params[name][...] = xp.asarray(rng.normal(0, spread, shape), np.float32)
            elif "norm" in name and "weight" in name:
                self.params[name][...] = 1

    def logits(self, tokens: Array) -> tuple[Array, Pull]:
        """Tokens (batch, seqlen) to (batch * seqlen, vocab): how likely each is to come next."""

        def block(i: int) -> Layer:
            norm_mix, norm_up = (partial(self.norm, f"{i}.{x}") for x in ("norm_mix", "norm_up"))
            qkv, mix, up, down = (
                partial(self.linear, f"{i}.{x}") for x in ("qkv", "mix", "up", "down")
            )
            attention = partial(self.attention, len(tokens))
            return chain(
                residual(norm_mix, qkv, attention, mix), residual(norm_up, up, self.gelu, down)
            )

        blocks = map(block, range(self.layers))
        return chain(self.embed, *blocks, partial(self.norm, "norm"), self.head)(tokens)

    def loss(self, tokens: Array, targets: Array) -> tuple[Array, Callable[[], None]]:
        """Mean cross-entropy, and the function that puts its gradients into `grads`."""
        logits, pull = self.logits(tokens)
        logits = logits - logits.max(axis=1, keepdims=True)
        log_p = logits - self.xp.log(self.xp.exp(logits).sum(axis=1, keepdims=True))
        hot = self.one_hot(targets)

        def backward() -> None:
            self.flat_grads.fill(0)
            pull((self.xp.exp(log_p) - hot) / len(hot))

        return -(hot * log_p).sum() / len(hot), backward

    def one_hot(self, tokens: Array) -> Array:
        """(tokens.size, vocab): 1 at each token."""
        return (tokens.reshape(-1, 1) == self.xp.arange(self.vocab)).astype(np.float32)

    def embed(self, tokens: Array) -> tuple[Array, Pull]:
        """What each token is plus where it is."""
        y = self.params["tokens"][tokens] + self.params["places"][: tokens.shape[1]]

        def pull(dy: Array) -> None:
            self.grads["tokens"] += self.one_hot(tokens).T @ dy
            self.grads["places"][: tokens.shape[1]] += dy.reshape(y.shape).sum(axis=0)

        return y.reshape(tokens.size, -1), pull

    def head(self, x: Array) -> tuple[Array, Pull]:
        """How well each row agrees with each token of the embedding."""

        def pull(dy: Array) -> Array:
            self.grads["tokens"] += dy.T @ x
            return dy @ self.params["tokens"]

        return x @ self.params["tokens"].T, pull

    def linear(self, name: str, x: Array) -> tuple[Array, Pull]:
        """x W + b"""
        weight, bias = self.params[f"{name}.weight"], self.params[f"{name}.bias"]

        def pull(dy: Array) -> Array:
            self.grads[f"{name}.weight"] += x.T @ dy
            self.grads[f"{name}.bias"] += dy.sum(axis=0)
            return dy @ weight.T

        return x @ weight + bias, pull

    def norm(self, name: str, x: Array) -> tuple[Array, Pull]:
        """Rows brought to mean 0 and variance 1, then scaled and shifted as learned."""
        weight, bias = self.params[f"{name}.weight"], self.params[f"{name}.bias"]
        x = x - x.mean(axis=1, keepdims=True)
        inverse = 1 / self.xp.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
        unit = x * inverse

        def pull(dy: Array) -> Array:
            self.grads[f"{name}.weight"] += (dy * unit).sum(axis=0)
            self.grads[f"{name}.bias"] += dy.sum(axis=0)
            dy = dy * weight
            dy = dy - dy.mean(axis=1, keepdims=True)
            return inverse * (dy - unit * (dy * unit).mean(axis=1, keepdims=True))

        return unit * weight + bias, pull

    def gelu(self, x: Array) -> tuple[Array, Pull]:
        """x times the chance that a normal number is below x; approximated by tanh."""
        c, d = 0.7978845608, 0.044715
        t = self.xp.tanh(c * (x + d * x * x * x))
        slope = 0.5 * (1 + t + c * x * (1 - t * t) * (1 + 3 * d * x * x))
        return 0.5 * x * (1 + t), lambda dy: dy * slope

    def attention(self, batch: int, x: Array) -> tuple[Array, Pull]:
        """Causal attention inside each of `batch` sequences; a row of x holds its q, k and v."""
        # (batch, seqlen, 3, heads, headdim): q, k and v are strided views, read in place.
        qkv = x.reshape(batch, len(x) // batch, 3, self.heads, -1).astype(self.dtype, copy=False)
        q, k, v = (qkv[:, :, i] for i in range(3))
        y, vjp = rawattn.attention_vjp(q, k, v, causal=True, backend=self.backend)

        def pull(dy: Array) -> Array:
            gradients = vjp(dy.reshape(y.shape).astype(self.dtype, copy=False))
            dqkv = [each.astype(np.float32, copy=False) for each in gradients[:3]]
            return self.xp.stack(dqkv, axis=2).reshape(x.shape)

        return y.reshape(len(x), -1).astype(np.float32, copy=False), pull


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
    """The loss at `count` places spread evenly over a text."""
    starts = np.linspace(0, len(text) - model.context - 1, count).astype(np.int64)
    return float(model.loss(*windows(model, text, starts))[0])


def generate(model: GPT, tokens: list[int], count: int, seed: int = 0) -> list[int]:
    """`tokens` and `count` more, each drawn from what the model expects, a little sharpened."""
    rng, tokens = np.random.default_rng(seed), list(tokens)
    for _ in range(count):
        logits, _ = model.logits(model.xp.asarray([tokens[-model.context :]]))
        last = np.array(logits[-1].tolist()) / 0.8
        p = np.exp(last - last.max())
        tokens.append(int(rng.choice(model.vocab, p=p / p.sum())))
    return tokens


def documentation() -> str:
    """This project's own."""
    root = Path(__file__).resolve().parents[1]
    files = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    return "\n".join(path.read_text("utf-8") for path in files)


def array_module(backend: str | None) -> Any:
    """NumPy for "cpu", CuPy for "cuda"; by default CuPy where there is a GPU."""
    if backend != "cpu":
        try:
            import cupy

            cupy.zeros(1)
            return cupy
        except Exception as error:  # CuPy and the driver fail in many ways where there is no GPU
            if backend == "cuda":
                raise RuntimeError(f"--backend cuda: no usable GPU: {error}") from None
    return np


def check_plot(path: Path) -> None:
    """Raises where the loss curve could not be written, before hours go into it."""
    from matplotlib.figure import Figure

    endings = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in endings:
        got = path.suffix or "no ending"
        raise ValueError(f"--plot {path}: got {got}, expected one of .{', .'.join(endings)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--plot {path}: expected the name of a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot {path}: cannot be written")


def run(args: argparse.Namespace) -> int:
    """Train on nine tenths of the text, print what the model writes, plot the losses."""
    from matplotlib.figure import Figure
    from tqdm import tqdm

    check_plot(args.plot)
    text = args.text.read_text("utf-8") if args.text else documentation()
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


def positive(text: str) -> int:
    """A number of something, for argparse."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value


def main(argv: list[str] | None = None) -> int:
    """The command line; an error is one line, and exit status 1."""
    parser = argparse.ArgumentParser(
        description="Train a character-level GPT, show what it writes, and plot its losses.",
        epilog="The default takes about three minutes on two CPU cores. "
        "A bar tells how long the rest takes. Ctrl-C ends the training; the losses up to there are plotted.",
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
            type=positive,
            default=default,
            help=f"{told} (default: {default})",
        )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of all that is random (default: 0)"
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
