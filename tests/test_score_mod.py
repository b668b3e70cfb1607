"""ScoreMod: its text and arrays, what it refuses, and its gradients in the reference."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, _handles, reference
from rawattn._scores.program import ScoreText, program
from rawattn._scores.score_mod import Predicate, require_float32, require_gradient
from tests.reference_rules import GROUPED, LENS_K, LENS_Q, arrays_of, draw

SLOPES = np.float32([0.5, 0.25])


def test_what_is_captured_may_be_called_self() -> None:
    assert ScoreMod("score * self", self=2.0).scalars == (2.0,)


def test_description_holds_neither_values_nor_shapes() -> None:
    def made(slope: Any, cap: Any) -> ScoreMod:
        return ScoreMod("cap * tanh(score / cap) + slope[head]", slope=slope, cap=cap, wrt="slope")

    mod = made(SLOPES, 2.0)
    assert mod.text == ScoreText(
        "expression", "cap * tanh(score / cap) + slope[head]", None, ("slope",),
        (("slope", "float32", 1),), (("cap", "float"),),
    )  # fmt: skip
    assert mod.arrays["slope"] is SLOPES and list(mod.arrays) == ["slope"]
    assert mod.scalars == (2.0,)
    other = made(np.float32([1, 2, 3]), 5.5)
    assert other.text == mod.text and hash(other.text) == hash(mod.text)
    for different in (made(np.float16([1]), 2.0), made(SLOPES, 2), made(SLOPES, True)):
        assert different.text != mod.text
    assert made(SLOPES, True).scalars == (1.0,)


def test_layout_of_an_expression_makes_no_other_kernel() -> None:
    spread = """
        score
          + 2.0
    """
    assert ScoreMod(spread).text == ScoreMod("score + 2.0").text


def test_repr_tells_the_forms_of_arrays() -> None:
    mod = ScoreMod("score + slope[head] * n * on", slope=SLOPES, n=3, on=True, wrt=["slope"])
    assert repr(mod) == (
        "ScoreMod('score + slope[head] * n * on', wrt=('slope',), slope=float32[2], n=3, on=True)"
    )
    assert "language='cuda'" in repr(ScoreMod("score *= 2;", language="cuda"))
    assert repr(Predicate("q_idx > n", n=1)) == "Predicate('q_idx > n', n=1)"


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones(2, np.float16), "float16"),
        (np.ones(2, ml_dtypes.bfloat16), "bfloat16"),
        (np.ones(2), "float64"),
        (np.ones(2, np.int32), "int32"),
        (np.ones(2, np.int64), "int64"),
        (np.ones(2, bool), "bool"),
    ],
)
def test_dtypes_of_arrays(array: np.ndarray, dtype: str) -> None:
    assert ScoreMod("score + x[head]", x=array).text.arrays == (("x", dtype, 1),)


@pytest.mark.frameworks
def test_arrays_of_frameworks() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mod = ScoreMod("score + x[head, 0]", x=x)
    assert mod.text.arrays == (("x", "bfloat16", 2),) and mod.arrays["x"] is x
    jax = pytest.importorskip("jax")
    assert ScoreMod("score * x[head]", x=jax.numpy.ones(2)).text.arrays == (("x", "float32", 1),)


class OnlyDLPack:
    def __dlpack__(self, **keywords: Any) -> Any:
        return SLOPES.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return SLOPES.__dlpack_device__()


def test_an_array_without_attributes_is_read_through_dlpack() -> None:
    mod = ScoreMod("score + x[head]", x=OnlyDLPack())
    assert mod.text.arrays == (("x", "float32", 1),)
    assert repr(mod) == "ScoreMod('score + x[head]', x=float32[2])"


CUDA = {"language": "cuda"}


@pytest.mark.parametrize(
    ("forward", "options", "error", "says"),
    [
        (lambda score: score, {}, TypeError, "score_mod: got .*expected a text"),
        ("  ", {}, ValueError, "score_mod: got an empty text"),
        ("score", {"language": "c++"}, ValueError, "language: got 'c\\+\\+'.*'expression' or 'cuda'"),
        ("score", {"language": None}, TypeError, "language: got None"),
        ("score", {"backward": "1"}, ValueError, "backward: .*differentiated by itself"),
        ("score + x", {"x": "a"}, TypeError, "x: got 'a'.*arrays of 1 to 4 axes"),
        ("score + x", {"x": [1.0, 2.0]}, TypeError, "x: got \\[1.0, 2.0\\].*numpy.asarray"),
        ("score + x", {"x": None}, TypeError, "x: got None"),
        ("score + x", {"x": 2j}, TypeError, "x: got 2j"),
        ("score + x[0]", {"x": np.ones(2, np.int8)}, TypeError, "x: got dtype int8.*int32"),
        ("score + x[0]", {"x": np.ones(())}, ValueError, "x: got shape \\(\\)"),
        ("score + x[0]", {"x": np.ones((1,) * 5)}, ValueError, "x: got shape .*1 to 4 axes"),
        ("score + x[0]", {"x": np.ones(0)}, ValueError, "x: got shape \\(0,\\).*one element"),
        ("score + x", {"x": 2**24 + 1}, ValueError, "x: got 16777217.*float32 holds exactly"),
        ("score + x", {"x": -(2**31)}, ValueError, "x: got -2147483648"),
        ("score * x", {"x": 1e39}, ValueError, "x: got 1e\\+39, expected a float that float32 holds"),
        ("score * x", {"x": np.float64(-1e39)}, ValueError, "x: got -1e\\+39, expected a float that"),
        ("score / x", {"x": 1e-50}, ValueError, "x: got 1e-50, expected a float that float32 holds"),
        ("score * x", {"x": -1e39}, ValueError, "x: .*; pass float\\('-inf'\\) if that is meant"),
        ("score", {"x": 1}, ValueError, "score_mod: got a captured 'x', which the text does not use; leave it out"),
        ("score", {"head": 1}, ValueError, "score_mod: got a captured 'head', but the language"),
        ("score", {"lambda": 1}, ValueError, "score_mod: got a captured 'lambda', expected a name"),
        ("score", {"a b": 1}, ValueError, "score_mod: got a captured 'a b', expected a name"),
        ("score + x[0]", {"x": SLOPES, "wrt": "y"}, ValueError, "wrt: got 'y'.*float arrays: x"),
        ("score + x", {"x": 1.0, "wrt": "x"}, ValueError, "wrt: got 'x'.*float arrays: none"),
        ("score + x[0]", {"x": SLOPES, "wrt": "xx"}, ValueError, "wrt: got 'xx'"),
        ("score + x[0]", {"x": SLOPES, "wrt": ("x", "x")}, ValueError, "wrt: .*each name once"),
        ("score + x[0]", {"x": np.ones(2, np.int32), "wrt": "x"}, ValueError, "wrt: got 'x'"),
        ("score + x[0]", {"x": SLOPES, "wrt": 3}, TypeError, "wrt: got 3"),
        ("score *= x[0];", {"x": SLOPES, "wrt": "x", **CUDA}, ValueError, "wrt: .*language='cuda'"),
        ("foo(score);", CUDA, ValueError, "score_mod: the text assigns no `score`"),
        ("if (score == 1) {}", CUDA, ValueError, "score_mod: the text assigns no `score`"),
        ("score = 1;", {"backward": "score = 1;", **CUDA}, ValueError, "backward: .*no `dscore`"),
        ("score = 1;", {"backward": 1, **CUDA}, TypeError, "backward: got 1"),
        ("score = 1;\n#include <x>", CUDA, ValueError, "score_mod: got `#` in line 2, a preprocessor"),
        ("score = 1;\n%:pragma x", CUDA, ValueError, "score_mod: got `%:` in line 2"),
        ("asm(x); score = 1;", CUDA, ValueError, "score_mod: got `asm` in line 1, assembly"),
        ("__global__ score = 1;", CUDA, ValueError, "score_mod: got `__global__`"),
        ("score = 1; char c = 'a';", CUDA, ValueError, "score_mod: got `'`"),
        ('score = 1; f("a");', CUDA, ValueError, 'score_mod: got `"`'),
        ("score = 1; \\ x", CUDA, ValueError, "score_mod: got `.` in line 1, a backslash"),
        ("score = 1; return score;", CUDA, ValueError, "score_mod: got `return`"),
        ("score = 1; }", CUDA, ValueError, "score_mod: got a `}` without its `{`"),
        ("score = (1;", CUDA, ValueError, "score_mod: got a `\\(` that is not closed"),
        ("score = 1; /* {", CUDA, ValueError, "score_mod: got a comment that is not closed"),
        ("// score = 1;", CUDA, ValueError, "score_mod: the text assigns no `score`"),
        ("score = 1; /*\n*/ f('a');", CUDA, ValueError, "score_mod: got `'` in line 2, a quote"),
        ("score = 1; // \\\nreturn", CUDA, ValueError, "score_mod: got `.` in line 1, a backslash"),
        ("score = true;", {"true": 1, **CUDA}, ValueError, "score_mod: got a captured 'true'"),
        ("score = P;", {"P": 1, **CUDA}, ValueError, "score_mod: got a captured 'P', which C"),
        ("score = int;", {"int": 1, **CUDA}, ValueError, "score_mod: got a captured 'int'"),
        ("score = at;", {"at": 1, **CUDA}, ValueError, "score_mod: got a captured 'at', which C"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(forward: Any, options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        ScoreMod(forward, **options)


def test_a_number_may_be_infinite_and_is_rounded_to_float32() -> None:
    mod = ScoreMod("where(kv_idx < n, a, score) + b", n=2, a=float("-inf"), b=0.1)
    assert mod.scalars == (2.0, float("-inf"), 0.1)
    assert ScoreMod("score * x", x=float(np.finfo(np.float32).max)).scalars[0] < 1e39


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">i4", ">i8"])
def test_another_order_of_bytes_is_refused_where_it_is_captured(dtype: str) -> None:
    """An array in another byte order is refused, also after an equal text with an array whose dtype has the same name."""
    native = ScoreMod("score + x[head]", x=np.ones(2, np.dtype(dtype).newbyteorder("=")))
    assert len(native.arrays) == 1
    says = rf"^x: got dtype {dtype}, which is not in this machine's byte order; pass x\.astype"
    with pytest.raises(TypeError, match=says):
        ScoreMod("score + x[head]", x=np.ones(2, dtype))
    with pytest.raises(TypeError, match=says):
        Predicate("x[kv_idx] > 0", x=np.ones(2, dtype))


def test_predicates_take_no_float64_array() -> None:
    with pytest.raises(
        TypeError, match=r"^x: got dtype float64, accepted are .*float32.*x.astype\(np.float32\)"
    ) as caught:
        Predicate("x[kv_idx] > 0", x=np.ones(2))
    assert "float64," not in str(caught.value).partition("accepted")[2]
    with pytest.raises(TypeError, match=r"^x: got dtype float64"):
        rawattn.block_mask(predicate="x[kv_idx] > 0", seqlen_q=1, seqlen_k=2, x=np.ones(2))


@pytest.mark.parametrize(
    "text",
    ["score *= 2.0f; // don't", "/* a \"quote\", # and\nreturn { */ score = 1; // /* none", "score = 1 /**/;"],
)  # fmt: skip
def test_comments_may_hold_anything(text: str) -> None:
    assert ScoreMod(text, language="cuda").text.forward == text


# https://en.cppreference.com/w/cpp/keyword, of C++20 and without those that are Python's.
CPP_KEYWORDS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
    co_yield compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast
    enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr
    operator or_eq private protected public register reinterpret_cast requires short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true typedef typeid typename union unsigned using virtual
    void volatile wchar_t xor xor_eq
"""


