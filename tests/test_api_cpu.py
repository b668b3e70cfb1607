"""The public calls on the CPU backend: values, every framework, and refused calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path

import numpy as np
import pytest

import rawattn
from tests import exhaustive
from tests.bad_calls import BAD_CALLS, Bad, check_refused
from tests.cases import Case, dense
from tests.curated_cases import curated
from tests.frameworks import Framework, Jax, NumPy, Torch
from tests.random_cases import random_case
from tests.shim.traits import of_call
from tests.verify import run, verify

NUMPY = NumPy()
CHEAP = [case for case in curated() if case.scores <= 300_000]
# Conversion through DLPack depends on dtype, strides and integers, not on mask or shape.
EXCHANGED = [
    case
    for case in CHEAP
    if case.name.startswith(("d64", "padded-", "slots-", "ragged-"))
    and case.layout != "reversed"  # torch has no negative strides
]


def exchanged(case: Case) -> Iterable[Hashable]:
    yield case.dtype, case.packed
    yield case.layout, case.give_out, case.packed
    yield case.integers, case.on_device, case.max_seqlen
    yield case.by_q, case.by_k, case.packed


@pytest.mark.parametrize("case", exhaustive.mark(CHEAP, of_call), ids=str)
def test_curated(case: Case) -> None:
    verify(case, NUMPY, backend="cpu")


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(20, 100))]
)
def test_random(seed: int) -> None:
    verify(random_case(seed), NUMPY, backend="cpu")


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", [Torch(), Jax()], ids=lambda framework: framework.name)
@pytest.mark.parametrize("case", exhaustive.mark(EXCHANGED, exchanged), ids=str)
def test_frameworks(case: Case, framework: Framework) -> None:
    pytest.importorskip(framework.name)
    verify(case, framework, backend="cpu")


@pytest.mark.parametrize("bad", BAD_CALLS, ids=str)
def test_mistakes_are_refused(bad: Bad) -> None:
    def call(**arguments: object) -> object:
        return rawattn.attention(**{"backend": "cpu", **arguments})

    check_refused(bad, NUMPY, call)


@pytest.mark.frameworks
@pytest.mark.parametrize("bad", [bad for bad in BAD_CALLS if "q" in bad.change], ids=str)
def test_mistakes_with_torch_are_refused(bad: Bad) -> None:
    pytest.importorskip("torch")

    def call(**arguments: object) -> object:
        return rawattn.attention(**{"backend": "cpu", **arguments})

    check_refused(bad, Torch(), call)


def _ones() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones((1, 3, 2, 8), np.float32), *np.ones((2, 1, 4, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda q: q, "shares memory with q"),
        (lambda q: np.broadcast_to(np.ones(8, np.float32), q.shape), "read-only|writable"),
        (
            lambda q: np.lib.stride_tricks.as_strided(
                np.ones(8, np.float32), q.shape, (0, 0, 0, 4)
            ),
            "overlap",
        ),
        (lambda q: np.ones((*q.shape, 2), np.float32)[..., 0], "stride"),
    ],
    ids=["is-an-input", "read-only", "overlaps-itself", "last-axis-strided"],
)
def test_unusable_out_is_refused(make, says) -> None:
    q, k, v = _ones()
    out = make(q)
    before = out.copy()
    with pytest.raises(ValueError, match=f"^out: .*({says})"):
        rawattn.attention(q, k, v, out=out, backend="cpu")
    np.testing.assert_array_equal(out, before)


def test_a_vjp_takes_every_option_of_the_call() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 5, 2, 8), dtype=np.float32)
    out = np.empty_like(q)
    got, backward = rawattn.attention_vjp(q, k, v, causal=True, num_splits=2, out=out)
    assert got is out and np.array_equal(out, rawattn.attention(q, k, v, causal=True))
    _, expected = rawattn.attention_vjp(q, k, v, causal=True)
    for mine, theirs in zip(backward(dout)[:3], expected(dout)[:3], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(ValueError, match=r"^num_splits: got 0"):
        rawattn.attention_vjp(q, k, v, num_splits=0)


def test_choices_may_be_bools_of_numpy() -> None:
    q, k, v = _ones()
    yes = np.bool_(True)
    out, lse = rawattn.attention(q, k, v, causal=yes, return_lse=yes)
    bias = np.zeros((q.shape[1], k.shape[1]), np.float32)
    options = {"want_dbias": np.bool_(False), "deterministic": yes}
    assert rawattn.attention_backward(out, q, k, v, out, lse, bias=bias, **options).dbias is None


def test_read_only_inputs_are_fine() -> None:
    q, k, v = _ones()
    for x in (q, k, v):
        x.flags.writeable = False
    assert np.all(rawattn.attention(q, k, v, backend="cpu") == 1)


@pytest.mark.frameworks
def test_tensor_that_requires_grad_is_refused_while_torch_records() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in _ones())
    for name in "qkv":
        given = {"q": q, "k": k, "v": v}
        given[name] = given[name].detach().requires_grad_()
        with pytest.raises(
            RuntimeError, match=rf"^{name}: .*rawattn\.torch\.attention.*\.detach\(\)"
        ):
            rawattn.attention(**given, backend="cpu")
        with torch.no_grad():
            out = rawattn.attention(**given, backend="cpu")
        assert not out.requires_grad
        assert bool((out == 1).all())
        vjp, _ = rawattn.attention_vjp(**given, backend="cpu")  # the caller computes the gradients
        assert bool((vjp == 1).all())


@pytest.mark.frameworks
def test_result_is_in_the_framework_of_q() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = _ones()
    assert isinstance(rawattn.attention(q, torch.from_numpy(k), v, backend="cpu"), np.ndarray)
    assert isinstance(rawattn.attention(torch.from_numpy(q), k, v, backend="cpu"), torch.Tensor)


def test_same_call_gives_the_same_bits() -> None:
    case = dense("repeat", 2, 300, 300, nheads_q=6, nheads_kv=3, dtype="float32", causal=True)
    first = run(case, NUMPY, backend="cpu")
    for _ in range(5):
        again = run(case, NUMPY, backend="cpu")
        assert again[0].tobytes() == first[0].tobytes()
        assert again[1].tobytes() == first[1].tobytes()


_IMPORT = """
import sys, time
import numpy, ml_dtypes
started = time.perf_counter()
import rawattn
seconds = time.perf_counter() - started
loaded = {"cupy", "torch", "jax", "cuda"} & {name.partition(".")[0] for name in sys.modules}
assert not loaded, f"import rawattn imported {loaded}"
print(seconds)
"""


def test_import_is_light(tmp_path: Path) -> None:
    """`import rawattn` loads no GPU library and no framework, and adds at most 0.2 s to the import of NumPy.

    The best of five runs counts. The first run writes bytecode, which an installed package already has, even if the environment
    forbids it.
    """
    command = [sys.executable, "-c", _IMPORT]
    environment = {
        **os.environ,
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    runs = [
        subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        for _ in range(5)
    ]
    assert min(float(run.stdout) for run in runs) <= 0.2


_WHILE_TORCH_IS_IMPORTED = """
import sys, types
import numpy as np
import rawattn
from rawattn import SeqLayout

# As another thread leaves them for seconds while it imports torch.
for name in ("torch", "torch.autograd", "torch.autograd.forward_ad"):
    sys.modules[name] = types.ModuleType(name)
x = np.ones((1, 3, 2, 8), np.float32)
SeqLayout.from_lengths([2])
SeqLayout.from_padding_mask(np.ones((1, 3), bool))
out, lse = rawattn.attention(x, x, x, seqs=SeqLayout(seqlen_q=[3]), return_lse=True)
rawattn.attention(x, x, x, out=np.empty_like(x))
rawattn.attention_backward(x, x, x, x, out, lse)
rawattn.combine([out, out], [lse, lse])
rawattn.plan(rawattn.attention, x, x, x)(x, x, x)
rawattn.attention(x, x, x, score_mod=rawattn.ScoreMod("score * 2"))
"""


def test_another_thread_may_import_torch_meanwhile() -> None:
    subprocess.run([sys.executable, "-c", _WHILE_TORCH_IS_IMPORTED], check=True)
