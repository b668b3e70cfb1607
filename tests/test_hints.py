"""Hints in error messages: each says what to write, and only where it fits."""

from __future__ import annotations

import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn._call import hints
from rawattn._call.keywords import IN_PAGES, KEYWORDS
from rawattn._interop.advice import array_advice, cast

# -- transposed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        pytest.param((2, 8, 128, 64), (2, 8, 100, 64), (2, 8, 100, 64), id="cross"),
        pytest.param((2, 8, 128, 64), (2, 2, 100, 64), (2, 2, 100, 32), id="shared-heads"),
        pytest.param((2, 8, 1, 64), (2, 8, 100, 64), (2, 8, 100, 64), id="decode"),
        pytest.param((2, 8, 128, 300), (2, 8, 100, 300), (2, 8, 100, 300), id="wide-heads-too"),
    ],
)
def test_heads_before_rows(q: Any, k: Any, v: Any) -> None:
    hint = hints.transposed(q, k, v)
    assert hint.startswith("; these look like (batch, heads, seqlen, D): pass ")
    assert "x.swapaxes(1, 2)" in hint
    assert "x.transpose(1, 2)" in hint
    assert hints.transposed(q, k, v, "torch") == (
        "; these look like (batch, heads, seqlen, D): pass x.transpose(1, 2)"
    )
    assert "swapaxes" in hints.transposed(q, k, v, "jax.numpy")


def test_heads_before_rows_in_a_packed_batch() -> None:
    hint = hints.transposed((8, 128, 64), (8, 100, 64), (8, 100, 64), "torch")
    assert hint == "; these look like (heads, total, D): pass x.transpose(0, 1)"


def test_the_advice_of_each_framework_works() -> None:
    x = np.zeros((2, 8, 128, 64))
    assert x.swapaxes(1, 2).shape == (2, 128, 8, 64)
    torch = pytest.importorskip("torch")
    assert torch.zeros(2, 8, 128, 64).transpose(1, 2).shape == (2, 128, 8, 64)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        pytest.param((2, 128, 8, 64), (2, 100, 8, 64), (2, 100, 8, 64), id="valid"),
        pytest.param((2, 8, 128, 64), (2, 8, 128, 64), (2, 8, 128, 64), id="valid-either-way"),
        pytest.param((2, 128, 8, 64), (2, 100, 3, 64), (2, 100, 3, 64), id="wrong-either-way"),
        pytest.param((2, 8, 128, 64), (2, 8, 100, 32), (2, 8, 100, 64), id="head-dims-differ"),
        pytest.param((2, 8, 128, 64), (3, 8, 100, 64), (3, 8, 100, 64), id="batches-differ"),
        pytest.param((2, 8, 128, 64), (8, 100, 64), (8, 100, 64), id="axes-differ"),
        pytest.param((8, 64), (8, 64), (8, 64), id="two-axes"),
        pytest.param((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), id="five-axes"),
        pytest.param((2, 0, 128, 64), (2, 8, 100, 64), (2, 8, 100, 64), id="no-head"),
        pytest.param((2, 8, 128, 64), (2, 0, 100, 64), (2, 0, 100, 64), id="no-kv-head"),
    ],
)
def test_no_transposition_would_help(q: Any, k: Any, v: Any) -> None:
    assert hints.transposed(q, k, v) == ""


# -- padding_mask ----------------------------------------------------------------------------------


def test_padding_mask() -> None:
    for mask in ((2, 7), (2, 5)):
        hint = hints.padding_mask(mask, 2, 5, 7)
        assert hint.startswith("; this looks like a padding mask")
        assert "SeqLayout.from_padding_mask(mask)" in hint
        assert "mask[:, None, None, :]" in hint
        assert "; this looks like" in (hint := hints.padding_mask(mask, 2, 5, 7, in_pages=True))
        assert "seqlen_k=mask.sum(1)" in hint
        assert "SeqLayout" not in hint  # with pages its lengths are those of q alone
    for mask in ((3, 7), (2, 6), (2, 1, 1, 7), (7,)):
        assert hints.padding_mask(mask, 2, 5, 7) == ""


