"""Measurements of `rawattn bench` with fake contenders, and the race of dtypes."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest

from rawattn._bench import contender, dtypes, grids, machine, measure, ours, peers, report, timing
from tests.bench_fakes import Fake, FakeClock


def _run_case(*fakes, absent=None, backward=False, base=None):
    case = (grids.backward if backward else grids.forward)()[0]
    reading = machine.Reading(1980.0, 650.0, 60.0)
    return measure.measure_case(
        case,
        fakes,
        [contender.Inputs(())] * 2,
        FakeClock(),
        lambda: reading,
        {} if absent is None else absent,
        repeats=3,
        base=base,
    )


def test_the_case_that_one_is_measured_against_takes_its_turns_beside_it():
    case, found = grids.forward()[1], report.Result()
    fake = Fake("rawattn", 0.004)
    entrant, *_ = measure.enter(case, fake, [contender.Inputs(())], FakeClock())
    results = _run_case(Fake("rawattn", 0.001), base=(entrant, found))
    assert list(results) == ["rawattn"]
    assert found.seconds == pytest.approx(0.004)
    assert len(found.samples) == 3
    bound = report.Bound("time over the other", 1.0, at_most=True)
    rows = [
        report.Row("a", "dense", 64, 10**9, 10**6, results, over="b", bounds=(bound,), base=found),
        # Measured in a race of its own, at another clock frequency.
        report.Row("b", "dense", 64, 10**9, 10**6, {"rawattn": report.Result(0.001)}),
    ]
    told = report.Report("scores", "bfloat16", "", 3, {}, {}, 1e12, ["rawattn"], [], rows=rows)
    assert [figure.value for figure in told.bounded()] == [pytest.approx(0.25)]


def test_a_case_measures_everybody():
    results = _run_case(Fake("rawattn", 0.001), Fake("FA2", 0.002))
    assert results["rawattn"].seconds == pytest.approx(0.001)
    assert results["FA2"].seconds == pytest.approx(0.002)
    assert results["rawattn"].first_seconds == 1.5
    assert (results["FA2"].sm_mhz, results["FA2"].watts, results["FA2"].celsius) == (1980, 650, 60)
    assert len(results["FA2"].samples) == 3
    assert not results["FA2"].reason


def test_a_peer_that_fails_leaves_its_reason_and_an_absent_one_is_not_tried_again():
    absent = {}
    broken, missing = (
        Fake("FA2", error=RuntimeError("no kernel\nfor this")),
        Fake("FA4", error=ImportError("no flash_attn")),
    )
    for _ in range(2):
        results = _run_case(Fake("rawattn"), broken, missing, absent=absent)
        assert results["FA2"].reason == "RuntimeError: no kernel"
        assert results["FA4"].reason == "ImportError: no flash_attn"
        assert results["rawattn"].seconds
    assert (broken.prepared, missing.prepared) == (2, 1)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("value", [1.1, 0.0, np.nan])
def test_who_computes_something_else_is_not_timed(value, backward):
    wrong = Fake("cuDNN", value=value)
    results = _run_case(Fake("rawattn"), wrong, Fake("FA2", value=1.001), backward=backward)
    assert results["cuDNN"].reason.startswith("not timed: differs from rawattn by ")
    assert results["cuDNN"].seconds is None
    assert wrong.calls == 1
    assert results["FA2"].seconds
    assert not results["FA2"].reason


def test_the_first_is_not_timed_when_its_result_is_no_number():
    results = _run_case(Fake("rawattn", value=np.nan), Fake("FA2"), Fake("FA4", value=2.0))
    assert results["rawattn"].reason == "not timed: differs from itself by nan of its RMS"
    assert results["FA2"].seconds
    assert results["FA4"].reason.startswith("not timed: differs from FA2")


def _kind(x):
    if x.dtype == ml_dtypes.bfloat16:
        return "bfloat16"
    assert x.dtype == np.float16
    shorter = np.array_equal(x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32), x)
    return "float16 of bfloat16 values" if shorter else "float16"


class ByKind(Fake):
    """A fake whose seconds depend on the kind of its inputs. It raises an exception given instead, and records the kinds."""

    def __init__(self, name, seconds):
        super().__init__(name)
        self.by_kind, self.kinds = seconds, []

    def prepare(self, case, inputs):
        arrays = [*inputs.qkv, inputs.dout] if case.backward else inputs.qkv
        (kind,) = set(map(_kind, arrays))
        self.kinds.append(kind)
        seconds = self.by_kind[kind]
        if isinstance(seconds, Exception):
            raise seconds
        call = super().prepare(case, inputs)
        return lambda: (call(), seconds)[1]


@pytest.fixture
def race_dtypes(monkeypatch):
    """Return a function that gives the figures of these contenders, on NumPy arrays of one row."""

    def random_array(shape, dtype):
        values = np.random.default_rng(0).standard_normal(shape[-1], np.float32)
        return values.astype(np.dtype(dtype))

    def figures(verb, names, our, *others):
        monkeypatch.setattr(ours, "ours", lambda verb: [our, Fake("portable")])
        monkeypatch.setattr(peers, "peers", lambda verb: others)
        return {f.name: (f.value, f.unit) for f in dtypes.figures(verb, "bfloat16", names)}

    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setattr(dtypes, "EventClock", FakeClock)
    monkeypatch.setattr(machine, "random_array", random_array)
    monkeypatch.setattr(machine, "Sensors", lambda: None)
    monkeypatch.setattr(machine, "facts", lambda sensors: {"l2_bytes": 50 << 20})
    return figures


_SECONDS = {"bfloat16": 0.0019, "float16": 0.002, "float16 of bfloat16 values": 0.00195}


def test_float16_over_bfloat16_is_one_race_of_all_kinds(race_dtypes, monkeypatch):
    raced = []

    def race(entrants):
        raced.append(list(entrants))
        return timing.race(entrants)

    monkeypatch.setattr(dtypes, "race", race)
    our, peer = ByKind("rawattn", _SECONDS), ByKind("FA4", {"bfloat16": 0.003, "float16": 0.004})
    asked, unasked = ("FA4", "cuDNN", "FA2"), ByKind("FA2", {})
    found = race_dtypes("forward", asked, our, peer, unasked)

    names = [case.name for case in dtypes.cases("forward")]
    assert names == [f"dense D{d} S4096 {m}" for d in (64, 128, 256) for m in ("causal", "full")]
    mine = [f"rawattn, {kind}" for kind in _SECONDS]
    assert raced == [[*mine, "FA4, bfloat16", "FA4, float16"]] * len(names)
    assert not unasked.kinds
    expected = {}
    for case in names:
        ratios = {
            f"rawattn, FLOP/s: float16 / bfloat16, {case}": 0.95,
            f"rawattn, FLOP/s: float16 of bfloat16 values / bfloat16, {case}": 1.9 / 1.95,
            f"FA4, FLOP/s: float16 / bfloat16, {case}": 0.75,
        }
        expected |= {name: (pytest.approx(ratio), "x") for name, ratio in ratios.items()}
    assert found == expected


def test_float16_over_bfloat16_of_a_backward(race_dtypes):
    our, peer = ByKind("rawattn", _SECONDS), ByKind("FA2", _SECONDS)
    found = race_dtypes("backward", ("FA2", "FA4"), our, peer, ByKind("FA4", {}))
    names = [f"dense D{d} S4096 {m}" for d in (64, 128) for m in ("causal", "full")]
    ratios = [
        *("rawattn, FLOP/s: float16 / bfloat16", "FA2, FLOP/s: float16 / bfloat16"),
        "rawattn, FLOP/s: float16 of bfloat16 values / bfloat16",
    ]
    assert set(found) == {f"{ratio}, {case}" for ratio in ratios for case in names}
    assert peer.kinds == ["bfloat16", "float16"] * len(names)
    assert set(race_dtypes("backward", (), our, peer)) == {n for n in found if "FA2" not in n}


@pytest.mark.parametrize("broken", ["bfloat16", "float16"])
def test_a_peer_without_both_dtypes_is_left_out_and_ours_must_have_them(race_dtypes, broken):
    missing = ByKind("FA4", {**_SECONDS, broken: ImportError("no flash_attn")})
    found = race_dtypes("forward", ("FA4",), ByKind("rawattn", _SECONDS), missing)
    assert len(found) == 12
    assert all(name.startswith("rawattn, ") for name in found)
    with pytest.raises(RuntimeError, match="no kernel"):
        race_dtypes(
            "forward", (), ByKind("rawattn", {**_SECONDS, broken: RuntimeError("no kernel")})
        )


def test_who_raises_in_the_race_of_dtypes(race_dtypes):
    class Mortal(ByKind):
        def prepare(self, case, inputs):
            call, lives = super().prepare(case, inputs), iter(range(20))
            return lambda: (next(lives), call())[1]

    found = race_dtypes("backward", ("FA2",), ByKind("rawattn", _SECONDS), Mortal("FA2", _SECONDS))
    assert len(found) == 8
    with pytest.raises(StopIteration):
        race_dtypes("backward", (), Mortal("rawattn", _SECONDS))


def test_an_error_is_described_without_paths_of_the_machine() -> None:
    error = RuntimeError("overflow at /usr/share/x/allocator.h:49: for 32/8 heads\nmore")
    assert measure.describe(error) == "RuntimeError: overflow at allocator.h:49: for 32/8 heads"
    error = RuntimeError("see https://docs.example.com/a/b.html, or file:///usr/share/x/b.html")
    assert measure.describe(error) == (
        "RuntimeError: see https://docs.example.com/a/b.html, or file:b.html"
    )
