"""The forward and the backward as two torch operators, for graphs: torch.compile knows only the shapes of their results.

An operator takes tensors, numbers and strings. So a `SeqLayout` is passed as its integer arrays, a window as its two
ends, and a seed as an int or as a tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rawattn import ScoreMod, SeqLayout, attention, attention_backward
from rawattn._call.hints import ACCEPTED_WINDOW
from rawattn._call.options import ARRAYS, DEFAULTS, ForwardOptions, Options, flag
from rawattn._handles import find
from rawattn._interop import dynamo, forward_mode
from rawattn._interop.integers import TensorIntegers
from rawattn._masks.block_mask import BlockMask
from rawattn._torch.captured import checked, tensors_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# The types of options (annotations of `ForwardOptions`) in torch's schema language.
_TYPES = {
    **{"bool": "bool", "int": "SymInt", "int | None": "SymInt?", "float": "float"},
    **{"float | None": "float?", "Any": "Tensor?", "Literal": "str"},
}
# Options that an operator takes in another form: a window as its two ends, a seed as a number or a tensor, and objects as
# their handles. A score function's captured tensors are inputs of their own, with the indices of those that get a gradient.
# These are passed, and not looked up by the handle, since torch caches programs on disk by the arguments of their operators:
# the arguments must determine which results there are.
_SPLIT_OPTIONS = {
    "window": ("SymInt? window_left", "SymInt? window_right"),
    "mask": ("Tensor? mask", "str? block_mask"),
    "seed": ("SymInt? seed", "Tensor? seed_array"),
    "score_mod": ("str? score_mod", "Tensor[] captured", "int[]? differentiated"),
}


def _parameters() -> tuple[str, ...]:
    """The schema of an operator's arguments behind those of a `Layout`: all options but `seqs`, then what is no option."""
    found: list[str] = []
    for name, annotation in ForwardOptions.__annotations__.items():
        if name != "seqs":
            kind = annotation.__forward_arg__.partition("[")[0]
            found += _SPLIT_OPTIONS.get(name) or (f"{_TYPES[kind]} {name}",)
    return (*found, "bool deterministic", "str? backend")


_PARAMETERS = _parameters()
_NAMES = tuple(parameter.split()[1] for parameter in _PARAMETERS)


class Layout(NamedTuple):
    """A `SeqLayout` as the operators take it: its arrays as tensors, then the bounds of its lengths."""

    seqstart_q: Any = None
    seqstart_k: Any = None
    seqlen_q: Any = None
    seqlen_k: Any = None
    cu_seqlen_q: Any = None
    cu_seqlen_k: Any = None
    position_q: Any = None
    position_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


_LAYOUT_AT = 3
_MAXIMA_AT = _LAYOUT_AT + Layout._fields.index("max_seqlen_q")
_OPTIONS_AT = _LAYOUT_AT + len(Layout._fields)
_TENSOR_ARGUMENTS = tuple(x.split()[1] for x in _PARAMETERS if x.startswith("Tensor?"))
_INDICES = {name: _OPTIONS_AT + n for n, name in enumerate(_NAMES)}


def layout_of(seqs: SeqLayout | None) -> Layout:
    """The arrays of `seqs` as tensors. Runs while torch traces."""
    if seqs is None:
        return Layout()
    given = seqs._deferred_arguments
    if given is not None:  # made in the compiled function
        return Layout(**{name: _tensor(name, x) for name, x in given.items()})
    # Read from `_arrays`: the public attributes may make a CuPy array, which torch would trace.
    arrays = {name: _tensor(name, x) for name, x in seqs._arrays.items()}
    return Layout(**arrays, max_seqlen_q=seqs.max_seqlen_q, max_seqlen_k=seqs.max_seqlen_k)


def with_tensors(options: Options) -> Options:
    """Options of a call that is not compiled, under a dispatch mode: what NumPy has made as tensors and Python's own values."""
    arrays = {name: x for name, x in options._asdict().items() if isinstance(x, np.ndarray)}
    found = {name: _tensor_of_array(x) for name, x in arrays.items() if name in (*ARRAYS, "seed")}
    if isinstance(options.causal, np.bool_):
        found["causal"] = bool(options.causal)
    return options._replace(**found) if found else options