# -- cast ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "dtype", "advice"),
    [
        ("torch", "float16", "q.half()"),
        ("torch", "bfloat16", "q.bfloat16()"),
        ("torch", np.dtype(np.float32), "q.float()"),
        ("torch", "int32", "q.to(torch.int32)"),
        ("numpy", "float32", "q.astype(np.float32)"),
        ("numpy", np.dtype(ml_dtypes.bfloat16), "q.astype(ml_dtypes.bfloat16)"),
        ("cupy", "float16", "q.astype(cupy.float16)"),
        ("cupy", "bfloat16", "q.astype(ml_dtypes.bfloat16)"),
        ("jax.numpy", "bfloat16", "q.astype(jnp.bfloat16)"),
        ("tensorflow", "float16", "tf.cast(q, tf.float16)"),
        ("paddle", "float16", "q converted to float16"),
    ],
)
def test_cast(framework: str, dtype: Any, advice: str) -> None:
    assert cast(framework, "q", dtype) == advice


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_casts_run(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    names = {"torch": torch, "np": np, "jnp": jax.numpy, "ml_dtypes": ml_dtypes}
    arrays = {"numpy": np.ones(2), "torch": torch.ones(2), "jax": jax.numpy.ones(2)}
    for framework, q in arrays.items():
        converted = eval(cast(framework, "q", dtype), {**names, "q": q})
        assert str(converted.dtype).removeprefix("torch.") == dtype


# -- renamed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("is_causal", "causal=True, align='top-left'"),
        ("softmax_scale", "scale="),
        ("sm_scale", "scale="),
        ("scaling", "scale="),
        ("attn_mask", "mask= for bool (True = keep) or bias="),
        ("attn_bias", "bias="),
        ("cu_seqlens_q", "seqs=SeqLayout(seqstart_q="),
        ("cu_seqlens_k", "seqstart_k="),
        ("cu_seqlens", "seqs=SeqLayout("),
        ("max_seqlen_q", "seqs=SeqLayout(..., max_seqlen_q="),
        ("max_seqlen_k", "max_seqlen_k="),
        ("window_size", "None (not -1)"),
        ("window_left", "window=(left, right)"),
        ("sliding_window", "window=(n - 1, 0)"),
        ("logits_soft_cap", "softcap="),
        ("logit_cap", "softcap="),
        ("dropout", "dropout_p= and an integer seed="),
        ("dropout_rate", "dropout_p="),
        ("enable_gqa", "leave it out"),
        ("block_tables", "rawattn.paged_attention("),
        ("cache_seqlens", "SeqLayout(seqlen_k=...)"),
        ("key_padding_mask", "True is padding"),
        ("attention_mask", "from_padding_mask"),
        ("need_weights", "never formed"),
        ("return_attn_probs", "return_lse=True"),
        ("return_softmax_lse", "return_lse=True"),
        ("alibi", "alibi_slopes="),
        ("deterministic", "attention_backward takes it"),
        ("s_aux", "sink_logits="),
        ("segment_ids", "SeqLayout.from_lengths("),
        ("block_mask", "mask=rawattn.block_mask("),
        ("query", "q, k and v"),
    ],
)
def test_keywords_of_other_libraries(keyword: str, says: str) -> None:
    assert says in str(hints.renamed(keyword))


@pytest.mark.parametrize("keyword", ["", "causal", "cuasal", "q", "fancy"])
def test_other_keywords_have_no_hint(keyword: str) -> None:
    assert hints.renamed(keyword) is None


# Arguments that hints name and `attention` does not have.
OTHER_OPTIONS = {"seqlen_k"}


def test_what_hints_name_exists() -> None:
    options = {*inspect.signature(rawattn.attention).parameters, *OTHER_OPTIONS}
    options |= set(inspect.signature(rawattn.SeqLayout).parameters)
    options |= set(inspect.signature(rawattn.attention_backward).parameters)
    for keyword, advice in KEYWORDS.items():
        named = set(re.findall(r"(?<![\w.])(\w+)=", advice))
        assert named <= options, keyword
        for method in re.findall(r"SeqLayout\.(\w+)", advice):
            assert callable(getattr(rawattn.SeqLayout, method))


