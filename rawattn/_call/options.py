"""All options of attention with their types and defaults, and those checks of each that need no array.

The public verbs show the options in their signatures (`_call.signatures`). Internally the options of a call are one `Options`.
Arrays among them become inputs of the verb (`_runtime.option_arrays.with_arrays`). The values of the other options are part
of the keys by which prepared calls are found (`structural`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import ml_dtypes
import numpy as np

from rawattn._call import option_advice
from rawattn._call.hints import ACCEPTED_WINDOW, short, window_end
from rawattn._interop.integers import import_integers

if TYPE_CHECKING:
    from rawattn._call.seq_layout import SeqLayout

MAX_SPLITS = 256  # largest num_splits

_INT32_MAX = 2**31 - 1
# Kernels compute scale * log2(e) in float32, so it must stay finite there.
_MAX_SCALE = 2.0**127
# Kernels compute the reciprocal of softcap, and the square of scale / softcap, in float32.
_MIN_SOFTCAP, _MAX_SOFTCAP = 2.0**-60, 2.0**120


class AttentionOptions(TypedDict, total=False):
    """The options that attention and its backward share, for type checkers and for signatures."""

    seqs: SeqLayout | None
    causal: bool
    align: Literal["bottom-right", "top-left"]
    window: tuple[int | None, int | None] | None
    sink: int
    scale: float | None
    bias: Any
    mask: Any
    alibi_slopes: Any
    softcap: float | None
    score_mod: Any
    sink_logits: Any
    dropout_p: float
    seed: Any


class ForwardOptions(AttentionOptions, total=False):
    """The options of the forward."""

    num_splits: int | None


class Options(NamedTuple):
    """The options of a call as the caller gave them, or their defaults."""

    seqs: Any = None
    causal: Any = False
    align: Any = "bottom-right"
    window: Any = None
    sink: Any = 0
    scale: Any = None
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    softcap: Any = None
    score_mod: Any = None
    sink_logits: Any = None
    dropout_p: Any = 0.0
    seed: Any = None
    num_splits: Any = None


DEFAULTS = Options()
# Options that are arrays, in the order of a verb's inputs. Captured arrays and a seed on the device follow.
ARRAYS = ("bias", "mask", "alibi_slopes", "sink_logits")


class ArrayForm(NamedTuple):
    """The form of an option's array.

    shape: with all axes. given: the caller's shape. dense: whether the last axis has unit stride.
    kept: for a mask whose rows share listed keys (`topk_mask`), the number of entries of each list; else 0.
    """

    dtype: str
    shape: tuple[int, ...]
    given: tuple[int, ...]
    dense: bool = True
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """The options that change scores and probabilities; arrays by their form only.

    bias, mask: of four axes, (1 or batch; 1, nheads_kv or nheads_q; 1 or rows; 1 or keys). The dtype of a mask is "bool"; or
    "bits" for a BlockMask; or "kept" for kept keys whose bits a kernel writes (`_kernels.gathered`).
    alibi_slopes: (1 or batch, nheads_q).
    seed: the form of a seed on the device; None for a number.
    score_mod: the text of the function; score_scalars: its numbers; captured: the forms of its arrays.
    """

    softcap: float | None = None
    bias: ArrayForm | None = None
    mask: Any = None
    alibi_slopes: ArrayForm | None = None
    score_mod: Hashable = None
    score_scalars: tuple[float, ...] = ()
    captured: tuple[ArrayForm, ...] = ()
    sink_logits: ArrayForm | None = None
    dropout_p: float = 0.0
    seed: ArrayForm | None = None


def structural(options: Options) -> Any:
    """The options' part of the key of a prepared call: all values but `seqs`. Arrays have left the options before.

    Types are part of the key: True == 1 == 1.0, but an option may accept only one of them.
    """
    values: tuple[Any, ...] = options[1:]
    types = tuple(map(type, values))
    if tuple in types:  # a window
        types += tuple(type(end) for x in values if type(x) is tuple for end in x)
    return values, types


def causal(options: Options) -> bool:
    return flag("causal", options.causal)


def top_left(options: Options) -> bool:
    value = options.align
    if not isinstance(value, str) or value not in ("bottom-right", "top-left"):
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"align: got {for_message(value)}, expected 'bottom-right' or 'top-left'")
    return value == "top-left"


def window(options: Options) -> tuple[int | None, int | None]:
    """(left, right) of `window`, where `causal` makes right 0; None is unbounded."""
    left, right = (None, None) if options.window is None else _window(options.window)
    return left, 0 if causal(options) else right


def _one_sided(given: Any) -> str:
    """Advice for a `window` that is one number, which other libraries take; "" for anything else."""
    if isinstance(given, bool) or not isinstance(given, int) or given < -1:
        return ""
    if given == -1:
        return "; where -1 meant unbounded write window=None"
    return f"; {given} keys on each side are window=({given}, {given}), those before a row alone ({given}, 0)"


def _window(given: Any) -> tuple[int | None, int | None]:
    if not isinstance(given, tuple):
        fix = "; write window=tuple(window)" if isinstance(given, list) else _one_sided(given)
        raise TypeError(f"window: got {for_message(given)}, expected {ACCEPTED_WINDOW}{fix}")
    if len(given) != 2:
        raise ValueError(f"window: got {for_message(given)}, expected {ACCEPTED_WINDOW}")
    left, right = map(window_end, given)
    # A row and a key of one sequence are never that far apart, so such an end is unbounded.
    return (
        None if left is None or left >= _INT32_MAX else left,
        None if right is None or right >= _INT32_MAX else right,
    )


def sink(options: Options) -> int:
    value = options.sink
    if type(value) is int and value == 0:
        return 0
    return min(nonnegative_int("sink", value, "an int >= 0"), _INT32_MAX)


def scale(options: Options, headdim: int) -> float:
    if options.scale is None:
        return 1 / math.sqrt(headdim)
    accepted = f"a finite number of magnitude at most {_MAX_SCALE:.2g}, or None for 1/sqrt(D)"
    value = as_float("scale", options.scale, accepted)
    if not abs(value) <= _MAX_SCALE:
        raise ValueError(f"scale: got {for_message(options.scale)}, expected {accepted}")
    return value


def softcap(options: Options) -> float | None:
    if options.softcap is None:
        return None
    accepted = f"a finite number above 0, from {_MIN_SOFTCAP:.2g} to {_MAX_SOFTCAP:.2g}, or None for no cap"
    value = as_float("softcap", options.softcap, accepted)
    if not _MIN_SOFTCAP <= value <= _MAX_SOFTCAP:
        raise ValueError(f"softcap: got {for_message(options.softcap)}, expected {accepted}")
    return value


def dropout_p(options: Options) -> float:
    accepted = "a probability in [0, 1)"
    value = as_float("dropout_p", options.dropout_p, accepted)
    if not 0 <= value < 1:
        raise ValueError(f"dropout_p: got {for_message(options.dropout_p)}, expected {accepted}")
    if value > 0 and options.seed is None:
        raise ValueError(f"seed: got None, expected an integer, since dropout_p = {value}")
    return value


def seed(options: Options) -> Any:
    """An int, an integer array of one element, or None."""
    value = options.seed
    accepted = "an int, or an integer array of one element"
    if value is None or (isinstance(value, (int, np.integer)) and not isinstance(value, bool)):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"seed: got {for_message(value)}, expected {accepted}")
    array = import_integers("seed", value)
    if array.size != 1:
        raise ValueError(f"seed: got shape {array.shape}, expected {accepted}")
    return array


def num_splits(options: Options) -> int | None:
    if options.num_splits is None:
        return None
    accepted = f"an int from 1 to {MAX_SPLITS}, or None"
    value = nonnegative_int("num_splits", options.num_splits, accepted)
    if not 1 <= value <= MAX_SPLITS:
        raise ValueError(f"num_splits: got {options.num_splits}, expected {accepted}")
    return value


# Options that are numbers and change scores or probabilities, with their checks. Each is a field of `ScoreOptions`.
SCORE_NUMBERS: dict[str, Callable[[Options], Any]] = {"softcap": softcap, "dropout_p": dropout_p}
_NUMBER_DEFAULTS = tuple((name, getattr(DEFAULTS, name)) for name in SCORE_NUMBERS)


def leaves_scores(options: Options) -> bool:
    """Whether scores and probabilities are unchanged by all options that are not arrays."""
    return (
        all(
            type(x := getattr(options, name)) is type(default) and x == default
            for name, default in _NUMBER_DEFAULTS
        )
        and options.score_mod is None
        and (options.seed is None or type(options.seed) is int)
    )


def nonnegative_int(name: str, value: Any, accepted: str) -> int:
    """`value` as an int >= 0. accepted: what the option accepts, for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name}: got {for_message(value)}, expected {accepted}{option_advice.number(name, value)}"
        )
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected {accepted}")
    return int(value)


