"""Calls of random shapes: their inputs, and the command line of the scripts that draw and time them."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import rawattn
from rawattn._bench import machine
from rawattn._bench.timing import Call
from rawattn._call import outputs
from rawattn._cli import arguments
from rawattn._runtime.devices import why_no_gpu

_DTYPE, _ITEMSIZE = "bfloat16", 2
_PAGE_SIZE = 16


class Shape(NamedTuple):
    """One call.

    keys: where they lie: "pages", pages of "float8", "rows", or rows with a "bias" or a "mask".
    """

    keys: str
    batch: int
    rows: int
    seqlen_k: int
    nheads_q: int
    nheads_kv: int
    headdim: int

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        itemsize = 1 if self.keys == "float8" else _ITEMSIZE
        return 2 * itemsize * self.batch * self.seqlen_k * self.nheads_kv * self.headdim

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages."""
        return self.keys in ("pages", "float8")


def between(source: random.Random, least: int, most: int) -> int:
    """Draw a whole number, log-uniform."""
    return round(math.exp(source.uniform(math.log(least), math.log(most))))


class Inputs(NamedTuple):
    """CuPy arrays and options of one call.

    arrays: those of `attention` or `paged_attention`; the block table follows keys and values.
    """

    arrays: tuple[Any, ...]
    options: dict[str, Any]


def make(shape: Shape) -> Inputs:
    """Make random inputs. Pages are scattered over the pool; a mask hides the last eighth of the last sequence's keys."""
    import cupy

    batch, keys, heads = shape.batch, shape.seqlen_k, (shape.nheads_kv, shape.headdim)
    q = machine.random_array((batch, shape.rows, shape.nheads_q, shape.headdim), _DTYPE)
    options: dict[str, Any] = {"causal": shape.rows > 1}
    if shape.paged:
        pages = -(-keys // _PAGE_SIZE)
        pool = (batch * pages, _PAGE_SIZE, *heads)
        if shape.keys == "float8":
            k, v = (machine.random_float8(pool) for _ in "kv")
            options |= {
                name: cupy.full(heads[0], 0.5, np.float32) for name in ("k_scale", "v_scale")
            }
        else:
            k, v = (machine.random_array(pool, _DTYPE) for _ in "kv")
        ids = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
        options["seqlen_k"] = cupy.full(batch, keys, np.int32)
        return Inputs((q, k, v, cupy.asarray(ids.reshape(batch, pages))), options)
    k, v = (machine.random_array((batch, keys, *heads), _DTYPE) for _ in "kv")
    if shape.keys == "bias":
        options["bias"] = machine.random_array((batch, shape.nheads_q, shape.rows, keys), _DTYPE)
    if shape.keys == "mask":
        seen = np.linspace(keys, keys - keys // 8, batch)
        options["mask"] = cupy.asarray(np.arange(keys) < seen[:, None, None, None])
    return Inputs((q, k, v), options)


def call(inputs: Inputs, scope: Callable[[], AbstractContextManager[Any]]) -> Call:
    """Return a function that calls the library within this scope."""
    verb = rawattn.paged_attention if len(inputs.arrays) > 3 else rawattn.attention

    def made() -> Any:
        with scope():
            return verb(*inputs.arrays, **inputs.options)

    return made


Times = Mapping[str, float]  # microseconds of a call by entrant
_Drawn = TypeVar("_Drawn", bound=NamedTuple)


def command_line(
    prog: str, description: str | None, keys: Sequence[str], shapes: int
) -> argparse.ArgumentParser:
    """The options that the scripts share. keys: the values of `--keys`, the first one if it is left out; () for no such option.
    shapes: by default."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", type=arguments.count, metavar="N", default=shapes, help="how many (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    if keys:
        parser.add_argument("--keys", choices=keys, default=keys[0], help="(%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="a file for the times of each shape"
    )
    return parser


def run(
    prog: str,
    given: argparse.Namespace,
    draw: Callable[[random.Random], _Drawn],
    measure: Callable[[_Drawn], Times],
    summary: Callable[[Sequence[tuple[_Drawn, Times]]], Sequence[str]],
) -> int:
    """Draw shapes, measure them, and print the summary of those that have times. Return the exit status."""
    try:
        if given.json:
            outputs.check("--json", given.json)
        if (why := why_no_gpu()) is not None:
            raise RuntimeError(f"GPU kernels are timed, and there is no usable GPU: {why}")
    except (OSError, RuntimeError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    source = random.Random(given.seed)
    results = []
    for n in range(given.shapes):
        shape = draw(source)
        if times := measure(shape):
            results.append((shape, times))
        print(f"[{n + 1}/{given.shapes}] {tuple(shape)}", file=sys.stderr)
    if given.json:
        rows = [{**shape._asdict(), **times} for shape, times in results]
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print("\n".join(summary(results)))
    return 0


def worst(
    over: Sequence[tuple[float, _Drawn, Times]],
    most: int,
    name: Callable[[_Drawn], object] = tuple,
) -> list[str]:
    """A line for each of the `most` shapes with the largest ratio, largest first: ratio, name and microseconds of all sides."""
    lines = []
    for ratio, shape, times in sorted(over, key=lambda each: -each[0])[:most]:
        shown = ", ".join(f"{side} {time:.1f}" for side, time in times.items())
        lines.append(f"  {ratio:.2f} {name(shape)}: {shown} us")
    return lines
