"""Repeated calls with a BlockMask reuse the prepared call, also for other arrays and masks: whole calls on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import BlockMask, reference
from rawattn._verbs import fast_path
from tests.shim.device import Device
from tests.shim.launch import Machine
from tests.shim.on_device import OnDevice, installed, mask_on_device
from tests.shim.shim import Builder

ROWS, KEYS = 70, 150  # with fewer rows a mask has no lists
F16 = np.float16


class Gpu:
    """Runs whole calls on the simulator. asked: how many of them went to the dispatcher."""

    def __init__(self, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.asked = Device(Machine(builder)), 0
        self.own = installed(self.device, monkeypatch)
        run = fast_path.dispatch.run

        def counted(*given: Any) -> Any:
            self.asked += 1
            return run(*given)

        monkeypatch.setattr(fast_path.dispatch, "run", counted)

    def put(self, *arrays: Any) -> list[OnDevice]:
        return [OnDevice(self.device, x, readonly=False) for x in arrays]

    def mask(self, kept: bool, seed: int) -> BlockMask:
        rng = np.random.default_rng(seed)
        if not kept:
            return mask_on_device(self.device, rng.random((1, 2, ROWS, KEYS)) < 0.5)
        mask = rawattn.topk_mask(rng.standard_normal((1, 2, 1, KEYS)), 50)
        mask._copies["", 0] = tuple(self.put(*mask.arrays))
        return mask

    def is_found(self, call: Callable[[], Any]) -> bool:
        before = self.asked
        call()
        return self.asked == before

    def known(self, call: Callable[[], Any]) -> None:
        """Repeats a call until the prepared one is found."""
        for _ in range(2):
            call()
        assert self.is_found(call)


@pytest.fixture
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(builder, monkeypatch)


def arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (1, ROWS, 4, 16), (1, KEYS, 2, 16), (1, KEYS, 2, 16)
    return [rng.standard_normal(shape).astype(F16) for shape in shapes]


@pytest.mark.parametrize("kept", [False, True])
def test_other_arrays_and_other_masks(gpu: Gpu, kept: bool) -> None:
    masks = [gpu.mask(kept, seed) for seed in (0, 1)]
    for n, of in enumerate((0, 0, 0, 1, 0)):
        given, mask = arrays(n), masks[of]
        exact, exact_lse = reference.attention(
            *given, mask=mask.to_bool(), causal=True, return_lse=True
        )
        on_device, asked = gpu.put(*given), gpu.asked
        (target,) = gpu.put(np.zeros_like(given[0]))
        options: dict[str, Any] = {"mask": mask, "causal": True}
        out = rawattn.attention(*on_device, **options)
        both = rawattn.attention(*on_device, **options, return_lse=True)
        assert rawattn.attention(*on_device, **options, out=target) is target
        for each in (out, both[0], target):
            np.testing.assert_allclose(each.in_memory.array(), exact, atol=0.01)
        np.testing.assert_allclose(both[1].in_memory.array(), exact_lse, atol=0.01)
        if n > 1:
            assert gpu.asked == asked


@pytest.mark.parametrize("kept", [False, True])
def test_gradients(gpu: Gpu, kept: bool) -> None:
    for n in range(4):
        mask = gpu.mask(kept, n)
        q, k, v = arrays(n)
        keep = mask.to_bool()
        out, lse = reference.attention(q, k, v, mask=keep, return_lse=True)
        dout = np.random.default_rng(9).standard_normal(out.shape)
        exact = reference.attention_backward(dout, q, k, v, out, lse, mask=keep)
        given = gpu.put(*(x.astype(F16) for x in (dout, q, k, v, out)), lse.astype(np.float32))
        asked = gpu.asked
        got = rawattn.attention_backward(*given, mask=mask)
        assert type(got) is rawattn.Gradients
        for ours, wanted in zip(got[:3], exact[:3], strict=True):
            assert np.linalg.norm(ours.in_memory.array() - wanted) <= 0.01 * np.linalg.norm(wanted)
        if n > 1:
            assert gpu.asked == asked


def test_what_is_another_call(gpu: Gpu) -> None:
    given, mask = gpu.put(*arrays(0)), gpu.mask(False, 0)
    call = lambda **more: rawattn.attention(*given, **{"mask": mask, **more})  # noqa: E731
    gpu.known(call)
    (bias,) = gpu.put(np.zeros((ROWS, KEYS), F16))
    layout = rawattn.SeqLayout(seqlen_k=[90])
    kept, wide = gpu.mask(True, 0), mask_on_device(gpu.device, np.ones((1, 1, ROWS, KEYS), bool))
    for more in (
        {"causal": True}, {"bias": bias}, {"seqs": layout}, {"mask": kept}, {"mask": wide}, {"dropout_p": 0.5, "seed": 1}
    ):  # fmt: skip
        assert not gpu.is_found(lambda more=more: call(**more))  # type: ignore[misc]
    for more in ({"bias": bias}, {"seqs": layout}, {"dropout_p": 0.5, "seed": 1}):
        assert not any(gpu.is_found(lambda more=more: call(**more)) for _ in range(3))  # type: ignore[misc]
    # A mask's form is not accepted as a mask, nor a mask as a bias.
    with pytest.raises(TypeError, match=r"^mask: got"):
        call(mask=mask.form)
    with pytest.raises(TypeError, match=r"^bias: got"):
        call(bias=mask)
    with pytest.raises(ValueError, match=r"^out: shares memory with"):
        call(out=given[0])
    assert gpu.is_found(call)


def test_results_in_the_memory_of_arrays(gpu: Gpu) -> None:
    given, mask = gpu.put(*arrays(0)), gpu.mask(False, 0)
    (out,) = gpu.put(np.zeros_like(arrays(0)[0]))
    call = lambda out: rawattn.attention(*given, mask=mask, out=out)  # noqa: E731
    gpu.known(lambda: call(out))
    launched = len(gpu.device.launched)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        call(given[0])
    assert len(gpu.device.launched) == launched


def test_graphs_and_masks_that_they_fill(gpu: Gpu) -> None:
    """A mask that a CUDA graph refills keeps no lists, and its repeated calls are found nevertheless."""
    given, mask = gpu.put(*arrays(0)), gpu.mask(False, 0)
    mask.memo = None
    call = lambda: rawattn.attention(*given, mask=mask)  # noqa: E731
    gpu.known(call)
    assert gpu.device.launched.count("rawattn_mask_tiles") == 3
