"""The code of docs/frameworks.md, and what it must do on every device."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.cases import Case, Strided, dense, padded, ragged
from tests.frameworks import Framework, Jax
from tests.gradients import NAMES, Backward, backward_of, check_gradient
from tests.verify import layout

PAGE = Path(__file__).resolve().parents[1] / "docs/frameworks.md"
CASES = [
    dense("autograd", 2, 70, 90, nheads_q=4, nheads_kv=2, causal=True),
    dense("autograd-float32", 1, 140, 100, headdim=40, headdim_v=24, dtype="float32"),
    dense("autograd-bhsd", 1, 50, 60, layout="bhsd", dtype="float16", window=(20, 3), sink=4),
    padded("autograd-padded", (30, 0, 64), (90, 17, 0), 70, 95, causal=True),
    ragged(
        "autograd-ragged", (30, 5, 64), (90, 0, 5), room_q=(33, 9, 70), by_q="seqlen", lead=3,
        tail=9, headdim=128,
    ),
]  # fmt: skip


def blocks(library: str) -> list[str]:
    """The Python of the page's section about a library."""
    section = re.search(
        rf"^## {library}$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert len(found) == 2, f"expected a definition and a use of it, got {len(found)} blocks"
    return found


@functools.cache
def page(library: str) -> dict[str, Any]:
    """What the page defines, after it has run as a whole."""
    names: dict[str, Any] = {}
    for block in blocks(library):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


def verify(call: Backward, framework: Framework, gradients: Any) -> None:
    for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
        gradient = framework.host(gradients[n])
        assert gradient.shape == call.shapes[n]
        check_gradient(call, n, gradient[rows])
        assert not np.any(gradient[~rows].astype(np.float32) != 0), f"{name}: padding is not 0"


def dlse_of(call: Backward) -> Strided:
    values = np.zeros_like(call.lse) if call.dlse is None else call.dlse
    strides = [x // values.itemsize for x in values.strides]
    return Strided(values.ravel(), 0, values.shape, tuple(strides))


def verify_jax(case: Case, platform: str) -> None:
    """Traced, and called by itself."""
    import jax

    call, framework = backward_of(case), Jax(platform)
    inputs = call.inputs
    arrays = [framework.array(x) for x in (inputs.q, inputs.k, inputs.v)]
    incoming = framework.array(call.dout), framework.array(dlse_of(call))
    attention = page("JAX")["attention_with"](seqs=layout(inputs), **inputs.options)

    def gradients(arrays: Any, incoming: Any) -> Any:
        return jax.vjp(attention, *arrays)[1](incoming)

    traced = jax.jit(gradients)(arrays, incoming)
    verify(call, framework, traced)
    verify(call, framework, gradients(arrays, incoming))


def in_the_middle_of_a_program(platform: str) -> None:
    """XLA's own work before and after: in a loop, twice in a step, on the same stream."""
    import jax
    import jax.numpy as jnp

    attention = page("JAX")["attention_with"](causal=True)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 64, 4, 32)) / 4, rng.standard_normal((32, 32)) / 6
    device = jax.devices(platform)[0]
    x, w = (jax.device_put(a.astype(np.float32), device) for a in (x, w))

    def plain(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        s = jnp.where(jnp.tri(q.shape[1], dtype=bool), s, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v), None

    def loss(x: Any, w: Any, attend: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            h = jnp.tanh(x @ w)
            h = h + attend(h, x, h @ w)[0]
            return h + 0.5 * attend(x, h, jnp.sin(h))[0], None

        return (jax.lax.scan(step, x, None, length=3)[0] ** 2).mean()

    with jax.default_matmul_precision("highest"):
        slope = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
        got, exact = slope(x, w, attention), slope(x, w, plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        size = float(jnp.abs(b).max())
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5 * size)