def _tensor_of_array(array: np.ndarray) -> torch.Tensor:
    if not array.flags.writeable or min(array.strides, default=0) < 0:  # torch takes neither
        array = array.copy()
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def arguments_of(options: Options, deterministic: Any, backend: str | None) -> tuple[Any, ...]:
    """The arguments of an operator, in the order of `_PARAMETERS`. Runs while torch traces.

    TypeError, in the library's words, for what the operator's schema would refuse or has no type for.
    """
    _check(options)
    given = options._asdict()
    for name, accepted in _NUMBERS.items():
        given[name] = _number(name, given[name], accepted)
    given["window_left"], given["window_right"] = _ends_of(options.window)
    given["seed"], given["seed_array"] = _seed_of(options.seed)
    given["captured"], given["differentiated"], given["block_mask"] = (), None, None
    if isinstance(options.score_mod, ScoreMod):
        given["captured"] = checked(options.score_mod)
        names = list(tensors_of(options.score_mod))
        wrt = options.score_mod.text.wrt
        given["differentiated"] = [names.index(name) for name in wrt if name in names] or None
        given["score_mod"] = options.score_mod.handle
    elif options.score_mod is not None:
        kind = type(options.score_mod).__name__
        raise TypeError(f"score_mod: got {kind}, expected a rawattn.ScoreMod or None")
    if isinstance(options.mask, BlockMask):
        given["mask"], given["block_mask"] = None, options.mask.handle
    given["deterministic"] = flag("deterministic", deterministic)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: got {backend}, expected 'cuda', 'cpu' or None")
    given["backend"] = backend
    return tuple([given[name] for name in _NAMES])


