"""Plans on the CPU: an ordinary call with the options of planning time, and what is refused when planning."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, SeqLayout, attention, attention_backward, plan
from rawattn._call.options import DEFAULTS
from rawattn._runtime import planned
from rawattn._runtime.verbs import FORWARD

RNG = np.random.default_rng(0)


def arrays(*shape: int) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def test_a_plan_is_the_call_with_its_options() -> None:
    q, k, v = arrays(2, 7, 4, 16)
    made = plan(attention, q, k, v, causal=True, window=(3, 0), scale=0.3, backend="cpu")
    assert isinstance(made, rawattn.Plan)
    options: dict[str, Any] = {"causal": True, "window": (3, 0), "scale": 0.3, "backend": "cpu"}
    for given in ((q, k, v), tuple(arrays(2, 7, 4, 16))):
        assert np.array_equal(made(*given), attention(*given, **options))
    assert np.array_equal(made(), attention(q, k, v, **options))
    assert np.array_equal(made(q, v=q, k=v), attention(q, v, q, **options))


def test_results_go_where_the_caller_wants_them() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    made = plan(attention, q, k, v, return_lse=True, backend="cpu")
    own = np.empty_like(q)
    out, lse = made(q, k, v, out=own)
    assert out is own
    assert np.array_equal(own, attention(q, k, v, backend="cpu"))
    assert lse.shape == (1, 2, 5)
    with pytest.raises(TypeError, match=r"^into: this plan writes its results to out="):
        made(q, k, v, into=Gradients())


def test_the_backward() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    seqs = SeqLayout(seqlen_q=[4], seqlen_k=[3])
    out, lse = attention(q, k, v, seqs=seqs, return_lse=True, backend="cpu")
    given = (np.ones_like(out), q, k, v, out, lse)
    exact = attention_backward(*given, seqs=seqs, backend="cpu")
    made = plan(attention_backward, *given, seqs=seqs, backend="cpu")
    into = Gradients(dq=np.full_like(q, 7))
    for gradients in (made(*given), made(*given, into=into)):
        assert isinstance(gradients, Gradients)
        for name in ("dk", "dv"):
            assert np.array_equal(getattr(gradients, name), getattr(exact, name))
    assert gradients.dq is into.dq
    assert into.dq is not None and np.array_equal(into.dq[:, :4], exact.dq[:, :4])
    assert np.all(into.dq[:, 4:] == 7), "padding of the caller's own changed"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"k": np.zeros((1, 5, 3, 8), np.float32)}, ValueError, r"^q: got nheads_q = 2"),
        ({"causal": 1}, TypeError, r"^causal: got 1"),
        ({"backend": "tpu"}, ValueError, r"^backend: got 'tpu'"),
        ({"softcap": 3.0}, NotImplementedError, r"^softcap"),
        ({"q": [1.0]}, TypeError, r"^q: got list"),
    ],
)
def test_what_is_wrong_is_told_when_planning(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    q, k, v = arrays(1, 5, 2, 8)
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "backend": "cpu", **change}
    with pytest.raises(error, match=says):
        plan(attention, **call)


def test_only_verbs_are_planned() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match=r"^fn: got sum; this version plans"):
        plan(sum, q, k, v)
    made = plan(attention, q, k, v, backend="cpu")
    with pytest.raises(TypeError, match=r"^scale: this plan takes q, k, v once each"):
        made(q, k, v, scale=2.0)
    with pytest.raises(TypeError, match=r"^k: this plan takes"):
        made(q, k, v, k=k)


@pytest.mark.parametrize("device", [0, 1])
def test_planning_is_done_on_the_gpu_of_the_arrays(
    device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one is current: kernels are loaded and memory is allocated on the current one."""
    current, seen = [0], []

    @contextlib.contextmanager
    def switched(to: int) -> Iterator[None]:
        current.append(to)
        yield
        current.pop()

    class Planned(Exception):
        pass

    def find(*_: Any) -> Any:
        seen.append(current[-1])
        raise Planned

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=switched)))
    monkeypatch.setattr(planned.dispatch, "find", find)
    own: Any = SimpleNamespace(current_device=lambda: current[-1])
    form = ((1, 5, 2, 8), (160, 32, 16, 2), np.dtype(np.float16), device) * 3
    with contextlib.suppress(Planned):
        planned.GpuPlan(
            *(FORWARD, own, ([0] * 3, form, 0, False), (None,) * 3, (None,) * 2),
            *(DEFAULTS, False, tuple),
        )
    assert seen == [device]
