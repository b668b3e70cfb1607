"""Kernels launched early (programmatic dependent launch), while the kernel before them in the stream still runs, read nothing
that it has yet to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rawattn

cupy = pytest.importorskip("cupy")

# Lets the next kernel start, and copies after a delay of 400 000 clock cycles. Its few blocks leave room on every SM, so
# blocks of the next kernel start at once.
_LATE_COPY = r"""
extern "C" __global__ void late_copy(const unsigned char* from, unsigned char* to, long long count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long begin = clock64();
  while (clock64() - begin < 400000) {}
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}
"""
_CHAIN = 12

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def late_copy() -> Callable[[Any, Any], None]:
    kernel = cupy.RawKernel(_LATE_COPY, "late_copy")

    def copy(source: Any, target: Any) -> None:
        kernel((8,), (64,), (source, target, source.nbytes))

    return copy


@pytest.fixture
def stream() -> Iterator[Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        yield stream
    stream.synchronize()


def _random(*shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return cupy.asarray(values, np.float16)


def _forward() -> tuple[Arrays, Callable[..., Any]]:
    arrays = {"q": _random(2, 300, 4, 64), "k": _random(2, 500, 4, 64), "v": _random(2, 500, 4, 64)}
    return arrays, rawattn.attention


def _paged(
    rows: int, *lens: int, dim: int = 64, integers: type = np.int32
) -> tuple[Arrays, Callable[..., Any]]:
    page_size, batch = 16, len(lens)
    each = max(lens) // page_size + 1
    table = np.random.default_rng(0).permutation(batch * each).reshape(batch, -1)
    arrays = {
        "q": _random(batch, rows, 8, dim),
        "k_pages": _random(batch * each, page_size, 2, dim),
        "v_pages": _random(batch * each, page_size, 2, dim),
        "block_table": cupy.asarray(table, integers),
        "seqlen_k": cupy.asarray(lens, integers),
    }
    return arrays, lambda **given: rawattn.paged_attention(**given, causal=True)


def _decode(keys: int) -> tuple[Arrays, Callable[..., Any]]:
    arrays = {
        "q": _random(3, 2, 8, 128),
        "k": _random(3, keys, 2, 128),
        "v": _random(3, keys, 2, 128),
    }
    return arrays, lambda **given: rawattn.attention(**given, causal=True)


def _decode_packed() -> tuple[Arrays, Callable[..., Any]]:
    arrays = {"q": _random(3, 8, 64), "k": _random(900, 2, 64), "v": _random(900, 2, 64) * 2}
    arrays["seqstart"] = cupy.asarray([0, 420, 430, 900], np.int32)

    def call(q: Any, k: Any, v: Any, seqstart: Any) -> Any:
        starts = cupy.arange(4, dtype=np.int32)
        seqs = rawattn.SeqLayout(
            seqstart_q=starts, seqstart_k=seqstart, max_seqlen_q=1, max_seqlen_k=900
        )
        return rawattn.attention(q, k, v, seqs=seqs, causal=True)

    return arrays, call


def _packed(*starts: int) -> tuple[Arrays, Callable[..., Any]]:
    arrays = {name: _random(500, 4, 64) * n for n, name in enumerate("qkv", start=1)}
    arrays["seqstart"] = cupy.asarray([0, *starts, 500], np.int32)

    def call(q: Any, k: Any, v: Any, seqstart: Any) -> Any:
        seqs = rawattn.SeqLayout(seqstart_q=seqstart, max_seqlen_q=500, max_seqlen_k=500)
        return rawattn.attention(q, k, v, seqs=seqs, causal=True)

    return arrays, call


CASES = {
    "forward": _forward,
    "packed": lambda: _packed(140, 150, 430),
    # Each lane of a warp looks at two of so many lengths.
    "many packed": lambda: _packed(*range(3, 490, 9)),
    "paged": lambda: _paged(200, 311, 290),
    "decode": lambda: _paged(1, 311, 290),
    "decode, 64-bit integers": lambda: _paged(4, 311, 290, integers=np.int64),
    "decode, one long sequence": lambda: _paged(1, 9000, dim=128),
    # Each thread of a block looks at several lengths; a block has several sequences.
    "decode, many": lambda: _paged(1, *range(40, 700)),
    "decode, rows": lambda: _decode(3000),
    "decode, packed": _decode_packed,
}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_waits_for_what_a_kernel_before_it_writes(
    name: str, captured: bool, stream: Any, late_copy: Callable[[Any, Any], None]
) -> None:
    arrays, call = CASES[name]()
    expected = call(**arrays).get()
    for late in arrays:
        # As lengths and page ids, ones are valid too, and they give other results. Lengths may also be too large before.
        for before in (1, 1000) if late in ("seqlen_k", "block_table") else (1,):
            stale = arrays[late].copy()
            stale.fill(before)
            given = {**arrays, late: stale}
            stale_result = call(**given).get()
            assert not np.array_equal(stale_result, expected), late
            stream.synchronize()
            if captured:
                stream.begin_capture()
                late_copy(arrays[late], stale)
                out = call(**given)
                stream.end_capture().launch()
            else:
                late_copy(arrays[late], stale)
                out = call(**given)
            np.testing.assert_array_equal(out.get(), expected, err_msg=f"{late} {before}")


@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_calls_that_read_what_the_last_one_wrote(rows: int, captured: bool, stream: Any) -> None:
    q, k = _random(2, rows, 8, 64), _random(2, 2000, 8, 64)
    keys = k * 8  # each result row is close to one row of k, so rows differ from each other

    def chain(wait: bool) -> Any:
        x = q
        for _ in range(_CHAIN):
            x = rawattn.attention(x, keys, k)
            if wait:
                stream.synchronize()
        return x

    expected = chain(True).get()
    stream.synchronize()
    if captured:
        stream.begin_capture()
        out = chain(False)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
            np.testing.assert_array_equal(out.get(), expected)
    else:
        np.testing.assert_array_equal(chain(False).get(), expected)


def test_inputs_that_the_next_kernel_overwrites(stream: Any) -> None:
    """A later call must not write its `out` before the earlier calls have read that memory as input."""
    q, k = _random(1, 128, 8, 64), _random(1, 4096, 8, 64)
    expected = rawattn.attention(q, k, k).get()
    other = _random(1, 4096, 8, 64) * 2
    kept = k.copy()
    for _ in range(50):
        out = rawattn.attention(q, k, k)
        # Writes to k, which the call before it reads.
        rawattn.attention(other, other, other, out=k)
        cupy.copyto(k, kept)
        np.testing.assert_array_equal(out.get(), expected)