def _check(options: Options) -> None:
    for name in ARRAYS:
        x = getattr(options, name)  # under torch.compile NumPy arrays are tensors
        if isinstance(x, (bool, int, float, str, list, tuple)):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor or None")
    causal, align, seqs = options.causal, options.align, options.seqs
    if not isinstance(causal, bool):
        raise TypeError(
            "causal: expected True or False; a bool of NumPy is a tensor under torch.compile: pass bool(causal)"
        )
    if not isinstance(align, str):
        raise TypeError(f"align: got {align}, expected 'bottom-right' or 'top-left'")
    if seqs is not None and not isinstance(seqs, SeqLayout):
        raise TypeError(f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None")


# Options that are numbers, with the text of what is accepted. _WHOLE: those that must be ints.
_WHOLE = {"sink": "an int >= 0", "num_splits": "an int from 1 to 256, or None"}
_NUMBERS = {
    **_WHOLE,
    "scale": "a finite number, or None for 1/sqrt(D)",
    "softcap": "a number above 0, or None for no cap",
    "dropout_p": "a probability in [0, 1)",
}


def _number(name: str, given: Any, accepted: str) -> Any:
    x = _of_python(given)
    if (
        _is_int(x)
        or (x is None and getattr(DEFAULTS, name) is None)
        or (
            isinstance(x, (float, torch.SymFloat))
            and name not in _WHOLE
            and _value_is_readable(given)
        )
    ):
        return x
    shown = given if isinstance(given, (bool, float, str)) else type(given).__name__
    of_arrays = isinstance(given, (np.ndarray, torch.Tensor))
    fix = f"; pass {name}.item(), made outside of the compiled function" if of_arrays else ""
    raise TypeError(f"{name}: got {shown}, expected {accepted}{fix}")


def _value_is_readable(x: Any) -> bool:
    """Whether torch.compile can read the value of x: of a NumPy float only if it has 64 bits."""
    return not isinstance(x, np.ndarray) or torch.as_tensor(x).dtype is torch.float64


def _of_python(x: Any) -> Any:
    """A NumPy number as a Python number. Under torch.compile a NumPy number is an array."""
    return x.item() if isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0 else x


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _ends_of(window: Any) -> tuple[Any, Any]:
    if window is None:
        return None, None
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window: got {window!r}, expected {ACCEPTED_WINDOW}")
    left, right = (_of_python(end) for end in window)
    for end in (left, right):
        if end is not None and not _is_int(end):
            raise TypeError(f"window: got {end}, expected {ACCEPTED_WINDOW}")
    return left, right


def _seed_of(seed: Any) -> tuple[int | None, Any]:
    """(int, None) or (None, tensor): the two arguments of the operator that stand for the seed."""
    if seed is None or isinstance(seed, torch.Tensor):
        return None, seed
    seed = _of_python(seed)
    if not _is_int(seed):
        raise TypeError(
            f"seed: got {type(seed).__name__}, expected an int, or an integer tensor of one element"
        )
    if not -(2**63) <= seed < 2**63:  # only its low 64 bits count
        seed = (seed + 2**63) % 2**64 - 2**63
    return seed, None


def _tensor(name: str, integers: Any) -> Any:
    if integers is None or name.startswith("max"):
        return integers
    if isinstance(integers, TensorIntegers):
        return integers.tensor
    if isinstance(integers, (np.ndarray, list, tuple, torch.Tensor)):
        return dynamo.tensor(integers)
    raise NotImplementedError(
        f"seqs: {name} is a GPU array of another library, which torch.compile cannot follow; expected a tensor, as by "
        f"torch.from_dlpack({name}), or host integers"
    )


def run(q: Any, k: Any, v: Any, layout: Layout, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """(out, lse), computed by the operator. arguments: from `arguments_of`."""
    results: tuple[Any, Any] = _attention(q, k, v, *layout, *arguments)
    return results


def _named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The options by name. arguments: of an operator, from those of the layout on."""
    return dict(zip(_NAMES, arguments[len(Layout._fields) :], strict=True))


def _keywords(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords for `rawattn.attention`. arguments: of an operator, from those of the layout on."""
    layout = Layout(*arguments[: len(Layout._fields)])
    keywords = _named(arguments)
    del keywords["deterministic"]
    window = keywords.pop("window_left"), keywords.pop("window_right")
    block_mask, score_mod = keywords.pop("block_mask"), keywords["score_mod"]
    captured = keywords.pop("captured")
    del keywords["differentiated"]
    if block_mask is not None:
        keywords["mask"] = find(block_mask)
    if score_mod is not None:
        keywords["score_mod"] = find(score_mod).with_tensors(captured)
    seed_array = keywords.pop("seed_array")
    if seed_array is not None:
        keywords["seed"] = seed_array
    given = any(x is not None for x in layout)
    seqs = SeqLayout(**layout._asdict()) if given else None
    return {**keywords, "window": None if window == (None, None) else window, "seqs": seqs}


def _forward(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, Any]:
    forward_mode.refuse_programs()
    result: tuple[Any, Any] = attention(q, k, v, **_keywords(arguments), return_lse=True)
    return result


def _backward(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    want_dbias: bool,
    *arguments: Any,
) -> list[Any]:
    forward_mode.refuse_programs()
    keywords = _keywords(arguments)
    keywords.pop("num_splits")
    options = _named(arguments)
    deterministic = options["deterministic"]
    gradients = attention_backward(
        dout, q, k, v, out, lse, **keywords, dlse=dlse, deterministic=deterministic,
        want_dbias=None if keywords["bias"] is None else want_dbias,
    )  # fmt: skip
    *found, of_captured = gradients
    if options["differentiated"]:
        names = find(options["score_mod"]).tensors
        found += (of_captured[names[n]] for n in options["differentiated"])
    return [x for x in found if x is not None]


def _forward_shapes(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, Any]:
    # A graph that opens a forward-mode level itself shows it while torch traces, and no longer when the operator runs.
    forward_mode.refuse_programs()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got dtype {x.dtype}, expected float16, bfloat16 or float32; convert it, as by "
                f"{name}.float()"
            )
    heads, rows = q.shape[-2], q.shape[-3]
    lse = q.new_empty((*q.shape[:-3], heads, rows), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _backward_shapes(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    want_dbias: bool,
    *arguments: Any,
) -> list[Any]:
    options = _named(arguments)
    inputs = [q, k, v]
    if options["bias"] is not None and want_dbias:
        inputs.append(options["bias"])
    if options["sink_logits"] is not None:
        inputs.append(options["sink_logits"])
    inputs += (options["captured"][n] for n in options["differentiated"] or ())
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    ctx.set_materialize_grads(False)
    options = _named(inputs[_LAYOUT_AT:])
    tensors = (*inputs[:3], *output, *inputs[_LAYOUT_AT:_MAXIMA_AT])
    ctx.save_for_backward(
        *tensors, *(options[name] for name in _TENSOR_ARGUMENTS), *options["captured"]
    )
    ctx.maxima = inputs[_MAXIMA_AT:_OPTIONS_AT]
    ctx.options = {**options, **dict.fromkeys(_TENSOR_ARGUMENTS), "captured": ()}


def _gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    arrays = _MAXIMA_AT - _LAYOUT_AT
    layout, others = (*others[:arrays], *ctx.maxima), others[arrays:]
    saved, captured = others[: len(_TENSOR_ARGUMENTS)], others[len(_TENSOR_ARGUMENTS) :]
    options = {
        **ctx.options,
        **dict(zip(_TENSOR_ARGUMENTS, saved, strict=True)),
        "captured": captured,
    }
    has_dbias = ctx.needs_input_grad[_INDICES["bias"]]
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (*layout, *options.values())
    found = _attention_backward(dout, dlse, q, k, v, out, lse, has_dbias, *arguments)
    gradients = [*found[:3], *(None,) * (len(layout) + len(options))]
    rest = iter(found[3:])
    if options["bias"] is not None and has_dbias:
        gradients[_INDICES["bias"]] = next(rest)
    if options["sink_logits"] is not None:
        gradients[_INDICES["sink_logits"]] = next(rest)
    gradients[_INDICES["captured"]] = [None] * len(captured)
    for n in options["differentiated"] or ():
        gradients[_INDICES["captured"]][n] = next(rest)
    return tuple(gradients)


_KINDS = tuple("SymInt?" if name.startswith("max") else "Tensor?" for name in Layout._fields)
_SCHEMA = ", ".join((*map(" ".join, zip(_KINDS, Layout._fields, strict=True)), *_PARAMETERS))


_attention = torch.library.custom_op(
    "rawattn::attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)",
)
_attention.register_fake(_forward_shapes)
_attention_backward = torch.library.custom_op(
    "rawattn::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool want_dbias, "
    f"{_SCHEMA}) -> Tensor[]",
)
_attention_backward.register_fake(_backward_shapes)
_attention.register_autograd(_gradients, setup_context=_save)
