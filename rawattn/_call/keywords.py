"""Keywords and functions of other libraries, and what to write instead of each."""

from __future__ import annotations

from collections.abc import Mapping


def _by_keyword(groups: Mapping[str, str]) -> dict[str, str]:
    """Advice by keyword. groups: keywords, with spaces between them, by the advice that they share."""
    return {keyword: advice for advice, keywords in groups.items() for keyword in keywords.split()}


_CAUSAL = (
    "write causal=True, align='top-left': torch, JAX and Keras align the diagonal so, and rawattn's default, 'bottom-right', "
    "differs where q and k have different lengths"
)
_SCALE = "write scale=, a factor of q . k as there (None is 1/sqrt(D))"
_MASK_OR_BIAS = (
    "write mask= for bool (True = keep) or bias= for numbers that are added to the scores; both "
    "broadcast to (batch, heads, seqlen_q, seqlen_k)"
)
_BIAS = "write bias=, added after scale and softcap; causal=True, window= and seqs= do what xformers' bias classes do"
_STARTS = "write seqs=SeqLayout(seqstart_q=..., seqstart_k=...), which takes cumulative lengths where there are no gaps"
_LENGTHS = (
    "write seqs=SeqLayout(seqlen_q=..., seqlen_k=...), the lengths that count of a padded batch"
)
_MAXIMA = "write seqs=SeqLayout(..., max_seqlen_q=..., max_seqlen_k=...); it is optional"
_WINDOW = "write window=(left, right), both ends inclusive, None (not -1) for an unbounded side; causal=True makes right 0"
_SLIDING = (
    "write causal=True, window=(n - 1, 0) for a sliding window of n keys, that of the row itself "
    "among them"
)
_SOFTCAP = "write softcap= (None, not 0, for none)"
_DROPOUT = "write dropout_p= and an integer seed="
_PAGES = "call rawattn.paged_attention(q, k_pages, v_pages, block_table, seqlen_k=...)"
_CACHE = (
    "pass the cache as k and v with seqs=SeqLayout(seqlen_k=...); where it has pages call rawattn.paged_attention. New rows "
    "are written to it before the call"
)
_PADDING = (
    "write seqs=SeqLayout.from_padding_mask(mask), True for a real token, where padding comes last; "
    "else mask=mask[:, None, None, :]"
)
_WEIGHTS = "leave it out: the weights are never formed; return_lse=True gives what they can be recomputed from"
_LSE = "write return_lse=True: the result is then (out, lse), natural logarithms"
_SHAPES = "leave it out: the shapes of q, k and v say it"
_ROTARY = "rotate q and k before the call"
_SINKS = (
    "write sink_logits=, a learned logit for each head; sink= is the number of leading keys that "
    "stay visible in a window"
)
_DETERMINISTIC = (
    "leave it out of a forward call, which always gives the same bits; attention_backward takes it; "
    "without dropout, leave dropout_p at 0"
)
_ALIBI = "write alibi_slopes=, (nheads_q,) or (batch, nheads_q)"
_BACKEND = "write backend='cuda' or 'cpu', or leave it out"
_SEGMENTS = "write seqs=SeqLayout.from_lengths(lengths) for a packed batch, q (total, heads, D)"
_LAYOUT = "leave it out: (batch, seqlen, heads, D) is read; another order is a transposed view, without a copy"
_SCORES = "write score_mod=rawattn.ScoreMod(...), with an expression in score, q_idx and kv_idx"
_BLOCK_MASK = "write mask=rawattn.block_mask(...)"

