"""Calls like earlier ones: which are taken for one, and which are not. A framework of the test's own stands for CuPy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._interop.native import View, _GeneratedReaders
from rawattn._interop.readers import Attributes
from rawattn._kernels.selection import only
from rawattn._runtime import on_gpu
from rawattn._runtime.calls import describe
from rawattn._runtime.verbs import Verb
from rawattn._verbs import fast_path
from tests import tiles

SHAPE = (1, 4, 2, 8)
NBYTES = 128


class Array:
    """On a GPU, dense."""

    def __init__(self, address: int, shape: tuple[int, ...] = SHAPE, device: int = 0) -> None:
        self.address, self.shape, self.device = address, shape, device
        self.tracked = False
        self.dtype = np.dtype(np.float16)

    __dlpack__ = None  # as a mark of an array
    strides = property(lambda self: np.empty(self.shape, self.dtype).strides)
    requires_grad = property(lambda self: self.tracked)


class Framework(_GeneratedReaders):
    """`Native` of `Array`, and a GPU: what is prepared there, and what is launched."""

    kinds = (Array,)

    def __init__(self) -> None:
        super().__init__(
            Attributes(
                plain="type({x}) is kind",
                address="{x}.address",
                form="{x}.shape, True, {x}.dtype, {x}.device",
                tracked="{x}.tracked",
                names={"kind": Array},
            )
        )
        self.current = 0
        self.asked: list[Options] = []
        self.launched: list[list[int]] = []
        self.lengths: list[Any] = []
        self.next = 1 << 20

    def view(self, x: Array) -> View:
        return View(x.address, x.shape, x.strides, x.dtype, x.device)

    def address(self, x: Array) -> int:
        return x.address

    def empty(self, shape: tuple[int, ...], dtype: Any, beside: Any) -> Array:
        self.next += 1 << 10
        return Array(self.next, shape)

    def allocator_like(
        self, shape: tuple[int, ...], dtype: Any, beside: Any
    ) -> Callable[[], Array]:
        return lambda: self.empty(shape, dtype, beside)

    def current_device(self) -> int:
        return self.current

    def stream(self, device: int) -> int:
        return 0

    def run(self, verb: Verb, inputs: Sequence[Any], targets: Sequence[Any], options: Options, flag: bool,
            backend: Any, values: tuple[int, ...], memo: Any) -> Any:  # fmt: skip
        """The dispatcher."""
        self.asked.append(options)
        read = self.read((*inputs, *targets), verb.required_count)
        assert read is not None
        self.current = read[1][3]
        return on_gpu.run(verb, self, read, inputs, targets, options, flag, "numpy", values, memo)  # type: ignore[arg-type]

    def prepare(
        self, verb: Verb, views: Sequence[View | None], options: Options, flag: bool, *_: Any
    ) -> on_gpu.Call:
        named = dict(zip(verb.inputs + verb.outputs, views, strict=True))
        arrays = {name: SimpleNamespace(**x._asdict()) if x else None for name, x in named.items()}
        problem, lengths, results = describe(verb, arrays, options, flag, "numpy")
        targets = views[len(verb.inputs) :]
        made = tuple(
            (n, *x)
            for n, (x, target) in enumerate(zip(results, targets, strict=True))
            if x and target is None
        )
        reach = tuple((0, NBYTES) if x else (0, 0) for x in views)
        masked = any(name.startswith("mask") for name in verb.extra_inputs)
        launches: Any = SimpleNamespace(
            run=self.launch,
            run_keeping=self.launch if masked else None,
            with_starts=lambda bound: (self.launch, lambda seqs: ((), bound(seqs))),
        )
        return on_gpu.Call(launches, problem, lengths, results, made, None, reach)

    def launch(self, addresses: list[int], stream: int, memory: Any, lengths: Lengths) -> None:
        self.launched.append(addresses)
        self.lengths.append(lengths)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    found = Framework()
    monkeypatch.setattr(fast_path, "native_of", lambda framework: found)
    monkeypatch.setattr(fast_path.dispatch, "run", found.run)
    monkeypatch.setattr(on_gpu, "prepare", found.prepare)
    with tiles.nothing_prepared():
        yield found


def arrays(first: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Array]:
    return [Array((1 << 12) * (n + 1) + first, shape) for n in range(3)]


def called_anew(gpu: Framework, call: Callable[[], Any]) -> bool:
    """Whether a call goes the way of a first one; its launch is as such a one's in any case."""
    asked, launched = len(gpu.asked), len(gpu.launched)
    call()
    assert len(gpu.launched) == launched + 1
    return len(gpu.asked) > asked


