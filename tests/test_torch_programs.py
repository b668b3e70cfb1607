"""Programs of `torch.compile` on the host: layouts made in them, and functions that break the graph."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import ml_dtypes
import numpy as np
import torch._dynamo.testing  # noqa: F811  (torch does not load it before it compiles)
from torch.utils.flop_counter import FlopCounterMode

from rawattn import SeqLayout
from rawattn._interop import dynamo
from rawattn.torch import attention
from tests import exhaustive, torch_programs
from tests.layout.on_device import OnDevice
from tests.torch_calls import random
from tests.torch_programs import LAYOUTS, REFUSED, UNTRACED

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "dynamic"), exhaustive.thin(itertools.product(LAYOUTS, (False, True)), 5)
)
def test_layouts_made_inside(name: str, dynamic: bool) -> None:
    torch_programs.verify_made_inside(name, "cpu", fullgraph=True, dynamic=dynamic)


def test_layouts_made_inside_of_a_program_that_may_break() -> None:
    torch_programs.verify_made_inside("from-lengths", "cpu", fullgraph=False, dynamic=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["lengths", "starts", "from-padding-mask", "lengths-of-lists"])
def test_layouts_made_inside_of_an_exported_program(name: str, strict: bool) -> None:
    torch_programs.verify_exported(name, "cpu", strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_every_batch(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x, lengths):
            return attention(x, x, x, seqs=SeqLayout(seqlen_k=lengths))

    def given(count):
        return torch.randn(count, 9, 4, 16), torch.arange(count) + 3

    batch = {0: torch.export.Dim("batch", min=1, max=100)}
    exported = torch.export.export(
        Model(), given(3), dynamic_shapes={"x": batch, "lengths": batch}, strict=strict
    )
    for count in (1, 6):
        x = given(count)
        torch.testing.assert_close(exported.module()(*x), Model()(*x))


def test_dispatch_modes() -> None:
    torch_programs.verify_modes("cpu")


@pytest.mark.filterwarnings("error")
def test_values_of_numpy_under_dispatch_modes() -> None:
    def check(options, q, k, v):
        exact = attention(q, k, v, **options)
        with FlopCounterMode(display=False):
            torch.testing.assert_close(attention(q, k, v, **options), exact)

    q, k, v = random("cpu")
    heads, rows, keys = q.shape[2], q.shape[1], k.shape[1]
    bias = np.linspace(-1, 1, rows * keys, dtype=np.float32).reshape(rows, keys)
    for options in (
        {"bias": bias},
        {"bias": bias[::-1]},
        {"bias": np.broadcast_to(bias[0], (rows, keys))},
        {"mask": bias < 0.5},
        {"alibi_slopes": np.ones(heads, np.float32)},
        {"sink_logits": np.ones(heads, np.float32)},
        {"dropout_p": 0.1, "seed": np.array([3])},
        {"dropout_p": 0.1, "seed": np.int64(3)},
        {"causal": np.bool_(True), "softcap": np.float32(3)},
    ):
        check(options, q, k, v)
    narrow = (x.bfloat16() for x in (q, k, v))
    check({"bias": bias.astype(ml_dtypes.bfloat16)}, *narrow)


def test_layouts_taken_outside() -> None:
    torch_programs.verify_taken_outside("cpu")


def test_layouts_read_inside() -> None:
    torch_programs.verify_read_inside("cpu")


def test_wrong_layouts_made_inside() -> None:
    """A wrong layout made inside is refused when the program runs, because before that nothing has values."""
    x = torch.randn(2, 9, 4, 16)

    def run(x, lengths):
        return attention(x, x, x, seqs=SeqLayout(seqlen_q=lengths))

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with pytest.raises(
        ValueError, match=r"seqlen_q: got length 10 for sequence 1, expected at most 9"
    ):
        compiled(x, torch.tensor([3, 10]))
    with pytest.raises(ValueError, match="seqlen_q: got -1"):
        compiled(x, torch.tensor([3, -1]))


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_refused(name: str) -> None:
    torch_programs.verify_refused(name, "cpu")


@pytest.mark.parametrize("row", [[False, True, True], [True, False, True]], ids=["left", "hole"])
@pytest.mark.parametrize("side", "qk")
def test_padding_before_tokens(row: list[bool], side: str) -> None:
    """Padding before tokens in a mask on the host is found when the program runs, as the lengths are."""
    x = torch.randn(2, 3, 4, 16)

    def run(x, mask):
        masks = (mask,) if side == "q" else (mask.new_ones(mask.shape), mask)
        return attention(x, x, x, seqs=SeqLayout.from_padding_mask(*masks))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    right = torch.tensor([[True, True, True], [True, False, False]])
    torch.testing.assert_close(compiled(x, right), run(x, right))
    for call in (compiled, run):
        with pytest.raises(ValueError, match=f"mask_{side}: got row 1 with padding .*on the right"):
            call(x, torch.tensor([[True, True, True], row]))


def test_lengths_of_another_library_on_a_gpu() -> None:
    """Lengths in a GPU array of another library, which torch cannot trace, are refused with an error that says so."""
    seqs = SeqLayout(seqlen_q=[3, 5])
    seqs._arrays["seqlen_q"] = OnDevice([3, 5], "int64")
    x = torch.randn(2, 9, 4, 16)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="seqlen_q is a GPU array of another library"
    ):
        torch.compile(lambda x: attention(x, x, x, seqs=seqs), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("name", exhaustive.thin(UNTRACED, 4))
def test_untraced(name: str) -> None:
    torch_programs.verify_untraced(name, "cpu")


def test_nobody_compiles() -> None:
    assert not dynamo.is_compiling()


def test_nothing_behind_a_break_is_traced() -> None:
    """Nothing that an untraced function calls is traced: torch does not know NumPy structs."""
    struct = np.dtype([("number", np.int32)])

    @dynamo.untraced
    def number() -> int:
        return int(np.zeros(1, struct)["number"][0])

    compiled = torch.compile(lambda x: x.sin() + number(), backend="eager")
    x = torch.ones(3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.sin())
