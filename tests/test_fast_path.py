"""Which calls the fast path takes for a repetition of an earlier call, and which not. The arrays are of a fake framework."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._interop.arrays import _frameworks as framework_of_type
from rawattn._kernels.selection import only
from rawattn._runtime import repeated
from rawattn._verbs import fast_path
from rawattn._verbs.paged_fast_path import of_append_kv, of_paged_attention
from tests.fast_path_fakes import (
    NBYTES,
    SHAPE,
    Array,
    Framework,
    arrays,
    called_anew,
    known,
    of_backward,
)


def test_a_repeated_call_is_launched_with_its_own_arrays(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    q, k, v = arrays(64)
    out = rawattn.attention(q, k, v)
    assert gpu.launched[-1] == [q.address, k.address, v.address, out.address, 0]
    assert out.shape == SHAPE
    out, lse = [rawattn.attention(q, k, v, return_lse=True) for _ in range(3)][-1]
    assert gpu.launched[-1] == [q.address, k.address, v.address, out.address, lse.address]
    assert lse.shape == (1, 2, 4)


def test_a_repeated_backward(gpu: Framework) -> None:
    given = of_backward()
    known(gpu, lambda: rawattn.attention_backward(*given))
    found = rawattn.attention_backward(*given)
    made = [x.address for x in found[:3]]
    assert gpu.launched[-1] == [*(x.address for x in given), 0, *made]
    assert type(found) is rawattn.Gradients
    assert found[3:] == (None, None, None)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (2, 0)}, {"scale": 1.0, "causal": False}, {"out": None, "seqs": None}],
    ids=str,
)  # fmt: skip
def test_options_are_told_apart(options: dict[str, Any], gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), **options))
    known(gpu, lambda: rawattn.attention(*arrays(), **options))


def test_values_that_are_equal_and_not_accepted(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), causal=True))
    known(gpu, lambda: rawattn.attention(*arrays(), window=(1, 0)))
    for wrong in ({"causal": 1}, {"window": (True, 0)}, {"window": (1, False)}, {"return_lse": 0}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}"):
            rawattn.attention(*arrays(), **wrong)


@pytest.mark.parametrize("change", ["shape", "alignment", "device", "dtype"])
def test_arrays_of_another_form(change: str, gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    other = arrays(4 if change == "alignment" else 0, (1, 5, 2, 8) if change == "shape" else SHAPE)
    for x in other:
        if change == "dtype":
            x.dtype = np.dtype(np.float32)
        x.device = int(change == "device")
    assert called_anew(gpu, lambda: rawattn.attention(*other))
    assert not called_anew(gpu, lambda: rawattn.attention(*other))
    if change == "device":  # if another device is current, only the dispatcher switches devices
        gpu.current = 0
        assert called_anew(gpu, lambda: rawattn.attention(*other))


def test_calls_that_differ_in_keys_alone_take_turns(gpu: Framework) -> None:
    q, k, v = arrays()
    longer = [Array(x.address, (1, 7, 2, 8)) for x in (k, v)]
    calls = [lambda: rawattn.attention(q, k, v), lambda: rawattn.attention(q, *longer)]
    for call in calls:
        known(gpu, call)
    for _ in range(3):
        assert not any(called_anew(gpu, call) for call in calls)


def test_frameworks_whose_arrays_have_one_shape_take_turns(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Array):
        pass

    monkeypatch.setattr(gpu, "kinds", (Array, Other))
    gpu.attributes = replace(gpu.attributes, typed="isinstance({x}, kind)")
    monkeypatch.setitem(framework_of_type, Other, "numpy")
    others = [Other(x.address) for x in arrays()]
    for _ in range(6):
        rawattn.attention(*arrays())
        rawattn.attention(*others)
    made = [key for key, x in fast_path.closures_by_call["attention"].items() if callable(x)]
    assert [key[0] for key in made] == [Array, Other]


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("into", [False, True])
def test_a_guarded_call_launches_what_its_key_would_find(
    into: bool, options: dict[str, Any], gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**options, "out": Array(1 << 16)} if into else options

    def launched() -> list[int]:
        gpu.next = 1 << 20
        result = rawattn.attention(*arrays(), **given)
        if options:
            assert result[1].shape == (1, 2, 4)
        assert not into or (result[0] if options else result) is given["out"]
        return gpu.launched[-1]

    known(gpu, launched)
    made: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(repeated.guarded, "guarded_call", lambda *x, **_: made.append(x))
        guarded = launched()
        assert not made
        table = fast_path.closures_by_call["attention"]
        found = [key for key, x in table.items() if not isinstance(x, repeated.Repeated)]
        assert len(found) == 1
        del table[found[0]]
        assert [launched() for _ in range(2)] == [guarded] * 2
        assert len(made) == 1


def test_arrays_by_name(gpu: Framework) -> None:
    q, k, v = arrays()
    known(gpu, lambda: rawattn.attention(q, v=v, k=k))
    assert gpu.launched[-1][:3] == [q.address, k.address, v.address]
    with pytest.raises(TypeError, match=r"^v: rawattn.attention got none, expected q, k, v"):
        rawattn.attention(q, k)
    with pytest.raises(TypeError, match="multiple values"):
        rawattn.attention(q, k, v, v=v)


def test_results_are_written_where_they_are_wanted(gpu: Framework) -> None:
    q, k, v = arrays()
    out = Array(1 << 16)
    known(gpu, lambda: rawattn.attention(q, k, v, out=out))
    other = Array(1 << 17)
    assert rawattn.attention(q, k, v, out=other) is other
    assert gpu.launched[-1] == [q.address, k.address, v.address, other.address, 0]
    launched = len(gpu.launched)
    for address in (q.address, v.address + NBYTES - 16, k.address - NBYTES + 16):
        with pytest.raises(ValueError, match=r"^out: shares memory with"):
            rawattn.attention(q, k, v, out=Array(address))
    assert len(gpu.launched) == launched
    assert not called_anew(gpu, lambda: rawattn.attention(q, k, v, out=Array(v.address + NBYTES)))


def test_a_gradient_is_not_lost_in_a_repeated_call(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    refused: list[Any] = []
    monkeypatch.setattr(
        fast_path, "refuse_gradients_of_read", lambda _, names, x: refused.append(list(names))
    )
    q, k, v = arrays()
    k.tracked = True
    rawattn.attention(q, k, v)
    assert refused == [["q", "k", "v"]]


def test_what_nothing_records_is_a_guarded_call(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated.guarded, "is_recording", lambda: False)
    known(gpu, lambda: rawattn.attention(*arrays()))
    monkeypatch.setattr(fast_path, "is_recording", lambda: pytest.fail("no guarded call"))
    q, k, v = arrays()
    k.tracked = True
    out = rawattn.attention(q, k, v)
    assert gpu.launched[-1] == [q.address, k.address, v.address, out.address, 0]


def test_a_write_of_a_repeated_call_is_told(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Array(1 << 16)
    known(gpu, lambda: rawattn.attention(*arrays(), out=out))
    told: list[Any] = []
    refused: list[Any] = []
    monkeypatch.setattr(fast_path, "bump_versions", lambda *x: told.extend(x))
    monkeypatch.setattr(
        fast_path, "refuse_gradients_of_written", lambda names, x: refused.append((*names, *x))
    )
    rawattn.attention(*arrays(), out=out)
    assert (told, refused) == ([out], [])
    out.tracked = True
    rawattn.attention(*arrays(), out=out)
    assert refused == [("out", out)]


def test_options_that_become_numbers_are_asked_for_each_time(gpu: Framework) -> None:
    seed = {"dropout_p": 0.5, "seed": 3}
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), **seed))
    with pytest.raises(TypeError, match=r"^scale"):
        rawattn.attention(*arrays(), scale=[1.0])


def test_a_call_for_the_cpu_is_never_launched_anew(gpu: Framework) -> None:
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), backend="cpu"))


def test_another_choice_of_kernels_is_not_the_known_one(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    with only("portable"):
        for _ in range(3):
            assert called_anew(gpu, lambda: rawattn.attention(*arrays()))
    assert not called_anew(gpu, lambda: rawattn.attention(*arrays()))


def test_calls_are_forgotten_when_there_are_too_many(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "_MAX_CLOSURES", 4)
    for n in range(20):
        for _ in range(3):
            rawattn.attention(*arrays(), scale=1.0 + n)
    assert 1 <= len(fast_path.closures_by_call["attention"]) <= 4


@pytest.mark.parametrize(
    ("gathered", "count"), [(of_paged_attention, 4), (of_append_kv, 5)], ids=["attention", "append"]
)
def test_calls_that_check_page_ids_are_never_launched_anew(gathered: Any, count: int) -> None:
    args, plain = (object(),) * count, {"seqlen_k": object()}
    assert gathered(args, plain) is not None
    assert gathered(args, {**plain, "seqs": None, "validate": False}) is not None
    for option in ({"validate": True}, {"validate": 1}, {"seqs": object()}):
        assert gathered(args, {**plain, **option}) is None
    for others in (args[1:], (*args, object())):
        assert gathered(others, plain) is None


def test_what_people_are_shown() -> None:
    for function, result in ((rawattn.attention, "Any"), (rawattn.attention_backward, "Gradients")):
        shown = inspect.signature(function)
        assert shown.return_annotation == function.__annotations__["return"] == result
        assert "unknown" not in shown.parameters
        assert shown.parameters["causal"].default is False
        assert function.__doc__