_GROUPS: dict[str, str] = {
    "pass q, k and v, in this order": "query key value queries keys values Q K V",
    "write dout=": "grad_output grad_out grad dO dy",
    "write lse=": "softmax_lse logsumexp",
    _CAUSAL: "is_causal use_causal_mask",
    _SCALE: "softmax_scale sm_scale scaling scale_factor softmax_scaling",
    _MASK_OR_BIAS: "attn_mask custom_mask",
    _BIAS: "attn_bias attention_bias position_bias rel_pos_bias",
    _STARTS: (
        "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_seq_q cu_seq_k "
        "cu_seq_lens_q cu_seq_lens_k qo_indptr kv_indptr seqstart_q seqstart_k "
        "cu_seqlen_q cu_seqlen_k"
    ),
    _LENGTHS: (
        "seqused_q seqused_k query_seq_lengths key_value_seq_lengths seqlen_q seqlen_k "
        "seqlens seqlens_q seqlens_k seq_lens"
    ),
    _MAXIMA: (
        "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv max_seqlens_q max_seqlens_k "
        "max_q max_k max_length_q max_length_k"
    ),
    _WINDOW: "window_size window_left window_right local_window_size",
    _SLIDING: "sliding_window sliding_window_size",
    _SOFTCAP: (
        "logits_soft_cap logit_cap logits_cap soft_cap logit_soft_cap logit_softcap "
        "logits_softcap attn_logit_softcapping attn_logits_soft_cap"
    ),
    _DROPOUT: "dropout dropout_rate dropout_prob attn_dropout attention_dropout p",
    "leave it out: dropout_p=0.0, the default, drops nothing": "training is_training inference deterministic_dropout",
    "write seed=, an integer or a one-element integer array on the device": "generator rng rng_state dropout_rng dropout_key",
    "leave it out: kv heads are shared whenever nheads_q is a multiple of nheads_kv": "enable_gqa pack_gqa use_gqa",
    _PAGES: (
        "block_tables block_table page_table k_pages v_pages paged_kv_cache page_size "
        "paged_kv_last_page_len"
    ),
    f"{_PAGES}, where block_table may be the pair (indptr, page_ids)": "paged_kv_indptr paged_kv_indices kv_indices",
    _CACHE: (
        "k_cache v_cache kv_cache cache_seqlens past_key_value past_key_values "
        "cache_position cache_batch_idx"
    ),
    _PADDING: "padding_mask key_mask",
    (
        "write seqs=SeqLayout.from_padding_mask(attention_mask != 0) where it is (batch, seqlen) and padding comes last; "
        "one of four axes is mask= if bool (True = keep), bias= if added to the scores"
    ): "attention_mask",
    (
        "write seqs=SeqLayout(seqlen_k=(~key_padding_mask).sum(1)), since True is padding in torch, where padding comes last; "
        "else mask=~key_padding_mask[:, None, None, :]"
    ): "key_padding_mask",
    _WEIGHTS: (
        "need_weights average_attn_weights return_attn_probs return_attention_scores "
        "output_attentions return_weights"
    ),
    _LSE: "return_softmax_lse return_logsumexp return_residual return_aux need_lse",
    _SHAPES: (
        "num_heads num_kv_heads num_qo_heads nheads head_dim headdim "
        "num_key_value_groups num_key_value_heads batch_size"
    ),
    _ROTARY: ("rotary_cos rotary_sin rotary_interleaved rope_scale rope_theta pos_encoding_mode"),
    _SINKS: "sinks s_aux learnable_sink attention_sinks softmax_sink",
    _DETERMINISTIC: "deterministic",
    _ALIBI: "alibi alibi_bias use_alibi",
    _BACKEND: "implementation attn_implementation",
    _SEGMENTS: "segment_ids q_segment_ids kv_segment_ids document_ids",
    _LAYOUT: "kv_layout qkv_format qkv_layout tensor_layout",
    _SCORES: "score_fn score_function mod_fn",
    _BLOCK_MASK: "block_mask mask_mod block_sparse_mask",
    "write seqs=SeqLayout(...), of sequences; the axes are (batch, seqlen, heads, D)": "layout seq_layout seqlayout lengths",
    "leave it out: results are of the dtype of q": "dtype out_dtype preferred_element_type",
    "leave it out: float32 has float32's accuracy, 16-bit inputs are summed in float32": "precision fp32 allow_tf32",
    "leave it out: results lie where q does; backend='cuda' or 'cpu' says where NumPy arrays are computed": "device",
    "leave it out: tiles are chosen for the call": (
        "kernel_options block_q block_k block_size BLOCK_M BLOCK_N num_warps num_stages"
    ),
    "give it to rawattn.paged_attention, whose pages may hold float8_e4m3fn; elsewhere multiply q or v by it": (
        "k_scale v_scale k_descale v_descale"
    ),
    "put it into scale=: q is of 16 or 32 bits": "q_scale q_descale",
    "leave it out: one sequence over several GPUs is no part of this version": (
        "mesh cp_group context_parallel_group process_group"
    ),
    "rotate q and k by them before the call": "position_ids freqs_cis",
    "give it to the forward call alone": "num_splits return_lse",
    "give it to attention_backward, or to the function that attention_vjp gives back": "dlse want_dbias into",
    "call it on the stream that is meant: the work runs on the current stream of the arrays' framework": "stream cuda_stream",
}

