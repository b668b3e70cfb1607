"""Masks that are built once: what they hold, how they are given to calls, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import BlockMask, block_mask, reference, show_mask, topk_mask
from rawattn._call.options import Options
from rawattn._kernels.portable import mask_writing
from rawattn._masks import host
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD

RNG = np.random.default_rng(0)
SHAPES = (
    *((1, 1, 1, 1), (2, 3, 70, 130), (1, 2, 129, 515), (2, 1, 1, 300), (1, 2, 200, 1)),
    *((0, 1, 3, 4), (1, 1, 0, 9), (1, 1, 9, 0)),
)


def random_mask(*shape: int, share: float = 0.5) -> np.ndarray:
    return RNG.random(shape) < share


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bools_come_back(shape: tuple[int, ...]) -> None:
    keep = random_mask(*shape)
    mask = block_mask(keep)
    assert mask.shape == shape
    np.testing.assert_array_equal(mask.to_bool(), keep)


def test_a_map_of_granules() -> None:
    keep = np.zeros((1, 1, 130, 200), bool)
    keep[..., :64, 64:128] = True
    keep[..., 129, 199] = True
    expected = [[0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(block_mask(keep).map[0, 0], expected)
    np.testing.assert_array_equal(block_mask(np.ones((70, 65), bool)).map[0, 0], [[2, 2], [2, 2]])


def test_fewer_axes_and_other_strides() -> None:
    keep = random_mask(60, 90)
    assert block_mask(keep).shape == (1, 1, 60, 90)
    np.testing.assert_array_equal(block_mask(keep.T[::-1]).to_bool()[0, 0], keep.T[::-1])
    whole = np.broadcast_to(keep[:1], (2, 3, 60, 90))
    np.testing.assert_array_equal(block_mask(whole).to_bool(), whole)


def test_arrays_of_other_frameworks() -> None:
    torch = pytest.importorskip("torch")
    keep = random_mask(3, 1, 20, 40)
    np.testing.assert_array_equal(block_mask(torch.from_numpy(keep)).to_bool(), keep)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ranges(dtype: Any) -> None:
    ranges = RNG.integers(-20, 320, (2, 150, 3, 2)).astype(dtype)
    ranges[0, 5] = (0, 300), (0, 0), (9, 3)
    ranges[1, 6] = np.iinfo(dtype).min, np.iinfo(dtype).max
    mask = block_mask(ranges=ranges, seqlen_k=300)
    keys = np.arange(300)
    keep = ((keys >= ranges[..., :1]) & (keys < ranges[..., 1:])).any(2)[:, None]
    np.testing.assert_array_equal(mask.to_bool(), keep)
    np.testing.assert_array_equal(mask.map, block_mask(keep).map)
    same = block_mask(ranges=ranges.tolist(), seqlen_q=150, seqlen_k=300, batch=2)
    np.testing.assert_array_equal(same.bits, mask.bits)


def test_a_predicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rawattn._verbs.predicate_mask.gpu_available", lambda: False)
    document = np.sort(RNG.integers(0, 5, 200))
    mask = block_mask(
        predicate="document[q_idx] == document[kv_idx] and kv_idx <= q_idx or head == slow",
        seqlen_q=200, seqlen_k=200, batch=2, nheads=3, document=document, slow=1,
    )  # fmt: skip
    expected = np.broadcast_to(np.tri(200) * (document[:, None] == document), (2, 3, 200, 200)) > 0
    expected = expected | (np.arange(3) == 1)[:, None, None]
    np.testing.assert_array_equal(mask.to_bool(), expected)
    np.testing.assert_array_equal(mask.map, block_mask(expected).map)


def test_lengths_are_integers_of_numpy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rawattn._verbs.predicate_mask.gpu_available", lambda: False)
    short, text = np.uint8(100), "q_idx >= kv_idx"
    mask = block_mask(
        predicate=text, seqlen_q=short, seqlen_k=short, batch=np.int8(1), nheads=np.uint8(3)
    )
    assert mask.shape == (1, 3, 100, 100)
    assert all(type(extent) is int for extent in mask.shape)
    np.testing.assert_array_equal(mask.to_bool()[0, 2], np.tri(100, dtype=bool))
    mask = block_mask(ranges=[[[[0, 3]]]], seqlen_k=short)
    assert type(mask.shape[3]) is int


def arrays(dtype: Any = np.float32) -> list[np.ndarray]:
    shapes = ((2, 75, 4, 16), (2, 90, 2, 16), (2, 90, 2, 24))
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("shape", [(2, 4, 75, 90), (1, 2, 75, 90), (1, 1, 1, 90)], ids=str)
def test_calls_on_the_cpu(shape: tuple[int, ...]) -> None:
    q, k, v = arrays()
    keep = random_mask(*shape, share=0.2)
    mask = block_mask(keep)
    out = rawattn.attention(q, k, v, mask=mask, causal=True, backend="cpu")
    wanted = rawattn.attention(q, k, v, mask=keep, causal=True, backend="cpu")
    np.testing.assert_array_equal(out, wanted)
    exact, lse = reference.attention(q, k, v, mask=mask, causal=True, return_lse=True)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    dout = RNG.standard_normal(out.shape).astype(np.float32)
    given = (dout, q, k, v, out, lse.astype(np.float32))
    ours = rawattn.attention_backward(*given, mask=mask, causal=True, backend="cpu")
    theirs = rawattn.attention_backward(*given, mask=keep, causal=True, backend="cpu")
    np.testing.assert_array_equal(ours.dk, theirs.dk)
    _, backward = rawattn.attention_vjp(q, k, v, mask=mask, causal=True, backend="cpu")
    np.testing.assert_allclose(backward(dout).dq, ours.dq, atol=1e-5)


def test_calls_with_other_bits_share_their_kernels() -> None:
    first, second = (block_mask(random_mask(1, 1, 75, 90)) for _ in range(2))
    verbs = [with_arrays(FORWARD, Options(mask=mask)) for mask in (first, second)]
    assert verbs[0].verb is verbs[1].verb
    assert verbs[0].options == verbs[1].options
    assert hash(verbs[0].options.mask) == hash(verbs[1].options.mask)


def test_it_lies_beside_q() -> None:
    torch = pytest.importorskip("torch")
    mask = block_mask(random_mask(1, 1, 75, 90))
    (q, k, v), keep = arrays(), mask.to_bool()
    out = rawattn.attention(*map(torch.from_numpy, (q, k, v)), mask=mask, backend="cpu")
    wanted = rawattn.attention(q, k, v, mask=keep, backend="cpu")
    np.testing.assert_array_equal(out.numpy(), wanted)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "expected one of mask, predicate and ranges, got none"),
        ({"mask": np.ones((2, 2), bool), "ranges": [[[[0, 1]]]]}, TypeError, "got mask and ranges"),
        ({"mask": np.ones((2, 2))}, TypeError, "mask: got dtype float64, expected bool"),
        ({"mask": np.ones((1,) * 5, bool)}, ValueError, "mask: got shape .* at most four axes"),
        ({"mask": np.ones((3, 2), bool), "seqlen_q": 4}, ValueError, "mask: got seqlen_q = 3"),
        ({"mask": np.ones((2, 2), bool), "slope": 3}, TypeError, "got slope="),
        ({"ranges": np.zeros((1, 2, 3), int), "seqlen_k": 4}, ValueError, "ranges: got shape"),
        ({"ranges": np.zeros((1, 2, 3, 2)), "seqlen_k": 4}, TypeError, "ranges: got dtype float64"),
        ({"ranges": np.zeros((1, 2, 3, 2), int)}, TypeError, "seqlen_k: got None"),
        ({"predicate": "q_idx == 0", "seqlen_k": 4}, TypeError, "seqlen_q: got None"),
        (
            {"predicate": "q_idx == x", "seqlen_q": 4, "seqlen_k": 4},
            (ValueError, NameError),
            "predicate",
        ),
        ({"predicate": "True", "seqlen_q": 4, "seqlen_k": -1}, ValueError, "seqlen_k: got -1"),
        ({"predicate": "True", "seqlen_q": 4.0, "seqlen_k": 1}, TypeError, "seqlen_q: got 4.0"),
        ({"mask": np.ones((2, 2), bool), "nheads": None}, TypeError, "nheads: got None.*an int"),
        ({"mask": np.ones((2, 2), bool), "batch": None}, TypeError, "batch: got None.*an int"),
        ({"predicate": "True", "seqlen_q": 2**31, "seqlen_k": 1}, ValueError, "seqlen_q: got 2147"),
        (
            {"mask": np.broadcast_to(True, (2**31, 1))},
            ValueError,
            "mask: got shape .*at most 2147418112",
        ),
        (
            {"ranges": np.broadcast_to(np.int32(0), (1, 2**31, 1, 2)), "seqlen_k": 1},
            ValueError,
            "ranges: got shape .*at most 2147418112",
        ),
        (
            {"ranges": [[[[0, 3]], [[1, 2], [3, 4]]]], "seqlen_k": 7},
            ValueError,
            r"^ranges: got lists of unequal lengths.*\[0, 0\] being an empty one",
        ),
        ({"mask": [[True, False]]}, TypeError, r"^mask: got list.*np.asarray\(mask, bool\)"),
    ],
)
def test_what_is_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        block_mask(**options)


@pytest.mark.parametrize("shape", [(1, 3, 75, 90), (2, 4, 75, 91), (3, 1, 75, 90), (1, 1, 74, 90)])
def test_a_shape_that_is_not_the_calls(shape: tuple[int, ...]) -> None:
    mask = block_mask(np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"^mask: got shape"):
        rawattn.attention(*arrays(), mask=mask, backend="cpu")


def by_sorting(scores: np.ndarray, k: int, seen: np.ndarray) -> np.ndarray:
    keep = np.zeros(scores.shape, bool)
    for n in np.ndindex(scores.shape[:-1]):
        row = [(-float(x), j) for j, x in enumerate(scores[n]) if np.isfinite(x) and seen[n[-1], j]]
        keep[(*n, [j for _, j in sorted(row)[:k]])] = True
    return keep


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [0, 1, 7, 40, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_the_largest_scores(dtype: Any, k: int, causal: bool, align: str) -> None:
    scores = RNG.integers(-6, 6, (2, 2, 33, 50)).astype(dtype)  # most are equal to others
    if dtype != np.int64:
        scores[RNG.random(scores.shape) < 0.2] = -np.inf
        scores[RNG.random(scores.shape) < 0.1] = np.nan
        scores[RNG.random(scores.shape) < 0.1] = np.inf
    offset = 17 if align == "bottom-right" else 0
    seen = np.arange(50) <= np.arange(33)[:, None] + offset if causal else np.ones((33, 50), bool)
    mask = topk_mask(scores, k, causal=causal, align=align)
    np.testing.assert_array_equal(mask.to_bool(), by_sorting(scores, k, seen))
    assert mask.kept is None


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.uint8, np.uint16])
def test_integers_are_compared_as_integers(dtype: Any) -> None:
    most = np.iinfo(dtype).max
    scores = np.array([most - 1, most, 0, np.iinfo(dtype).min], dtype)
    for count, kept in ((1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        np.testing.assert_array_equal(topk_mask(scores, count).kept[0, 0, 0], kept)
    lowest = np.full((4, 4), np.iinfo(dtype).min, dtype)
    keep = topk_mask(lowest, 2, causal=True).to_bool()[0, 0]
    np.testing.assert_array_equal(keep, np.tri(4, dtype=bool) & (np.arange(4) < 2))


def test_keys_that_all_rows_share() -> None:
    scores = np.array([5, np.nan, 7, 7, -np.inf, 6, 7.0])
    mask = topk_mask(scores, 3)
    np.testing.assert_array_equal(mask.kept, [[[[2, 3, 6]]]])
    many = topk_mask(np.stack([scores, np.full(7, np.nan)])[:, None, None], 6, causal=True)
    np.testing.assert_array_equal(many.kept[:, 0, 0], [[0, 2, 3, 5, 6, -1], [-1] * 6])


def test_one_query_aligned_to_the_top_left_sees_one_key() -> None:
    scores = np.array([5, 7, 7, 6.0])
    for count, kept in ((1, [0]), (3, [0, -1, -1])):
        mask = topk_mask(scores, count, causal=True, align="top-left")
        np.testing.assert_array_equal(mask.to_bool()[0, 0], [[True, False, False, False]])
        np.testing.assert_array_equal(mask.kept, [[[kept]]])
    unlimited = topk_mask(scores, 2, align="top-left")
    np.testing.assert_array_equal(unlimited.kept, [[[[1, 2]]]])


def test_lists_of_keys_are_given_to_calls() -> None:
    scores = RNG.standard_normal((2, 3, 1, 90))
    mask = topk_mask(scores, 20)
    given = with_arrays(FORWARD, Options(mask=mask))
    assert given.verb.extra_inputs == ("mask_bits", "mask_map", "mask_keys", "mask_kept")
    assert given.options.mask == (mask.shape, 20)
    np.testing.assert_array_equal(given.arrays[-1].reshape(mask.kept.shape), mask.kept)
    for other in (topk_mask(scores, 0), block_mask(mask.to_bool()), topk_mask(scores[..., :0], 9)):
        assert (
            with_arrays(FORWARD, Options(mask=other)).verb.extra_inputs
            == given.verb.extra_inputs[:3]
        )
        assert other.form.kept == 0


def test_keys_that_all_rows_share_in_calls() -> None:
    q, k, v = arrays()
    mask = topk_mask(RNG.standard_normal((2, 1, 1, 90)), 20)
    for options in ({}, {"causal": True}):
        exact = reference.attention(q, k, v, mask=mask.to_bool(), **options)
        out = rawattn.attention(q, k, v, mask=mask, backend="cpu", **options)
        np.testing.assert_allclose(out, exact, atol=1e-5)


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(TypeError, match="scores: got dtype bool"):
        topk_mask(np.ones(3, bool), 1)
    with pytest.raises(ValueError, match="k: got -1"):
        topk_mask(np.ones(3), -1)


def test_tiles_as_text() -> None:
    keep = np.ones((1, 2, 200, 200), bool)
    keep[0, 1, :, 70:] = False
    lines = show_mask(block_mask(keep), head=1).splitlines()
    assert lines == ["tiles of 64 x 64: 8 dead, 4 partial, 4 full of 16", *["#+.."] * 4]
    lines = show_mask(keep, causal=True, tile=(100, 50)).splitlines()
    assert lines[1:] == ["++..", "##++"]
    assert show_mask(seqlen_q=4, seqlen_k=4, tile=(2, 2), causal=True).splitlines()[1:] == [
        "+.",
        "#+",
    ]
    assert len(show_mask(seqlen_q=100_000, seqlen_k=10, causal=True).splitlines()[1]) == 1


def test_tiles_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    show_mask(seqlen_q=300, seqlen_k=300, window=(50, 50), path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mask.xyz", ValueError, r"^path .*mask.xyz: got .xyz, expected .png"),
        ("none/mask.png", FileNotFoundError, r"^path .*mask.png: there is no folder .*none"),
        (3, TypeError, r"^path: got 3 \(int\), expected the name of a file"),
    ],
)
def test_a_picture_that_cannot_be_written(
    name: Any, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        show_mask(seqlen_q=3, seqlen_k=3, path=tmp_path / name if isinstance(name, str) else name)


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'^path: .*pip install "rawattn\[bench\]"'):
        show_mask(seqlen_q=3, seqlen_k=3, path=tmp_path / "mask.png")


def test_tiles_of_nothing() -> None:
    with pytest.raises(TypeError, match="seqlen_q: got None"):
        show_mask(causal=True)
    with pytest.raises(ValueError, match="head: got 2, expected less than 2"):
        show_mask(np.ones((1, 2, 3, 3), bool), head=2)


def test_what_a_mask_says_of_itself() -> None:
    mask = block_mask(random_mask(2, 1, 75, 90))
    assert isinstance(mask, BlockMask)
    assert repr(mask) == f"<rawattn.BlockMask (2, 1, 75, 90) on the host, {mask.nbytes} bytes>"
    np.testing.assert_array_equal(host.to_bools(mask.bits, mask.shape), mask.to_bool())


@pytest.mark.parametrize(
    ("strides", "alignment", "dense"),
    [
        ((7680, 2560, 64, 1), 0, True),
        ((64, 1), 0, True),
        ((7680, 2560, 64, 1), 8, False),
        ((7680, 2560, 64, 1), 15, False),
        ((7680, 2560, 72, 1), 0, False),
        ((7688, 2560, 64, 1), 0, False),
        ((7680, 2560, 64, 2), 0, False),
        ((7680, 2560, 64, 0), 0, False),  # one bool for all keys
    ],
)
def test_which_arrays_of_bools_are_read_16_bytes_at_a_time(
    strides: tuple[int, ...], alignment: int, dense: bool
) -> None:
    made = mask_writing.step((2, 3, 40, 64), strides, alignment)
    assert made.source == mask_writing.source(dense)
