"""The features of cases of the suite `scores`: what happens between q . k and the softmax, its arrays and our options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import rawattn
from rawattn._bench import counters, machine

if TYPE_CHECKING:
    from rawattn._bench.cases import Case

# The largest RMS of the difference of two contenders' results, over the RMS of one. Two correct bfloat16 kernels differ by some
# tenths of a percent, in gradients too; a wrong mask makes a far larger difference.
AGREE = 0.02

TILE = 128
# Functions of this package are looked up when a case needs them, so that a missing one ends only that case.
_late_rawattn: Any = rawattn


@dataclass(frozen=True)
class Feature:
    """No feature; base class of the features.

    gradients: names of gradients of the feature's arrays that a backward returns after dq, dk and dv.
    q_factor: a factor of q, so large that results without the feature would differ.
    """

    gradients: ClassVar[tuple[str, ...]] = ()
    q_factor: ClassVar[float] = 1.0

    @property
    def elements(self) -> int:
        """The elements of the feature's large arrays, in the dtype of the call."""
        return 0

    @property
    def agree(self) -> float:
        """The RMS of the difference of two results, over that of one, up to which both count as right."""
        return AGREE

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        """The feature's CuPy arrays, which all contenders get."""
        return {}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The feature as options of `rawattn.attention`."""
        return {}

    def visible(self, len_q: int, len_k: int, causal: bool) -> counters.Visible | None:
        """The visible pairs of a sequence; None if causal and the window determine them."""
        return None


PLAIN = Feature()


@dataclass(frozen=True)
class Bias(Feature):
    """An additive bias of this shape."""

    shape: tuple[int, int, int, int]

    gradients = ("dbias",)

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        return {"bias": machine.random_array(self.shape, dtype)}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"bias": arrays["bias"]}


@dataclass(frozen=True)
class Alibi(Feature):
    """The built-in ALiBi, with the usual slopes."""

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        import cupy

        heads = np.arange(1, case.nheads_q + 1)
        return {"slopes": cupy.asarray(2.0 ** (-8 * heads / case.nheads_q), np.float32)}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"alibi_slopes": arrays["slopes"]}


@dataclass(frozen=True)
class AlibiText(Alibi):
    """The same scores under a causal mask, by a `ScoreMod`."""

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        text = "score + slope[head] * (kv_idx - q_idx)"
        return {"score_mod": _late_rawattn.ScoreMod(text, slope=arrays["slopes"])}


@dataclass(frozen=True)
class Softcap(Feature):
    cap: float = 30.0

    # Scores then have a standard deviation of 4, and a cap of 30 makes the largest of them smaller by a fifth.
    q_factor = 4.0

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"softcap": self.cap}


@dataclass(frozen=True)
class Dropout(Feature):
    p: float = 0.1

    @property
    def agree(self) -> float:
        # Two contenders have different dropout masks, so their results differ by about sqrt(2 p) of the RMS of either: for v of
        # mean 0 each mask adds a variance of p / (1 - p) to that of a result, 1.
        return 1.1 * float(np.sqrt(2 * self.p))

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"dropout_p": self.p, "seed": 0}


@dataclass(frozen=True)
class Sinks(Feature):
    """A learned sink for each head, with about the weight of 50 keys, so that a result without it differs."""

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        return {"sink_logits": 4 + machine.random_array((case.nheads_q,), "float32")}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"sink_logits": arrays["sink_logits"]}


@dataclass(frozen=True)
class Tiles(Feature):
    """A BlockMask in which a random share of the 128 x 128 tiles is visible."""

    share: float

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        import cupy

        tiles = cupy.asarray(live_tiles(self.share, case.rows, case.keys))
        return {"mask": tiles.repeat(TILE, axis=0).repeat(TILE, axis=1)[None, None]}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"mask": _late_rawattn.block_mask(arrays["mask"])}

    def visible(self, len_q: int, len_k: int, causal: bool) -> counters.Visible | None:
        live = live_tiles(self.share, len_q, len_k)
        rows, keys = (TILE * int(live.any(axis).sum()) for axis in (1, 0))
        return counters.Visible(TILE * TILE * int(live.sum()), rows, keys)


def live_tiles(share: float, len_q: int, len_k: int) -> Any:
    """A bool NumPy array (query tiles, key tiles): True for exactly this share of tiles, rounded; the same in every call."""
    shape = (len_q // TILE, len_k // TILE)
    live = np.zeros(shape[0] * shape[1], bool)
    live[: round(share * live.size)] = True
    return np.random.default_rng(0).permutation(live).reshape(shape)


@dataclass(frozen=True)
class Documents(Feature):
    """A BlockMask of documents of equal length, made from ranges of keys."""

    length: int

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        import cupy

        document = cupy.arange(case.rows, dtype=np.int32) // self.length
        begin = document * self.length
        ranges = cupy.stack([begin, begin + self.length], axis=-1)[None, :, None]
        return {"document": document, "ranges": ranges.repeat(case.batch, axis=0)}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"batch": case.batch, "seqlen_q": case.rows, "seqlen_k": case.keys}
        return {"mask": _late_rawattn.block_mask(ranges=arrays["ranges"], **sizes)}

    def visible(self, len_q: int, len_k: int, causal: bool) -> counters.Visible | None:
        one = counters.visible(self.length, self.length, causal=causal)
        times = len_q // self.length
        return counters.Visible(times * one.pairs, len_q, len_k)


@dataclass(frozen=True)
class TopK(Feature):
    """A BlockMask of the keys with the largest random importance, the same keys for every row."""

    kept: int

    def arrays(self, case: Case, dtype: str) -> dict[str, Any]:
        import cupy

        return {"importance": cupy.asarray(importance(case.keys)[None, None, None])}

    def options(self, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"mask": _late_rawattn.topk_mask(arrays["importance"], min(self.kept, case.keys))}

    def visible(self, len_q: int, len_k: int, causal: bool) -> counters.Visible | None:
        kept = np.argsort(-importance(len_k), kind="stable")[: self.kept]
        first = np.maximum(kept - (len_k - len_q), 0) if causal else 0 * kept
        rows = len_q - first
        return counters.Visible(int(rows.sum()), int(rows.max()), kept.size)


@functools.lru_cache(maxsize=2)
def importance(len_k: int) -> Any:
    """The random importance of every key, a float32 NumPy array; the same in every call."""
    return np.random.default_rng(0).standard_normal(len_k, np.float32)