# Advice for a keyword that was given to a call.
KEYWORDS = _by_keyword(_GROUPS)

_TO_THE_CALL = "give it to the call: a layout says only where sequences are"

_LAYOUT_GROUPS: dict[str, str] = {
    "write seqstart_q= (and seqstart_k= where k differs), which takes cumulative lengths where there are no gaps": (
        "cu_seqlens cu_seqlens_q cu_seq_q cu_seq_lens_q cu_seqlen qo_indptr seqstart starts offsets"
    ),
    "write seqstart_k=, which takes cumulative lengths where there are no gaps": (
        "cu_seqlens_k cu_seqlens_kv cu_seq_k cu_seq_lens_k kv_indptr"
    ),
    "write seqlen_q=": "seqused_q query_seq_lengths seqlens_q q_seqlens",
    "write seqlen_k=": "seqused_k key_value_seq_lengths seqlens_k seqlens_kv seqlen_kv cache_seqlens kv_seqlens",
    "write seqlen_q= and seqlen_k=, or SeqLayout.from_lengths(lengths) for a packed batch": (
        "seqlen seqlens seq_lens lengths seqlengths sequence_lengths"
    ),
    "write max_seqlen_q= and max_seqlen_k=": "max_seqlen max_length",
    "write max_seqlen_q=": "max_seqlens_q max_q max_length_q",
    "write max_seqlen_k=": "max_seqlens_k max_seqlen_kv max_k max_length_k",
    "call SeqLayout.from_padding_mask(mask), True for a real token": (
        "mask attention_mask padding_mask key_mask key_padding_mask"
    ),
    "leave it out: the arrays say how many sequences there are": "batch batch_size group",
    _TO_THE_CALL: "causal align window sink scale bias softcap is_causal",
}

_PAGE_GROUPS: dict[str, str] = {
    (
        "pass arrays by position, as in append_kv(k, v, k_pages, v_pages, block_table) and "
        "paged_attention(q, k_pages, v_pages, block_table)"
    ): "query key value queries keys values Q K V",
    "write seqlen_k=, the keys of each sequence, new ones among them": (
        "cache_seqlens context_lens context_lengths seq_lens seq_lens_k seqused_k kv_len kv_lens cache_position "
        "paged_kv_last_page_len kv_last_page_len"
    ),
    "leave it out: the shape of k_pages says it": "page_size block_size",
    "leave it out: block_table and seqlen_k say where new rows go": "slot_mapping batch_indices positions",
    "write block_table=": "block_tables page_table page_tables",
    "write block_table=(indptr, page_ids)": "paged_kv_indptr paged_kv_indices kv_indptr kv_indices",
    "pass k_pages and v_pages": "k_cache v_cache key_cache value_cache kv_cache paged_kv_cache",
    "leave it out: pages are (num_pages, page_size, nheads_kv, D); another order is a transposed view, without a copy": (
        "kv_layout layout"
    ),
    "write seqs=SeqLayout(seqstart_q=...), the lengths of q alone; those of the keys are seqlen_k=": (
        "cu_seqlens cu_seqlens_q cu_seq_q cu_seq_lens_q qo_indptr seqstart_q cu_seqlen_q"
    ),
    "write seqlen_k=, the keys of each sequence; pages have no starts, so of cumulative lengths pass the differences": (
        "cu_seqlens_k cu_seqlens_kv cu_seq_k cu_seq_lens_k seqstart_k cu_seqlen_k"
    ),
    "write seqs=SeqLayout(seqlen_q=...), the lengths of q alone; those of the keys are seqlen_k=": (
        "seqlen_q seqlens_q seqused_q query_seq_lengths"
    ),
    "write seqs=SeqLayout(max_seqlen_q=...); it is optional": "max_seqlen_q max_seqlens_q max_q max_length_q",
    "write seqs=SeqLayout(max_seqlen_k=...); it is optional": (
        "max_seqlen_k max_seqlen_kv max_seqlens_k max_k max_length_k max_kv_len"
    ),
    "write k_scale=": "k_descale",
    "write v_scale=": "v_descale",
    "give it to rawattn.paged_attention: new rows are stored as they are": "scale",
    "call rawattn.append_kv(..., rotary=(cos, sin))": "rotary_cos rotary_sin cos sin freqs_cis",
    "leave it out: rawattn.append_kv(..., seqlen_k=..., rotary=(cos, sin)) turns new rows by their positions": "position_ids",
    "call rawattn.append_kv(..., rotary=(cos, sin), interleaved=...)": "rotary_interleaved",
    (
        "where padding comes last write seqs=SeqLayout(seqlen_q=mask.sum(1)) for a mask of the new rows, seqlen_k=mask.sum(1) "
        "for one of the keys, new ones among them; True is a real token"
    ): "attention_mask padding_mask key_mask",
    (
        "where padding comes last write seqs=SeqLayout(seqlen_q=(~mask).sum(1)) for a mask of the new rows, "
        "seqlen_k=(~mask).sum(1) for one of the keys, new ones among them; True is padding in torch"
    ): "key_padding_mask",
}

