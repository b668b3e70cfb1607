"""Checks of `rawattn.torch` that hold on every device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

import rawattn.torch
from rawattn import Gradients
from tests.autograd import CASES, PAGE, dlse_of, verify
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import Torch
from tests.gradients import backward_of, verify_others
from tests.score_cases import curated_scores
from tests.tolerance import check, check_lse
from tests.verify import expected, layout, options_of

sdpa = torch.nn.functional.scaled_dot_product_attention

GRADIENT_CASES = [
    *CASES,
    dense("torch-d128", 1, 65, 130, nheads_q=6, nheads_kv=1, headdim=128, dtype="float16"),
    dense("torch-no-keys", 2, 9, 0, headdim=16),
    dense("torch-top-left", 1, 40, 70, align="top-left", causal=True, scale=-0.3),
    padded("torch-padded-k", (70, 70), (90, 17), 70, 95, by_q="room", by_k="cu_seqlen", headdim=32),
    ragged("torch-starts", (30, 0, 64), (90, 20, 5), causal=True, dtype="float16"),
]

_NAMES = ("softcap", "score-mod", "bias", "alibi-slopes", "mask", "sink-logits", "dropout-p")
_WANTED = {
    *(f"{name}-{kind}-bfloat16" for name in _NAMES for kind in ("packed", "padded")),
    *(f"{name}-{dtype}" for name in _NAMES for dtype in ("float16", "float32")),
    "every-option-bfloat16", "every-option-packed-bfloat16", "seed-int32-0-bfloat16", "seed-int64-1-bfloat16",
    "bias-axes-1kv1k-bfloat16", "bias-axes-bqr1-bfloat16", "bias-no-keys-bfloat16", "score-table-float32",
    "bias-transposed-bfloat16", "bias-expanded-bfloat16", "bias-odd-bfloat16", "slopes-1-bfloat16",
}  # fmt: skip
SCORE_CASES = [case for case in curated_scores() if str(case) in _WANTED]
assert len(SCORE_CASES) == len(_WANTED), _WANTED - {str(case) for case in SCORE_CASES}


def verify_scores(case: Case, device: str, *, compiled: bool = False) -> None:
    """Check values, and the gradients of the options that have one."""
    call, framework, exact = backward_of(case), Torch(device), expected(case)
    inputs = call.inputs
    options = options_of(inputs, framework)
    mod = options.pop("score_mod", None)
    constants = {name: x for name, x in options.items() if not isinstance(x, torch.Tensor)}
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    differentiated = {
        name: tensors.pop(name).requires_grad_()
        for name in ("bias", "sink_logits")
        if name in tensors
    }
    captured = {} if mod is None else dict(mod.arrays)
    if mod is not None:
        for name in mod.text.wrt:
            captured[name].requires_grad_()
        constants["score_mod"] = rawattn.ScoreMod(mod.text.forward, wrt=mod.text.wrt, **captured)
    seqs = layout(inputs) if compiled else layout(inputs, case, framework)

    def run(q: Any, k: Any, v: Any, tensors: Any, differentiated: Any) -> Any:
        return rawattn.torch.attention(
            q, k, v, seqs=seqs, return_lse=True, **constants, **tensors, **differentiated
        )

    q, k, v = (framework.array(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    attend = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    out, lse = attend(q, k, v, tensors, differentiated)
    incoming = framework.array(call.dout), framework.array(dlse_of(call))
    torch.autograd.backward((out, lse), incoming)
    of_options = [
        getattr(differentiated.get(name), "grad", None) for name in ("bias", "sink_logits")
    ]
    of_captured = {name: captured[name].grad for name in (mod.text.wrt if mod else ())}
    gradients = Gradients(q.grad, k.grad, v.grad, *of_options, of_captured or None)
    verify(call, framework, gradients)
    verify_others(call, framework, gradients, None)
    log = framework.host(lse).swapaxes(-1, -2)
    check(framework.host(out)[inputs.rows], exact.out, exact.low_out, what="out")
    check_lse(log[inputs.rows], exact.lse, exact.low_lse)


def verify_case(case: Case, device: str) -> None:
    """Check values, padding, and gradients of out and lse, eager and compiled."""
    call, framework, exact = backward_of(case), Torch(device), expected(case)
    inputs = call.inputs
    incoming = framework.array(call.dout), framework.array(dlse_of(call))
    # A compiled function takes lengths only from the host.
    for compiled, seqs in ((False, layout(inputs, case, framework)), (True, layout(inputs))):

        def run(q: Any, k: Any, v: Any, seqs: Any = seqs) -> Any:
            return rawattn.torch.attention(q, k, v, seqs=seqs, **inputs.options, return_lse=True)

        q, k, v = (framework.array(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(
            q, k, v
        )
        torch.autograd.backward((out, lse), incoming)
        verify(call, framework, (q.grad, k.grad, v.grad))
        log = framework.host(lse).swapaxes(-1, -2)
        check(framework.host(out)[inputs.rows], exact.out, exact.low_out, what="out")
        check_lse(log[inputs.rows], exact.lse, exact.low_lse)


def documentation() -> list[str]:
    """The Python blocks of the documentation page's section about PyTorch."""
    section = re.search(r"^## PyTorch$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert section is not None
    return re.findall(r"^```python\n(.*?)^```$", section[1], re.M | re.S)


def leaves(*tensors: Any) -> list[Any]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def random(device: str, *, heads: int = 4, heads_kv: int = 2, rows: int = 33, dim: int = 32) -> Any:
    """Return float32 q, k, v, always from the same seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, rows, heads, dim), (2, rows, heads_kv, dim), (2, rows, heads_kv, dim))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def torchs_own(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """torch's own attention, on arrays in rawattn's axis order."""
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(*turned, enable_gqa=q.shape[2] != k.shape[2], **options).transpose(1, 2)


def same_as_torchs_own(
    device: str, dtype: Any = torch.float32, *, causal: bool, heads_kv: int
) -> None:
    given = [x.to(dtype) for x in random(device, heads_kv=heads_kv)]
    dout = torch.randn_like(given[0])
    results = []
    for attend, options in (
        (rawattn.torch.attention, {"causal": causal}),
        (torchs_own, {"is_causal": causal}),
    ):
        x = leaves(*given)
        out = attend(*x, **options)
        results.append((out, *torch.autograd.grad(out, x, dout)))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, **tolerance)


def gradients(run: Callable[..., Any], *given: Any) -> list[Any]:
    """Return the gradients of the sum of squares of all that `run` returns."""
    x = leaves(*given)
    results = run(*x)
    results = results if isinstance(results, tuple) else (results,)
    sum(y.float().square().sum() for y in results).backward()
    return [each.grad for each in x]


class Block(torch.nn.Module):
    """A trainable attention layer."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.to_qkv = torch.nn.Linear(48, 48 * 3)
        self.to_out = torch.nn.Linear(48, 48)

    def forward(self, x: Any) -> Any:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 4, 12)).unbind(-3)
        return self.to_out(self.attend(q, k, v).flatten(-2))


def losses_of_training(attend: Callable[..., Any], device: str, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    block, x, target = Block(attend), torch.randn(4, 21, 48), torch.randn(4, 21, 48)
    block, x, target = block.to(device), x.to(device), target.to(device)
    optimizer = torch.optim.AdamW(block.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