def known(gpu: Framework, call: Callable[[], Any]) -> None:
    """Makes a call until it is known."""
    for _ in range(3):
        call()
    assert not called_anew(gpu, call)


def test_a_repeated_call_is_launched_with_its_own_arrays(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    q, k, v = arrays(64)
    out = rawattn.attention(q, k, v)
    assert gpu.launched[-1] == [q.address, k.address, v.address, out.address, 0]
    assert out.shape == SHAPE
    out, lse = [rawattn.attention(q, k, v, return_lse=True) for _ in range(3)][-1]
    assert gpu.launched[-1] == [q.address, k.address, v.address, out.address, lse.address]
    assert lse.shape == (1, 2, 4)


def of_backward() -> list[Array]:
    dout, out, lse = Array(1 << 16), Array(1 << 17), Array(1 << 18, (1, 2, 4))
    lse.dtype = np.dtype(np.float32)
    return [dout, *arrays(), out, lse]


def test_a_repeated_backward(gpu: Framework) -> None:
    given = of_backward()
    known(gpu, lambda: rawattn.attention_backward(*given))
    found = rawattn.attention_backward(*given)
    made = [x.address for x in found[:3]]
    assert gpu.launched[-1] == [*(x.address for x in given), 0, *made]
    assert type(found) is rawattn.Gradients
    assert found[3:] == (None, None, None)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (2, 0)}, {"scale": 1.0, "causal": False}, {"out": None, "seqs": None}],
    ids=str,
)  # fmt: skip
def test_options_are_told_apart(options: dict[str, Any], gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), **options))
    known(gpu, lambda: rawattn.attention(*arrays(), **options))


def test_values_that_are_equal_and_not_accepted(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), causal=True))
    known(gpu, lambda: rawattn.attention(*arrays(), window=(1, 0)))
    for wrong in ({"causal": 1}, {"window": (True, 0)}, {"window": (1, False)}, {"return_lse": 0}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}"):
            rawattn.attention(*arrays(), **wrong)