# Advice for a keyword that was given to a call on pages. It comes before that of `KEYWORDS`.
IN_PAGES = _by_keyword(_PAGE_GROUPS)

# Advice for keywords that `SeqLayout.from_lengths` does not have.
IN_LENGTHS: dict[str, str] = dict.fromkeys(
    _GROUPS[_STARTS].split(),
    "call SeqLayout(seqstart_q=..., seqstart_k=...), which takes cumulative lengths",
)

# Advice for keywords that `rawattn.jax.attention` does not have.
IN_JAX = _by_keyword(
    {
        "leave it out: a call runs where its program runs": "backend device implementation attn_implementation",
        "leave it out: arrays of JAX never change": "out",
    }
)

# Advice for keywords that the backward of `attention_vjp` does not have.
IN_PULLBACK = _by_keyword(
    {
        "give it to rawattn.attention_vjp": (
            "seqs causal align window sink scale bias mask alibi_slopes softcap score_mod sink_logits dropout_p seed "
            "deterministic backend"
        ),
        "leave it out: it keeps what the forward returned": "out lse",
    }
)

# Advice for a function of another library that is looked up in `rawattn`.
FUNCTIONS = _by_keyword(
    {
        "call rawattn.attention(q, k, v), of (batch, seqlen, heads, D); in torch, with gradients, rawattn.torch.attention": (
            "scaled_dot_product_attention flash_attn_func memory_efficient_attention dot_product_attention "
            "flash_attention flash_attn_qkvpacked_func flex_attention single_prefill_with_kv_cache mha"
        ),
        "call rawattn.attention(q, k, v, seqs=rawattn.SeqLayout(seqstart_q=cu_seqlens_q, seqstart_k=cu_seqlens_k))": (
            "flash_attn_varlen_func"
        ),
        "call rawattn.append_kv for new rows, then rawattn.paged_attention": "flash_attn_with_kvcache",
        "call rawattn.append_kv": "append_paged_kv_cache reshape_and_cache reshape_and_cache_flash",
        "call rawattn.paged_attention(q, k_pages, v_pages, (indptr, page_ids), seqlen_k=...)": (
            "BatchDecodeWithPagedKVCacheWrapper BatchPrefillWithPagedKVCacheWrapper"
        ),
        "it is rawattn.torch.register_transformers": "register_transformers",
        "call rawattn.combine(outs, lses)": "merge_state merge_states",
        "call rawattn.block_mask(predicate=...)": "create_block_mask create_mask",
    }
)

# Advice for a keyword that was given to `SeqLayout`.
IN_LAYOUT = _by_keyword(_LAYOUT_GROUPS)