def _refused(keyword: str, function: Any, name: str) -> str:
    accepted = inspect.signature(function).parameters
    with pytest.raises(TypeError) as caught:
        hints.refuse_unknown(name, [keyword], accepted)
    return str(caught.value)


ELSEWHERE = {
    "append_kv": rawattn.append_kv,
    "attention": rawattn.attention,
    "attention_backward": rawattn.attention_backward,
    "combine": rawattn.combine,
    "paged_attention": rawattn.paged_attention,
    "topk_mask": rawattn.topk_mask,
    "unpack_pages": rawattn.unpack_pages,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_hints_name_only_arguments_that_the_function_takes(name: str) -> None:
    function = ELSEWHERE[name]
    accepted = set(inspect.signature(function).parameters)
    for keyword in {*KEYWORDS, *IN_PAGES} - accepted:
        told = _refused(keyword, function, f"rawattn.{name}").partition("; ")[2]
        while "(" in told:  # arguments of another function, or of a SeqLayout
            told = re.sub(r"\([^()]*\)", "", told)
        assert set(re.findall(r"(?<![\w.])(\w+)=", told)) <= accepted, (keyword, told)
        assert "q" in accepted or not re.search(r"\bq\b", told), (keyword, told)


def test_hints_of_the_pullback_name_its_own_arguments() -> None:
    q = np.ones((1, 2, 1, 8), np.float32)
    out, backward = rawattn.attention_vjp(q, q, q)
    for keyword, says in {
        "softmax_scale": "accepted are dout, dlse, want_dbias, into",
        "causal": "give it to rawattn.attention_vjp",
        "num_splits": "give it to the forward call alone",
    }.items():
        with pytest.raises(TypeError, match=f"^{keyword}: .*; {says}$"):
            backward(out, **{keyword: 1})


@pytest.mark.parametrize("function", [rawattn.paged_attention, rawattn.append_kv])
def test_masks_of_tokens_in_calls_on_pages(function: Any) -> None:
    """`SeqLayout.from_padding_mask` has lengths of keys, which these calls refuse in `seqs`."""
    for keyword in ("attention_mask", "padding_mask", "key_mask", "key_padding_mask"):
        told = _refused(keyword, function, f"rawattn.{function.__name__}")
        assert "from_padding_mask" not in told
        assert "seqs=SeqLayout(seqlen_q=" in told
        assert "seqlen_k=" in told.partition(")")[2]


def test_slots_of_other_caches() -> None:
    told = _refused("slot_mapping", rawattn.append_kv, "rawattn.append_kv")
    assert told.endswith("; leave it out: block_table and seqlen_k say where new rows go")


@pytest.mark.parametrize("keyword", ["cu_seqlens", "cu_seqlens_q", "kv_indptr"])
def test_starts_that_are_given_as_lengths(keyword: str) -> None:
    told = _refused(keyword, rawattn.SeqLayout.from_lengths, "SeqLayout.from_lengths")
    assert told.endswith(
        "; call SeqLayout(seqstart_q=..., seqstart_k=...), which takes cumulative lengths"
    )


@pytest.mark.parametrize("keyword", ["backend", "implementation", "device"])
def test_a_call_of_jax_has_no_backend(keyword: str) -> None:
    told = _refused(keyword, rawattn.combine, "rawattn.jax.attention")
    assert told.endswith("; leave it out: a call runs where its program runs")


def test_no_keyword_is_listed_twice() -> None:
    from rawattn._call.keywords import _GROUPS

    assert len(" ".join(_GROUPS.values()).split()) == len(KEYWORDS)


def test_hints_are_one_short_sentence_each() -> None:
    for keyword, advice in KEYWORDS.items():
        assert advice[0].islower(), keyword
        assert not advice.endswith("."), keyword
        assert len(advice) < 260, keyword


# -- no_attribute ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_modules_of_frameworks_are_imported_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(rawattn, name, raising=False)
    with pytest.raises(AttributeError) as caught:
        getattr(rawattn, name)
    told = f"module 'rawattn' has no attribute '{name}'; write `import rawattn.{name}` first: it is loaded"
    assert str(caught.value).startswith(told)
    assert not str(hints.no_attribute("rawattn.torch", "jax")).endswith("first")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("append_paged_kv_cache", "call rawattn.append_kv"),
        ("reshape_and_cache", "call rawattn.append_kv"),
        ("flash_attn_qkvpacked_func", "rawattn.attention("),
        ("single_prefill_with_kv_cache", "rawattn.attention("),
        ("BatchDecodeWithPagedKVCacheWrapper", "call rawattn.paged_attention"),
        ("register_transformers", "it is rawattn.torch.register_transformers"),
    ],
)
def test_functions_of_other_libraries(name: str, says: str) -> None:
    assert says in str(hints.no_attribute("rawattn", name))


