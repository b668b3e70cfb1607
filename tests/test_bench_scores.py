"""`rawattn bench --suite scores`: cases, bounds, peers and figures, as far as they go without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import textwrap
import types

import numpy as np
import pytest

import rawattn
from rawattn import cli, reference
from rawattn._bench import (
    accuracy,
    before,
    cases,
    contender,
    counters,
    grids,
    machine,
    measure,
    ours,
    peers,
    render,
    score_cases,
    score_features,
    score_figures,
    score_peers,
    suites,
)
from rawattn._bench.report import Bound, Figure, Report, Result, Row
from tests.bench_fakes import Fake, FakeClock

features = score_features


def _draw(shape, dtype):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.fixture
def on_numpy(monkeypatch):
    """Features make NumPy arrays, and masks of the library are bool arrays."""

    def block_mask(mask=None, *, ranges=None, batch=1, seqlen_q=0, seqlen_k=0):
        if mask is not None:
            return mask
        assert ranges.shape == (batch, seqlen_q, 1, 2)
        keys = np.arange(seqlen_k)
        return ((ranges[..., :1] <= keys) & (keys < ranges[..., 1:])).transpose(0, 2, 1, 3)

    def topk_mask(scores, k):
        return scores >= np.sort(scores, axis=-1)[..., -k:][..., :1]

    masks = {"block_mask": block_mask, "topk_mask": topk_mask}
    library = types.SimpleNamespace(**masks, ScoreMod=rawattn.ScoreMod)
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(machine, "random_array", _draw)
    monkeypatch.setattr(features, "_library", library)


def _case(feature, *, causal=True, heads=(4, 2), rows=256, keys=None, backward=False, batch=2):
    lengths = (rows,) * batch
    return cases.Case(
        *("kind", "label", lengths, *heads, 16, causal),
        backward=backward,
        seqlen_k=keys,
        feature=feature,
    )


def _inputs(case):
    q, k, v, *dout = (_draw(shape, np.float32) for shape in case.shapes)
    extras = case.feature.arrays(case, "float32")
    inputs = contender.Inputs((q, k + 1, v[::-1].copy()), *dout, max_seqlen=case.rows)
    return dataclasses.replace(inputs, extras=extras)


def test_the_suite_has_a_bound_for_each_promise_that_is_a_case():
    suite = score_cases.cases()
    by_name = {case.name: case for case in suite}
    assert len(by_name) == len(suite)
    assert all(case.over is None or case.over in by_name for case in suite)
    assert all(bound.peers or case.over for case in suite for bound in case.bounds)
    assert all(set(bound.peers) <= set(case.peers) for case in suite for bound in case.bounds)
    bounds = {
        (case.kind, case.headdim, case.backward, bound.limit, bound.at_most, bound.peers)
        for case in suite
        for bound in case.bounds
    }
    both = ("FlexAttention", "FA4")
    assert bounds == {
        ("bias", 64, False, 2.0, False, ("cuDNN",)),
        ("bias", 128, False, 2.5, False, ("cuDNN",)),
        *(("bias", d, True, 3.0, False, ("efficient", "flash-sparse-attn")) for d in (64, 128)),
        ("broadcast", 128, False, 1.2, True, ()),
        ("broadcast", 128, True, 1.4, True, ()),
        ("blocks", 128, False, 0.13, True, ()),
        ("blocks", 128, True, 0.18, True, ()),
        ("documents", 128, False, 1.7, False, ("FlexAttention",)),
        ("documents", 128, True, 1.2, False, ("FlexAttention",)),
        *(("topk", 128, verb, 1.3, True, ()) for verb in (False, True)),
        *(("alibi", 128, verb, 0.93, False, ()) for verb in (False, True)),
        *(("scoremod", 128, verb, 0.95, False, ()) for verb in (False, True)),
        *(("softcap", 128, verb, 1.3, False, both) for verb in (False, True)),
        ("softcap", 128, False, 2.2, False, ("FlexAttention",)),
        ("dropout", 128, False, 0.6, False, ()),
        ("dropout", 128, False, 1.3, False, ("FA2",)),
    }
    biases = {
        (c.batch, c.nheads_q, c.nheads_kv, c.rows, c.headdim, c.feature.shape[:2])
        for c in suite
        if c.kind == "bias" and c.causal
    }
    assert biases == {
        (1, 2, 1, 4096, 64, (1, 1)),
        (1, 2, 1, 16384, 64, (1, 1)),
        (2, 16, 16, 4096, 128, (2, 16)),
        (2, 16, 4, 4096, 128, (1, 1)),
        (8, 16, 16, 2048, 64, (8, 16)),
    }
    base = by_name["topk-ref D128 B1 H16/16 S32768 keys1024 forward full"]
    assert base.shapes[0][1] == 32768
    assert base.shapes[1][1] == 1024
    assert by_name["topk D128 B1 H16/16 S32768 kept1024 forward full"].flops == base.flops
    quick = score_cases.cases(quick=True)
    assert {case.name for case in quick} < set(by_name)
    assert all(case.over is None or case.over in {c.name for c in quick} for case in quick)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(256, 256), (128, 384), (1, 300)])
@pytest.mark.parametrize("kind", ["tiles", "documents", "topk"])
def test_visible_pairs_against_the_mask_itself(on_numpy, kind, rows, keys, causal):
    feature = {
        "tiles": features.Tiles(0.4),
        "documents": features.Documents(64),
        "topk": features.TopK(30),
    }[kind]
    if kind == "documents" and rows != keys:
        pytest.skip("documents are those of self-attention")
    if kind == "tiles" and (causal or rows == 1):
        pytest.skip("tiles are whole, and alone")
    case = _case(feature, causal=causal, rows=rows, keys=keys)
    (mask,) = feature.options(case, feature.arrays(case, "float32")).values()
    mask = np.broadcast_to(mask, (2, 1, rows, keys))[0, 0]
    if causal:
        mask = mask & np.tri(rows, keys, keys - rows, dtype=bool)
    expected = counters.Visible(mask.sum(), mask.any(1).sum(), mask.any(0).sum())
    assert feature.visible(rows, keys, causal) == expected
    assert case.visible.pairs == 2 * mask.sum()


def test_a_case_with_a_bias_counts_its_bytes():
    plain = _case(features.PLAIN)
    bias = dataclasses.replace(plain, feature=features.Bias((2, 4, 256, 256)))
    assert bias.nbytes(2) - plain.nbytes(2) == 2 * 2 * 4 * 256 * 256
    both = [dataclasses.replace(case, backward=True).nbytes(2) for case in (plain, bias)]
    assert both[1] - both[0] == 2 * 2 * 2 * 4 * 256 * 256
    assert (plain.ngradients, bias.ngradients) == (3, 4)


def _expected(case, inputs, options):
    """out, or dq, dk, dv and dbias, by the reference."""
    options = {"causal": case.causal, **options}
    if not case.backward:
        return (reference.attention(*inputs.qkv, **options),)
    out, lse = reference.attention(*inputs.qkv, **options, return_lse=True)
    gradients = reference.attention_backward(inputs.dout, *inputs.qkv, out, lse, **options)
    return gradients[: case.ngradients]


@pytest.fixture
def real_torch():
    """Imported before anything pretends to be CuPy."""
    return pytest.importorskip("torch")


@pytest.fixture
def torch_on_cpu(real_torch, on_numpy, monkeypatch):
    torch = real_torch

    def tensors(*arrays):
        return [torch.from_numpy(x.copy()) for x in arrays]

    monkeypatch.setattr(peers, "tensors", tensors)
    monkeypatch.setattr(score_peers, "tensors", tensors)
    monkeypatch.setattr(np, "from_dlpack", lambda x: x.detach().numpy())
    # Uncompiled, torch computes the same.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch, "from_dlpack", lambda x: torch.from_numpy(x.copy()))
    return torch


_FEATURES = {
    "bias": (features.Bias((2, 4, 256, 256)), lambda extras: {"bias": extras["bias"]}),
    "shared bias": (features.Bias((1, 1, 256, 256)), lambda extras: {"bias": extras["bias"]}),
    "alibi": (features.Alibi(), lambda extras: {"alibi_slopes": extras["slopes"]}),
    "softcap": (features.Softcap(1.5), lambda extras: {"softcap": 1.5}),
    "documents": (
        features.Documents(64),
        lambda extras: {"mask": extras["document"][:, None] == extras["document"]},
    ),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "feature", "causal"),
    [
        *(
            (name, feature, causal)
            for name in ("cuDNN", "efficient")
            for feature in ("bias", "shared bias")
            for causal in (True, False)
        ),
        *(("FlexAttention", feature, True) for feature in ("alibi", "softcap")),
        ("FlexAttention", "documents", False),
    ],
)
def test_a_peer_computes_what_the_case_means(torch_on_cpu, name, feature, causal, backward):
    feature, options = _FEATURES[feature]
    heads = (4, 4) if name == "FlexAttention" else (4, 2)
    case = _case(feature, causal=causal, heads=heads, backward=backward)
    inputs = _inputs(case)
    expected = _expected(case, inputs, options(inputs.extras))
    (side,) = (c for c in score_peers.peers() if c.name == name)
    if name != "FlexAttention":
        side._backend = "MATH"  # the others want a GPU
    if name == "FlexAttention" and backward:
        pytest.skip("FlexAttention has no backward on the CPU")
    with side.scope():
        got = side.read(case, side.prepare(case, inputs)())
    # cuDNN has no dbias.
    assert len(got) == (3 if backward and name == "cuDNN" else len(expected))
    assert not measure.disagreement(got, ("reference", expected), 1e-5)


def test_the_text_of_a_score_function_means_the_built_in_one(on_numpy):
    case = _case(features.Alibi(), backward=True)
    inputs = _inputs(case)
    results = [
        _expected(case, inputs, feature.options(case, inputs.extras))
        for feature in (features.Alibi(), features.AlibiText())
    ]
    assert not measure.disagreement(results[1], ("built-in", results[0]), 1e-12)


@pytest.mark.parametrize("feature", ["alibi", "softcap", "bias"])
def test_who_leaves_a_feature_out_would_be_found_out(on_numpy, feature):
    feature, options = _FEATURES[feature]
    if isinstance(feature, features.Softcap):
        feature = features.Softcap()
        options = lambda extras: {"softcap": 30.0}  # noqa: E731
    case = _case(feature)
    inputs = _inputs(case)
    q, k, v = inputs.qkv
    inputs = dataclasses.replace(inputs, qkv=(q * feature.q_factor, k, v))
    expected = _expected(case, inputs, options(inputs.extras))
    assert measure.disagreement(_expected(case, inputs, {}), ("reference", expected))


def test_two_draws_of_dropout_agree_and_another_mask_does_not(on_numpy):
    case = _case(features.Dropout(0.1), heads=(4, 4))
    q, k, v = (_draw(shape, np.float32) for shape in case.shapes)
    inputs = contender.Inputs((q, k, np.roll(v, 7, axis=1)))
    draws = [_expected(case, inputs, {"dropout_p": 0.1, "seed": seed}) for seed in (1, 2)]
    assert not measure.disagreement(draws[0], ("other", draws[1]), case.feature.agree)
    assert measure.difference(draws[0][0], draws[1][0]) > 0.8 * case.feature.agree
    full = _expected(dataclasses.replace(case, causal=False), inputs, {})
    assert measure.disagreement(full, ("other", draws[1]), case.feature.agree)


def test_flash_attention_gets_its_keywords(torch_on_cpu, monkeypatch):
    asked = {}
    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func = lambda *args, **options: asked.update(options)
    interface.flash_attn_varlen_func = None
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    (side,) = (c for c in score_peers.peers() if c.name == "FA4")
    case = _case(features.Softcap(30.0))
    side.prepare(case, _inputs(case))()
    assert asked["softcap"] == 30.0
    case = dataclasses.replace(_case(features.Sinks()), window_left=8)
    inputs = _inputs(case)
    side.prepare(case, inputs)()
    assert asked["window_size"] == (8, None)
    assert asked["learnable_sink"].float().numpy() == pytest.approx(
        inputs.extras["sink_logits"], rel=1e-2
    )
    with pytest.raises(NotImplementedError):
        side.prepare(_case(features.Alibi()), inputs)


def test_dropout_goes_to_torchs_flash_attention(torch_on_cpu):
    (side,) = (c for c in score_peers.peers() if c.name == "FA2")
    case = _case(features.Dropout(0.25))
    call = side.prepare(case, _inputs(case))
    assert call.keywords["dropout_p"] == 0.25
    assert call.keywords["is_causal"] is True


def test_flash_sparse_attention_is_listed_where_it_is_installed(torch_on_cpu, monkeypatch):
    assert "flash-sparse-attn" not in [c.name for c in score_peers.peers()]
    package = types.ModuleType("flash_sparse_attn")
    package.__spec__ = types.SimpleNamespace(name=package.__name__)
    module = types.ModuleType("flash_sparse_attn.flash_sparse_attn_triton")
    asked = []
    module.triton_sparse_attn_func = lambda *args, **options: asked.append((args, options))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    side = score_peers.peers()[-1]
    assert side.name == "flash-sparse-attn"
    case = _case(_FEATURES["shared bias"][0])
    side.prepare(case, _inputs(case))()
    ((args, options),) = asked
    assert [x.shape for x in args] == [(2, 256, 4, 16), (2, 256, 2, 16), (2, 256, 2, 16)]
    assert options["is_causal"] is True
    assert options["attn_bias"].shape == (1, 1, 256, 256)
    assert not options["attn_bias"].isinf().any()


def test_ours_is_called_with_the_options_of_the_case(on_numpy, monkeypatch):
    asked = []
    monkeypatch.setattr(
        ours.rawattn, "attention", lambda *args, **options: asked.append(options) or (None, None)
    )
    made = []
    monkeypatch.setattr(
        features._library, "ScoreMod", lambda text, **captured: made.append((text, captured))
    )
    wanted = {
        features.Bias((1, 1, 256, 256)): {"bias"},
        features.Alibi(): {"alibi_slopes"},
        features.AlibiText(): {"score_mod"},
        features.Softcap(): {"softcap"},
        features.Dropout(): {"dropout_p", "seed"},
        features.Sinks(): {"sink_logits"},
        features.Tiles(0.5): {"mask"},
        features.Documents(64): {"mask"},
        features.TopK(9): {"mask"},
    }
    for feature, names in wanted.items():
        case = _case(feature)
        ours.Ours("rawattn").prepare(case, _inputs(case))()
        assert set(asked[-1]) == {"seqs", "causal", "window", *names}
    ((text, captured),) = made
    assert text == "score + slope[head] * (kv_idx - q_idx)"
    assert set(captured) == {"slope"}


def _row(name, seconds, bounds=(), over=None, **others):
    results = {who: Result(s, samples=(s,)) for who, s in others.items()}
    results["rawattn"] = Result(seconds, reason="" if seconds else "NotImplementedError: softcap")
    return Row(name, "kind", 128, 10**12, 1, results, over, True, bounds)


def _report(*rows, figures=()):
    return Report(
        *("scores", "bfloat16", "2026-01-02T03:04:05+00:00", 9),
        *({"device": "GPU", "driver": "1"}, {}, 8e14, ["rawattn"], ["FA2", "FA4"]),
        rows=list(rows),
        figures=list(figures),
    )


@pytest.mark.parametrize(
    ("bound", "others", "value", "verdict"),
    [
        (Bound("speed", 1.3, peers=("FA2",)), {"FA2": 0.003}, 1.5, "ok"),
        (Bound("speed", 1.6, peers=("FA2",)), {"FA2": 0.003}, 1.5, "below"),
        (Bound("speed", 1.3, peers=("FA2", "FA4")), {"FA2": 0.003, "FA4": 0.002}, 1.0, "below"),
        (Bound("speed", 1.3, peers=("FA2", "FA4")), {"FA2": 0.003}, 1.5, "ok"),
        (Bound("speed", 1.3, peers=("FA4",)), {"FA2": 0.003}, None, "not available"),
        (Bound("time", 0.5, True), {}, 0.4, "ok"),
        (Bound("time", 0.3, True), {}, 0.4, "above"),
        (Bound("speed", 2.5), {}, 2.5, "ok"),
    ],
)
def test_a_bound_is_held_or_not(bound, others, value, verdict):
    report = _report(_row("a", 0.002, (bound,), "base", **others), _row("base", 0.005))
    (figure,) = report.bounded()
    assert figure.value == (None if value is None else pytest.approx(value))
    assert figure.verdict == verdict
    line = next(line for line in render.text(report).splitlines() if "a: " in line)
    assert verdict in line
    assert "at most" in line if bound.at_most else "at least" in line
    assert ("rawattn, time: a / base" in render.text(report)) is bool(bound.peers)
    kept = int(verdict == "ok")
    assert f"within their bounds: {kept} of 1 figures" in render.text(report)


def test_a_bound_over_a_case_that_did_not_run():
    report = _report(_row("a", 0.002, (Bound("time", 0.5, True),), "base"))
    (figure,) = report.bounded()
    assert (figure.verdict, figure.of) == ("not available", "without base")


def test_a_missing_option_is_not_available_with_its_reason():
    report = _report(_row("a", None, (Bound("speed", 1.3, peers=("FA2",)),), FA2=0.001))
    (figure,) = report.bounded()
    assert (figure.verdict, figure.of) == ("not available", "NotImplementedError: softcap")
    assert "0 of 1 figures, 1 not available" in render.text(report)
    assert "rawattn n/a (a): NotImplementedError: softcap" in render.text(report)
    assert "| a: speed | n/a | at least 1.3 x | not available |" in render.markdown(report)


def test_bounds_and_figures_survive_json(tmp_path):
    bound = Bound("speed", 1.3, peers=("FA2", "FA4"))
    figures = [
        Figure("with", 1.0, "s", 1.5, True, "of"),
        Figure("without", None, "ms", of="no GPU"),
    ]
    report = _report(_row("a", 0.002, (bound,), FA2=0.003), figures=figures)
    report.save(tmp_path / "a.json")
    loaded = Report.load(tmp_path / "a.json")
    assert loaded.rows[0].bounds == (bound,)
    assert loaded.figures == figures
    assert render.text(loaded) == render.text(report)
    assert "without n/a: no GPU" in render.text(report)
    assert "| without | n/a |" in render.markdown(report)


def test_a_library_has_one_colour_in_every_plot():
    names = ["rawattn", "portable", "deterministic", *grids.PEERS]
    assert len({render.colour(name) for name in names}) == len(names)
    assert render.colour("some other") not in map(render.colour, names)


def test_the_plot_takes_the_colour_of_the_library(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    seen = []
    bar = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda *args, **more: seen.append(more["color"]) or bar(*args, **more)
    )
    for order in (["FA2", "FA4"], ["FA4", "FA2"]):
        seen.clear()
        report = _report(_row("a", 0.002, FA2=0.003, FA4=0.004))
        report.peers = order
        render.plot(report, tmp_path / "a.png")
        assert seen == [[render.colour(name) for name in ("rawattn", *order)]]


def test_the_plot_has_panels_of_the_suite_without_bases_and_sweeps(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    titles, ticks = [], []
    monkeypatch.setattr(Axes, "set_title", lambda axis, title, **more: titles.append(title))
    monkeypatch.setattr(Axes, "set_xticks", lambda axis, at, names, **more: ticks.extend(names))
    rows = [
        dataclasses.replace(
            _row(case.name, 0.002, over=case.over), kind=case.kind, panel=case.panel
        )
        for case in score_cases.cases()
    ]
    render.plot(_report(*rows), tmp_path / "a.png")
    panels = ("bias", "masks", "score functions")
    assert titles == [f"{panel}, {verb}" for verb in ("forward", "backward") for panel in panels]
    assert ticks[0] == "bias D64\nB1 H2/1\nS4096 heads1\ncausal"
    assert not any("ref" in tick or "sweep" in tick for tick in ticks)


def test_the_command_lists_measures_and_shows_the_suite(monkeypatch, capsys, tmp_path):
    assert cli.main(["bench", "--suite", "scores", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[-4:] == ["accuracy", "compile", "masks", "before"]
    assert len(listed) == len(score_cases.cases()) + 4

    missing = Fake("rawattn", error=NotImplementedError("softcap: no kernel has it"))
    sides = [missing, Fake("FlexAttention", 0.002), Fake("FA4", 0.001)]
    sensors = types.SimpleNamespace(read=lambda: None)
    facts = {"device": "Pretended GPU", "driver": "1.2", "l2_bytes": 1}
    monkeypatch.setattr("rawattn._cli.bench.require_gpu", lambda: None)
    monkeypatch.setattr(suites, "contenders", lambda suite: sides)
    monkeypatch.setattr(measure, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "Sensors", lambda: sensors)
    monkeypatch.setattr(machine, "facts", lambda sensors: facts)
    monkeypatch.setattr(machine, "matmul_flops", lambda dtype, clock: 1e15)
    monkeypatch.setattr(measure, "make_inputs", lambda *args: [contender.Inputs(())])
    words = ["--filter", "softcap forward", "--repeats", "1"]
    path = tmp_path / "a.json"
    assert cli.main(["bench", "--suite", "scores", *words, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("not available  NotImplementedError: softcap: no kernel has it") == 2

    missing.error = None
    assert cli.main(["bench", "--suite", "scores", *words, "--json", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "at least" in line]
    assert len(lines) == 2
    assert all("below" in line for line in lines)
    assert Report.load(path).bounded()[0].value == pytest.approx(1.0)
    assert Report.load(path).bounded()[1].value == pytest.approx(2.0)


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
    monkeypatch.delattr(features._library, "topk_mask")
    documents, topk = score_figures.masks("bfloat16", ())
    assert documents.value == 2.0
    assert topk.value is None
    assert "topk_mask" in topk.of


def _package(folder, seconds):
    """As much of a version of this package as the process of `before` touches."""
    bench = folder / "rawattn" / "_bench"
    bench.mkdir(parents=True)
    (folder / "rawattn" / "__init__.py").touch()
    names = sorted({(suite, case) for suite, _, case in before.ASKED})
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
    assert len(found) == len(before.ASKED)
    for figure, (_, side, _) in zip(found, before.ASKED, strict=True):
        if side == "portable":  # which this package does not have
            assert figure.value is None
            assert "ValueError" in figure.of
        else:
            assert figure.value == pytest.approx(0.98)
            assert figure.verdict == "below"
    names = {"forward": grids.forward(), "backward": grids.backward()}
    for suite, _, case in before.ASKED:
        assert case in [c.name for c in names[suite]]


def test_without_an_earlier_version_its_line_says_so(monkeypatch):
    monkeypatch.delenv(before.FOLDER, raising=False)
    (figure,) = before.figures("bfloat16", ())
    assert figure.verdict == "not available"
    assert before.FOLDER in figure.of
