"""Figures of `rawattn bench --suite scores` beside times: errors of gradients, first uses, masks, an earlier version."""

from __future__ import annotations

import functools
import itertools
import textwrap
import types

import numpy as np
import pytest

from rawattn._bench import accuracy, before, contender, grids, score_figures
from rawattn._bench import score_features as features
from tests.bench_scores.features import _case, _expected, _inputs


@pytest.mark.parametrize("causal", [False, True])
def test_the_exact_gradients_of_the_accuracy_table(on_numpy, causal):
    case = _case(features.PLAIN, causal=causal, heads=(2, 2), rows=40, backward=True)
    inputs = _inputs(case)
    expected = _expected(case, inputs, {})
    for got, of in zip(accuracy.exact(inputs, causal, np), expected, strict=False):
        np.testing.assert_allclose(got, of, rtol=1e-10, atol=1e-12)


class _Off(contender.Contender):
    """Exact gradients, but for an error of a size."""

    def __init__(self, name, size):
        super().__init__(name)
        self.size = size

    def prepare(self, case, inputs):
        exact = accuracy.exact(inputs, case.causal, np)
        signs = [np.where(np.arange(x.size).reshape(x.shape) % 2, 1, -1) for x in exact]
        return lambda: [x + self.size * s for x, s in zip(exact, signs, strict=True)]


def test_ratios_of_errors_over_seeds(on_numpy, monkeypatch):
    monkeypatch.setattr(accuracy, "SEEDS", 3)
    case = _case(features.PLAIN, heads=(2, 2), rows=40, backward=True)
    draw = functools.partial(_inputs, case)
    errors = accuracy.case_errors(case, [_Off("rawattn", 3e-3), _Off("FA2", 2e-3)], draw, np)
    assert [len(seeds) for seeds in errors.values()] == [3, 3]
    lines = accuracy.lines(case, "bfloat16", errors)
    assert [line.name.split(":")[0] for line in lines] == [
        f"{gradient} {what} error over FA2's"
        for gradient in ("dq", "dk")
        for what in ("max", "rms")
    ]
    for line in lines:
        assert line.value == pytest.approx(1.5, rel=1e-3)
        assert line.verdict == "above"
    assert lines[0].of == "3.00e-03, 2.00e-03"
    assert {line.verdict for line in accuracy.lines(case, "bfloat16", {}, "no torch")} == {
        "not available"
    }
    kinds = {(kind, c.headdim, c.causal) for kind, c in accuracy.cases()}
    assert kinds == set(itertools.product(("bfloat16", "float16"), (64, 128), (True, False)))


def test_the_first_use_of_a_score_function(monkeypatch):
    monkeypatch.setattr(score_figures.child, "run", lambda code, **environment: [1.25, 1.75])
    found = score_figures.first_use("bfloat16", ())
    assert [(f.value, f.verdict) for f in found] == [(1.25, "ok"), (1.75, "above")]

    def fails(code, **environment):
        raise RuntimeError("a new process failed: AttributeError: ScoreMod")

    monkeypatch.setattr(score_figures.child, "run", fails)
    found = score_figures.first_use("bfloat16", ())
    assert [f.verdict for f in found] == ["not available"] * 2
    assert "ScoreMod" in found[0].of


def test_what_making_masks_takes(on_numpy, monkeypatch):
    monkeypatch.setattr(
        score_figures, "time_call", lambda call: (call(), types.SimpleNamespace(seconds=0.002))[1]
    )
    small = [_case(features.Documents(64)), _case(features.TopK(9)), _case(features.PLAIN)]
    monkeypatch.setattr(score_figures.score_cases, "cases", lambda: small)
    assert [figure.value for figure in score_figures.masks("bfloat16", ())] == [2.0, 2.0]
    monkeypatch.delattr(features._late_rawattn, "topk_mask")
    documents, topk = score_figures.masks("bfloat16", ())
    assert documents.value == 2.0
    assert topk.value is None
    assert "topk_mask" in topk.of


def _package(folder, seconds):
    """As much of a version of this package as the process of `before` touches."""
    bench = folder / "rawattn" / "_bench"
    bench.mkdir(parents=True)
    (folder / "rawattn" / "__init__.py").touch()
    names = sorted({(suite, case) for suite, _, case in before.CASES})
    code = f"""
        import contextlib, types
        def grid(suite):
            return lambda: [types.SimpleNamespace(name=c) for s, c in {names!r} if s == suite]
        grids = types.SimpleNamespace(forward=grid("forward"), backward=grid("backward"))
        machine = types.SimpleNamespace(Sensors=lambda: None, facts=lambda s: {{"l2_bytes": 1}})
        class EventClock:
            def burst(self, call, calls):
                return {seconds}
        timing = types.SimpleNamespace(EventClock=EventClock)
        sides = [types.SimpleNamespace(name=n) for n in ("rawattn", "deterministic")]
        ours = types.SimpleNamespace(ours=lambda suite: sides)
        entrant = types.SimpleNamespace(scope=contextlib.nullcontext, call=None)
        measure = types.SimpleNamespace(
            make_inputs=lambda case, dtype, l2: [dtype],
            enter=lambda case, side, inputs, clock: (entrant, 1.0, None),
        )
    """
    (bench / "__init__.py").write_text(textwrap.dedent(code))
    return folder


def test_every_kernel_before_and_after(tmp_path, monkeypatch):
    old, new = _package(tmp_path / "old", 0.0098), _package(tmp_path / "new", 0.01)
    monkeypatch.setenv(before.FOLDER, str(old))
    monkeypatch.setattr(before, "__file__", str(new / "rawattn" / "_bench" / "before.py"))
    found = before.figures("bfloat16", ())
    assert len(found) == len(before.CASES)
    for figure, (_, side, _) in zip(found, before.CASES, strict=True):
        if side == "portable":  # which this package does not have
            assert figure.value is None
            assert "ValueError" in figure.of
        else:
            assert figure.value == pytest.approx(0.98)
            assert figure.verdict == "below"
    names = {"forward": grids.forward(), "backward": grids.backward()}
    for suite, _, case in before.CASES:
        assert case in [c.name for c in names[suite]]


def test_without_an_earlier_version_its_line_says_so(monkeypatch):
    monkeypatch.delenv(before.FOLDER, raising=False)
    (figure,) = before.figures("bfloat16", ())
    assert figure.verdict == "not available"
    assert before.FOLDER in figure.of
