"""Parameter structs of the kernels of attention, field by field, with what each means; `helper_params` has the others.

They are declared there and here alone: `params_header` generates kernels_cu/attn/params.cuh from them.
"""

from __future__ import annotations

from functools import partial

from rawattn._kernels import structs
from rawattn._kernels.structs import Struct

STRUCTS: list[Struct] = []
_struct = partial(structs.declare, STRUCTS)


INTEGERS = _struct(
    "Integers",
    "Integers the caller may keep on the GPU as int32 or int64; null when not given.",
    ("const void*", "data", ""),
    ("int64", "is_64bit", ""),
)
SIDE_STRUCT = _struct(
    "Side",
    "Where the sequences of one side (queries or keys) lie, and how much of each is real.",
    (INTEGERS, "start", "(batch + 1) physical starts; null in batch mode"),
    (INTEGERS, "length", "(batch + 1) cumulative or (batch) logical lengths; null = physical"),
    ("int64", "cumulative", "whether `length` is cumulative"),
    ("int64", "rows", "rows of the array: seqlen in batch mode, total in packed mode"),
)
SIDE = SIDE_STRUCT.dtype
STRIDES = _struct(
    "Strides",
    "Rows are addressed as base + batch * stride_batch + row * stride_row + head * stride_head, in elements; the last axis "
    "has stride 1.",
    ("int64", "batch, row, head", ""),
)
_SCORES = _struct(
    "Scores",
    "What becomes of q . k before the softmax: scaled, then capped.",
    ("float", "scale, softcap", ""),
)
_BIAS = _struct(
    "Bias",
    "What is added to scores. Strides are in elements, 0 where the bias is the same for all.",
    ("const void*", "data", ""),
    ("int64", "batch, head, row, key", ""),
    ("int", "group", "query heads that share a head of it"),
    (
        "int",
        "rows, keys",
        "its extents: no row or key beyond them is read, whatever the lengths are",
    ),
)
_PER_HEAD = _struct(
    "PerHead",
    "A number for each query head. Strides are in elements.",
    ("const void*", "data", ""),
    ("int64", "batch, head", ""),
    ("int", "kind", "0: float32, 1: float16, 2: bfloat16"),
)
_DROPOUT = _struct(
    "Dropout",
    "Which probabilities are kept (docs/notes/dropout.md).",
    ("const void*", "seed", "an integer on the device; null: seed_value"),
    ("int64", "seed_value", ""),
    ("int", "seed_is_64bit", ""),
    ("unsigned", "threshold", ""),
    ("float", "factor", "of what is kept: 1 / (1 - dropout_p)"),
)
TILE_LISTS = _struct(
    "TileLists",
    "Of each tile of one side's sequences and head, the tiles of the other side that meet it (see attn/listed_tiles.cuh).",
    ("int*", "data", ""),
    (
        "int*",
        "order",
        "of Hopper's forward: tiles by the lengths of their lists, the longest first; null where there are few",
    ),
    (
        "int64",
        "sequence",
        "lists of a head between those of two sequences in batch mode; 0 where all share them",
    ),
    ("int", "nheads", "that have lists of their own"),
    ("int", "group", "heads that share lists"),
    ("int", "capacity", "entries of a list"),
)
_BLOCK_MASK = _struct(
    "BlockMask",
    "Keys that are hidden one by one. Bit n of a half-word is the key n of its 16; strides are in half-words.",
    ("const unsigned short*", "bits", ""),
    ("int64", "batch, head", ""),
    ("int", "group", "query heads that share a head of it"),
    (
        "int",
        "rows, words",
        "its extents: what lies behind them is as the last row and the last 8 half-words of a row are",
    ),
    (TILE_LISTS, "lists", "of the kernel's own tiles"),
    ("const unsigned short*", "keys", "of each head one row of bits: the keys that any row sees"),
    ("int64", "keys_batch", "of a head of it the stride is `words`"),
)
_CAPTURED = _struct(
    "Captured",
    "An array that a score function reads. Strides are in elements.",
    ("const void*", "data", ""),
    ("int64", "strides[4]", ""),
    ("int", "extents[4]", ""),
)
CAPTURED_ARRAYS = _struct(
    "CapturedArrays",
    "What a score function reads, in the order of its names.",
    (_CAPTURED, "array0, array1, array2, array3, array4, array5, array6, array7", ""),
    ("float", "scalars[8]", ""),
)
PAGES = _struct(
    "Pages",
    "Where keys and values lie that are in pages (attn/pages.cuh). Of them the strides of batches are those of pages. Other "
    "strides are in ids.",
    (INTEGERS, "ids", "of pages, a row of each sequence"),
    (
        INTEGERS,
        "indptr",
        "(batch + 1): where the ids of each sequence begin in one row of all; null: a row of each",
    ),
    ("int64", "row, entry", "strides of the rows and of the ids in one"),
    ("int64", "capacity", "ids of a row"),
    ("int64", "count", "pages of the array"),
    ("int", "page_size", "keys of a page"),
    ("unsigned", "inverse", "with shift: divides by it (tile/rows.cuh)"),
    ("int", "shift", ""),
)
KV_SCALE = _struct(
    "KvScale",
    "What keys or values in 8 bits are multiplied with (attn/stored_keys.cuh).",
    ("const float*", "data", "for each kv head; null: the number, for all"),
    ("int64", "head", "its stride in elements"),
    ("float", "number", ""),
)
_MASK = _struct(
    "Mask",
    "Which keys a query sees (attn/visible.cuh).",
    ("int64", "window_left, window_right, sink", ""),
)
_SPLITS = _struct(
    "Splits",
    "Query tiles whose keys several blocks share (attn/splits.cuh).",
    ("unsigned*", "arrived", "by query tile: how many blocks are done; zero between launches"),
    ("void*", "partials", "what they come to"),
    ("int", "count", "blocks of a query tile"),
    ("int", "least", "key tiles of a piece, at least: of fewer keys there are fewer pieces"),
    (
        "int",
        "abreast",
        "heads whose blocks read the same keys at the same time (attn/schedule/line.cuh)",
    ),
    (
        "int",
        "of_group",
        "query tiles beside each other that share keys; these four too are of a line",
    ),
    ("int", "ranks", "of query tiles, as many abreast in each"),
    ("int", "blocks", "of those abreast one, where these decide how many parts a line has"),
    ("float", "per_busy", "1 / the number of parts that keep the memory busy"),
)
ORDERED_SEQUENCE = _struct(
    "OrderedSequence",
    "A sequence of a ragged batch: the side whose tiles are handed out, and the other one.",
    (
        "int64",
        "tiled_start, other_start",
        "first physical rows, inside the batch entry in batch mode",
    ),
    ("int", "tiled_length, other_length", "logical rows"),
    ("int", "sequence", ""),
    ("int", "first_tile", "tiles before it in the order"),
)
FORWARD = _struct(
    "ForwardParams",
    "",
    ("const void*", "q", ""),
    ("const void*", "k", ""),
    ("const void*", "v", ""),
    ("void*", "out", ""),
    ("float*", "lse", "unit stride along rows; null when not wanted"),
    (STRIDES, "q_strides, k_strides, v_strides, out_strides", ""),
    ("int64", "lse_batch, lse_head", ""),
    (SIDE_STRUCT, "q_side, k_side", ""),
    (
        "OrderedSequence*",
        "order",
        "ragged only: the longest first, and behind the last one their tiles together (see attn/schedule/order_sequences.cuh); "
        "Hopper's forward has none where sequences are few and each block orders them for itself",
    ),
    (_MASK, "mask", ""),
    ("int", "batch, nheads_q, nheads_kv", ""),
    (
        "int",
        "section_keys",
        "keys of one kv head whose K and V fill the share of L2 that concurrent blocks should live in",
    ),
    (_SCORES, "scores", ""),
    (_BIAS, "bias", ""),
    (_PER_HEAD, "alibi_slopes, sink_logits", ""),
    (_DROPOUT, "dropout", ""),
    (_BLOCK_MASK, "block_mask", ""),
    (CAPTURED_ARRAYS, "captured", ""),
    (PAGES, "pages", ""),
    (_SPLITS, "splits", ""),
    (KV_SCALE, "k_scale, v_scale", ""),
)
PADDING = _struct(
    "PaddingParams",
    "",
    ("void*", "out", "rows that belong to no sequence become 0 in out"),
    ("float*", "lse", "and -inf in lse; either is null when it is not ours to fill"),
    (STRIDES, "out_strides", ""),
    ("int64", "lse_batch, lse_head", ""),
    (SIDE_STRUCT, "side", ""),
    ("int", "batch, nheads, headdim, element_bytes", ""),
)
_STREAM_K = _struct(
    "StreamK",
    "How a schedule ends: `tiles` query tiles of `units` each, in pieces of `piece` units, no more than a query tile "
    "has (see attn/schedule/stream_k.cuh). No tiles where all come whole. All of their units are fewer than 2^31.",
    ("int", "tiles, piece, units", "of a dense batch"),
    (
        "int",
        "rows, pieces",
        "of one whose tiles are unlike: query tiles of each head in the line, the longest, and pieces of the line; no rows "
        "where tiles are alike",
    ),
    (
        "int",
        "least_gain, least_piece",
        "of a ragged one: key tiles by which a piece must be shorter than a tile, and which it has at least",
    ),
)
_KEY_MASK = _struct(
    "KeyMask",
    "A bool of each key, side by side, the same for all rows and heads of a sequence.",
    ("const unsigned char*", "data", ""),
    ("int64", "batch", "from a sequence to the next"),
    ("int", "keys", "its extent"),
)
SM90_FORWARD = _struct(
    "Sm90ForwardParams",
    "",
    (FORWARD, "forward", ""),
    (
        "unsigned*",
        "next_work",
        "a counter of work handed out and one of blocks done; zero between launches",
    ),
    (
        "unsigned*",
        "arrived",
        "by tile that is split and wave: how many of its items are done; likewise",
    ),
    ("void*", "partials", "what items of such tiles come to"),
    ("int", "row_bound_q, row_bound_k", "ragged only: where the row axes of the tensor maps end"),
    (
        "int",
        "kept_tiles",
        "of each head of a causal dense batch: the shortest, which come last of all",
    ),
    (
        "int",
        "next_page_k, next_page_v",
        "keys in pages whose boxes bring whole rows: heads from a page to the next in the tensor maps",
    ),
    (_STREAM_K, "stream_k", ""),
    (_KEY_MASK, "key_mask", ""),
    (PADDING, "padding", "ragged only"),
)
_BIAS_GRADIENT = _struct(
    "BiasGradient",
    "Where the gradient of the bias is written, all of it. Strides are in elements.",
    ("void*", "data", ""),
    (
        "float*",
        "partials",
        "of each split a sum of its own, in C order; null where there is one split, which writes data",
    ),
    ("int64", "batch, head, row, key", ""),
    ("int", "batches, heads", "its extents, beside those of the bias"),
    ("int", "splits", "of what an element is summed over"),
    ("int", "strip", "key tiles of a block, one after the other"),
    (
        "int",
        "row_tiles, key_tiles",
        "of the longest sequences, where the bias has no axis for them",
    ),
)
BACKWARD = _struct(
    "BackwardParams",
    "",
    (FORWARD, "forward", "the order is that of key tiles here (see attn/schedule/keys.cuh)"),
    ("const void*", "dout", ""),
    ("const float*", "dlse", "laid out as lse; null = zeros"),
    ("void*", "dq", ""),
    ("void*", "dk", ""),
    ("void*", "dv", ""),
    ("float*", "row_delta", "laid out as lse: dlse - dout . out; 0 where a row sees no key"),
    (
        "float*",
        "dq_sum",
        "(batch, rows, nheads_q, dq_pitch), columns of 16 in the order of Accumulator::position(); null when not wanted",
    ),
    (STRIDES, "dout_strides, dq_strides, dk_strides, dv_strides", ""),
    ("void*", "dsink_logits", "in the dtype of sink_logits"),
    ("int64", "dsink_head", "its stride in elements"),
    (_BIAS_GRADIENT, "dbias", ""),
    (
        "float*",
        "part_sums",
        "dv, then dk: each (parts, batch, rows, nheads_kv, depth), columns of 16 in the order of Accumulator::position()",
    ),
    ("int", "parts", "blocks of a key tile, which share the turns of its walk"),
    ("int", "sink_rows", "where only key tiles with sink tokens have so many: the keys of those"),
    (
        "int",
        "query_row_shift, key_row_shift",
        "of kernels that visit physical rows of queries, or of keys: the logarithm of how many waves share a row",
    ),
    (
        "void*",
        "captured_sums",
        "gradients of captured arrays, one after the other, in C order: floats, or ExactSums",
    ),
    ("int64", "captured_at[8]", "where that of each begins"),
    (
        "int",
        "section_queries",
        "query rows of one kv head's group that fill the share of L2 that concurrent blocks should live in",
    ),
)
CAPTURED_GRADIENT = _struct(
    "CapturedGradientParams",
    "A gradient of a captured array is given out, and its sums are zeros again.",
    ("void*", "sums", "as `BackwardParams::captured_sums`"),
    ("void*", "to", ""),
    ("int64", "first, count", "of its elements among all sums"),
    ("int64", "strides[4]", "in elements"),
    ("int", "extents[4]", ""),
    ("int", "kind", "0: float32, 1: float16, 2: bfloat16"),
)
