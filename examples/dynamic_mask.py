"""Attention to the keys that matter: a mask that is made anew for each sequence, in NumPy or CuPy.

    python examples/dynamic_mask.py --keys 65536 --queries 4096 --keep 8192

The last queries of a long context read it. A learned weight vector for each key head scores each block of
keys. `rawattn.topk_mask` keeps the blocks with the largest scores, and the queries' own blocks. Attention
neither loads nor computes the other blocks.

Here the weights are given: the keys of a few blocks, and all queries, hold the direction of the head's
weight vector. In a model both the weights and the keys are learned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import rawattn

Array = Any  # a NumPy or CuPy array

HEADS, HEADS_KV, HEADDIM = 8, 2, 64
BLOCK = 64  # keys that are kept or hidden together: tiles that are hidden whole cost nothing
TOPICS = 6  # blocks of each key head that matter
SIZES = {"cuda": (65536, 4096, 8192), "cpu": (4096, 256, 1024)}  # keys, queries, keys to keep


class Context(NamedTuple):
    """q (1, queries, HEADS, HEADDIM), k and v (1, keys, HEADS_KV, HEADDIM), and weights (HEADS_KV, HEADDIM)."""

    q: Array
    k: Array
    v: Array
    weights: Array


def make_context(keys: int, queries: int, xp: Any, seed: int = 0) -> Context:
    """Make noise, in which some blocks of keys of each head hold the direction that its queries hold."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((HEADS_KV, HEADDIM), dtype=np.float32)
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    q = rng.standard_normal((1, queries, HEADS, HEADDIM), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, keys, HEADS_KV, HEADDIM), dtype=np.float32)
    q += 10 * np.repeat(weights, HEADS // HEADS_KV, axis=0)
    blocks = (keys - queries) // BLOCK
    for head in range(HEADS_KV):
        for block in rng.choice(blocks, min(TOPICS, blocks), replace=False):
            k[0, block * BLOCK : (block + 1) * BLOCK, head] += 6 * weights[head]
    dtype = np.float32 if xp is np else np.float16
    return Context(*(xp.asarray(x.astype(dtype)) for x in (q, k, v, weights)))


def importance(context: Context) -> Array:
    """The score of each key, which is that of its block, (1, HEADS_KV, 1, keys). The queries' own blocks score highest."""
    xp = np if isinstance(context.k, np.ndarray) else sys.modules["cupy"]
    _, keys, heads, headdim = context.k.shape
    blocks = context.k.reshape(keys // BLOCK, BLOCK, heads, headdim).mean(axis=1, dtype=np.float32)
    scores = (blocks * context.weights).sum(axis=2)
    scores[-context.q.shape[1] // BLOCK :] = scores.max() + 1
    return xp.repeat(scores.T, BLOCK, axis=1).reshape(1, heads, 1, keys)


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of GPU time for one call, the mean of `repeats` calls in a row."""
    import cupy

    call()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1000 / repeats


def run(args: argparse.Namespace) -> int:
    """Make a context and its mask, show the kept blocks, and measure times where there is a GPU."""
    xp: Any = np
    if args.backend != "cpu":
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
            xp = cupy
        except (ImportError, RuntimeError) as error:
            if args.backend == "cuda":
                raise RuntimeError(f"--backend: got cuda, but there is no GPU: {error}") from error
    backend = "cpu" if xp is np else "cuda"
    given = (args.keys, args.queries, args.keep)
    keys, queries, keep = (n or default for n, default in zip(given, SIZES[backend], strict=True))
    for name, value in (("keys", keys), ("queries", queries), ("keep", keep)):
        if value % BLOCK:
            raise ValueError(f"--{name}: got {value}, expected a multiple of {BLOCK}")
    if queries > keys:
        raise ValueError(
            f"--queries: got {queries}, expected at most {keys} (keys): they are the last of the keys"
        )
    if not queries <= keep <= keys:
        raise ValueError(
            f"--keep: got {keep}, expected from {queries} (queries) to {keys} (keys): queries see themselves"
        )

    context = make_context(keys, queries, xp, args.seed)
    q, k, v = context.q, context.k, context.v
    mask = rawattn.topk_mask(importance(context), keep)
    width = max(BLOCK, keys // 64)
    print(f"{keys} keys, of which the last {queries} are queries; {keep} keys kept; {backend}")
    print(f"a sign is {width} keys: # all kept, + seen by some queries or kept in part, . hidden")
    for head in range(HEADS_KV):
        kept = mask.kept[0, head, 0, ::BLOCK] // BLOCK
        earlier = kept[kept < (keys - queries) // BLOCK].tolist()
        shown = " ".join(map(str, earlier[:12])) + (" ..." if len(earlier) > 12 else "")
        print(f"key head {head}: {len(earlier)} blocks of the context: {shown}")
        line = rawattn.show_mask(
            mask, seqlen_q=queries, causal=True, head=head, tile=(queries, width)
        )
        print(line.partition("\n")[2])

    options: dict[str, Any] = {"causal": True, "backend": backend}
    _, whole = rawattn.attention(q, k, v, **options, return_lse=True)
    _, part = rawattn.attention(q, k, v, mask=mask, **options, return_lse=True)
    share = float(xp.exp(part - whole).mean())
    print(f"the kept keys have {100 * share:.2f}% of the probability")
    if xp is not np:
        without = seconds(lambda: rawattn.attention(q, k, v, **options))
        masked = seconds(lambda: rawattn.attention(q, k, v, mask=mask, **options))
        making = seconds(lambda: rawattn.topk_mask(importance(context), keep))
        print(f"without the mask {1e3 * without:.3f} ms, with it {1e3 * masked:.3f} ms")
        print(f"to make the mask {1e3 * making:.3f} ms: once for all layers that share it")
    return 0


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
    """The command line; an error is one line, and exit status 1."""
    parser = argparse.ArgumentParser(
        description="Keep the keys of a long context that matter, and show what that saves.",
        epilog="The default takes a few seconds. Times are measured where there is a GPU.",
    )
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    for n, (name, told) in enumerate(
        (
            ("keys", "tokens of the sequence"),
            ("queries", "the last of them, which read it"),
            ("keep", "keys that each of them sees, at most"),
        )
    ):
        default = f"{SIZES['cuda'][n]}, on the CPU {SIZES['cpu'][n]}"
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=integer(1),
            help=f"{told}, a multiple of {BLOCK} (default: {default})",
        )
    parser.add_argument(
        "--seed", metavar="N", type=integer(0), default=0, help="of the context (default: 0)"
    )
    try:
        return run(parser.parse_args(argv))
    except (ValueError, RuntimeError) as error:
        print(f"dynamic_mask.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
