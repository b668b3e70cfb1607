"""Calls of `rawattn.torch.attention` in eager mode: passed on to `rawattn.attention`, recorded if autograd needs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from rawattn import ScoreMod, SeqLayout, attention, attention_backward
from rawattn._call.argument_kinds import argument_kinds, check_arguments
from rawattn._call.options import ARRAYS, DEFAULTS, Options, flag
from rawattn._interop.forward_mode import lost_tangent
from rawattn._interop.integers import TensorIntegers
from rawattn._torch.captured import checked, tensors_of, with_tensors

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The option that only the backward takes.
_OF_BACKWARD = "deterministic"
# Options that may be tensors. They go through `save_for_backward`, so that autograd refuses one that was changed in place
# between the forward and the backward.
_TENSOR_OPTIONS = (*ARRAYS, "seed")
# Options that neither are tensors nor hold any. With these alone, only q, k and v decide whether autograd records the call.
_NON_TENSOR_OPTIONS = {*Options._fields, "return_lse"} - {*_TENSOR_OPTIONS, "score_mod"}

_DEFAULTS: dict[str, Any] = {**DEFAULTS._asdict(), "return_lse": False, _OF_BACKWARD: False}


_is_compiling, _modes = torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack


def is_traced() -> bool:
    """Whether the call must go through the operator: under torch.compile, or under a dispatch mode, as of torch.export,
    `make_fx` or FakeTensorMode.
    """
    return bool(_is_compiling() or _modes())


def with_fast_path(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps `function`, the public one, with a fast path: calls that are not traced and whose options are all in
    `_NON_TENSOR_OPTIONS` skip its checks, which `rawattn.attention` makes too.
    """
    kinds = argument_kinds("rawattn.torch.attention", inspect.signature(function))

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if (
            len(args) == 3
            and not is_traced()
            and options.keys() <= _NON_TENSOR_OPTIONS
            and isinstance(args[0], torch.Tensor)
            and isinstance(args[1], torch.Tensor)
            and isinstance(args[2], torch.Tensor)
        ):
            q, k, v = args
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                try:
                    return Recorded.apply(options, (), q, k, v)
                except RuntimeError:
                    refuse_transforms()
                    raise
            return attention(q, k, v, **options)
        if len(args) != 3:
            check_arguments(kinds, args, options)
        return function(*args, **options)

    return call


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """A call in eager mode, recorded if one of its tensors requires grad. Options that have their default are dropped."""
    options = {name: x for name, x in options.items() if x is not _DEFAULTS.get(name)}
    if _OF_BACKWARD in options:
        flag(_OF_BACKWARD, options[_OF_BACKWARD])
    score_mod = options.get("score_mod")
    captured = checked(score_mod) if isinstance(score_mod, ScoreMod) else ()
    if not torch.is_grad_enabled() or not (
        any(x.requires_grad for x in (q, k, v, *captured))
        or getattr(options.get("bias"), "requires_grad", False)
        or getattr(options.get("sink_logits"), "requires_grad", False)
    ):
        options.pop(_OF_BACKWARD, None)
        return attention(q, k, v, **options)
    if "out" in options:
        raise ValueError(
            "out: got a tensor in a call that autograd records, where nothing can be written in place; expected "
            "None, or a call under torch.no_grad()"
        )
    names = tuple(name for name in _TENSOR_OPTIONS if isinstance(options.get(name), torch.Tensor))
    tensors = [options.pop(name) for name in names]
    try:
        return Recorded.apply(options, names, q, k, v, *tensors, *captured)
    except RuntimeError:
        refuse_transforms()
        raise


def refuse_transforms() -> None:
    """NotImplementedError for a call under torch.func.grad and the like, where `Recorded.apply` fails without running.

    Asked after a failure alone, so that it costs other calls nothing.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "rawattn.torch.attention: got a call in a function that torch.func.grad, torch.func.vjp or the like transforms, "
            "expected one under plain autograd; call torch.autograd.grad(loss, tensors) or loss.backward()"
        ) from None


class Recorded(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """The autograd function of eager mode. It takes less host time than a torch operator."""

    @staticmethod
    def forward(
        ctx: Any,
        options: dict[str, Any],
        names: tuple[str, ...],
        q: Any,
        k: Any,
        v: Any,
        *tensors: Any,
    ) -> Any:
        """options: those of the forward and the backward, without tensors.

        tensors: the options in `names`, which are tensors, then the tensors that a score function captures.
        """
        with_lse = "return_lse" in options and flag("return_lse", options["return_lse"])
        given = {**options, "return_lse": True}
        given.update(zip(names, tensors))  # noqa: B905  # the rest are a score function's tensors
        given.pop(_OF_BACKWARD, None)
        out, lse = attention(q, k, v, **given)
        lengths = _read_in_place(options["seqs"]) if "seqs" in options else ()
        ctx.save_for_backward(*lengths, q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.call = options, names
        ctx.lengths = len(lengths)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors[ctx.lengths :]
        if torch.is_grad_enabled():  # the gradients may be differentiated again (create_graph=True)
            gradients: tuple[Any, ...] = _FirstDerivative.apply(ctx, dout, dlse, *saved)
            return gradients
        return _gradients(ctx, dout, dlse, *saved)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        options, names = ctx.call
        captured = tensors_of(options["score_mod"]) if "score_mod" in options else ()
        inputs = ("options", "names", "q", "k", "v", *names, *captured)
        raise lost_tangent(inputs[[x is not None for x in tangents].index(True)])


def _read_in_place(seqs: SeqLayout | None) -> list[Any]:
    """The layout's tensors on a GPU. The backward reads them where they lie, so autograd must refuse one that was changed.

    Without those that were read on a stream that is not CuPy's current one, of which the layout keeps CuPy's view alone.
    """
    if seqs is None:
        return []
    found = (x.tensor for x in seqs._arrays.values() if type(x) is TensorIntegers)
    return [x for x in found if not x.is_inference()]  # autograd saves no other


class _FirstDerivative(torch.autograd.Function):  # type: ignore[misc]
    """`_gradients`, recorded by autograd with all that the gradients depend on, so that a second derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(
            "rawattn.torch.attention has first derivatives alone: got a gradient of its gradient, expected none; call "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that"
        )


def _gradients(
    ctx: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *tensors: Any
) -> tuple[Any, ...]:
    """The gradients with respect to all inputs of `Recorded`; None for those that have none."""
    options, names = ctx.call
    if dout is None:
        dout = torch.zeros_like(out)
    options = {**options}
    options.pop("return_lse", None)
    options.pop("num_splits", None)
    if dlse is not None:
        options["dlse"] = dlse
    if not tensors:
        dq, dk, dv, *_ = attention_backward(dout, q, k, v, out, lse, **options)
        return None, None, dq, dk, dv
    options.update(zip(names, tensors))  # noqa: B905  # as in `Recorded.forward`
    captured = tensors[len(names) :]
    if captured:
        options["score_mod"] = with_tensors(options["score_mod"], captured)
    if "bias" in names:
        options["want_dbias"] = ctx.needs_input_grad[5 + names.index("bias")]
    found = attention_backward(dout, q, k, v, out, lse, **options)
    of_options = {"bias": found.dbias, "sink_logits": found.dsink_logits}
    of_captured = found.captured or {}
    return (
        *(None, None, *found[:3]),
        *(of_options.get(name) for name in names),
        *(of_captured.get(name) for name in (tensors_of(options["score_mod"]) if captured else ())),
    )
