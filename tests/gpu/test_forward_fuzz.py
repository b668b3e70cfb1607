"""Random calls with every form and option. RAWATTN_FUZZ=first:count runs other seeds than the default ones."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from rawattn._kernels.selection import only
from tests.cases import Case
from tests.frameworks import CuPy, Jax, NumPy, Torch
from tests.landed import without_missing
from tests.random_cases import random_case
from tests.score_cases import random_score_case
from tests.tiles import clusters, splitting, splitting_by_length, tensor_stores
from tests.verify import verify

_FIRST, _COUNT = map(int, os.environ.get("RAWATTN_FUZZ", "0:160").split(":"))
# Every fourth call goes through another framework.
_FRAMEWORKS = [CuPy(), CuPy(), CuPy(), NumPy(), CuPy(), CuPy(), CuPy(), Torch("cuda"), Jax("gpu")]


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT))
def test_random(seed: int) -> None:
    _check(seed, random_case(seed))


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + 3 * _COUNT // 40))
def test_random_scores(seed: int) -> None:
    _check(seed, without_missing(random_score_case(seed), "cuda", "attention"))


def _check(seed: int, case: Case) -> None:
    framework = _FRAMEWORKS[seed % len(_FRAMEWORKS)]
    if framework.name in ("torch", "jax"):
        pytest.importorskip(framework.name)
    if framework.name == "torch" and case.layout == "reversed":
        framework = CuPy()
    # Odd seeds use the portable kernel. Even seeds use the kernels that calls choose, some of them with tiles in clusters, with
    # outputs that TMA stores, or with tiles split by keys (stream-K).
    ways = nullcontext, clusters, splitting_by_length, tensor_stores, splitting
    with only("portable") if seed % 2 else ways[seed // 2 % len(ways)]():
        verify(case, framework)