@pytest.mark.parametrize("name", [*CPP_KEYWORDS.split(), "DEVICE", "CapturedArray"])
def test_names_of_cpp_are_not_captured(name: str) -> None:
    with pytest.raises(ValueError, match=f"^score_mod: got a captured '{name}'"):
        ScoreMod(f"score = {name};", language="cuda", **{name: 1.0})


@pytest.mark.parametrize("kind", ["arrays", "numbers"])
def test_at_most_eight_of_each(kind: str) -> None:
    one: Any = SLOPES if kind == "arrays" else 1.0
    names = [f"x{n}" for n in range(9)]
    index = "[0]" if kind == "arrays" else ""
    text = " + ".join(name + index for name in names)
    ScoreMod(text.removesuffix(f" + x8{index}"), **dict.fromkeys(names[:8], one))
    with pytest.raises(ValueError, match=f"^score_mod: got 9 captured {kind}, expected at most 8"):
        ScoreMod(text, **dict.fromkeys(names, one))


def test_kernels_take_no_float64_array() -> None:
    require_float32(ScoreMod("score + x[0]", x=SLOPES).text)
    with pytest.raises(TypeError, match=r"^x: got dtype float64.*astype"):
        require_float32(ScoreMod("score + x[0]", x=np.ones(2)).text)


