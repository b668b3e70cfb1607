"""Calls of `rawattn.attention` on JAX arrays outside `jit`, as on a GPU: CPU programs stand for the GPU's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import rawattn
from rawattn._jax import eager
from rawattn._kernels.selection import only
from rawattn._runtime import dispatch
from rawattn._runtime.verbs import Verb
from rawattn._verbs import fast_path
from tests import jax_calls

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects the inputs of calls that did not take the fast path: they went to the dispatcher or looked for a program."""
    found: list[Any] = []
    run, program = dispatch.run, eager.attention

    def spy(verb: Verb, inputs: Any, *others: Any) -> Any:
        found.append(inputs)
        return run(verb, inputs, *others)

    def spy_on_programs(inputs: Any, *others: Any) -> Any:
        found.append(inputs)
        return program(inputs, *others)

    monkeypatch.setattr(dispatch, "run", spy)
    monkeypatch.setattr(eager, "attention", spy_on_programs)
    monkeypatch.setattr(eager, "_are_on_gpus", lambda array: True)
    monkeypatch.setitem(fast_path.closures_by_call, "attention", {})
    yield found
    eager._programs.clear()


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (3, None)}])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_is_its_program(
    options: dict[str, Any], return_lse: bool, dispatched: list[Any]
) -> None:
    q, k, v = arrays(2, 9, 2, 16)
    call = functools.partial(rawattn.attention, return_lse=return_lse, **options)
    for _ in range(3):  # the first call may find no reader, the second is remembered
        call(q, k, v)
    count = len(dispatched)
    # For another shape JAX compiles its program anew; the call is still known.
    for given in ((k, q, v), (q[:1, :5], k[:1], v[:1])):
        found = call(*given)
        exact = rawattn.attention(*map(np.asarray, given), return_lse=return_lse, **options)
        for got, wanted in zip(*((x if return_lse else (x,)) for x in (found, exact)), strict=True):
            assert isinstance(got, jax.Array)
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    dispatched = [one for one in dispatched if isinstance(one[0], jax.Array)]
    assert len(dispatched) == count, "a known call went the way of a first one"


def test_other_calls_are_none_of_it(dispatched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(2, 9, 2, 16)

    def went_there(*given: Any, **options: Any) -> bool:
        count = len(dispatched)
        rawattn.attention(*given, **options)
        return len(dispatched) > count

    for _ in range(3):
        rawattn.attention(q, k, v)
    assert not went_there(q, k, v)
    assert went_there(q, np.asarray(k), v)
    for _ in range(3):
        assert went_there(q, k, v, seqs=rawattn.SeqLayout(seqlen_k=[3, 5]))
        assert went_there(q, k, v, backend="cpu")
        assert went_there(q, k, v, mask=np.ones(9, bool))
    with only("portable"):
        assert went_there(q, k, v)
    with pytest.raises(ValueError, match=r"^k: "):
        rawattn.attention(q, k[..., :8], v)
    monkeypatch.setattr(eager, "_are_on_gpus", lambda array: False)
    assert went_there(q, k, v)
    # Under a transformation arrays have no values.
    with pytest.raises(TypeError, match=r"rawattn\.jax"):
        jax.jit(rawattn.attention)(q, k, v)


def test_a_plan_runs_the_program(dispatched: list[Any]) -> None:
    q, k, v = arrays(2, 9, 2, 16)
    planned = rawattn.plan(rawattn.attention, q, k, v, causal=True)
    (program,) = eager._programs.values()
    np.testing.assert_array_equal(planned(k, q, v), program(k, q, v))
    assert len(eager._programs) == 1
