"""`rawattn.combine` on the CPU: against the reference, against attention over all keys, and refused calls."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from tests.partials import BFLOAT16, DTYPES, FORMS, Call, Form, call_of, pieces

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rawattn._runtime.dispatch.gpu_available", lambda: False)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form: Form) -> None:
    call = call_of(form)
    call.check(*rawattn.combine(call.outs, call.lses, **call.options()))


@pytest.mark.parametrize("ends", [[7], [1, 2, 30], [0, 40], [40]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pieces_of_the_keys_are_all_of_them(ends: list[int], dtype: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for shape in ((2, 9, 6, 32), (2, 40, 2, 32), (2, 40, 2, 48))
    )
    outs, lses = pieces(rawattn.attention, q, k, v, ends)
    out, lse = rawattn.combine(outs, lses)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    assert out.dtype == q.dtype


def test_a_packed_batch() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((9, 4, 16), np.float32)
    k, v = rng.standard_normal((2, 24, 2, 16), np.float32)
    whole = rawattn.SeqLayout(seqstart_q=[0, 4, 9], seqstart_k=[0, 10, 24])
    # The first 6 keys of each sequence, and the others.
    parts = [
        {"seqlen_k": [6, 6]},
        {"seqstart_k": [6, 16, 24], "seqlen_k": [4, 8]},
    ]
    layouts = [
        rawattn.SeqLayout(
            seqstart_q=[0, 4, 9],
            seqstart_k=part.get("seqstart_k", [0, 10, 24]),
            seqlen_k=part["seqlen_k"],
        )
        for part in parts
    ]
    results = [rawattn.attention(q, k, v, seqs=x, return_lse=True) for x in layouts]
    out, lse = rawattn.combine(*zip(*results, strict=True))
    exact, exact_lse = reference.attention(q, k, v, seqs=whole, return_lse=True)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


def test_reference_is_what_it_says() -> None:
    call = call_of(Form(dtype="float32"))
    out, lse = reference.combine(call.outs, call.lses)
    with np.errstate(divide="ignore"):
        total = sum(np.exp(x.astype(np.float64)) for x in call.logs)
        np.testing.assert_allclose(lse, np.log(total), atol=1e-12)
    summed = np.zeros(out.shape)
    for each, log in zip(call.values, call.logs, strict=True):
        weight = np.swapaxes(np.exp(log.astype(np.float64)), 1, 2)[..., None]
        summed += np.where(weight > 0, weight * each, 0)
    wanted = np.swapaxes(total, 1, 2)[..., None]
    alive = wanted[..., 0] > 0
    assert not alive.all()
    np.testing.assert_allclose(out[alive], (summed / np.where(wanted > 0, wanted, 1))[alive])
    assert (out[~alive] == 0).all()
    assert out.dtype == lse.dtype == np.float64


def test_no_logarithm_is_too_large() -> None:
    outs = np.array([1.0, 3.0], np.float32).reshape(2, 1, 1, 1, 1)
    for level in (-3e38, -1e4, 1e4, 3e38):
        lses = np.full((2, 1, 1, 1), level, np.float32)
        out, lse = rawattn.combine(outs, lses)
        assert out.item() == 2.0
        assert lse.item() == pytest.approx(np.float32(level + np.log(2)))


def test_a_convex_sum_does_not_overflow() -> None:
    huge = np.full((3, 1, 1, 1, 1), np.finfo(np.float32).max)
    out, _ = rawattn.combine(huge, np.zeros((3, 1, 1, 1), np.float32))
    assert out.item() == pytest.approx(huge.flat[0])


@pytest.mark.parametrize("value", [1e30, -1e30, 3e38])
def test_partials_that_weigh_the_same_are_averaged(value: float) -> None:
    """Partials with equal lse are averaged, also where log(n) is lost next to lse in float32; the reference does the same."""
    outs = [np.full((1, 1, 1, 2), x, np.float32) for x in (1, 2, 6)]
    lses = [np.full((1, 1, 1), value, np.float32)] * 3
    for out, lse in (rawattn.combine(outs, lses), reference.combine(outs, lses)):
        np.testing.assert_allclose(out, np.full((1, 1, 1, 2), 3.0), rtol=1e-6)
        np.testing.assert_allclose(lse, lses[0], rtol=1e-6)


@pytest.mark.parametrize("where", ["out", "lse"])
def test_nan_of_a_partial_that_weighs_comes_out(where: str) -> None:
    call = call_of(Form(dtype="float32", dead=0.0))
    given = call.outs if where == "out" else call.lses
    given[1][0, 0, 0] = np.nan
    out, lse = rawattn.combine(call.outs, call.lses)
    assert np.isnan(out[0, 0, 0]).all()
    if where == "lse":
        assert np.isnan(lse[0, 0, 0])
        for each in call.lses:
            each[0, 0, 0] = np.nan  # in all partials
        out, lse = rawattn.combine(call.outs, call.lses)
        assert np.isnan(lse[0, 0, 0])
        assert np.isnan(out[0, 0, 0]).all()


def test_out_is_written_and_returned() -> None:
    call = call_of(Form(dtype="float32"))
    buffer = np.full((2, 5, 9, 64), 7, np.float16)
    target = buffer[:, :, ::-2][:, :, :4]
    out, lse = rawattn.combine(call.outs, call.lses, out=target, dtype=np.float16)
    assert out is target
    Call(Form(dtype="float32", result="float16"), None, None, call.values, call.logs).check(
        out, lse
    )
    assert (buffer[:, :, 1::2] == 7).all()


def test_results_can_be_combined_again() -> None:
    call = call_of(Form("four", 4, dtype="float32"))
    halves = [rawattn.combine(call.outs[s], call.lses[s]) for s in (slice(2), slice(2, 4))]
    call.check(*rawattn.combine(*zip(*halves, strict=True)))


def test_partials_stay_as_they_were() -> None:
    call = call_of(Form())
    before = [x.tobytes() for x in (*call.outs, *call.lses)]
    rawattn.combine(tuple(call.outs), tuple(call.lses))
    assert [x.tobytes() for x in (*call.outs, *call.lses)] == before


@pytest.mark.parametrize("dtype", [np.float16, "float16", np.dtype("float16")], ids=repr)
def test_names_of_a_dtype(dtype: Any) -> None:
    call = call_of(Form(dtype="bfloat16"))
    assert rawattn.combine(call.outs, call.lses, dtype=dtype)[0].dtype == np.float16
    assert rawattn.combine(call.outs, call.lses, dtype=BFLOAT16)[0].dtype == BFLOAT16
    assert rawattn.combine(call.outs, call.lses, dtype="bfloat16")[0].dtype == BFLOAT16


def test_plan() -> None:
    call, other = call_of(Form()), call_of(Form(), seed=3)
    made = rawattn.plan(rawattn.combine, call.outs, call.lses)
    assert isinstance(made, rawattn.Plan)
    for results in (made(), made(call.outs, call.lses), made(call.outs, lses=call.lses)):
        call.check(*results)
    other.check(*made(other.outs, other.lses))
    target = np.empty(call.form.shape, np.float16)
    out, lse = made(other.outs, other.lses, out=target)
    assert out is target
    other.check(out, lse)
    own = rawattn.plan(rawattn.combine, call.outs, call.lses, out=target, dtype="float16")
    assert own()[0] is target
    call.check(target, own()[1])


def test_a_plan_of_a_long_list() -> None:
    form = Form("seventy", 70, (1, 3, 2, 16), "bfloat16")
    call, other = call_of(form), call_of(form, seed=3)
    target = np.empty(form.shape, np.float32)
    made = rawattn.plan(rawattn.combine, call.outs, call.lses, out=target, dtype="float32")
    out, lse = made(other.outs, other.lses)
    assert out is target
    Call(
        Form(dtype="bfloat16", result="float32", shape=form.shape),
        *[None] * 2,
        other.values,
        other.logs,
    ).check(out, lse)
    with pytest.raises(ValueError, match=r"^outs\[69\]: got shape .*; the plan is for shape"):
        made([*call.outs[:-1], call.outs[-1][:, :1]], call.lses)
    with pytest.raises(ValueError, match="outs: got a list of 3, expected a list of 70"):
        made(call.outs[:3], call.lses[:3])
    with pytest.raises(TypeError, match="into: this plan writes its results to out="):
        made(into=rawattn.Gradients())


def test_a_long_list_that_holds_out_is_refused() -> None:
    call = call_of(Form("seventy", 70, (1, 3, 2, 16)))
    before = call.outs[3].copy()
    for do in (rawattn.combine, functools.partial(rawattn.plan, rawattn.combine)):
        with pytest.raises(ValueError, match=r"^out: shares memory with outs\[3\]"):
            do(call.outs, call.lses, out=call.outs[3])
    np.testing.assert_array_equal(call.outs[3], before)


def test_plans_that_are_refused() -> None:
    outs, lses = good()
    with pytest.raises(ValueError, match="lses: got 2, expected 3"):
        rawattn.plan(rawattn.combine, outs, lses[:2])
    with pytest.raises(ValueError, match=r"^lses: got shape \(\), expected \(3, 2, 4, 5\)"):
        rawattn.plan(rawattn.combine, outs, np.array(1, F32))
    with pytest.raises(TypeError, match=r"causal: rawattn\.combine has no such argument"):
        rawattn.plan(rawattn.combine, outs, lses, causal=True)
    made = rawattn.plan(rawattn.combine, outs, lses)
    with pytest.raises(TypeError, match="into: this plan writes its results to out="):
        made(into=rawattn.Gradients())
    with pytest.raises(TypeError, match="q: this plan takes outs and lses"):
        made(q=outs)
    with pytest.raises(TypeError, match="outs: this plan takes outs and lses once each"):
        made(outs, outs=outs)


@pytest.mark.frameworks
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    call = call_of(Form(dtype="float32"))
    outs, lses = ([torch.from_numpy(x) for x in each] for each in (call.outs, call.lses))
    out, lse = rawattn.combine(outs, lses, dtype=torch.float16)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    Call(Form(dtype="float32", result="float16"), None, None, call.values, call.logs).check(
        out.numpy(), lse.numpy()
    )
    target = torch.empty(out.shape)
    assert rawattn.combine(torch.stack(outs), torch.stack(lses), out=target)[0] is target
    call.check(target.numpy(), lse.numpy())
    outs[1].requires_grad_()
    with pytest.raises(RuntimeError, match=r"outs\[1\]: .*outs\[1\]\.detach\(\)"):
        rawattn.combine(outs, lses)
    with torch.no_grad():
        rawattn.combine(outs, lses)


def good() -> tuple[list[np.ndarray], list[np.ndarray]]:
    call = call_of(Form())
    return call.outs, call.lses


F16, F32 = np.float16, np.float32
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no-partials": (lambda o, s: ([], []), ValueError, r"outs: got an empty list, expected"),
    "none-stacked": (
        lambda o, s: (np.stack(o)[:0], np.stack(s)[:0]),
        ValueError,
        r"outs: got no partial",
    ),
    "no-array": (lambda o, s: ([o[0], 3], s), TypeError, r"outs\[1\]: got int"),
    "generator": (
        lambda o, s: ((x for x in o), s),
        TypeError,
        r"outs: got generator; accepted are .*; pass a list, list\(outs\)$",
    ),
    "values": (
        lambda o, s: (o, dict(enumerate(s)).values()),
        TypeError,
        r"lses: got dict_values; accepted are .*; pass a list, list\(lses\)$",
    ),
    "nested": (lambda o, s: (o, [s[0], [1.0], s[2]]), TypeError, r"lses\[1\]: got list"),
    "axes": (lambda o, s: ([x[0, 0] for x in o], s), ValueError, r"outs\[0\]: got shape \(4, 64\)"),
    "not-stacked": (
        lambda o, s: (o[0][0], s),
        ValueError,
        r"outs: got shape .*of one partial pass",
    ),
    "counts": (lambda o, s: (o, s[:2]), ValueError, r"lses: got 2, expected 3"),
    "shapes": (
        lambda o, s: ([o[0], o[1][:, :4], o[2]], s),
        ValueError,
        r"outs\[1\]: got shape \(2, 4, 4, 64\), expected \(2, 5, 4, 64\)",
    ),
    "lse-swapped": (
        lambda o, s: (o, [x.swapaxes(1, 2) for x in s]),
        ValueError,
        r"lses\[0\]: got shape \(2, 5, 4\), expected \(2, 4, 5\).*swap its last two",
    ),
    "lse-stacked": (
        lambda o, s: (o, np.stack(s)[..., :2]),
        ValueError,
        r"lses: got shape \(3, 2, 4, 2\), expected \(3, 2, 4, 5\)",
    ),
    "lse-without-axes": (
        lambda o, s: (o[:1], np.array(1, F32)),
        ValueError,
        r"lses: got shape \(\), expected \(1, 2, 4, 5\), which is \(partials, \.\.\.\) of",
    ),
    "wide": (
        lambda o, s: ([np.repeat(x, 5, axis=-1) for x in o], s),
        ValueError,
        r"outs\[0\]: got Dv = 320 .*1 to 256",
    ),
    "float64": (lambda o, s: ([x.astype(float) for x in o], s), TypeError, r"outs\[0\]: .*float64"),
    "integers": (lambda o, s: (np.ones((3, 2, 5, 4, 64), int), s), TypeError, r"outs: .*int64"),
    "two-dtypes": (
        lambda o, s: ([o[0], o[1].astype(F32), o[2]], s),
        TypeError,
        r"outs\[1\]: got dtype float32, expected float16, that of outs\[0\]",
    ),
    "lse-float64": (
        lambda o, s: (o, [s[0], s[1].astype(float), s[2]]),
        TypeError,
        r"lses\[1\]: got dtype float64, expected float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    bad, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        rawattn.combine(*bad(*good()))


@pytest.mark.parametrize(
    ("dtype", "shown"), [(np.float64, "float64"), ("half-size", "half-size"), (3, "3")]
)
def test_refused_dtypes(dtype: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"dtype: got .*{shown}.*expected float16"):
        rawattn.combine(*good(), dtype=dtype)


def test_refused_outs() -> None:
    outs, lses = good()
    with pytest.raises(ValueError, match=r"out: got shape \(2, 5, 4, 32\), expected"):
        rawattn.combine(outs, lses, out=np.empty((2, 5, 4, 32), F16))
    with pytest.raises(
        TypeError, match=r"out: got dtype float32, expected float16.*dtype='float32'"
    ):
        rawattn.combine(outs, lses, out=np.empty((2, 5, 4, 64), F32))
    with pytest.raises(ValueError, match=r"out: shares memory with outs\[2\]"):
        rawattn.combine(outs, lses, out=outs[2])
    with pytest.raises(ValueError, match=r"out: got a last-axis stride"):
        rawattn.combine(outs, lses, out=np.empty((2, 5, 4, 128), F16)[..., ::2])
    readonly = np.empty((2, 5, 4, 64), F16)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="out: got a read-only array"):
        rawattn.combine(outs, lses, out=readonly)


@pytest.mark.parametrize("backend", [[], ["--dtype", "float16"]], ids=str)
def test_the_example_runs(backend: list[str]) -> None:
    script = ROOT / "examples/shared_prefix.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), "--prefix", "200", "--batch", "3", *backend]
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    assert "largest difference" in run.stdout
    command[3] = "99999999999"
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 1
    assert re.fullmatch(r"shared_prefix\.py: .+\n", run.stderr), "an error is one line"


def test_the_example_without_a_gpu() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples/shared_prefix.py"), "--arrays", "cupy"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("shared_prefix.py: --arrays: got cupy, but there is no GPU")
