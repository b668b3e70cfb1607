"""The array that a caller gives for the result: its shape, its strides and what it may not share memory with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from rawattn import append_kv
from rawattn._call.checks import check_out
from tests.append import appended
from tests.problems import BATCH

SHAPE = (3, 5, 4, 16)
F16 = np.dtype(np.float16)
LENS = (9, 1, 24, 3)


def inputs() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(shape, F16) for shape in BATCH.values())


def named() -> dict[str, np.ndarray]:
    return dict(zip("qkv", inputs(), strict=True))


class OnDevice:
    """Stands for a CuPy array: its address must not be read."""

    def __init__(self, like: np.ndarray, address: int) -> None:
        self.shape, self.strides, self.dtype, self.flags = (
            like.shape,
            like.strides,
            like.dtype,
            like.flags,
        )
        self.data = SimpleNamespace(ptr=address)


def check(out: Any, *others: Any) -> None:
    given = [*others, *inputs()[len(others) :]]
    check_out(out, shape=out.shape, dtype=F16, others=list(zip("qkv", given, strict=True)))


def test_a_good_out() -> None:
    check_out(np.empty(SHAPE, F16), shape=SHAPE, dtype=F16, others=named().items())


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(np.empty((3, 4, 5, 16), F16).transpose(0, 2, 1, 3), id="bhsd"),
        pytest.param(np.empty((3, 9, 4, 24), F16)[:, 2:7, :, 4:20], id="slice"),
        pytest.param(np.empty(SHAPE, F16)[::-1, :, ::-1], id="reversed"),
        pytest.param(np.empty((3, 5, 4, 1), F16)[..., ::-1], id="headdim-1"),
        pytest.param(np.broadcast_to(np.empty(1, F16), (1, 1, 1, 1)).copy(), id="one-element"),
        pytest.param(as_strided(np.empty(64, F16), (1, 2, 1, 16), (0, 64, 0, 2)), id="axes-of-1"),
        pytest.param(np.empty((3, 0, 4, 16), F16), id="no-rows"),
    ],
)  # fmt: skip
def test_any_strides_with_a_unit_last_one(out: np.ndarray) -> None:
    check(out)


def test_out_of_the_wrong_shape() -> None:
    with pytest.raises(
        ValueError, match=r"^out: got shape \(3, 5, 4, 8\), expected \(3, 5, 4, 16\)"
    ):
        check_out(np.empty((3, 5, 4, 8), F16), shape=SHAPE, dtype=F16, others=named().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", ">f2"])
def test_out_of_the_wrong_dtype(dtype: str) -> None:
    with pytest.raises(TypeError, match=rf"^out: got dtype {dtype}, expected float16, that of q"):
        check(np.empty(SHAPE, dtype))


def test_out_with_a_strided_last_axis() -> None:
    with pytest.raises(ValueError, match=r"^out: got a last-axis stride of 4 bytes, expected 2"):
        check(np.empty((3, 5, 4, 32), F16)[..., ::2])


def test_a_last_axis_of_few_elements() -> None:
    """The stride of a last axis counts from two elements on."""
    check_out(np.empty((3, 5, 4, 2), F16)[..., ::2], shape=(3, 5, 4, 1), dtype=F16, others=[])
    with pytest.raises(ValueError, match=r"^out: got a last-axis stride of 4 bytes, expected 2"):
        check_out(np.empty((3, 5, 4, 4), F16)[..., ::2], shape=(3, 5, 4, 2), dtype=F16, others=[])
    call = appended(LENS, 4, dims=(2, 2), dtype=F16)
    gaps = np.repeat(call.pages.k_pages, 2, -1)[..., ::2]
    given = {"k": call.k, "v": call.v, "k_pages": gaps, "v_pages": call.pages.v_pages.copy()}
    with pytest.raises(ValueError, match=r"^k_pages: got a last-axis stride of 4 bytes"):
        append_kv(**given, block_table=call.pages.block_table, seqlen_k=LENS)


def test_unaligned_out() -> None:
    raw = np.zeros(2 * math.prod(SHAPE) + 1, np.uint8)
    with pytest.raises(ValueError, match=r"^out: got strides .* address .*multiples of 2 bytes"):
        check(raw[1:].view(F16).reshape(SHAPE))
    # Of the second the first row alone is aligned.
    fields: list[Any] = [("x", np.uint8), ("row", F16, 16)]
    for record in (fields, fields[::-1]):
        with pytest.raises(ValueError, match=r"^out: got strides .*multiples of 2 bytes"):
            check(np.zeros(SHAPE[:-1], record)["row"])


@pytest.mark.parametrize(
    "strides",
    [
        pytest.param((0, 128, 32, 2), id="broadcast"),
        pytest.param((640, 128, 30, 2), id="overlapping-heads"),
        pytest.param((640, 96, 32, 2), id="overlapping-rows"),
    ],
)
def test_out_whose_elements_share_memory(strides: tuple[int, ...]) -> None:
    out = as_strided(np.zeros(960, F16), SHAPE, strides)
    with pytest.raises(
        ValueError, match=r"^out: got strides .*expected memory of its own for each"
    ):
        check(out)


OVERLAPS = [
    pytest.param(0, 0, True, id="the-same"),
    pytest.param(0, 1914, True, id="last-element"),
    pytest.param(0, 1920, False, id="right-after"),
    pytest.param(1920, 0, False, id="right-before"),
    pytest.param(1914, 0, True, id="first-element"),
]


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(("at_out", "at_input", "overlap"), OVERLAPS)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_out_that_overlaps_an_input(
    position: int, at_out: int, at_input: int, overlap: bool, on_device: bool
) -> None:
    raw = np.zeros(2 * 1920, np.uint8)
    out, other = (raw[at : at + 1920].view(F16).reshape(SHAPE) for at in (at_out, at_input))
    given: list[Any] = list(inputs())
    given[position] = other
    if on_device:
        given = [OnDevice(x, 2**40 + i * 2**20) for i, x in enumerate(given)]
        given[position] = OnDevice(other, 2**50 + at_input)
        out = OnDevice(out, 2**50 + at_out)  # type: ignore[assignment]
    if not overlap:
        check(out, *given)
        return
    with pytest.raises(ValueError, match=rf"^out: shares memory with {'qkv'[position]}, expected"):
        check(out, *given)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_interleaved_arrays_of_one_buffer_do_not_overlap(on_device: bool) -> None:
    buffer = np.zeros((3, 5, 2, 4, 16), F16)
    out: Any = buffer[:, :, 0]
    q: Any = buffer[:, :, 1]
    clash: Any = buffer.reshape(3, 5, 8, 16)[:, :, 3:7]
    if on_device:
        out, q, clash = OnDevice(out, 2**50), OnDevice(q, 2**50 + 128), OnDevice(clash, 2**50 + 96)
    check(out, q)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        check(out, clash)


def test_overlap_with_reversed_and_broadcast_inputs() -> None:
    buffer = np.zeros((6, 5, 4, 16), F16)
    check(buffer[:3], buffer[3:][::-1], np.broadcast_to(buffer[5, 4, 3], SHAPE))
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        check(buffer[:3], buffer[2:5][::-1])
    with pytest.raises(ValueError, match=r"^out: shares memory with k"):
        check(buffer[:3], buffer[3:], np.broadcast_to(buffer[2, 4, 3], SHAPE))


def test_empty_inputs_overlap_nothing() -> None:
    buffer = np.zeros(SHAPE, F16)
    check(buffer, buffer[:, :0], buffer[:, :0], buffer[:, :0])
