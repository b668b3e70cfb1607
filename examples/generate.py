"""Generate text with a model that train.py saved: a batch of prompts, a cache in pages, a CUDA graph.

    pip install "rawattn[cuda13,demo]"
    python examples/train.py --save gpt.npz
    python examples/generate.py --model gpt.npz "The " "A plan is " "rawattn.attention takes "
    python examples/generate.py --model gpt.npz --window 32 --sink 4 --temperature 0 "The "

The prompts go through the model packed: rows of different texts follow each other, and none is
padding. After that each step adds a row to every text. `rawattn.append_kv` writes keys and values
into pages, `rawattn.paged_attention` reads them there. On a GPU the step is captured once and
replayed. Lengths grow on the device, and the host reads nothing back until the end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rawattn
from char_gpt import GPT, Array, Pull, array_module, integer, load

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


class Generation:
    """A batch of texts that a model continues: `prefill`, then `step` until each has `count` tokens more.

    Parameters
    ----------
    model
        Its `xp` and `backend` say where all of it runs.
    prompts
        The tokens of each text, at least one. Lengths may differ.
    count
        How many tokens each text gets. Together with its prompt a text has at most `model.context`.
    window, sink
        A token sees the `window` before it and the first `sink` of its text; None: all before it.
    temperature, seed
        Of the sampling; 0 takes the likeliest token. The random numbers are the same on every backend.
    page_size
        Tokens of a page of the cache.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        window: int | None = None,
        sink: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        page_size: int = 16,
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or not all(lengths):
            raise ValueError("prompts: got none or an empty one, expected at least a token in each")
        longest, room = max(lengths), model.context - max(lengths)
        if room < 1:
            raise ValueError(
                f"prompts: got one of {longest} tokens, expected fewer than the {model.context} "
                "positions of the model"
            )
        if not 1 <= count <= room:
            raise ValueError(
                f"count: got {count} after a prompt of {longest} tokens, expected 1 to {room}: the "
                f"model has {model.context} positions"
            )
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature: got {temperature}, expected a number of at least 0")
        self.model, self.xp, self.count, self.made = model, model.xp, count, 0
        self.temperature = temperature
        self.visible: dict[str, Any] = {"causal": True}
        if window is not None:
            self.visible |= {"window": (window, 0), "sink": sink}
        self.stream: Any = contextlib.nullcontext()
        if self.xp is not np:
            # A capture needs a stream of its own. That stream does not wait for the one that made the weights.
            self.xp.cuda.Device().synchronize()
            self.stream = self.xp.cuda.Stream(non_blocking=True)
        self.graph: Any = None
        self.plans: list[tuple[Any, Any]] = []

        table = page_table([-(-(n + count) // page_size) for n in lengths])
        pages = (int(table.max()) + 1, page_size, model.heads, model.width // model.heads)
        batch, rng = len(lengths), np.random.default_rng(seed)
        with self.stream:
            asarray = self.xp.asarray
            # Keys and values of each layer. Rows that hold nothing yet are never read.
            self.cache = self.xp.empty((model.layers, 2, *pages), model.dtype)
            self.table, self.lengths = asarray(table), asarray(lengths, np.int32)
            self.prompts = asarray([token for prompt in prompts for token in prompt], np.int64)
            self.positions = asarray(np.concatenate([np.arange(n) for n in lengths]))
            self.seqs = rawattn.SeqLayout(seqstart_q=np.cumsum([0, *lengths]))
            self.last = asarray(np.cumsum(lengths) - 1)
            # A step changes these arrays in place: a captured graph holds their addresses.
            self.logits = self.xp.zeros((batch, model.vocab), np.float32)
            self.tokens = self.xp.zeros(batch, np.int64)
            self.written = self.xp.zeros((count, batch), np.int64)
            self.now = self.xp.zeros(1, np.int64)
            # The argmax of logits plus Gumbel noise is a sample from their softmax.
            self.noise = None
            if temperature:
                noise = rng.gumbel(size=(count, batch, model.vocab))
                self.noise = asarray(noise, np.float32)

    def prefill(self) -> None:
        """Run all prompts through the model in one packed batch, and choose the first token of each text."""
        with self.stream:
            given = self.prompts, self.positions
            self.choose(self.forward(self.model, *given, self.attend_prompts, self.last))
        self.made = 1

    def step(self) -> None:
        """Add one token to each text."""
        if not 1 <= self.made < self.count:
            raise RuntimeError(
                f"step: got {self.made} of {self.count} tokens; expected a call after prefill, and "
                "while a token is left"
            )
        with self.stream:
            if self.graph is None:
                self.decode(self.model)
            else:
                self.graph.launch(self.stream)
        self.made += 1

    def capture(self) -> None:
        """From now on a step is one launch of a CUDA graph, which lives as long as this object."""
        cupy, model = self.xp, copy.copy(self.model)
        model.product = product_of_few_rows(cupy)
        with self.stream:
            q, k, v = self.split(cupy.empty((len(self.tokens), 3 * model.width), np.float32), 1)
            fixed: dict[str, Any] = {"seqlen_k": self.lengths}
            for pages in self.cache:
                append = rawattn.plan(rawattn.append_kv, k, v, *pages, self.table, **fixed)
                attend = rawattn.plan(
                    rawattn.paged_attention, q, *pages, self.table, **fixed, **self.visible
                )
                self.plans.append((append, attend))
            changed = (self.lengths, self.tokens, self.now, self.logits)
            before = [x.copy() for x in changed]
            self.decode(model)  # loads the kernels: they cannot be loaded during a capture
            for x, old in zip(changed, before, strict=True):
                x[...] = old
            # Every replay writes to the memory that the step allocates here, so nothing else may get it.
            self.pool = cupy.cuda.MemoryPool()
            with cupy.cuda.using_allocator(self.pool.malloc):
                self.stream.begin_capture()
                try:
                    self.decode(model)
                finally:  # after an interrupt too: nothing can be read while a stream captures
                    graph = self.stream.end_capture()
            self.graph = graph

    def texts(self) -> list[list[int]]:
        """The tokens that each text has got so far; waits for them."""
        with self.stream:
            found: list[list[int]] = self.written[: self.made].T.tolist()
        return found

    def decode(self, model: GPT) -> None:
        """Run the newest token of each text through the model, and choose the next one."""
        self.lengths += 1
        self.choose(self.forward(model, self.tokens, self.lengths - 1, self.attend_newest))

    def forward(
        self,
        model: GPT,
        tokens: Array,
        positions: Array,
        attend: Callable[[int, Array], tuple[Array, Pull]],
        wanted: Array = slice(None),
    ) -> Array:
        """Logits after the wanted tokens. `attend` takes the number of the layer, and rows of q, k and v."""
        x = model.params["tokens"][tokens] + model.params["positions"][positions]
        for i in range(model.layers):
            x, _ = model.block(i, partial(attend, i))(x)
        x, _ = model.norm("norm", x[wanted])
        return model.head(x)[0]

    def attend_prompts(self, i: int, x: Array) -> tuple[Array, Pull]:
        """Attention inside each of the packed prompts."""
        q, k, v = self.split(x)
        return self.attend(i, q, k, v, seqs=self.seqs)

    def attend_newest(self, i: int, x: Array) -> tuple[Array, Pull]:
        """Attention of the newest row of each text to the whole text."""
        q, k, v = self.split(x, 1)
        if not self.plans:
            return self.attend(i, q, k, v)
        append, attend = self.plans[i]
        append(k, v)
        return rows(attend(q)), no_gradient

    def attend(
        self, i: int, q: Array, k: Array, v: Array, seqs: rawattn.SeqLayout | None = None
    ) -> tuple[Array, Pull]:
        """Append keys and values to their pages, then attend to the keys in the pages."""
        given = {
            "k_pages": self.cache[i, 0],
            "v_pages": self.cache[i, 1],
            "block_table": self.table,
            "seqlen_k": self.lengths,
            "seqs": seqs,
            "backend": self.model.backend,
        }
        rawattn.append_kv(k, v, **given)
        y: Array = rawattn.paged_attention(q, **given, **self.visible)
        return rows(y), no_gradient

    def split(self, x: Array, *seqlen: int) -> list[Array]:
        """Views (rows, *seqlen, heads, D) of q, k and v, in the dtype of the cache."""
        qkv = x.reshape(len(x), *seqlen, 3, self.model.heads, -1)
        qkv = qkv.astype(self.model.dtype, copy=False)
        return [qkv[..., part, :, :] for part in range(3)]

    def choose(self, logits: Array) -> None:
        """Choose the next token of each text, and store it."""
        self.logits[...] = logits
        if self.noise is not None:
            logits = logits / self.temperature + self.noise[self.now][0]
        self.tokens[...] = logits.argmax(axis=1)
        self.written[self.now] = self.tokens
        self.now += 1


def page_table(needed: Sequence[int]) -> np.ndarray[Any, Any]:
    """Page ids (batch, max_pages), in the order in which texts that grow together need pages; -1 for no page."""
    table = np.full((len(needed), max(needed)), -1, np.int32)
    asked = [(turn, text) for turn in range(max(needed)) for text in range(len(needed))]
    for page, (turn, text) in enumerate(x for x in asked if x[0] < needed[x[1]]):
        table[text, turn] = page
    return table


def rows(y: Array) -> Array:
    """The output of attention in the layout that the model has between layers: (rows, width), float32."""
    return y.reshape(len(y), -1).astype(np.float32, copy=False)


def no_gradient(dy: Array) -> Array:
    """The second function that a layer returns: here it fails, since the cache keeps nothing for a gradient."""
    raise RuntimeError("a generated text has no gradients; train.py has")


def product_of_few_rows(cupy: Any) -> Callable[[Array, Array], Array]:
    """x W in one kernel: CuPy's own product calls cuBLAS, which CuPy refuses in a capture."""
    product = cupy.ReductionKernel(
        *("float32 x, float32 w", "float32 y", "x * w", "a + b", "y = a", "0"),
        "product_of_few_rows",
    )
    return lambda x, w: product(x[:, :, None], w, axis=1)


def tokens_of(text: str, letters: Sequence[str]) -> list[int]:
    """The number of each character."""
    numbers = {letter: number for number, letter in enumerate(letters)}
    if not text:
        raise ValueError("TEXT: got an empty one, expected at least a character in each")
    if unknown := sorted({letter for letter in text if letter not in numbers}):
        raise ValueError(
            f"TEXT {text!r}: the model has not learnt {', '.join(map(repr, unknown))}; "
            f"it knows {''.join(letters)!r}"
        )
    return [numbers[letter] for letter in text]


def run(args: argparse.Namespace) -> int:
    """Continue all texts at once, print them and the speed."""
    from tqdm import tqdm

    if args.model is None:
        raise ValueError(
            "no model: give one with --model FILE; examples/train.py trains one in about three minutes:\n"
            "    python examples/train.py --save gpt.npz"
        )
    xp = array_module(args.backend)
    model, letters = load(args.model, xp=xp, backend="cpu" if xp is np else "cuda")
    prompts = [tokens_of(text, letters) for text in args.texts]
    count = args.count or max(1, model.context - max(map(len, prompts)))
    options = {name: getattr(args, name) for name in ("window", "sink", "temperature", "seed")}
    generation = Generation(model, prompts, count, **options, page_size=args.page_size)
    kept = generation.cache.nbytes / 2**20
    print(f"{model.flat.size} weights; {model.backend}; {kept:.1f} MiB of pages", flush=True)

    status, begin = 0, time.perf_counter()
    try:
        generation.prefill()
        generation.texts()
        took = time.perf_counter() - begin
        print(f"prefill: {sum(map(len, prompts))} tokens, {took:.2f} s")
        if xp is not np and count > 1:
            begin = time.perf_counter()
            generation.capture()
            print(f"a step captured as a CUDA graph: {time.perf_counter() - begin:.2f} s")
        begin = time.perf_counter()
        with tqdm(total=len(prompts) * count, initial=len(prompts), unit="token") as bar:
            while generation.made < count:
                generation.step()
                bar.update(len(prompts))
            found = generation.texts()
    except KeyboardInterrupt:
        status, found = INTERRUPTED, generation.texts()
    took = time.perf_counter() - begin
    made = len(prompts) * max(0, generation.made - 1)
    if made:
        speed = made / took
        print(f"decode: {made} tokens in {generation.made - 1} steps, {speed:.0f} tokens/s")
    for text, tokens in zip(args.texts, found, strict=True):
        print(f"\n--- {text!r}\n{text}{''.join(letters[token] for token in tokens)}")
    return status


def main(argv: list[str] | None = None) -> int:
    """The command line; an error is told, and gives exit status 1."""
    parser = argparse.ArgumentParser(
        description="Continue texts with a character-level GPT that train.py saved, all of them at "
        "once, and print how many tokens a second that makes.",
        epilog="Some seconds on a CPU. On a GPU the first run also compiles kernels. A bar tells how "
        "long the rest takes. Ctrl-C ends it; what was written up to there is printed.",
    )
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="beginnings, of characters that the model knows"
    )
    parser.add_argument(
        "--model", metavar="FILE", type=Path, help="what `train.py --save FILE` wrote"
    )
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument(
        "--count",
        metavar="N",
        type=integer(1),
        help="characters to add to each text (default: as many as the model has positions for)",
    )
    parser.add_argument(
        "--window",
        metavar="N",
        type=integer(0),
        help="let a character see only the N before it (default: all before it)",
    )
    parser.add_argument(
        "--sink",
        metavar="N",
        type=integer(0),
        default=0,
        help="with --window: and the first N of its text (default: 0)",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="below 1 likely characters are chosen more often than the model expects them, at 0 "
        "always the likeliest (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        metavar="N",
        type=integer(1, 1024),
        default=16,
        help="tokens of a page of the cache, up to 1024 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=integer(0), default=0, help="of the choices (default: 0)"
    )
    args = parser.parse_args(argv)
    if args.sink and args.window is None:
        parser.error("--sink: got it without --window, where every character is seen anyway")
    try:
        return run(args)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        hint = f'{name} is not installed; get it with: pip install "rawattn[demo]"'
        print(f"generate.py: {hint}", file=sys.stderr)
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