@pytest.mark.parametrize("change", ["shape", "alignment", "device", "dtype"])
def test_arrays_of_another_form(change: str, gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    other = arrays(4 if change == "alignment" else 0, (1, 5, 2, 8) if change == "shape" else SHAPE)
    for x in other:
        if change == "dtype":
            x.dtype = np.dtype(np.float32)
        x.device = int(change == "device")
    assert called_anew(gpu, lambda: rawattn.attention(*other))
    assert not called_anew(gpu, lambda: rawattn.attention(*other))
    if change == "device":  # where another one is current, it is the dispatcher that switches
        gpu.current = 0
        assert called_anew(gpu, lambda: rawattn.attention(*other))


def test_arrays_by_name(gpu: Framework) -> None:
    q, k, v = arrays()
    known(gpu, lambda: rawattn.attention(q, v=v, k=k))
    assert gpu.launched[-1][:3] == [q.address, k.address, v.address]
    with pytest.raises(TypeError, match=r"^v: rawattn.attention got none, expected q, k, v"):
        rawattn.attention(q, k)
    with pytest.raises(TypeError, match="multiple values"):
        rawattn.attention(q, k, v, v=v)


def test_results_are_written_where_they_are_wanted(gpu: Framework) -> None:
    q, k, v = arrays()
    out = Array(1 << 16)
    known(gpu, lambda: rawattn.attention(q, k, v, out=out))
    other = Array(1 << 17)
    assert rawattn.attention(q, k, v, out=other) is other
    assert gpu.launched[-1] == [q.address, k.address, v.address, other.address, 0]
    launched = len(gpu.launched)
    for address in (q.address, v.address + NBYTES - 16, k.address - NBYTES + 16):
        with pytest.raises(ValueError, match=r"^out: shares memory with"):
            rawattn.attention(q, k, v, out=Array(address))
    assert len(gpu.launched) == launched
    assert not called_anew(gpu, lambda: rawattn.attention(q, k, v, out=Array(v.address + NBYTES)))


def test_a_gradient_is_not_lost_in_a_repeated_call(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    refused: list[Any] = []
    monkeypatch.setattr(fast_path, "refuse_gradients", lambda names, x: refused.append(list(names)))
    q, k, v = arrays()
    k.tracked = True
    rawattn.attention(q, k, v)
    assert refused == [["q", "k", "v"]]


def test_a_write_of_a_repeated_call_is_told(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Array(1 << 16)
    known(gpu, lambda: rawattn.attention(*arrays(), out=out))
    told: list[Any] = []
    refused: list[Any] = []
    monkeypatch.setattr(fast_path, "bump_versions", lambda *x: told.extend(x))
    monkeypatch.setattr(
        fast_path, "refuse_gradients_of_written", lambda names, x: refused.append((*names, *x))
    )
    rawattn.attention(*arrays(), out=out)
    assert (told, refused) == ([out], [])
    out.tracked = True
    rawattn.attention(*arrays(), out=out)
    assert refused == [("out", out)]


def bias(address: int = 1 << 16, shape: tuple[int, ...] = (2, 4, 4)) -> Array:
    return Array(address, shape)


def test_a_repeated_call_is_launched_with_the_arrays_of_its_options(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), causal=True, bias=bias()))
    q, k, v = arrays(64)
    other = bias(1 << 18)
    out = rawattn.attention(q, k, v, causal=True, bias=other)
    assert gpu.launched[-1] == [q.address, k.address, v.address, other.address, out.address, 0]
    slopes = Array(1 << 19, (2,))
    known(gpu, lambda: rawattn.attention(q, k, v, bias=other, alibi_slopes=slopes, out=out))
    found = [x.address for x in (q, k, v, other, slopes, out)]
    assert gpu.launched[-1] == [*found, 0]
    with pytest.raises(ValueError, match=r"^out: shares memory with"):
        rawattn.attention(q, k, v, bias=other, alibi_slopes=slopes, out=Array(other.address))


def test_a_repeated_backward_with_a_bias(gpu: Framework) -> None:
    given = of_backward()
    known(gpu, lambda: rawattn.attention_backward(*given, bias=bias()))
    found = rawattn.attention_backward(*given, bias=bias(1 << 20))
    made = [x.address for x in (*found[:3], found.dbias)]
    assert gpu.launched[-1] == [*(x.address for x in given), 0, 1 << 20, *made]
    # Gradients of some options, and none of others before them.
    alone = lambda: rawattn.attention_backward(*given, bias=bias(), want_dbias=False)  # noqa: E731
    known(gpu, alone)
    assert gpu.launched[-1][:8] == [*(x.address for x in given), 0, 1 << 16]
    assert alone().dbias is None


def test_the_order_in_which_arrays_of_options_are_spelled_does_not_matter(gpu: Framework) -> None:
    q, k, v = arrays()
    slopes = Array(1 << 19, (2,))
    slopes.dtype = np.dtype(np.float32)
    known(gpu, lambda: rawattn.attention(q, k, v, alibi_slopes=slopes, bias=bias()))
    assert gpu.launched[-1][3:5] == [1 << 16, 1 << 19]
    given = of_backward()
    dlse = Array(1 << 21, (1, 2, 4))
    dlse.dtype = np.dtype(np.float32)
    for options in ({"bias": bias(), "dlse": dlse}, {"dlse": dlse, "bias": bias()}):
        known(gpu, lambda options=options: rawattn.attention_backward(*given, **options))
        assert gpu.launched[-1][6:8] == [1 << 21, 1 << 16]


def of_mask(monkeypatch: pytest.MonkeyPatch, first: int) -> tuple[rawattn.BlockMask, list[int]]:
    """A mask whose arrays lie where this test's framework has them, and their addresses."""
    mask = rawattn.block_mask(np.ones((4, 4), bool))
    copies = []
    for n, words in enumerate(mask.arrays):
        array = Array(first + (n << 12), words.shape)
        array.dtype = words.dtype
        copies.append(array)
    monkeypatch.setitem(beside, mask.handle, tuple(copies))
    return mask, [x.address for x in copies]


beside: dict[Any, tuple[Array, ...]] = {}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_repeated_call_is_given_the_arrays_of_its_mask_and_its_memo(
    backward: bool, gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawattn.BlockMask, "on_device_of", lambda mask, q: beside[mask.handle])
    (one, _), (other, words) = (of_mask(monkeypatch, n << 24) for n in (1, 2))
    given = of_backward() if backward else arrays()
    call: Any = rawattn.attention_backward if backward else rawattn.attention
    known(gpu, lambda: call(*given, causal=True, mask=one))
    assert gpu.lengths[-1] is one.memo
    result = call(*given, causal=True, mask=other)
    assert gpu.lengths[-1] is other.memo
    made = [x.address for x in result[:3]] if backward else [result.address, 0]
    assert gpu.launched[-1] == [*(x.address for x in given), *[0] * backward, *words, *made]
    if not backward:
        out = Array(1 << 30)
        known(gpu, lambda: call(*given, causal=True, mask=other, out=out))
        assert gpu.launched[-1] == [*(x.address for x in given), *words, out.address, 0]
    assert called_anew(gpu, lambda: call(*given, causal=False, mask=other))


def test_arrays_of_options_of_another_form(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), bias=bias()))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=bias(shape=(1, 4, 4))))
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=None))
    mask = bias()
    mask.dtype = np.dtype(np.bool_)
    assert called_anew(gpu, lambda: rawattn.attention(*arrays(), mask=mask))
    # Kernels are chosen by where such an array begins within 16 bytes.
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), bias=bias((1 << 16) + 4)))


