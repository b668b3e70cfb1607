"""The options that change scores and probabilities, through the public calls on the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from tests import exhaustive, gradients, verify
from tests.cases import Case
from tests.frameworks import NumPy
from tests.landed import VERBS, lacking, require, without_missing
from tests.score_cases import curated_scores, random_score_case

NUMPY = NumPy()
CASES = curated_scores()
# One case for all that differ in the dtype or the head dim alone: the CPU backend treats these alike.
COMMON = exhaustive.mark(CASES, lambda case: {(case.score_options, case.packed), case.name.split("-")[0],
    *(("bias", case.bias.values, case.bias.layout) for _ in "x" if case.bias),
    *(("mask", case.mask.values, case.mask.layout) for _ in "x" if case.mask)})  # fmt: skip
SEEDS = exhaustive.thin(range(200), 20)


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_forward(case: Case) -> None:
    require(case, "cpu", "attention")
    verify.verify(case, NUMPY, backend="cpu")


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_backward(case: Case) -> None:
    require(case, "cpu")
    gradients.verify(case, NUMPY, backend="cpu")


@pytest.mark.parametrize("seed", SEEDS)
def test_random(seed: int) -> None:
    case = random_score_case(seed)
    verify.verify(without_missing(case, "cpu", "attention"), NUMPY, backend="cpu")
    gradients.verify(without_missing(case, "cpu"), NUMPY, backend="cpu")


def test_backward_where_dp_and_delta_cancel() -> None:
    """The rounding of out is most of the error of dq, and is undone by chance where the tolerance is measured."""
    case = without_missing(random_score_case(302001), "cpu")
    gradients.verify(case, NUMPY, backend="cpu")
    call = gradients.backward_of(case)
    of_given, of_low = (np.abs(x - call.exact[0]).max() for x in (call.of_given[0], *call.low[0]))
    assert of_given > 4 * of_low
    with pytest.raises(AssertionError, match="dq: largest error"):
        gradients.check_gradient(call, 0, 1.02 * call.of_given[0])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_nothing_is_skipped(backend: str, verb: str) -> None:
    """No backend lacks an option: tests of that option would be skipped."""
    assert not lacking(backend, verb)
