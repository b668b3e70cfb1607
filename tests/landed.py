"""Which options a backend supports. Tests of the others are skipped, with the option's name."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

import rawattn
from rawattn._kernels import registry
from tests.cases import Case, dense
from tests.frameworks import NumPy
from tests.inputs import materialise
from tests.score_arrays import OPTIONS
from tests.score_cases import EACH
from tests.verify import options_of

VERBS = ("attention", "attention_backward")
# Names of features in the kernels' registry, where they differ from the option's.
_FEATURES = {"alibi_slopes": "alibi", "dropout_p": "dropout", "mask": "block_mask"}


@lru_cache
def lacking(backend: str, verb: str) -> frozenset[str]:
    """Return the options that a verb does not support. For "cuda" this reads the registry and runs nothing."""
    if backend == "cuda":
        features = registry.CANDIDATES[verb][-1].load().features
        return frozenset(x for x in OPTIONS if _FEATURES.get(x, x) not in features)
    return frozenset(option for option in OPTIONS if not _on_cpu(verb, option))


def require(case: Case, backend: str, *verbs: str) -> None:
    """Skip the test if the backend does not support an option of the case."""
    for verb in verbs or VERBS:
        missing = [x for x in case.score_options if x in lacking(backend, verb)]
        if missing:
            pytest.skip(f"{verb} of {backend} does not have it yet: {', '.join(missing)}")


def _on_cpu(verb: str, option: str) -> bool:
    inputs = materialise(dense("probe", 1, 3, 4, headdim=4, dtype="float32", **EACH[option]))
    arrays = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    options = options_of(inputs, NumPy())
    out, lse = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    try:
        if verb == "attention":
            rawattn.attention(*arrays, **options, backend="cpu")
        else:
            rawattn.attention_backward(out, *arrays, out, lse, **options, backend="cpu")
    except NotImplementedError:
        return False
    return True


def without_missing(case: Case, backend: str, *verbs: str) -> Case:
    """Drop the options that the backend does not support from a random case."""
    empty = Case()
    missing = frozenset().union(*(lacking(backend, verb) for verb in verbs or VERBS))
    return replace(case, **{x: getattr(empty, x) for x in case.score_options if x in missing})