def test_a_gradient_of_an_array_of_options_is_not_lost(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(gpu, lambda: rawattn.attention(*arrays(), bias=bias()))
    refused: list[Any] = []
    monkeypatch.setattr(fast_path, "refuse_gradients", lambda names, x: refused.append(list(names)))
    tracked = bias()
    tracked.tracked = True
    rawattn.attention(*arrays(), bias=tracked)
    assert refused == [["q", "k", "v", "bias"]]


def test_options_that_become_numbers_are_asked_for_each_time(gpu: Framework) -> None:
    seed = {"dropout_p": 0.5, "seed": 3}
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), **seed))
    with pytest.raises(TypeError, match=r"^scale"):
        rawattn.attention(*arrays(), scale=[1.0])


def test_a_call_for_the_cpu_is_never_launched_anew(gpu: Framework) -> None:
    for _ in range(3):
        assert called_anew(gpu, lambda: rawattn.attention(*arrays(), backend="cpu"))


def test_another_choice_of_kernels_is_not_the_known_one(gpu: Framework) -> None:
    known(gpu, lambda: rawattn.attention(*arrays()))
    with only("portable"):
        for _ in range(3):
            assert called_anew(gpu, lambda: rawattn.attention(*arrays()))
    assert not called_anew(gpu, lambda: rawattn.attention(*arrays()))


def test_layouts_of_one_structure_share_a_call_and_keep_their_lengths(gpu: Framework) -> None:
    packed = arrays(shape=(10, 2, 8))
    kept = SeqLayout(seqstart_q=[0, 4, 10])
    known(gpu, lambda: rawattn.attention(*packed, seqs=kept))
    assert not called_anew(
        gpu, lambda: rawattn.attention(*packed, seqs=SeqLayout(seqstart_q=[0, 5, 10]))
    )
    assert gpu.lengths[-1].q.start.tolist() == [0, 5, 10]
    assert called_anew(gpu, lambda: rawattn.attention(*packed, seqs=SeqLayout(seqstart_q=[0, 10])))
    for wrong in (SeqLayout(seqstart_q=[0, 4, 11]), SeqLayout(seqlen_q=[3])):
        with pytest.raises(ValueError, match=r"^seqs|^seqstart_q"):
            rawattn.attention(*packed, seqs=wrong)
    with pytest.raises(TypeError, match=r"^seqs"):
        rawattn.attention(*packed, seqs=[0, 4, 10])


def test_calls_are_forgotten_when_there_are_too_many(
    gpu: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "_MAX_CLOSURES", 4)
    for n in range(20):
        for _ in range(3):
            rawattn.attention(*arrays(), scale=1.0 + n)
    assert 1 <= len(fast_path.closures_by_call["attention"]) <= 4


def test_what_people_are_shown() -> None:
    for function, result in ((rawattn.attention, "Any"), (rawattn.attention_backward, "Gradients")):
        shown = inspect.signature(function)
        assert shown.return_annotation == function.__annotations__["return"] == result
        assert "unknown" not in shown.parameters
        assert shown.parameters["causal"].default is False
        assert function.__doc__


# What is read


def test_readers_read_what_is_given() -> None:
    own = Framework()
    q, k, v = arrays(4)
    addresses, form, tracked = own.read((q, None, v), 1) or ([], (), True)
    assert addresses == [q.address, 0, v.address]
    each = (SHAPE, True, np.dtype(np.float16), 0)
    assert form == (*each, None, *each, 4)
    assert not tracked
    k.tracked = True
    assert own.reader(2)(q, k)[2]  # type: ignore[index]
    assert own.read((q, None, v), 2) is None
    assert own.read((q, np.zeros(3), v), 3) is None


@pytest.mark.frameworks
def test_tensors_that_are_not_plain_are_not_read() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    from rawattn._interop.native import native_of

    own = native_of("torch")
    assert own is not None
    x = torch.zeros(1, 4, 2, 8)
    sparse = x.to_sparse()
    negated = torch.zeros(1, 4, dtype=torch.complex64).conj().imag
    assert [own.read((one,), 1) for one in (x, sparse, negated)] == [None] * 3
