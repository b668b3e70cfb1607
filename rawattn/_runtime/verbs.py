"""`Verb`: inputs, outputs and checks of each verb. The dispatcher treats all verbs alike but for this.

The CPU backend is imported by the first call that runs on it, since most programs use a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rawattn._call import scales
from rawattn._call.binding import bind
from rawattn._call.layout import HostLengths, Lengths
from rawattn._call.options import Options
from rawattn._call.problem import Problem, describe, describe_paged, result_shapes
from rawattn._interop.advice import cast
from rawattn._masks.block_mask import bools_of

FLOAT32 = np.dtype(np.float32)

Shape = tuple[int, ...]
Extras = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """The arrays and checks of one verb.

    name: that of the public function, by which kernel families are registered.
    inputs: names of the input arrays; `optional` ones may be None.
    lead: the input whose framework and device are those of the call. written: inputs that a call changes.
    c_order: arrays that kernels need in C order; an input that is not is copied. Other arrays need only a dense last axis.
    outputs: names of the results. prefix: precedes these in messages, where the caller gives arrays to write.
    results: from (problem, dtype, flag), shape and dtype of each output, None for one that the flag leaves out. The flag is the
        one choice of a call that is no option: return_lse, or deterministic.
    check: from (problem, arrays by name, framework), the checks of inputs beside those that the forward has.
    step_arguments: from the flag, further keyword arguments of the kernel family's `steps`.
    cpu: the CPU backend, from (problem, lengths, inputs, results, flag, arrays of `extra_inputs` and numbers of `values` by
        name, gradients). lengths are None if the batch is not ragged.
    padding: the value of padding rows in each output that the library allocates.
    refuses_gradients: whether tensors that require a gradient are refused, since the call would lose it without notice.
    bind: from the options' `seqs` and the inputs, the sequences of a call.
    describe: from (arrays by name, options, framework, arrays of `extra_inputs` by name), the problem and the sequences.
    extra_inputs: the last inputs, which may have any strides: a page table, arrays of options. Kernels choose the width of
        accesses by the alignment of each. They do not affect the width of accesses to the other arrays.
    dense: the extra inputs whose last axis must be dense; they are copied if it is not.
    any_alignment: whether extra inputs are read an element at a time, so that their alignment makes no difference.
    same_strides: groups of inputs that must have the same strides; if a group has not, all of it is copied.
    gradients: the last outputs, which are the gradients of options' arrays. values: numbers of options for the kernels.
        Apart from page tables, angles, scales and lses of partials, extra inputs, gradients and values are what
        `option_arrays.with_arrays` found in a call.
    """

    name: str
    inputs: tuple[str, ...]
    optional: frozenset[str]
    c_order: frozenset[str]
    outputs: tuple[str, ...]
    prefix: str
    results: Callable[
        [Problem, np.dtype[Any], bool], tuple[tuple[Shape, np.dtype[Any]] | None, ...]
    ]
    check: Callable[[Problem, Mapping[str, Any], str | None], None]
    step_arguments: Callable[[bool], dict[str, Any]]
    cpu: Callable[
        [Problem, HostLengths | None, Sequence[Any], Sequence[Any], bool, Extras, Sequence[str]],
        None,
    ]
    padding: tuple[float, ...]
    refuses_gradients: bool
    bind: Callable[[Any, Sequence[Any]], Lengths]
    describe: Callable[
        [Mapping[str, Any], Options, str | None, Mapping[str, Any]], tuple[Problem, Lengths]
    ]
    extra_inputs: tuple[str, ...] = ()
    dense: frozenset[str] = frozenset()
    gradients: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    lead: str = "q"
    written: frozenset[str] = frozenset()
    any_alignment: bool = False
    same_strides: tuple[tuple[str, ...], ...] = ()

    names: tuple[str, ...] = field(init=False)  # what a run takes in front: inputs, outputs, values
    lead_index: int = field(init=False)  # the index of the lead among the inputs
    required_count: int = field(init=False)  # how many inputs are not optional; these come first

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.inputs + self.outputs + self.values)
        object.__setattr__(self, "lead_index", self.inputs.index(self.lead))
        object.__setattr__(self, "required_count", len(self.inputs) - len(self.optional))

    def named(self, inputs: Sequence[Any], targets: Sequence[Any]) -> list[tuple[str, Any]]:
        """The arrays of a call with their names, inputs first."""
        return list(zip(self.inputs + self.outputs, (*inputs, *targets), strict=True))


def _bind_rows(seqs: Any, q: Any, k: Any) -> Lengths:
    batch = q.shape[0] if len(q.shape) == 4 else None
    return bind(seqs, batch=batch, rows_q=q.shape[-3], rows_k=k.shape[-3])


def _describe_rows(
    named: Mapping[str, Any], options: Options, framework: str | None, arrays: Extras
) -> tuple[Problem, Lengths]:
    return describe(named["q"], named["k"], named["v"], options, framework, arrays)


def _forward_results(
    problem: Problem, dtype: np.dtype[Any], return_lse: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    out, lse = result_shapes(problem)
    return (out, dtype), (lse, FLOAT32) if return_lse else None


def _forward_cpu(
    problem: Problem,
    lengths: HostLengths | None,
    inputs: Sequence[Any],
    results: Sequence[Any],
    return_lse: bool,
    extras: Extras,
    gradients: Sequence[str],
) -> None:
    from rawattn._cpu import forward as cpu_forward

    q, k, v = inputs
    out, lse = results
    cpu_forward.forward(problem, lengths, q, k, v, out, lse, _with_bools(problem, extras))


def _with_bools(problem: Problem, extras: Extras) -> Extras:
    """The arrays of `extra_inputs`, with a BlockMask's bits replaced by a mask of bools."""
    if "mask_bits" not in extras:
        return extras
    return {**extras, "mask": bools_of(extras["mask_bits"], problem.mask.shape)}


