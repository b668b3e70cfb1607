"""Programs of torch.compile on the GPU: layouts whose lengths are there, also in CUDA graphs, and what breaks the program."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import torch._dynamo.testing  # noqa: F811  (torch does not load it before it compiles)

import rawattn.torch
from rawattn import SeqLayout
from tests import torch_programs
from tests.torch_calls import gradients
from tests.torch_programs import LAYOUTS, UNTRACED

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_made_inside(name: str, dynamic: bool) -> None:
    torch_programs.verify_made_inside(name, "cuda", fullgraph=True, dynamic=dynamic)


def test_layouts_given() -> None:
    torch_programs.verify_given("cuda")


def test_layouts_taken_outside() -> None:
    torch_programs.verify_taken_outside("cuda")


def test_layouts_read_inside() -> None:
    torch_programs.verify_read_inside("cuda")


@pytest.mark.parametrize("name", UNTRACED)
def test_untraced(name: str) -> None:
    torch_programs.verify_untraced(name, "cuda")


def test_lengths_that_change_between_replays() -> None:
    """A program in CUDA graphs reads the values that the starts hold at each replay."""

    def model(x: Any, starts: Any) -> Any:
        seqs = SeqLayout(seqstart_q=starts, max_seqlen_q=300, max_seqlen_k=300)
        q, k, v = (x * 2).chunk(3, -1)
        return rawattn.torch.attention(q, k, v, seqs=seqs, causal=True, deterministic=True) + 1

    torch.manual_seed(0)
    x = torch.randn(400, 4, 3 * 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for middle in (100, 250, 300, 101, 200):
        starts = torch.tensor([0, middle, 400], device="cuda")
        got, exact = (
            gradients(lambda x, run=run, starts=starts: run(x, starts), x)[0].clone()
            for run in (compiled, model)
        )
        torch.testing.assert_close(got, exact)
