"""Score functions as compiled into kernels: on the simulator against NumPy, and through NVRTC."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn import ScoreMod
from rawattn._compile.compiler import CompileError, compile_source
from rawattn._scores import numpy_eval
from rawattn._scores.cuda_text import compile_error_message, device_text, predicate_text
from rawattn._scores.expression import POSITION
from rawattn._scores.program import program
from rawattn._scores.score_mod import Predicate
from tests.score_trees import (
    CAPTURED,
    EDGES,
    Writer,
    edge,
    positions,
    predicate,
    score_mod,
    values_of,
)
from tests.shim.score_texts import Device, source
from tests.shim.shim import Builder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def written() -> list[ScoreMod | Predicate]:
    writer = Writer(random.Random(5))
    whole = np.random.default_rng(6).normal(size=(3, 4, 5, 6)).astype(ml_dtypes.bfloat16)
    four = "score + exp(a[batch, head, q_idx, kv_idx])"
    mods: list[ScoreMod | Predicate] = [
        score_mod("score + slope[head] * (kv_idx - q_idx)"),
        ScoreMod(four, a=whole, wrt="a"),
        ScoreMod(four, a=np.asfortranarray(whole), wrt="a"),
    ]
    mods += [score_mod(writer.float(4)) for _ in range(40)]
    mods += [predicate(writer.predicate(3)) for _ in range(20)]
    return [mod for mod in mods if isinstance(mod, Predicate) or _partials(mod) <= 4]


def _partials(mod: ScoreMod) -> int:
    return len(program(mod.text).partials)


def _rows(at: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack([at[name] for name in POSITION], axis=1)


@pytest.mark.parametrize("exact", [True, False])
def test_device_agrees_with_the_host(builder: Builder, written: Any, exact: bool) -> None:
    device = Device(builder, written, exact=exact)
    at = positions(64, seed=3)
    where = [at[name] for name in POSITION]
    score = np.linspace(-3, 3, 64, dtype=np.float32)
    for mod in written:
        found = device.run(mod, score, _rows(at))
        if isinstance(mod, Predicate):
            np.testing.assert_array_equal(found[:, 0], values_of(mod, **at), err_msg=str(mod))
            continue
        call = (mod.text, score, *where, mod.arrays, mod.scalars)
        columns = [numpy_eval.evaluate(*call), numpy_eval.derivative(*call)]
        for each in numpy_eval.partials(*call):
            columns.append(each.partial)
            columns.append(np.ravel_multi_index(each.indices, mod.arrays[each.name].shape))
        expected = np.stack(columns, axis=1).astype(np.float64)
        close = {"rtol": 2e-5, "atol": 2e-5}
        np.testing.assert_allclose(found[:, : len(columns)], expected, err_msg=str(mod), **close)
        assert np.isnan(found[:, len(columns) :]).all()


@pytest.mark.parametrize("exact", [True, False])
def test_device_agrees_at_edges(builder: Builder, exact: bool) -> None:
    mods = [edge(text) for text in EDGES]
    numbers = np.int32([-(2**31), -(2**31) + 1, -7, -6, -2, -1, 0, 1, 2, 5, 6, 2**31 - 1])
    pairs = [ScoreMod(f"0 * score + x[q_idx] {op} x[kv_idx]", x=numbers) for op in ("//", "%", "*")]
    device = Device(builder, [*mods, *pairs], exact=exact)
    for mod, expected in zip(mods, EDGES.values(), strict=True):
        found = device.run(mod, np.float32([3]), np.array([[0, 1, 0, 0, 0, 0, 0]]))
        assert found[0, 0] == np.float32(expected), mod
    at = {name: np.zeros(144, int) for name in POSITION}
    at["q_idx"], at["kv_idx"] = np.divmod(np.arange(144), 12)
    for mod in pairs:
        found = device.run(mod, np.zeros(144), _rows(at))
        np.testing.assert_array_equal(found[:, 0], values_of(mod, np.zeros(144, np.float32), **at))


def test_quick_tanh(builder: Builder) -> None:
    """Its relative error is that of some roundings of float32, everywhere. It is odd, and NaN stays NaN. Its derivative
    vanishes."""
    mod = ScoreMod("tanh(score)")
    device = Device(builder, [mod], exact=False)
    score = np.float32([0, *np.geomspace(1e-30, 100, 5000), np.inf])
    score = np.concatenate([score, -score, np.float32([np.nan])])
    found, slope = device.run(mod, score, np.zeros((len(score), len(POSITION)))).T[:2]
    expected = np.tanh(np.float64(score))
    assert not slope[np.abs(score) >= 8].any()
    np.testing.assert_allclose(found, expected, rtol=8e-7, atol=0)
    np.testing.assert_array_equal(np.signbit(found[:-1]), np.signbit(score[:-1]))


def test_quick_divisions_are_those_of_scores() -> None:
    """The floor of a position's quotient must not depend on how a division is rounded."""
    text = device_text(ScoreMod("score / 41 + floor(q_idx / 41)").text, exact=False)
    assert text.count("maths::div(score, 41.0f, ") == 1
    assert text.count(" / 41.0f;") == 2  # of the position, and 1 / 41 of the derivative


def test_quotients_of_positions(builder: Builder) -> None:
    """Positions are divided without a sign, what may be negative is not."""
    texts = ("kv_idx // 7 + kv_idx % 7 / 8", "(q_idx - kv_idx) // 7 % 3", "kv_idx // 7 % 3 // 2")
    mods = [ScoreMod(f"0 * score + {text}") for text in texts]
    device = Device(builder, mods)
    at = positions(64, seed=3)
    for mod in mods:
        found = device.run(mod, np.zeros(64), _rows(at))[:, 0]
        np.testing.assert_array_equal(found, values_of(mod, np.zeros(64, np.float32), **at))
    assert "unsigned(at.kv_idx) / 7u" in device_text(mods[0].text, exact=True)
    assert "unsigned" not in device_text(mods[1].text, exact=True)


