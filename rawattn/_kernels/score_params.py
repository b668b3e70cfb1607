"""The parameters of the options that change scores and probabilities: fields of `params.FORWARD`, and offsets of addresses."""

from __future__ import annotations

from typing import Any

from rawattn._call import scales
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem
from rawattn._kernels import structs
from rawattn._kernels.operands import Operands
from rawattn._kernels.structs import Struct
from rawattn._masks import layout
from rawattn._strides import Strides

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
_ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}

# The field of `params.FORWARD` to which the address of an option's array, or the option's number, belongs.
_ADDRESSES = {
    "bias": "bias.data",
    "alibi_slopes": "alibi_slopes.data",
    "sink_logits": "sink_logits.data",
    "mask_bits": "block_mask.bits",
    "mask_keys": "block_mask.keys",
    "k_scale": "k_scale.data",
    "v_scale": "v_scale.data",
    "k_scale_value": "k_scale.number",
    "v_scale_value": "v_scale.number",
    "seed": "dropout.seed",
    "seed_value": "dropout.seed_value",
}


def fields(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Fields of `params.FORWARD` by path, without addresses."""
    found: dict[str, Any] = {}
    if problem.bias is not None:
        found |= broadcast(
            "bias", problem.bias.shape, operands.option_strides["bias"], problem.bias.dtype
        )
        found["bias.group"] = problem.nheads_q // problem.bias.shape[1]
        found["bias.rows"], found["bias.keys"] = problem.bias.shape[2:]
    for name in ("alibi_slopes", "sink_logits"):
        form = getattr(problem, name)
        if form is not None:
            strides = elements(operands.option_strides[name], form.dtype)
            found[f"{name}.batch"] = strides[0] if len(strides) > 1 else 0
            found[f"{name}.head"] = strides[-1]
            found[f"{name}.kind"] = KINDS[form.dtype]
    if problem.mask is not None:
        _, _, rows, words = layout.bits_shape(problem.mask.shape)
        batch, nheads = problem.mask.shape[:2]
        found["block_mask.batch"] = nheads * rows * words if batch > 1 else 0
        found["block_mask.head"] = rows * words
        found["block_mask.keys_batch"] = nheads * words if batch > 1 else 0
        found["block_mask.group"] = problem.nheads_q // nheads
        found["block_mask.rows"], found["block_mask.words"] = rows, words
    if problem.dropout_p > 0:
        found["dropout.threshold"] = threshold(problem.dropout_p)
        found["dropout.factor"] = 1 / (1 - problem.dropout_p)
        found["dropout.seed_is_64bit"] = int(
            problem.seed is not None and problem.seed.dtype == "int64"
        )
    for n, form in enumerate(problem.captured):
        strides = elements(operands.option_strides[f"captured{n}"], form.dtype)
        missing = 4 - len(form.shape)
        found[f"captured.array{n}.strides"] = (*strides, *(0,) * missing)
        found[f"captured.array{n}.extents"] = (*form.shape, *(1,) * missing)
    if problem.score_scalars:
        found["captured.scalars"] = (
            *problem.score_scalars,
            *(0.0,) * (8 - len(problem.score_scalars)),
        )
    return found | scale_fields(problem, operands)


def scale_fields(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Fields of the scales of 8-bit keys and values."""
    found: dict[str, Any] = {}
    for name in scales.NAMES if problem.float8 else ():
        found[f"{name}.number"] = 1.0
        if isinstance(getattr(problem, name), ArrayForm):
            found[f"{name}.head"] = elements(operands.option_strides[name], "float32")[0]
    return found


def scale_patches(
    problem: Problem, struct: Struct, prefix: str = ""
) -> tuple[tuple[int, str], ...]:
    """Where addresses of scales, or their numbers, belong. Patches have 8 bytes: 4 of padding follow a number."""
    names = [
        name if isinstance(getattr(problem, name), ArrayForm) else f"{name}_value"
        for name in scales.NAMES
        if getattr(problem, name) is not None
    ]
    return tuple((structs.offset(struct, prefix + _ADDRESSES[name]), name) for name in names)


def patches(problem: Problem, struct: Struct, prefix: str = "") -> tuple[tuple[int, str], ...]:
    """Where the addresses of the options' arrays belong. prefix: the path of the `params.FORWARD` in `struct`."""
    given = {
        "bias": problem.bias is not None,
        "mask_bits": problem.mask is not None,
        "mask_keys": problem.mask is not None,
        "alibi_slopes": problem.alibi_slopes is not None,
        "sink_logits": problem.sink_logits is not None,
        "seed": problem.seed is not None,
        "seed_value": problem.dropout_p > 0 and problem.seed is None,
    }
    paths = {name: _ADDRESSES[name] for name, is_given in given.items() if is_given}
    paths |= {f"captured{n}": f"captured.array{n}.data" for n in range(len(problem.captured))}
    own = tuple((structs.offset(struct, prefix + path), name) for name, path in paths.items())
    return own + scale_patches(problem, struct, prefix)


def broadcast(path: str, shape: tuple[int, ...], strides: Strides, dtype: str) -> dict[str, int]:
    """The strides in elements of an array of four axes, 0 along axes of one element. The caller gives the last axes."""
    own = (0,) * (4 - len(strides)) + elements(strides, dtype)
    names = ("batch", "head", "row", "key")
    return {
        f"{path}.{name}": stride if extent > 1 else 0
        for name, stride, extent in zip(names, own, shape, strict=True)
    }


def elements(strides: Strides, dtype: str) -> Strides:
    """Strides in elements, from strides in bytes."""
    return tuple(stride // _ITEMSIZE[dtype] for stride in strides)


def threshold(dropout_p: float) -> int:
    """The number below which 16 random bits drop a probability (docs/notes/dropout.md)."""
    return min(int(dropout_p * 65536 + 0.5), 65535)
