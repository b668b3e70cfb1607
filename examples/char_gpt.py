"""A character-level GPT in NumPy or CuPy, with gradients: train.py trains it, generate.py runs it.

There is no automatic differentiation here. A layer is a function that returns its output and a
second function, which pulls the gradient of the output back to the input, as
`rawattn.attention_vjp` does. `chain` makes one layer of several. On the way back each layer adds to
the gradients of its parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rawattn

Array = Any  # a NumPy or CuPy array: the module `xp` of a model decides which
Pull = Callable[[Array], Array]
Layer = Callable[[Array], tuple[Array, Pull]]


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
    """A small GPT-2: learned positions, norms before each layer, output weights tied to the embedding.

    Layers pass float32 arrays (batch * seqlen, width). The parameters are views of one vector,
    `flat`, matrices first, and their gradients views of `flat_grads`. `dtype` is the dtype of
    attention, `xp` is NumPy or CuPy, `backend` as for `rawattn.attention`. `product` multiplies
    rows and weights on the way forward.
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
        self.width, self.dtype, self.xp, self.backend = width, np.dtype(dtype), xp, backend
        self.product: Callable[[Array, Array], Array] = xp.matmul
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (vocab, width),
            "positions": (context, width),
        }
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
            if len(shape) == 2:  # smaller where all layers add to one sum, as in GPT-2
                spread = 0.02 / math.sqrt(2 * layers if "mix" in name or "down" in name else 1)
                self.params[name][...] = xp.asarray(rng.normal(0, spread, shape), np.float32)
            elif "norm" in name and "weight" in name:
                self.params[name][...] = 1

    def logits(self, tokens: Array) -> tuple[Array, Pull]:
        """Logits of the next token, (batch * seqlen, vocab), of tokens (batch, seqlen)."""
        blocks = (self.block(i, partial(self.attention, len(tokens))) for i in range(self.layers))
        return chain(self.embed, *blocks, partial(self.norm, "norm"), self.head)(tokens)

    def block(self, i: int, attention: Layer) -> Layer:
        """Attention, then a perceptron, both added to what comes in."""
        norm_mix, norm_up = (partial(self.norm, f"{i}.{x}") for x in ("norm_mix", "norm_up"))
        qkv, mix, up, down = (
            partial(self.linear, f"{i}.{x}") for x in ("qkv", "mix", "up", "down")
        )
        return chain(
            residual(norm_mix, qkv, attention, mix), residual(norm_up, up, self.gelu, down)
        )

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
        """The embedding of each token plus that of its position."""
        y = self.params["tokens"][tokens] + self.params["positions"][: tokens.shape[1]]

        def pull(dy: Array) -> None:
            self.grads["tokens"] += self.one_hot(tokens).T @ dy
            self.grads["positions"][: tokens.shape[1]] += dy.reshape(y.shape).sum(axis=0)

        return y.reshape(tokens.size, -1), pull

    def head(self, x: Array) -> tuple[Array, Pull]:
        """Logits: the dot product of each row with the embedding of each token."""

        def pull(dy: Array) -> Array:
            self.grads["tokens"] += dy.T @ x
            return dy @ self.params["tokens"]

        return self.product(x, self.params["tokens"].T), pull

    def linear(self, name: str, x: Array) -> tuple[Array, Pull]:
        """x W + b"""
        weight, bias = self.params[f"{name}.weight"], self.params[f"{name}.bias"]

        def pull(dy: Array) -> Array:
            self.grads[f"{name}.weight"] += x.T @ dy
            self.grads[f"{name}.bias"] += dy.sum(axis=0)
            return dy @ weight.T

        return self.product(x, weight) + bias, pull

    def norm(self, name: str, x: Array) -> tuple[Array, Pull]:
        """Layer norm: rows brought to mean 0 and variance 1, then scaled and shifted as learned."""
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
        """GELU by tanh: x times the probability that a normal number is below x, approximately."""
        c, d = 0.7978845608, 0.044715
        t = self.xp.tanh(c * (x + d * x * x * x))

        def pull(dy: Array) -> Array:
            return dy * (0.5 * (1 + t + c * x * (1 - t * t) * (1 + 3 * d * x * x)))

        return 0.5 * x * (1 + t), pull

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


def save(path: Path, model: GPT, letters: Sequence[str]) -> None:
    """Write a NumPy archive of the parameters, by name, and of `config`, a JSON text."""
    sizes = {name: getattr(model, name) for name in ("context", "layers", "heads", "width")}
    config = json.dumps({**sizes, "dtype": str(model.dtype), "letters": "".join(letters)})
    weights = {
        name: x if model.xp is np else model.xp.asnumpy(x) for name, x in model.params.items()
    }
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, config=config, **weights)
    os.replace(part, path)  # so the file is never there half written


def load(path: Path, *, xp: Any = np, backend: Any = None) -> tuple[GPT, list[str]]:
    """The model that `save` wrote, and the characters that its tokens stand for.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file holds something else.
    """
    expected = "expected a file that train.py --save wrote"
    try:
        archive = np.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file, {expected}") from None
    except (EOFError, ValueError, zipfile.BadZipFile):  # NumPy would suggest to allow pickles
        raise ValueError(f"{path}: got no archive of arrays, {expected}") from None
    try:
        with archive:
            config = json.loads(str(archive["config"]))
            letters = list(config.pop("letters"))
            model = GPT(len(letters), **config, xp=xp, backend=backend)
            for name, x in model.params.items():
                weight = archive[name]
                if weight.shape != x.shape:
                    raise ValueError(f"{name} has shape {weight.shape}, not {x.shape}")
                x[...] = xp.asarray(weight, np.float32)
    except (AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: got other contents ({error}), {expected}") from None
    return model, letters


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


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Read an int from `least` to `most`, for argparse."""
    expected = f", at least {least}" if most is None else f" from {least} to {most}"

    def read(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number{expected}")
        return value

    return read
