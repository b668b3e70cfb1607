"""Calls with a ScoreMod that they cannot compute or differentiate: refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, reference
from rawattn._call.options import DEFAULTS
from rawattn._compile.compiler import CompileError
from rawattn._cpu import backward as cpu_backward
from rawattn._cpu import forward as cpu_forward
from rawattn._interop.native import View
from rawattn._kernels.target import without_device
from rawattn._runtime import calls, kernel
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD

Q = np.random.default_rng(0).standard_normal((1, 3, 2, 8), dtype=np.float32)
LSE = np.zeros((1, 2, 3), np.float32)


def forward(**options: Any) -> Any:
    return rawattn.attention(Q, Q, Q, **options)


def backward(**options: Any) -> Any:
    return rawattn.attention_backward(Q, Q, Q, Q, Q, LSE, **options)


def vjp(**options: Any) -> Any:
    return rawattn.attention_vjp(Q, Q, Q, **options)


def plan(**options: Any) -> Any:
    return rawattn.plan(rawattn.attention, Q, Q, Q, **options)


def plan_of_backward(**options: Any) -> Any:
    return rawattn.plan(rawattn.attention_backward, Q, Q, Q, Q, Q, LSE, **options)


@pytest.fixture
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the backend was called")

    for backend in (cpu_forward, cpu_backward):
        name = backend.__name__.rpartition(".")[2]
        monkeypatch.setattr(backend, name, refuse)


@pytest.mark.parametrize("call", [forward, backward, vjp, plan, plan_of_backward])
@pytest.mark.parametrize("wrt", [(), ("slope",)])
def test_captured_float64_is_for_the_reference_alone(
    nothing_computed: None, call: Callable[..., Any], wrt: tuple[str, ...]
) -> None:
    mod = ScoreMod("score * slope[head]", slope=np.ones(2), wrt=wrt)
    with pytest.raises(TypeError, match=r"^slope: got dtype float64.*slope\.astype\(np\.float32\)"):
        call(score_mod=mod, backend="cpu")
    assert reference.attention(Q, Q, Q, score_mod=mod).dtype == np.float64


@pytest.mark.parametrize("call", [backward, vjp, plan_of_backward])
def test_a_text_in_cuda_without_a_backward_has_no_gradient(
    nothing_computed: None, call: Callable[..., Any]
) -> None:
    """The error comes from the call that asks for the gradient, also on the CPU, where the text could not run anyway."""
    mod = ScoreMod("score *= 2;", language="cuda")
    with pytest.raises(
        NotImplementedError, match=r"^score_mod: got a text .*no backward.*`dscore`"
    ):
        call(score_mod=mod, backend="cpu")


@pytest.mark.parametrize("call", [forward, backward, vjp])
def test_a_text_in_cuda_needs_a_gpu(call: Callable[..., Any]) -> None:
    mod = ScoreMod("score *= 2;", "dscore *= 2;", language="cuda")
    into = np.full_like(Q, 3)
    options = {"out": into} if call is forward else {}
    for seqs in (None, rawattn.SeqLayout(seqlen_k=[0])):
        with pytest.raises(
            NotImplementedError, match=r"^score_mod: got .*'cuda', which needs a GPU"
        ):
            call(score_mod=mod, backend="cpu", seqs=seqs, **options)
    assert (into == 3).all()


def test_an_error_in_a_text_in_cuda_is_told_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the compiler's log is reported for the user's text. In NVRTC's log that text has the name of the argument in
    place of a file."""
    log = 'score_mod(2): error: identifier "foo" is undefined\n\nkernel.cu(7): error: no'

    def refuse(source: Any, device: int) -> Any:
        raise CompileError("forward did not compile for sm_80", log)

    monkeypatch.setattr(kernel, "load", refuse)
    monkeypatch.setattr(kernel, "target", lambda device: without_device("sm_80"))
    for forward, error, says in (
        (
            "score *= 2.f;\nscore = foo(score);",
            ValueError,
            r'^score_mod: .*\n  forward, line 2: .*"foo".*\n    score = foo\(score\);\nforward did not',
        ),
        (None, CompileError, "^forward did not compile"),
    ):
        text = "score * 2" if forward is None else forward
        mod = ScoreMod(text, language="expression" if forward is None else "cuda")
        given = with_arrays(FORWARD, DEFAULTS._replace(score_mod=mod))
        q = np.zeros((1, 4, 2, 16), np.float32)
        views = [View(4096 * n, q.shape, q.strides, q.dtype, 0) for n in (1, 2, 3)] + [None, None]
        with pytest.raises(error, match=says) as raised:
            calls.prepare(given.verb, views, given.options, False, 0, 0, "numpy")
        assert isinstance(raised.value, CompileError)
