"""PyTorch programs that outlive their process. Run `python -m tests.torch_processes verb ...`, with one verb a process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import rawattn
from rawattn.torch import attention


class _Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = rawattn.block_mask(predicate="kv_idx <= q_idx", seqlen_q=5, seqlen_k=5)
        self.mod = rawattn.ScoreMod("score * rate", rate=0.5)

    def forward(self, x: Any) -> Any:
        return attention(x, x, x, mask=self.mask, score_mod=self.mod)


def gradients(wrt: str) -> None:
    """Check gradients of captured tensors, in either order of `wrt`, in a program that torch caches on disk."""
    torch.manual_seed(0)
    x, *tables = torch.randn(1, 4, 4, 16), *torch.rand(2, 4, requires_grad=True).unbind()
    a, b = (table.detach().requires_grad_() for table in tables)
    mod = rawattn.ScoreMod("score * a[head] + b[head] * kv_idx", wrt=wrt.split(","), a=a, b=b)

    def run(x: Any) -> Any:
        return attention(x, x, x, score_mod=mod)

    exact, got = (
        torch.autograd.grad(f(x), (a, b), x) for f in (run, torch.compile(run, fullgraph=True))
    )
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other)


def save(path: str) -> None:
    torch.export.save(torch.export.export(_Masked(), (torch.randn(1, 5, 2, 8),)), path)


def load(path: str) -> None:
    """Load a program of another process. It must not run with this process's masks and score functions."""
    others = _Masked()
    program = torch.export.load(path).module()
    with pytest.raises(RuntimeError, match="or in another process"):
        program(torch.randn(1, 5, 2, 8))
    del others


if __name__ == "__main__":
    {"gradients": gradients, "save": save, "load": load}[sys.argv[1]](sys.argv[2])