def _backward_results(
    problem: Problem, dtype: np.dtype[Any], deterministic: bool
) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
    outer: Shape = () if problem.packed else (problem.batch,)
    queries = (*outer, problem.rows_q, problem.nheads_q)
    keys = (*outer, problem.rows_k, problem.nheads_kv)
    dims = problem.headdim, problem.headdim_v
    return (
        ((*queries, dims[0]), dtype),
        ((*keys, dims[0]), dtype),
        ((*keys, dims[1]), dtype),
    )


def _check_backward(problem: Problem, arrays: Mapping[str, Any], framework: str | None) -> None:
    dtype = arrays["q"].dtype
    out_shape, lse_shape = result_shapes(problem)
    expected = {"dout": (out_shape, dtype), "out": (out_shape, dtype)}
    expected |= {"lse": (lse_shape, FLOAT32), "dlse": (lse_shape, FLOAT32)}
    for name, (shape, kind) in expected.items():
        array = arrays[name]
        if array is None:
            continue
        of = f"that of the forward's {name.removeprefix('d')}"
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, expected {shape}, {of}")
        if array.dtype != kind:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected {kind}, {of}; convert it, as by {cast(framework, name, kind)}"
            )


def _backward_cpu(
    problem: Problem,
    lengths: HostLengths | None,
    inputs: Sequence[Any],
    results: Sequence[Any],
    deterministic: bool,
    extras: Extras,
    names: Sequence[str],
) -> None:
    from rawattn._cpu import backward as cpu_backward

    # `deterministic` makes no difference: the CPU backend always adds in the same order.
    dout, q, k, v, out, lse, dlse = inputs
    dq, dk, dv, *others = results
    arrays = (dout, q, k, v, out, lse, dlse, dq, dk, dv)
    gradients = dict(zip(names, others, strict=True))
    cpu_backward.backward(problem, lengths, *arrays, _with_bools(problem, extras), gradients)


def _bind_pages(seqs: Any, inputs: Sequence[Any]) -> Lengths:
    q, k_pages, _, table = inputs[:4]
    lengths: Lengths = seqs.bind(q.shape, k_pages.shape, table.shape)
    return lengths


def _describe_pages(
    named: Mapping[str, Any],
    options: Options,
    framework: str | None,
    arrays: Extras,
    number_scales: tuple[str, ...] = (),
) -> tuple[Problem, Lengths]:
    given = {name: arrays[name] for name in scales.NAMES if name in arrays}
    own = {name: x for name, x in arrays.items() if name != "block_table" and name not in given}
    q, k_pages, v_pages, table = (named[name] for name in PAGED.inputs[:4])
    return describe_paged(q, k_pages, v_pages, table, options, framework, own, given, number_scales)


def _paged_cpu(
    problem: Problem,
    lengths: HostLengths | None,
    inputs: Sequence[Any],
    results: Sequence[Any],
    return_lse: bool,
    extras: Extras,
    gradients: Sequence[str],
) -> None:
    from rawattn._cpu import paged as cpu_paged

    assert lengths is not None
    own = dict(_with_bools(problem, extras))
    q, k_pages, v_pages = inputs
    out, lse = results
    cpu_paged.forward(problem, lengths, q, k_pages, v_pages, out, lse, own)


FORWARD = Verb(
    name="attention",
    inputs=("q", "k", "v"),
    optional=frozenset(),
    c_order=frozenset({"lse"}),
    outputs=("out", "lse"),
    prefix="",
    results=_forward_results,
    check=lambda problem, arrays, framework: None,
    step_arguments=lambda return_lse: {},
    cpu=_forward_cpu,
    padding=(0.0, -np.inf),
    refuses_gradients=True,
    bind=lambda seqs, inputs: _bind_rows(seqs, inputs[0], inputs[1]),
    describe=_describe_rows,
)

# The options' `seqs` is a `PagedLayout`. block_table: the page ids, with one axis if the layout has an indptr, else with two.
PAGED = replace(
    FORWARD,
    name="paged_attention",
    inputs=("q", "k_pages", "v_pages", "block_table"),
    cpu=_paged_cpu,
    bind=_bind_pages,
    describe=_describe_pages,
    extra_inputs=("block_table",),
)

BACKWARD = Verb(
    name="attention_backward",
    inputs=("dout", "q", "k", "v", "out", "lse", "dlse"),
    optional=frozenset({"dlse"}),
    c_order=frozenset({"lse", "dlse"}),
    outputs=("dq", "dk", "dv"),
    prefix="into.",
    results=_backward_results,
    check=_check_backward,
    step_arguments=lambda deterministic: {"deterministic": deterministic},
    cpu=_backward_cpu,
    padding=(0.0, 0.0, 0.0),
    refuses_gradients=False,
    bind=lambda seqs, inputs: _bind_rows(seqs, inputs[1], inputs[2]),
    describe=_describe_rows,
)


@lru_cache(maxsize=64)
def with_scales(verb: Verb, arrays: tuple[str, ...], numbers: tuple[str, ...]) -> Verb:
    """`verb`, one of keys in pages, with these scales as further inputs (`arrays`) or numbers for kernels (`numbers`)."""
    if not arrays and not numbers:
        return verb
    return replace(
        verb,
        inputs=verb.inputs + arrays,
        extra_inputs=verb.extra_inputs + arrays,
        values=verb.values + tuple(f"{name}_value" for name in numbers),
        describe=partial(verb.describe, number_scales=numbers),  # type: ignore[call-arg]
    )