def test_cuda_without_backward_has_no_gradient() -> None:
    require_gradient(ScoreMod("score").text)
    require_gradient(ScoreMod("score *= 2;", "dscore *= 2;", language="cuda").text)
    with pytest.raises(NotImplementedError, match=r"^score_mod: .*no backward"):
        require_gradient(ScoreMod("score *= 2;", language="cuda").text)


def test_it_cannot_be_changed() -> None:
    mod = ScoreMod("score + x[0]", x=SLOPES)
    with pytest.raises(AttributeError):
        mod.text = ScoreMod("score").text  # type: ignore[misc]
    with pytest.raises(TypeError):
        mod.arrays["x"] = SLOPES  # type: ignore[index]


def test_public_name() -> None:
    assert rawattn.ScoreMod is ScoreMod and "ScoreMod" in rawattn.__all__


def gradients_of(
    text: str, wrt: tuple[str, ...], options: dict[str, Any], **captured: Any
) -> tuple[Any, Any]:
    """For q and each array in wrt: the reference's directional derivative, and the one by central differences."""
    if "seqs" in options:
        q, k, v = draw(16, 4, 3), draw(25, 2, 3, seed=1), draw(25, 2, 6, seed=2)
    else:
        q, k, v = arrays_of()

    def call(q: np.ndarray, **changed: Any) -> Any:
        mod = ScoreMod(text, wrt=wrt, **{**captured, **changed})
        return mod, reference.attention(q, k, v, score_mod=mod, return_lse=True, **options)

    mod, (out, lse) = call(q)
    dout, dlse = draw(*out.shape, seed=7), draw(*lse.shape, seed=8)
    gradients = reference.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, score_mod=mod, **options
    )

    def loss(q: np.ndarray = q, **changed: Any) -> float:
        _, (out, lse) = call(q, **changed)
        return float((dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum())

    step = 1e-6
    measured = {}
    for name in (*wrt, "q"):
        x = q if name == "q" else captured[name]
        gradient = gradients.dq if name == "q" else gradients.captured[name]
        assert gradient.shape == x.shape and gradient.dtype == np.float64
        for trial in range(3):
            direction = draw(*x.shape, seed=20 + trial)
            ahead, back = (loss(**{name: x + sign * step * direction}) for sign in (1, -1))
            measured[name, trial] = (ahead - back) / (2 * step), (gradient * direction).sum()
    return gradients, measured


@pytest.mark.parametrize(
    ("text", "captured"),
    [
        ("score + slope[head] * (kv_idx - q_idx)", {"slope": draw(4)}),
        ("score * gain[kv_head, batch] + 0.1 * n[q_idx]", {"gain": draw(2, 2), "n": np.arange(5)}),
        ("score + table[q_idx - kv_idx + 3]", {"table": draw(8)}),
        ("score + table[q_idx - kv_idx + 3] * table[kv_idx]", {"table": draw(8)}),
        ("score + a[batch, head, q_idx, kv_idx]", {"a": draw(2, 4, 5, 7)}),
        ("where(kv_idx % 3 == 0, -inf, tanh(score) * g[head])", {"g": draw(4)}),
        ("where(q_idx == 1, -inf, score) + t[kv_idx, q_idx]", {"t": draw(3, 2)}),
        ("exp(-w[0] ** 2 * abs(q_idx - kv_idx)) * score", {"w": draw(1)}),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 1.5, "bias": draw(5, 7)}, {"seqs": GROUPED}],
    ids=["plain", "more", "group"],
)  # fmt: skip
def test_gradients_of_captured_arrays(
    text: str, captured: dict[str, Any], options: dict[str, Any]
) -> None:
    wrt = tuple(name for name, x in captured.items() if x.dtype.kind == "f")
    _, measured = gradients_of(text, wrt, options, **captured)
    for what, (by_difference, by_rule) in measured.items():
        assert by_difference == pytest.approx(by_rule, rel=1e-6, abs=1e-7), what