def as_float(name: str, value: Any, accepted: str) -> float:
    """`value` as a float, infinite for an int beyond a float's range. accepted: what the option accepts, for the message."""
    numbers = (float, int, np.floating, np.integer, ml_dtypes.bfloat16)
    if isinstance(value, bool) or not isinstance(value, numbers):
        raise TypeError(
            f"{name}: got {for_message(value)}, expected {accepted}{option_advice.number(name, value)}"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_array(name: str, value: Any) -> None:
    """TypeError if the value of an option that takes an array is no array."""
    if not hasattr(value, "__dlpack__"):
        accepted = "an array of bool, a rawattn.BlockMask" if name == "mask" else "an array"
        raise TypeError(
            f"{name}: got {for_message(value)}, expected {accepted} or None{option_advice.array_option(name, value)}"
        )


def no_score_mod(value: Any) -> TypeError:
    """The error for a `score_mod` that is not a ScoreMod."""
    advice = option_advice.array_option("score_mod", value)
    return TypeError(
        f"score_mod: got {for_message(value)}, expected a rawattn.ScoreMod or None{advice}"
    )


def backend(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value in ("cuda", "cpu")):
        return value
    error = ValueError if isinstance(value, str) else TypeError
    shown = for_message(value) if hasattr(value, "__dlpack__") else short(value)
    raise error(f"backend: got {shown}; accepted are 'cuda', 'cpu' and None")


def flag(name: str, value: Any) -> bool:
    """`value` as a bool. Python's and NumPy's bools are accepted."""
    if value is not True and value is not False and not isinstance(value, np.bool_):
        raise TypeError(
            f"{name}: got {for_message(value)}, expected a bool: True or False{option_advice.number(name, value)}"
        )
    return bool(value)


def for_message(value: Any) -> str:
    """A value in short form, for a message. Arrays are shown by type and shape: their contents may be on a GPU."""
    if hasattr(value, "__dlpack__"):
        return f"a {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"
    return f"{short(value)} ({type(value).__name__})"
