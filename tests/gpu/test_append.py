"""`append_kv` on the GPU: rotary styles, batches, frameworks, and a captured decoding loop that grows its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import rawattn
from rawattn import append_kv, paged_attention
from tests.append import Appended, appended, rounded
from tests.gpu.pages import lengths_of, on_gpu
from tests.paged import BFLOAT16

cupy = pytest.importorskip("cupy")

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (700, 3, 64, 1290)
SHAPES: list[dict[str, Any]] = [
    {"page_size": 16, "dims": (128, 128), "heads": (8, 2), "rotary_dim": 128},
    {"page_size": 16, "rows": (200, 3, 9, 129), "packed": True, "pair": True, "rotary_dim": 16},
    {"page_size": 24, "rows": (200, 0, 9, 129), "room_q": 210, "dims": (64, 40), "heads_first": True},
    {"page_size": 128, "rows": 3, "dtype": F32, "dims": (256, 7), "rotary_dim": 64},
    {"page_size": 1, "dtype": F16, "dims": (80, 80), "rotary_dim": 20, "angles": F16},
    {"page_size": 7, "rows": 2, "dims": (7, 7), "rotary_dim": 6, "integers": np.int64},
    {"page_size": 16, "rows": LENS, "room_q": 1290, "dims": (96, 96), "rotary_dim": 96},
]  # fmt: skip


def write(call: Appended, *, on_device: bool) -> tuple[Any, Any, Any]:
    """Appends, and returns the two pools afterwards and the rotated queries."""
    pools = [on_gpu(pool) for pool in call.pools()]
    table = call.pages.block_table
    k, v = on_gpu(call.k), on_gpu(call.v)
    given = lengths_of(call.pages, on_device=on_device)
    for name, x in call.pages.scales.items():
        given[name] = cupy.asarray(x) if on_device and isinstance(x, np.ndarray) else x
    if call.rotary is not None:
        given |= {"q": on_gpu(call.q), "rotary": tuple(map(on_gpu, call.rotary))}
        given["interleaved"] = call.interleaved
    out = append_kv(k, v, *pools, on_gpu(table) if on_device else table, **given)
    return (*map(off_gpu, pools), None if out is None else out.get())


def off_gpu(pool: Any) -> Any:
    return pool.view(f"u{pool.itemsize}").get().view(pool.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_reference(shape: dict[str, Any], interleaved: bool) -> None:
    call = appended(LENS, **shape, interleaved=interleaved)
    for on_device in (True, False):
        call.verify(*write(call, on_device=on_device))


@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_of_8_bits(shape: dict[str, Any], float8: str) -> None:
    calls = [appended(LENS, **shape, float8=float8, interleaved=float8 == "numbers")]
    calls.append(appended(LENS, **{**shape, "rotary_dim": 0}, float8=float8))
    for call in calls:
        for on_device in (True, False):
            call.verify(*write(call, on_device=on_device))


@pytest.mark.parametrize("dtype", [BFLOAT16, F16, F32], ids=str)
def test_rounding_to_8_bits(dtype: Any) -> None:
    for call in rounded(dtype):
        call.verify(*write(call, on_device=True))


def test_numpy_stays_on_the_host_and_torch_on_the_device() -> None:
    call = appended(LENS, 16, rotary_dim=16, dtype=F16)
    pools = call.pools()
    options = {"seqlen_k": call.pages.seqlen_k, "q": call.q, "rotary": call.rotary}
    table = call.pages.block_table
    for backend in (None, "cpu", "cuda"):
        pools = call.pools()
        out = append_kv(call.k, call.v, *pools, table, **options, backend=backend)
        call.verify(*pools, out)
    on_device = [on_gpu(pool) for pool in call.pools()]
    out = append_kv(
        on_gpu(call.k), on_gpu(call.v), *on_device, table, seqlen_k=call.pages.seqlen_k,
        q=on_gpu(call.q), rotary=tuple(map(on_gpu, call.rotary or ())), backend="cpu",
    )  # fmt: skip
    call.verify(*(pool.get() for pool in on_device), out.get())
    torch = pytest.importorskip("torch")
    k, v, q, *pages, cos, sin = (
        torch.from_numpy(x).cuda()
        for x in (call.k, call.v, call.q, *call.pools(), *(call.rotary or ()))
    )
    out = append_kv(k, v, *pages, table, seqlen_k=call.pages.seqlen_k, q=q, rotary=(cos, sin))
    assert isinstance(out, torch.Tensor)
    call.verify(*(x.cpu().numpy() for x in (*pages, out)))


def test_whatever_integers_say_nothing_else_is_written() -> None:
    """Rows with an invalid position or page id are dropped: nothing else is written, and the CUDA context stays usable."""
    call = appended((70, 30, 9), 16, dtype=F32)
    pools = call.pools()
    guarded = [cupy.full((len(pool) + 2, *pool.shape[1:]), 7, F32) for pool in pools]
    for memory, pool in zip(guarded, pools, strict=True):
        memory[1:-1] = cupy.asarray(pool)
    inner = [memory[1:-1] for memory in guarded]
    table, lengths = on_gpu(call.pages.block_table), on_gpu(call.pages.seqlen_k)
    k, v = on_gpu(call.k), on_gpu(call.v)
    wild = cupy.full_like(table, -1)
    wild[1], wild[2] = len(pools[0]), 2**31 - 1
    append_kv(k, v, *inner, wild, seqlen_k=lengths)
    for bad in (-1, 0, 16 * table.shape[1] + 1, 2**31 - 1):
        append_kv(k, v, *inner, table, seqlen_k=cupy.full_like(lengths, bad))
    for memory, pool in zip(guarded, pools, strict=True):
        assert memory[1:-1].get().tobytes() == pool.tobytes()
        assert (memory[0].get() == 7).all() and (memory[-1].get() == 7).all()
    with pytest.raises(ValueError, match=r"^block_table: got page id -1"):
        append_kv(k, v, *inner, wild, seqlen_k=lengths, validate=True)
    with pytest.raises(ValueError, match=r"^seqlen_k: got 0 keys"):
        append_kv(k, v, *inner, table, seqlen_k=cupy.zeros_like(lengths), validate=True)
    append_kv(k, v, *inner, table, seqlen_k=lengths)
    call.verify(*(x.get() for x in inner), None)


class Decoding(NamedTuple):
    """New rows of each step, shaped (steps, batch, heads, D), float16; their block table; cos and sin of their positions."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    cos: np.ndarray
    sin: np.ndarray

    def pool(self) -> np.ndarray:
        """A pool without keys: all NaN."""
        steps, batch, *heads = self.k.shape
        return np.full((self.table.size, batch * steps // self.table.size, *heads), np.nan, F16)

    def verify(self, results: np.ndarray, **options: Any) -> None:
        q, k, v = (x.swapaxes(0, 1).astype(F32) for x in self[:3])
        cos, sin = (x[None, :, None] for x in (self.cos, self.sin))

        def turn(x: Any) -> Any:
            a, b = np.split(x, 2, axis=-1)
            return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(F16)

        wanted = rawattn.reference.attention(turn(q), turn(k), v, causal=True, **options)
        np.testing.assert_allclose(results.swapaxes(0, 1), wanted, atol=4e-3)


def decoding() -> Decoding:
    """256 steps of three sequences, in pages of 16."""
    steps, batch, page_size, heads, headdim = 256, 3, 16, (8, 2), 64
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((steps, batch, h, headdim)).astype(F16) for h in (*heads, heads[1])
    )
    table = rng.permutation(batch * steps // page_size).astype(np.int32).reshape(batch, -1)
    phases = np.arange(steps)[:, None] * 1000.0 ** -np.linspace(0, 1, headdim // 2)
    return Decoding(q, k, v, table, np.cos(phases).astype(F32), np.sin(phases).astype(F32))


@pytest.mark.parametrize("window", [None, 40])
def test_a_captured_loop_of_decoding(window: int | None) -> None:
    """256 replays of one graph, whose lengths grow on the device, give what the reference computes for all steps at once."""
    loop = decoding()
    steps, batch = loop.q.shape[:2]
    q, k, v, table, *rotary = (cupy.asarray(x) for x in loop)
    pools = [cupy.asarray(loop.pool()) for _ in range(2)]
    options: dict[str, Any] = {} if window is None else {"window": (window, 0), "sink": 4}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        lengths = cupy.zeros(batch, np.int32)
        now = [cupy.empty((batch, 1, *x.shape[2:]), F16) for x in (q, k, v)]
        add = rawattn.plan(
            append_kv,
            now[1],
            now[2],
            *pools,
            table,
            seqlen_k=lengths,
            q=now[0],
            rotary=tuple(rotary),
        )
        turned = add()
        attend = rawattn.plan(
            paged_attention, turned, *pools, table, seqlen_k=lengths, causal=True, **options
        )
        lengths += 1  # compiles CuPy's kernel, which a capture would not allow
        lengths.fill(0)
        stream.begin_capture()
        lengths += 1
        turned = add()
        out = attend(turned, *pools, table)
        graph = stream.end_capture()
        results = cupy.empty_like(q)
        for n in range(steps):
            for memory, x in zip(now, (q, k, v), strict=True):
                memory[:, 0] = x[n]
            graph.launch(stream)
            results[n] = out[:, 0]
        stream.synchronize()
    loop.verify(results.get(), **options)


@pytest.mark.parametrize("window", [None, 40])
def test_a_captured_loop_of_decoding_in_torch(window: int | None) -> None:
    """The same loop with torch's graph and tensors."""
    torch = pytest.importorskip("torch")
    loop = decoding()
    steps, batch = loop.q.shape[:2]
    q, k, v, table, *rotary = (torch.from_numpy(x).cuda() for x in loop)
    pools = [torch.from_numpy(loop.pool()).cuda() for _ in range(2)]
    options: dict[str, Any] = {} if window is None else {"window": (window, 0), "sink": 4}
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    now = [torch.empty_like(x[0, :, None]) for x in (q, k, v)]
    add = rawattn.plan(
        append_kv, now[1], now[2], *pools, table, seqlen_k=lengths, q=now[0], rotary=tuple(rotary)
    )
    turned = add()
    attend = rawattn.plan(
        paged_attention, turned, *pools, table, seqlen_k=lengths, causal=True, **options
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths += 1
        turned = add()
        out = attend(turned, *pools, table)
    results = torch.empty_like(q)
    for n in range(steps):
        for memory, x in zip(now, (q, k, v), strict=True):
            memory[:, 0] = x[n]
        graph.replay()
        results[n] = out[:, 0]
    loop.verify(results.cpu().numpy(), **options)


def test_many_rows_of_many_sequences() -> None:
    lens = tuple(int(n) for n in np.random.default_rng(1).integers(0, 90, 300))
    call = appended(lens, 16, rows=lens, packed=True, rotary_dim=24, dtype=BFLOAT16)
    call.verify(*write(call, on_device=True))
    shifted = replace(call, interleaved=True)
    shifted.verify(*write(shifted, on_device=False))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["v_pages", "k", "q"])
def test_what_is_written_and_shares_memory_is_refused(name: str, planned: bool) -> None:
    """An array to write that shares memory with another argument is refused, also in repeated and planned calls. Pools of k
    and v interleaved in one array are accepted at any address."""
    call = appended((9, 1, 24, 3), 4, rotary_dim=8, dtype=F32, heads=(2, 2), dims=(24, 24))
    pool, n = call.pages.k_pages, len(call.k)
    both, other = (cupy.zeros((len(pool), 2, *pool.shape[1:]), F32) for _ in range(2))
    table, lengths = cupy.asarray(call.pages.block_table), cupy.asarray(call.pages.seqlen_k)
    k, v, q = map(cupy.asarray, (call.k, call.v, call.q))
    options = {"seqlen_k": lengths, "rotary": tuple(map(cupy.asarray, call.rotary))}
    given = {"k": k, "v": v, "k_pages": both[:, 0], "v_pages": both[:, 1], "q": q}

    def run(k: Any, v: Any, k_pages: Any, v_pages: Any, q: Any) -> Any:
        if planned:
            return plan(k, v, k_pages, v_pages, table, q=q)
        return append_kv(k, v, k_pages, v_pages, table, q=q, **options)

    plan = rawattn.plan(append_kv, *list(given.values())[:4], table, q=q, **options)
    for pools in (both, other, both):
        run(**{**given, "k_pages": pools[:, 0], "v_pages": pools[:, 1]})
    assert (both == other).all()
    shared = both[:, 0] if name == "v_pages" else cupy.ascontiguousarray(both[:n, 0, :1])
    if name != "v_pages":
        # The shape and strides of earlier calls, but inside the pages.
        flat = both.reshape(-1)[: shared.size]
        shared = flat.reshape(shared.shape)
    before = both.copy()
    for _ in range(2):
        with pytest.raises(ValueError, match="shares memory with"):
            run(**{**given, name: shared})
    assert (both == before).all()


def test_angles_of_any_strides_and_out_of_a_plan() -> None:
    """Angles whose last axis is not dense are copied at each call, also in a captured call. A plan refuses them."""
    call = appended(LENS, 16, rotary_dim=16, dtype=F16)
    k, v, q, table, lengths = map(
        cupy.asarray, (call.k, call.v, call.q, call.pages.block_table, call.pages.seqlen_k)
    )
    dense = tuple(map(cupy.asarray, call.rotary or ()))
    spread = tuple(cupy.repeat(x, 2, -1)[:, ::2] for x in dense)
    for _ in range(3):
        pools = [on_gpu(pool) for pool in call.pools()]
        out = append_kv(k, v, *pools, table, seqlen_k=lengths, q=q, rotary=spread)
        call.verify(*(pool.get() for pool in pools), out.get())
    with pytest.raises(ValueError, match=r"^rotary\[0\]: its last axis is not dense"):
        rawattn.plan(append_kv, k, v, *pools, table, seqlen_k=lengths, q=q, rotary=spread)
    stream = cupy.cuda.Stream(non_blocking=True)
    pools = [on_gpu(pool) for pool in call.pools()]
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        out = append_kv(k, v, *pools, table, seqlen_k=lengths, q=q, rotary=spread)
        stream.end_capture().launch(stream)
        stream.synchronize()
    call.verify(*(pool.get() for pool in pools), out.get())
    pools = [on_gpu(pool) for pool in call.pools()]
    plan = rawattn.plan(append_kv, k, v, *pools, table, seqlen_k=lengths, q=q, rotary=dense)
    for _ in range(3):  # from the second call on, the plan knows these named arguments
        mine = cupy.empty_like(q)
        assert plan(k, v, *pools, table, out=mine, rotary=dense) is mine
        call.verify(*(pool.get() for pool in pools), mine.get())