def test_gradients_of_captured_arrays_only_where_asked() -> None:
    q, k, v = arrays_of()
    mod = ScoreMod("score + a[head] * b[head]", a=draw(4), b=draw(4), wrt="b")
    out, lse = reference.attention(q, k, v, score_mod=mod, return_lse=True)
    gradients = reference.attention_backward(out, q, k, v, out, lse, score_mod=mod)
    assert list(gradients.captured) == ["b"]
    mod = ScoreMod("score + a[head]", a=draw(4))
    gradients = reference.attention_backward(out, q, k, v, out, lse, score_mod=mod)
    assert gradients.captured is None


def test_sequence_lengths_and_positions_are_those_inside_the_sequence() -> None:
    q, k, v = np.zeros((16, 2, 1)), np.zeros((25, 2, 1)), draw(25, 2, 1)
    text = "100 * (seqlen_q == n[batch]) * (seqlen_k == m[batch]) * (kv_idx < 2) * (kv_idx == q_idx % 2) + score"
    mod = ScoreMod(text, n=np.int32(LENS_Q), m=np.int64(LENS_K))
    out = reference.attention(q, k, v, seqs=GROUPED, score_mod=mod)
    starts_q, starts_k = (1, 5, 7, 12), (2, 6, 13, 15)
    for start_q, rows, start_k, keys in zip(starts_q, LENS_Q, starts_k, LENS_K, strict=True):
        for i in range(rows if keys else 0):
            np.testing.assert_allclose(out[start_q + i], v[start_k + i % 2], rtol=1e-12)


