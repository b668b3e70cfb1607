"""`plan`: a call prepared once, for loops and CUDA graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rawattn._call import options as _options
from rawattn._call import scales
from rawattn._call.argument_kinds import argument_kinds, check_arguments
from rawattn._call.gradients import wanted
from rawattn._call.hints import refuse_unknown
from rawattn._call.options import Options, flag, for_message
from rawattn._call.seq_layout import SeqLayout
from rawattn._eviction import evict_if_full
from rawattn._interop import arrays, dynamo
from rawattn._interop.native import native_of
from rawattn._jax import eager
from rawattn._runtime import dispatch
from rawattn._runtime.call_request import SLOW_PATH
from rawattn._runtime.calls import refuse_gradients
from rawattn._runtime.option_arrays import (
    arrays_to_write,
    caller_names,
    differentiated,
    named_gradients,
    with_arrays,
)
from rawattn._runtime.plan_same_arrays import Repeat
from rawattn._runtime.planned import GpuPlan
from rawattn._runtime.verbs import BACKWARD, FORWARD, PAGED, Verb
from rawattn._verbs.append import append_kv
from rawattn._verbs.attention import attention, first
from rawattn._verbs.backward import attention_backward, gradients
from rawattn._verbs.combine import combine
from rawattn._verbs.paged import check_pages, paged_attention, read_pages, scaled, visibility_of
from rawattn._verbs.plan_arguments import Arguments, check_form, description, host_table

# Entries of `Plan._repeats`. Each is one way to pass a call's arrays: how many by position, and which by name.
_MAX_KNOWN = 64


class Plan:
    """A call of a verb on arrays of one form, made by `plan`.

    Call it with arrays of the same shapes, strides, dtypes and device as in planning, by position or by name. For an array
    that is left out, the call takes the one of planning time. Names are those of the planned function, and the names by
    which a score function captures arrays. ``out=`` (for the backward ``into=``) gives arrays to write the results to.
    Otherwise the results are in arrays of the plan, the same ones at every call, so the next call overwrites them. Padding
    rows of the plan's arrays are 0, in lse -inf. An input in the memory of such an array is a
    ValueError.

    Lengths on the GPU may be other arrays too, as in ``seqlen_k=``. They are read at every call and at every replay of a
    captured graph, so they may change in place. Values on the host (scale, window, lengths, a page table, ...) are those of
    planning time: lengths and page tables may be given again, but other values are refused. If q is on the host too, a page
    table is an array like q: its values may change, and each call checks them.

    A call allocates nothing, waits for nothing and can be captured in a CUDA graph (CuPy's and torch's). The plan must live
    as long as such a graph, since the graph uses the plan's scratch memory. For the same reason two calls of one plan must
    not run at the same time on different streams, and two threads must not call it at the same time, on whatever stream: their
    launches would mix. Calls of two plans may.

    On the CPU, and for arrays that are neither CuPy arrays nor CUDA tensors of torch, a call is an ordinary one with the
    options of planning time. Strides may then differ, and the results are in new arrays.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 16), dtype=np.float32)
    >>> bias = np.zeros((5, 5), np.float32)
    >>> biased = rawattn.plan(rawattn.attention, q, k, v, bias=bias)
    >>> out = np.empty_like(q)
    >>> biased(q, k, v, bias=bias + 1, out=out) is out
    True
    """

    def __new__(cls, *args: Any, **named: Any) -> Plan:
        if cls is Plan and not (args and isinstance(args[0], Verb)):
            raise TypeError(
                "Plan: got a call, but a plan is made by rawattn.plan(rawattn.attention, q, k, v, ...); call that"
            )
        return super().__new__(cls)

    def __init__(
        self,
        verb: Verb,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        options: Options,
        flag: bool,
        backend: str | None,
        returned: Callable[[Sequence[Any]], Any],
        values: tuple[int, ...],
        table: Any = None,
    ) -> None:
        """table: the page ids of planning time if these are on the host and the other arrays are not."""
        self._verb, self._options, self._flag, self._backend = verb, options, flag, backend
        self._values = values
        self._inputs, self._targets, self._returned = tuple(inputs), tuple(targets), returned
        self._arguments = Arguments(verb, inputs, options, table)
        self._gpu: GpuPlan | None = None
        self._repeat: Repeat | None = None
        self._repeats: dict[tuple[Any, ...], Repeat] = {}  # calls that pass arrays by name
        native = native_of(arrays.framework_of(inputs[verb.lead_index]))
        if native is not None and backend != "cpu":
            read = native.read((*inputs, *targets), verb.required_count)
            if read is not None:
                if read[2]:
                    refuse_gradients(verb, options, inputs, targets)
                self._gpu = GpuPlan(
                    verb, native, read, inputs, targets, options, flag, returned, values
                )
                self._repeat = self._gpu.repeat
        if self._gpu is None:  # planning raises every error that the call has
            if self._is_program(inputs, targets):
                self._run(inputs, targets)  # compiles the program
            else:
                dispatch.check(verb, inputs, targets, options, flag, backend, values)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the planned function returns."""
        if self._repeat is None:
            return self._call(*args, **named)
        if not named:
            result = self._repeat(args)
            return self._call(*args) if result is SLOW_PATH else result
        if "into" in named:
            key, given = self._call_key(args, named)
        else:
            key, given = (len(args), *named), (*args, *named.values())
        repeat = self._repeats.get(key)
        if repeat is not None:
            result = repeat(given)
            if result is not SLOW_PATH:
                return result
        result = self._call(*args, **named)
        if repeat is None:
            self._remember_call(key, given)
        return result

    def __repr__(self) -> str:
        names = caller_names(self._verb, self._options)
        return description(self._verb.name, zip(names, self._inputs, strict=True))

    def __reduce__(self) -> NoReturn:
        # A copy would share the memory that the plan frees.
        raise TypeError(
            "Plan: got a copy or a pickle to make of it, but it owns kernels and memory of its process; call rawattn.plan "
            "again where another plan is needed"
        )

    def _call_key(
        self, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The key in `_repeats` of a call with ``into=``, and its arrays: by position, by name, then those of `into`."""
        written = self._outputs_to_write(None, named["into"])
        others = {name: x for name, x in named.items() if name != "into"}
        given = tuple(n for n, x in enumerate(written) if x is not None)
        return (len(args), *others, given), (*args, *others.values(), *[written[n] for n in given])

    def _remember_call(self, key: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Keeps a fast path for calls like one that has been made, if there is one."""
        if self._gpu is None:
            return
        count, *names = key
        results = names.pop() if names and isinstance(names[-1], tuple) else ()
        places = self._arguments.places(count, names)
        first = len(self._inputs)
        if "out" in names and "out" not in self._verb.inputs:
            places[count + names.index("out")] = first
        repeat = self._gpu.repeat_of(given, [*places, *[first + n for n in results]])
        if repeat is not None:
            evict_if_full(self._repeats, _MAX_KNOWN)
            self._repeats[key] = repeat

    @dynamo.untraced
    def _call(self, *args: Any, out: Any = None, into: Any = None, **named: Any) -> Any:
        # A backward reads the forward's out: there `out` is an input.
        if out is not None and "out" in self._verb.inputs:
            named["out"], out = out, None
        written = None
        if out is not None or into is not None:
            written = self._outputs_to_write(out, into)
        inputs, integers = self._arguments.complete(args, named)
        if self._gpu is not None:
            return self._gpu(inputs, written, integers)
        for name in integers:
            raise ValueError(
                f"{name}: got other lengths on the GPU, which plans of CuPy arrays and of torch's CUDA tensors take alone; "
                "change the planned ones in place"
            )
        for name, array, planned in zip(
            caller_names(self._verb, self._options), inputs, self._inputs, strict=True
        ):
            check_form(name, array, planned)
        self._check_values(inputs)
        targets = self._targets if written is None else written
        return self._returned(self._run(inputs, targets))

    def _run(self, inputs: Sequence[Any], targets: Sequence[Any]) -> Sequence[Any]:
        """An ordinary call."""
        if self._is_program(inputs, targets):
            return eager.attention(inputs, self._options, self._flag)
        call = self._verb, inputs, targets, self._options, self._flag
        return dispatch.run(*call, self._backend, self._values)

    def _is_program(self, inputs: Sequence[Any], targets: Sequence[Any]) -> bool:
        """Whether the call runs as a compiled program of JAX."""
        if arrays.framework_of(inputs[self._verb.lead_index]) != "jax":
            return False
        return eager.is_compilable(self._verb, inputs, targets, self._options, self._backend)

    def _check_values(self, inputs: Sequence[Any]) -> None:
        """ValueError for a page table or scales on the host that an ordinary call would refuse too."""
        named = dict(zip(self._verb.inputs, inputs, strict=True))
        for name in scales.NAMES:
            if name in named:
                scales.check(name, named[name])
        self._check_table(named)

    def _check_table(self, named: Mapping[str, Any]) -> None:
        table, layout = named.get("block_table"), self._options.seqs
        if isinstance(table, np.ndarray) and layout.on_host:
            q, k_pages, v_pages = (named[name] for name in PAGED.inputs[:3])
            check_pages(q, k_pages, v_pages, table, layout, visibility_of(self._options))

    def _outputs_to_write(self, out: Any, into: Any) -> Sequence[Any]:
        """The caller's array for each output of the verb, None for those that are not given."""
        forward = self._verb.name != BACKWARD.name
        if (into if forward else out) is not None:
            given, other = ("into", "out") if forward else ("out", "into")
            raise TypeError(f"{given}: this plan writes its results to {other}=")
        if forward:
            return (out, *[None] * (len(self._verb.outputs) - 1))
        found, score_mod = wanted(into), self._options.score_mod
        captured = differentiated(score_mod[0] if score_mod is not None else None)
        return (*found[:3], *arrays_to_write(found, self._verb.gradients, captured))


@dynamo.untraced
def plan(fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """Prepare a call once, so that later calls like it neither validate, nor plan, nor allocate.

    Parameters
    ----------
    fn : `rawattn.attention`, `rawattn.attention_backward`, `rawattn.paged_attention`, `rawattn.append_kv` or `rawattn.combine`
    *args, **options
        As `fn` takes them. Of arrays the shapes, strides, dtypes and device count, not the values.
        Arrays of options (`bias`, `mask`, `alibi_slopes`, `sink_logits`, a seed on the GPU, arrays that a score function
        captures) are kept for the calls: ``Plan(q, k, v)`` reads those of planning time, ``Plan(q, k, v, bias=other)``
        reads another bias.

    Returns
    -------
    Plan
        Call it with the arrays: ``Plan(q, k, v)``, ``Plan(dout, q, k, v, out, lse)``, ``Plan(q, k_pages, v_pages,
        block_table)``, ``Plan(k, v, k_pages, v_pages, block_table, q=q)`` or ``Plan(outs, lses)``.
        If the call was planned with a pair (indptr, page_ids) as block table, calls may give page_ids only. They then read
        the indptr of planning time, which may change in place if it is on the GPU.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `fn` raises them. Also ValueError for CuPy arrays and CUDA tensors of torch whose last axis is not dense, since
        each call would have to copy them.

    Notes
    -----
    Planning waits for the current stream. A plan owns its results and the scratch memory of its kernels. This memory is
    freed with the plan, once the work on all streams that used it is done.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q = k = v = np.ones((1, 5, 2, 16), np.float32)
    >>> causal = rawattn.plan(rawattn.attention, q, k, v, causal=True)
    >>> causal(q, k, v).shape
    (1, 5, 2, 16)
    """
    planned: tuple[Any, ...] = (attention, attention_backward, paged_attention, append_kv, combine)
    # Not `fn in planned`, which fails for an array: comparing it with == gives no bool.
    if not any(fn is each for each in planned):
        name = getattr(fn, "__name__", None) or for_message(fn)
        if name == "attention":
            name = f"{fn.__module__}.{name}"
        if hasattr(fn, "__dlpack__"):
            name += " where the function stands, as in plan(rawattn.attention, q, k, v)"
        raise NotImplementedError(
            f"fn: got {name}; this version plans rawattn.attention, rawattn.attention_backward, rawattn.paged_attention, "
            "rawattn.append_kv and rawattn.combine"
        )
    signature = inspect.signature(fn)
    unknown = [name for name in options if name not in signature.parameters]
    if unknown:
        refuse_unknown(f"rawattn.{fn.__name__}", unknown, signature.parameters)
    check_arguments(argument_kinds(f"rawattn.{fn.__name__}", signature), args, options)
    given = signature.bind(*args, **options)
    given.apply_defaults()
    named = given.arguments
    if fn is combine:
        from rawattn._verbs.combine_plan import CombinePlan  # imported here, since it needs `Plan`

        return CombinePlan(**named)
    if fn is append_kv:
        from rawattn._verbs.append_plan import AppendPlan  # imported here, since it needs `Plan`

        return AppendPlan(**named)
    known = Options(**{name: named[name] for name in Options._fields if name in named})
    if isinstance(known.seqs, SeqLayout):
        known = known._replace(seqs=known.seqs._with_separate_starts())
    backend = _options.backend(named["backend"])
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    table = None
    if fn is not attention_backward:
        verb, choice = FORWARD, flag("return_lse", named["return_lse"])
        if fn is paged_attention:
            given_table = named["block_table"]
            named["block_table"], known = read_pages(named, known)
            table = host_table(given_table, named["block_table"])
            verb, factors, numbers = scaled(PAGED, named["q"], {n: named[n] for n in scales.NAMES})
            named |= zip(verb.inputs[len(PAGED.inputs) :], factors, strict=True)
        targets: Sequence[Any] = (named["out"], None)
        returned: Callable[[Sequence[Any]], Any] = tuple if choice else first
    else:
        verb, choice = BACKWARD, flag("deterministic", named["deterministic"])
        into = wanted(named["into"], named["bias"], named["want_dbias"])
        names, written = named_gradients(into, known, named["want_dbias"])
        targets = (*into[:3], *written)
        returned = functools.partial(gradients, names, known.score_mod)
    inputs = [named[name] for name in verb.inputs]
    verb, extras, values, known = with_arrays(verb, known, names, named["q"])
    values = numbers + values
    return Plan(verb, [*inputs, *extras], targets, known, choice, backend, returned, values, table)