# -- array_advice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param([[1.0, 2.0]], "np.asarray(q, np.float32)", id="list"),
        pytest.param((), "np.asarray(q, np.float32)", id="tuple"),
        pytest.param([np.zeros((3, 2, 8)), np.zeros((5, 2, 8))], "from_lengths", id="ragged"),
        pytest.param(np.ma.masked_array([1.0]), "q.filled(0)", id="masked"),
        pytest.param(iter([1.0]), "pass an array, np.stack(list(q))", id="iterator"),
        pytest.param(np.zeros(2), "", id="array"),
        pytest.param(None, "", id="none"),
        pytest.param(3.5, "", id="number"),
    ],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_array_advice(given: object, says: str) -> None:
    advice = array_advice(given, "q")
    assert says in advice
    assert bool(advice) == bool(says)


@pytest.mark.frameworks
def test_array_advice_for_torch() -> None:
    torch = pytest.importorskip("torch")
    jagged = torch.nested.nested_tensor(
        [torch.ones(3, 2, 8), torch.ones(5, 2, 8)], layout=torch.jagged
    )
    advice = array_advice(jagged, "q")
    assert "q.values()" in advice
    seqs = eval(
        re.findall(r"seqs=(SeqLayout\(.*?\))(?=;)", advice)[0],
        {"SeqLayout": rawattn.SeqLayout, "q": jagged},
    )
    assert seqs.seqstart_q.tolist() == [0, 3, 8]
    assert tuple(jagged.values().shape) == (8, 2, 8)
    assert array_advice(torch.ones(2).to_sparse(), "q") == "pass q.to_dense()"
    assert array_advice(torch.ones(2), "q") == ""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert "rawattn.torch.attention" in array_advice(torch.ones(2), "q")


@pytest.mark.frameworks
def test_array_advice_for_jax() -> None:
    jax = pytest.importorskip("jax")
    seen: list[str] = []

    def traced(x: Any) -> Any:
        seen.append(array_advice(x, "q"))
        return x.sum()

    jax.jit(traced)(jax.numpy.ones(2))
    jax.grad(traced)(jax.numpy.ones(2))
    jax.vmap(traced)(jax.numpy.ones((2, 2)))
    assert len(seen) == 3
    assert all("rawattn.jax.attention" in advice for advice in seen)
    assert array_advice(jax.numpy.ones(2), "q") == ""


# -- window_end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 7, 2**70, np.int32(3)])
def test_window_end(value: Any) -> None:
    end = hints.window_end(value)
    assert type(end) is int
    assert end == value


def test_window_end_unbounded() -> None:
    assert hints.window_end(None) is None


class OnDevice:
    """An array whose contents may not be shown."""

    def __dlpack__(self) -> None: ...

    def __repr__(self) -> str:
        raise AssertionError("read back")


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (-1, ValueError, r"got -1, .*where -1 meant unbounded use None.*window=\(None, None\)"),
        (np.int64(-1), ValueError, r"got -1, .*use None"),
        (-3, ValueError, r"got -3, expected .*ints >= 0, or None for an unbounded side$"),
        (1.0, TypeError, r"got 1\.0 \(float\), expected"),
        (True, TypeError, r"got True \(bool\), expected"),
        (np.True_, TypeError, r"got np\.True_ \(bool\), expected"),
        (OnDevice(), TypeError, r"got \(OnDevice\), expected"),
    ],
)
def test_window_end_refuses(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^window: {says}"):
        hints.window_end(value)
