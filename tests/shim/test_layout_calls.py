"""Repeated calls with SeqLayouts of arrays on the device: which share a prepared call, and starts that both sides share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, attention, reference
from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.structure import structure
from rawattn._kernels.sm90.forward_config import MOST_ORDERED
from rawattn._verbs import fast_path
from tests.shim.device import MakeDevice
from tests.shim.on_device import Put
from tests.shim.score_calls import BFLOAT16, normal
from tests.shim.whole import small_tiles


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Lengths]:
    """The lengths that repeated calls have bound."""
    found: list[Lengths] = []
    original = fast_path._bound

    def counted(*args: Any) -> Lengths:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(fast_path, "_bound", counted)
    return found


def inputs(rows: int) -> list[np.ndarray]:
    return [normal(rows, heads, 16, dtype=BFLOAT16) for heads in (2, 1, 1)]


def verify(found: Any, qkv: list[np.ndarray], **options: Any) -> None:
    expected = reference.attention(*qkv, **options)
    got = found.in_memory.array().astype(np.float64)
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got, expected, atol=0.02)


LAYOUTS: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[int, ...]]] = {
    "starts": (lambda n: {"seqstart_q": [0, n, 20]}, (20,)),
    "of both": (lambda n: {"seqstart_q": [0, n, 20], "seqstart_k": [n, 18, 20]}, (20,)),
    "gaps": (lambda n: {"seqstart_q": [1, 9, 20], "seqlen_q": [n, 8], "seqlen_k": [8, n]}, (20,)),
    "cumulative": (lambda n: {"seqstart_q": [1, 9, 20], "cu_seqlen_k": [0, n, n + 3]}, (20,)),
    "padded": (lambda n: {"seqlen_q": [n, 9], "cu_seqlen_k": [3, 3, n]}, (2, 10)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_differ_in_values(put: Put, bound: list[Lengths], name: str) -> None:
    """Layouts that differ only in values share a prepared call, and a layout whose arrays are rewritten is read anew."""
    made, rows = LAYOUTS[name]
    qkv = [normal(*rows, heads, 16, dtype=BFLOAT16) for heads in (2, 1, 1)]
    given = [put(x) for x in qkv]
    for n in (3, 8, 5, 7):
        integers = {key: np.array(x, np.int32) for key, x in made(n).items()}
        seqs = SeqLayout(**{key: put(x) for key, x in integers.items()}, max_seqlen_q=19)
        on_host = SeqLayout(**integers, max_seqlen_q=19)
        verify(attention(*given, seqs=seqs, causal=True), qkv, seqs=on_host, causal=True)
    for n in (6, 4):
        integers = {key: np.array(x, np.int32) for key, x in made(n).items()}
        for key, x in integers.items():
            seqs._arrays[key].write(x)
        on_host = SeqLayout(**integers, max_seqlen_q=19)
        verify(attention(*given, seqs=seqs, causal=True), qkv, seqs=on_host, causal=True)
    assert not bound
    assert len(fast_path.closures_by_call["attention"]) == 1


def test_layouts_that_are_told_apart(put: Put) -> None:
    starts = put(np.array([0, 5, 20], np.int32))
    told = [
        SeqLayout(seqstart_q=starts),
        SeqLayout(seqstart_q=starts, max_seqlen_q=17),
        SeqLayout(seqstart_q=starts, max_seqlen_k=17),
        SeqLayout(seqstart_q=starts, seqstart_k=starts),
        SeqLayout(seqstart_q=starts, seqstart_k=put(np.array([0, 5, 20], np.int32))),
        SeqLayout(seqstart_q=starts, cu_seqlen_q=starts),
        SeqLayout(seqstart_q=starts, cu_seqlen_k=starts),
        SeqLayout(seqstart_q=put(np.array([0, 5, 20]))),
        SeqLayout(seqstart_q=put(np.array([0, 5, 9, 20], np.int32))),
    ]
    assert len({layout._key for layout in told}) == len(told)
    assert SeqLayout(seqstart_q=starts, seqlen_q=[3, 4])._key is None
    assert SeqLayout(seqstart_q=[0, 5, 20], seqlen_k=[3, 4])._key is None
    assert SeqLayout()._key is None


def test_what_is_wrong_is_told_of_each(put: Put) -> None:
    q = put(np.zeros((20, 2, 16), BFLOAT16))
    k = put(np.zeros((21, 1, 16), BFLOAT16))
    for _ in range(3):
        seqs = SeqLayout(seqstart_q=put(np.array([0, 5, 20], np.int32)))
        attention(q, q, q, seqs=seqs)
        with pytest.raises(ValueError, match=r"^seqstart_k: got None, by default seqstart_q, but"):
            attention(q, k, k, seqs=seqs)
        with pytest.raises(ValueError, match=r"^seqlen_q: got 3 entries"):
            SeqLayout(seqstart_q=put(np.zeros(3, np.int32)), seqlen_q=put(np.zeros(3, np.int32)))


@pytest.mark.parametrize("on_device", [False, True])
def test_one_array_for_both_sides(put: Put, on_device: bool) -> None:
    """The same array for starts of both sides, as FlashAttention's users write it, means the same as leaving the keys' out."""
    starts: Any = np.array([0, 5, 20], np.int32)
    starts = put(starts) if on_device else starts

    def shared(rows_k: int = 20, **given: Any) -> bool:
        lengths = bind(SeqLayout(**given), batch=None, rows_q=20, rows_k=rows_k)
        assert (lengths.k is lengths.q) == structure(lengths).shared
        return structure(lengths).shared

    both = {"seqstart_q": starts, "seqstart_k": starts}
    assert shared(**both)
    assert shared(**both, max_seqlen_q=15, max_seqlen_k=15)
    assert not shared(**both, max_seqlen_q=15)
    assert not shared(**both, seqlen_q=np.array([1, 2]))
    assert not shared(**both, rows_k=30)
    other = put(np.array([0, 5, 20], np.int32)) if on_device else starts.copy()
    assert not shared(seqstart_q=starts, seqstart_k=other)


def test_a_layout_that_is_unpickled_elsewhere(put: Put) -> None:
    """A layout whose arrays are unpickled on another GPU has the key of those arrays, not that of the pickled layout."""
    seqs = SeqLayout(seqstart_q=put(np.array([0, 5, 20], np.int32)))
    state = seqs.__getstate__()
    moved = copy.copy(seqs._arrays["seqstart_q"])
    moved.data = SimpleNamespace(ptr=moved.data.ptr, device_id=1)
    other = SeqLayout.__new__(SeqLayout)
    other.__setstate__({**state, "_arrays": {"seqstart_q": moved}})
    assert other._key != seqs._key
    assert other._key == SeqLayout(seqstart_q=moved)._key


def test_plans_leave_starts_of_the_host_joined() -> None:
    """A plan keeps starts on the host joined, since none of its calls replaces them."""
    starts = np.array([0, 5, 20])
    joined = SeqLayout(seqstart_q=starts, seqstart_k=starts)
    assert joined._with_separate_starts() is joined


def test_a_plan_may_replace_the_starts_of_one_side(put: Put) -> None:
    qkv = inputs(20)
    given = [put(x) for x in qkv]
    first, second = ([0, 5, 20], [0, 9, 11])
    starts, others = (put(np.array(x, np.int32)) for x in (first, second))
    with small_tiles():
        seqs = SeqLayout(seqstart_q=starts, seqstart_k=starts)
        made = rawattn.plan(attention, *given, seqs=seqs)
        verify(made(*given), qkv, seqs=SeqLayout(seqstart_q=first))
        for _ in range(2):
            wanted = SeqLayout(seqstart_q=first, seqstart_k=second)
            verify(made(*given, seqstart_k=others), qkv, seqs=wanted)
            wanted = SeqLayout(seqstart_q=second, seqstart_k=first)
            verify(made(*given, seqstart_q=others), qkv, seqs=wanted)
    assert seqs._same_starts


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_a_layout_that_was_used(copied: Callable[[SeqLayout], SeqLayout]) -> None:
    qkv = inputs(20)
    for layout in (
        SeqLayout(seqstart_q=[0, 5, 20]),
        SeqLayout(seqstart_q=[0, 5, 20], seqlen_k=[2, 9]),
    ):
        expected = attention(*qkv, seqs=layout, backend="cpu")
        for _ in range(3):
            attention(*qkv, seqs=layout, backend="cpu")
        layout._calls["attention"] = (None, None, lambda: None)  # as after a call on a GPU
        other = copied(layout)
        assert np.array_equal(attention(*qkv, seqs=other, backend="cpu"), expected)
        assert (other.batch, other.packed, repr(other)) == (2, True, repr(layout))
        assert not other._calls


@pytest.fixture(params=["portable", "hopper"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Put:
    """As `put`, on each kind of device."""
    make: MakeDevice = request.getfixturevalue(
        "machine" if request.param == "portable" else "hopper"
    )
    return Put(make(), monkeypatch)


def test_the_options_of_kept_starts(on: Put) -> None:
    """A prepared call that a layout keeps is not used for other options or for another layout."""
    qkv = inputs(30)
    given = [on(x) for x in qkv]
    layouts = [SeqLayout(seqstart_q=x) for x in ([0, 9, 30], [0, 12, 30])]
    for turn in range(4):
        for seqs in layouts:
            for options in (
                {},
                {"causal": True},
                {"window": (3, 0)},
                {"causal": True, "scale": 0.5},
            ):
                verify(attention(*given, seqs=seqs, **options), qkv, seqs=seqs, **options)
            out, lse = attention(*given, seqs=seqs, return_lse=True)
            verify(out, qkv, seqs=seqs)
            assert lse.shape == (2, 30), turn


@pytest.mark.parametrize(
    ("batch", "rows_q", "rows_k"), [(2, 0, 5), (0, 3, 3), (2, 3, 0), (0, 0, 0)]
)
def test_empty_arrays(on: Put, batch: int, rows_q: int, rows_k: int) -> None:
    """Repeated calls with empty arrays are right: they launch nothing, or only fill their results."""
    shapes = ((batch, rows_q, 2, 16), (batch, rows_k, 1, 16), (batch, rows_k, 1, 16))
    given = [on(np.ones(shape, BFLOAT16)) for shape in shapes]
    for _ in range(4):
        out, lse = attention(*given, return_lse=True)
        assert out.shape == shapes[0] and lse.shape == (batch, 2, rows_q)
        assert not out.in_memory.array().astype(np.float32).any() or rows_k
        assert attention(*given).shape == shapes[0]


@pytest.mark.parametrize("sequences", [3, MOST_ORDERED + 1])
@pytest.mark.parametrize("apart", [False, True])
def test_starts_on_the_host(on: Put, bound: list[Lengths], sequences: int, apart: bool) -> None:
    """Layouts on the host share a prepared call if they agree in their longest sequences and in whether they have padding."""
    rows = 90
    qkv = inputs(rows)
    given = [on(x) for x in qkv]
    draw = np.random.default_rng(sequences)
    for turn in range(6):
        starts = [np.sort(draw.integers(0, rows + 1, sequences + 1)) for _ in range(2)]
        if turn % 3:
            for each in starts:
                each[[0, -1]] = 0, rows
        integers = dict(zip(("seqstart_q", "seqstart_k"), starts[: 1 + apart], strict=False))
        seqs = SeqLayout(**integers)
        for _ in range(2):
            verify(attention(*given, seqs=seqs, causal=True), qkv, seqs=seqs, causal=True)
        wrong = {name: x + (rows + 1 - x[-1]) for name, x in integers.items()}
        with pytest.raises(ValueError, match=r"^seqstart_[qk]: got an end of 91"):
            attention(*given, seqs=SeqLayout(**wrong), causal=True)
    assert not bound
