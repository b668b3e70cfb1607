"""Attention of many sequences that share a prefix, such as a system prompt: the prefix is read once for all of them.

    python examples/shared_prefix.py
    python examples/shared_prefix.py --prefix 4096 --batch 64 --dtype float16

All queries attend to the prefix as the rows of one long sequence, and each to the keys of its own sequence. `rawattn.combine`
merges both results into that of attention over prefix and own keys together. A single call for that would store and read the
prefix once for each sequence.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import rawattn

Array = Any  # a NumPy or CuPy array


def attend(q: Array, prefix: tuple[Array, Array], own: tuple[Array, Array]) -> Array:
    """Attention of q (batch, seqlen_q, nheads, D) to the prefix (1, keys, nheads_kv, D), then causally to own keys."""
    batch, rows, nheads, _ = q.shape
    one = q.reshape(1, batch * rows, nheads, -1)
    out, lse = rawattn.attention(one, *prefix, return_lse=True)
    of_prefix = out.reshape(batch, rows, nheads, -1)
    # (1, nheads, batch * rows) as (batch, nheads, rows): strides are enough.
    lse_of_prefix = lse.reshape(nheads, batch, rows).swapaxes(0, 1)
    of_own, lse_of_own = rawattn.attention(q, *own, causal=True, return_lse=True)
    return rawattn.combine([of_prefix, of_own], [lse_of_prefix, lse_of_own])[0]


def attend_to_copies(
    xp: Any, q: Array, prefix: tuple[Array, Array], own: tuple[Array, Array]
) -> Array:
    """The same with a copy of the prefix before the own keys of each sequence."""
    copies = []
    for shared, each in zip(prefix, own, strict=True):
        length = shared.shape[1]
        whole = xp.empty((len(each), length + each.shape[1], *each.shape[2:]), each.dtype)
        whole[:, :length], whole[:, length:] = shared, each
        copies.append(whole)
    return rawattn.attention(q, *copies, causal=True)


def run(args: argparse.Namespace) -> int:
    """Compute both ways on random arrays. The exit status is 1 if they differ."""
    if args.arrays == "cupy" and not has_gpu():
        raise RuntimeError("--arrays: got cupy, but there is no GPU; numpy needs none")
    xp: Any = importlib.import_module(args.arrays or ("cupy" if has_gpu() else "numpy"))
    rng = np.random.default_rng(args.seed)

    def draw(*shape: int) -> Array:
        return xp.asarray(rng.standard_normal(shape, dtype=np.float32), args.dtype)

    heads = (args.heads_kv, args.headdim)
    q = draw(args.batch, args.own, args.heads, args.headdim)
    prefix = draw(1, args.prefix, *heads), draw(1, args.prefix, *heads)
    own = draw(args.batch, args.own, *heads), draw(args.batch, args.own, *heads)
    shared, copied = attend(q, prefix, own), attend_to_copies(xp, q, prefix, own)
    difference = float(xp.abs(shared.astype(np.float64) - copied.astype(np.float64)).max())
    nbytes = 2 * args.prefix * args.heads_kv * args.headdim * q.dtype.itemsize
    print(f"{args.batch} sequences of {args.own} tokens behind {args.prefix} shared ones")
    print(f"the prefix's keys and values: {mib(nbytes)}, copied {mib(args.batch * nbytes)}")
    print(f"largest difference between both ways: {difference:.1e}")
    bound = {"float32": 1e-4, "float16": 1e-2}[args.dtype]
    if not difference <= bound:
        print(f"shared_prefix.py: expected at most {bound}", file=sys.stderr)
        return 1
    return 0


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


def mib(nbytes: int) -> str:
    """A number of bytes as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"


def integer(least: int) -> Callable[[str], int]:
    """Read an int of at least `least`, for argparse."""

    def read(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"got {text}, expected a whole number, at least {least}"
            )
        return value

    return read


def main(argv: list[str] | None = None) -> int:
    """The command line. An error is one line, and exit status 1."""
    parser = argparse.ArgumentParser(
        description="Attention of many sequences behind a shared prefix, which is read once, and the same with "
        "the prefix copied to each: both agree."
    )
    parser.add_argument(
        "--arrays",
        choices=("numpy", "cupy"),
        help="default: CuPy's if there is a GPU, else NumPy's",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of all arrays (default: %(default)s)",
    )
    for name, default, told in (
        ("prefix", 1000, "tokens that all sequences share"),
        ("batch", 8, "sequences"),
        ("own", 16, "tokens of each sequence behind the prefix"),
        ("heads", 8, "query heads"),
        ("heads-kv", 2, "heads of keys and values; they divide the query heads"),
        ("headdim", 64, "numbers of a head, 1 to 256"),
    ):
        parser.add_argument(
            f"--{name}", metavar="N", type=integer(1), default=default, help=f"{told} ({default})"
        )
    parser.add_argument(
        "--seed", metavar="N", type=integer(0), default=0, help="of the numbers drawn (0)"
    )
    try:
        return run(parser.parse_args(argv))
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        print(f"shared_prefix.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