def test_minus_infinity_hides_a_key() -> None:
    q, k, v = arrays_of()
    mod = ScoreMod("where((q_idx + kv_idx) % 2 == 0 and q_idx != 3, score, -inf)")
    i, j = np.arange(5)[:, None], np.arange(7)
    mask = ((i + j) % 2 == 0) & (i != 3)
    given = reference.attention(q, k, v, score_mod=mod, return_lse=True)
    expected = reference.attention(q, k, v, mask=mask, return_lse=True)
    for x, y in zip(given, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    dout = draw(*given[0].shape, seed=3)
    gradients = reference.attention_backward(dout, q, k, v, *given, score_mod=mod)
    wanted = reference.attention_backward(dout, q, k, v, *expected, mask=mask)
    for x, y in zip(gradients[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert program(mod.text).additive


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_score_functions_of_their_own(again: Callable[[Any], Any]) -> None:
    """A copy, as of a model that holds a score function, has its own array, and so its own identity for torch.compile."""
    slopes = np.arange(3, dtype=np.float32)
    text = "where(on, score * w + slope[head] * n, score)"
    made = ScoreMod(text, slope=slopes, w=0.25, n=3, on=True, wrt="slope")
    other = again(made)
    assert other.text == made.text and other.scalars == made.scalars
    assert np.array_equal(other.arrays["slope"], slopes) and other.arrays["slope"] is not slopes
    assert other.handle != made.handle
    mask = rawattn.block_mask(np.tri(70, dtype=bool))
    assert np.array_equal(again(mask).to_bool(), mask.to_bool())
    assert again(mask).handle != mask.handle


def test_threads_that_make_equal_ones_share_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program finds the function by its handle, so there may be no second one that a program does not find."""
    together = threading.Barrier(2)

    class Objects(WeakValueDictionary[str, Any]):
        """Its `setdefault` lets another thread run between its two steps, as Python may."""

        def setdefault(self, key: str, default: Any = None) -> Any:
            found = self.get(key)
            if found is None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(0.2)
                self[key] = found = default
            return found

    monkeypatch.setattr(_handles, "_objects", Objects())
    made: list[ScoreMod] = []
    threads = [
        threading.Thread(target=lambda: made.append(ScoreMod("score * 3.25"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0]._function is made[1]._function is _handles.find(made[0].handle)
