"""Features of scores on NumPy's arrays."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import rawattn
from rawattn._bench import machine
from rawattn._bench import score_features as features
from tests.bench_scores.features import _draw


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
    monkeypatch.setattr(features, "_late_rawattn", library)