def test_wide_arrays(builder: Builder) -> None:
    """An array with a step of 2 GiB or more is read with 64-bit products."""
    table = np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (1, 8), (1 << 31, 4))
    narrow = ScoreMod("score + x[q_idx, kv_idx]", x=np.ones((1, 8), np.float32))
    wide = narrow.text.of_strides([table.strides])
    assert wide.wide == ("x",) and narrow.text.of_strides([(32, 4)]) == narrow.text
    assert "captured_at<float, true>" in device_text(wide, exact=True)
    assert "captured_at<float, false>" in device_text(narrow.text, exact=True)


IN_CUDA = ScoreMod(
    """
    // ALiBi, and every other key
    const float bias = slope[head] * (kv_idx - q_idx) + table(q_idx, kv_idx);
    score = score * score * cap + bias;
    if (kv_idx % n == 0 && flags[head] && on) score = -inf;
    """,
    "dscore *= 2.0f * score * cap;",
    language="cuda",
    **{name: CAPTURED[name] for name in ("slope", "table", "flags", "cap", "n", "on")},
)


def test_texts_in_cuda(builder: Builder) -> None:
    same = score_mod(
        "where(kv_idx % n == 0 and flags[head] and on, -inf, score * score * cap"
        " + slope[head] * (kv_idx - q_idx) + table[q_idx, kv_idx])"
    )
    device = Device(builder, [IN_CUDA, same])
    at, score = positions(50, seed=4), np.linspace(-3, 3, 50)
    found, expected = (device.run(mod, score, _rows(at)) for mod in (IN_CUDA, same))
    np.testing.assert_allclose(found[:, :2], expected[:, :2], rtol=1e-6)
    assert np.isinf(found[:, 0]).any() and np.isfinite(found[:, 0]).any()


def test_a_text_in_cuda_without_backward_has_a_value(builder: Builder) -> None:
    mod = ScoreMod("score *= 2.0f;", language="cuda")
    assert "template" in device_text(mod.text, exact=True)
    with pytest.raises(AssertionError, match="without backward has no derivative"):
        Device(builder, [mod])


UNFINISHED = [
    ScoreMod("score *= 2.0f", "dscore *= 2.0f // twice", language="cuda"),
    ScoreMod(
        "score *= 2.0f; if (score > 0.0f)", "dscore *= 2.0f; if (score < 0.0f)", language="cuda"
    ),
]


def test_what_a_text_in_cuda_leaves_open_ends_with_it(builder: Builder) -> None:
    """A last statement needs no semicolon, and the generated `return` does not become a part of it."""
    device = Device(builder, UNFINISHED)
    at, score = positions(50, seed=4), np.linspace(-3, 3, 50)
    for mod in UNFINISHED:
        found = device.run(mod, score, _rows(at))
        np.testing.assert_array_equal(found[:, 0], np.float32(score) * 2)
        np.testing.assert_array_equal(found[:, 1], 2)


def test_an_error_at_the_end_of_a_text_is_told(cache: Path) -> None:
    mod = ScoreMod("score = 2.0f *", "dscore *= 2.0f;", language="cuda")
    with pytest.raises(CompileError) as raised:
        compile_source(source([mod]), "sm_80")
    told = compile_error_message(str(raised.value), mod.text).splitlines()
    assert told[0] == "score_mod: the text does not compile"
    assert told[1].startswith("  forward, line 1: ")
    assert told[2] == "    score = 2.0f *"


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_nvrtc_takes_every_text(arch: str, written: Any, cache: Path) -> None:
    for exact in (True, False):
        cubin = compile_source(source([*written, IN_CUDA], exact=exact), arch)
        assert cubin.image
        assert "warning" not in cubin.log


BROKEN = ScoreMod(
    "score += slope[head];\nscore = foo(score);",
    "dscore = bar;",
    language="cuda",
    slope=CAPTURED["slope"],
)
TOLD = [
    "score_mod: the text does not compile",
    "  forward, line 2: ",
    "    score = foo(score);",
    "  backward, line 1: ",
    "    dscore = bar;",
]


def _check_told(log: str) -> None:
    told = compile_error_message(log, BROKEN.text).splitlines()
    assert len(told) == len(TOLD), told
    assert all(line.startswith(start) for line, start in zip(told, TOLD, strict=True)), told
    assert "foo" in told[1] and "bar" in told[3]


def test_compile_errors_point_at_the_users_lines(cache: Path) -> None:
    with pytest.raises(CompileError) as raised:
        compile_source(source([BROKEN]), "sm_80")
    _check_told(str(raised.value))
    assert compile_error_message("kernel.cu(3): error: no", BROKEN.text) == ""


def test_compile_errors_of_gcc_too(builder: Builder) -> None:
    with pytest.raises(AssertionError) as raised:
        Device(builder, [BROKEN])
    _check_told(str(raised.value))


def test_float64_arrays_reach_no_kernel() -> None:
    with pytest.raises(TypeError, match=r"^x: got dtype float64"):
        device_text(ScoreMod("score + x[0]", x=np.ones(1)).text, exact=True)
    with pytest.raises(TypeError, match=r"^x: got dtype float64"):
        predicate_text(Predicate("x[0] > 0", x=np.ones(1)).text)
