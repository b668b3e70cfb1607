"""Parameter structs of the attention kernels, with a comment for each field. `helper_params` has the structs of other kernels.

These two modules are the only declarations: `params_header` generates headers in kernels_cu/attn/ from them, comments included.
"""

from __future__ import annotations

from functools import partial

from rawattn._kernels import structs
from rawattn._kernels.structs import Struct

STRUCTS: list[Struct] = []
_struct = partial(structs.declare, STRUCTS)


INTEGERS = _struct(
    "Integers",
    "Integers that the caller may keep on the GPU as int32 or int64; null when not given.",
    ("const void*", "data", ""),
    ("int64", "is_64bit", ""),
)
SIDE_STRUCT = _struct(
    "Side",
    "Where the sequences of one side (queries or keys) lie, and how much of each is real.",
    (INTEGERS, "start", "(batch + 1) physical starts; null in batch mode"),
    (INTEGERS, "length", "(batch + 1) cumulative or (batch) logical lengths; null: physical ones"),
    ("int64", "cumulative", "whether `length` is cumulative"),
    ("int64", "rows", "rows of the array: seqlen in batch mode, total in packed mode"),
    (INTEGERS, "position", "(batch) positions of the first rows in the whole sequences; null: 0"),
)
STRIDES = _struct(
    "Strides",
    "Rows are addressed as base + batch * stride_batch + row * stride_row + head * stride_head, in elements; the last axis "
    "has stride 1.",
    ("int64", "batch, row, head", ""),
)
_SCORES = _struct(
    "Scores",
    "What is done to q . k before the softmax: it is scaled, then soft-capped.",
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
    ("float", "factor", "on probabilities that are kept: 1 / (1 - dropout_p)"),
)
TILE_LISTS = _struct(
    "TileLists",
    "For each tile of one side's sequences and each head, the tiles of the other side that it meets (see "
    "attn/listed_tiles.cuh).",
    ("int*", "data", ""),
    (
        "int*",
        "order",
        "for Hopper's forward: the tiles, those with the longest lists first; null where tiles are few",
    ),
    (
        "int64",
        "sequence",
        "in batch mode, how many lists of a head each sequence has; 0 where all sequences share them",
    ),
    ("int", "nheads", "heads with lists of their own"),
    ("int", "group", "heads that share lists"),
    ("int", "capacity", "entries of a list"),
)
_BLOCK_MASK = _struct(
    "BlockMask",
    "A mask that hides single keys. Bit n of a half-word is key n of its 16; strides are in half-words.",
    ("const unsigned short*", "bits", ""),
    ("int64", "batch, head", ""),
    ("int", "group", "query heads that share a head of it"),
    (
        "int",
        "rows, words",
        "its extents: beyond them the last row, and the last 8 half-words of a row, are repeated",
    ),
    (TILE_LISTS, "lists", "of the kernel's own tiles"),
    ("const unsigned short*", "keys", "one row of bits for each head: the keys that any row sees"),
    ("int64", "keys_batch", "the stride of `keys` by batch; by head it is `words`"),
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
    "The arrays and numbers that a score function captures, in the order of its names.",
    (_CAPTURED, "array0, array1, array2, array3, array4, array5, array6, array7", ""),
    ("float", "scalars[8]", ""),
)
PAGES = _struct(
    "Pages",
    "The block table of keys and values in pages (attn/pages.cuh). In the strides of k and v, `batch` is from page to page.",
    (INTEGERS, "ids", "page ids: a row for each sequence"),
    (
        INTEGERS,
        "indptr",
        "(batch + 1): where each sequence begins in one row of all ids; null: rows are apart",
    ),
    ("int64", "row, entry", "strides of `ids`, in ids: from row to row, and inside a row"),
    ("int64", "capacity", "ids of a row"),
    ("int64", "count", "pages of the array"),
    ("int", "page_size", "keys of a page"),
    ("unsigned", "inverse", "with shift: divides by page_size (tile/rows.cuh)"),
    ("int", "shift", ""),
)
KV_SCALE = _struct(
    "KvScale",
    "The factor on 8-bit keys or values (attn/stored_keys.cuh).",
    ("const float*", "data", "a factor for each kv head; null: `number`, for all"),
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
    "How the keys of query tiles are split among blocks: in pieces (attn/splits.cuh), or in a line that is cut into parts "
    "(attn/schedule/line.cuh).",
    (
        "unsigned*",
        "arrived",
        "how many blocks are done, by query tile; of a line, by block; zero between launches",
    ),
    ("void*", "partials", "the partial results of blocks"),
    (
        "int",
        "count",
        "pieces of a query tile; of a line, 0 where it is cut into equal parts or the GPU decides",
    ),
    ("int", "least", "the fewest key tiles of a piece, or units of a part"),
    (
        "int",
        "abreast",
        "of a line: query tiles of different heads that a part has, each with a block",
    ),
    (
        "int",
        "of_group",
        "of a line: query tiles that one query of a kv head's group takes",
    ),
    ("int", "ranks", "of a line: sets of query tiles abreast that one query of all heads takes"),
    ("int", "blocks", "of a line: the most parts; 0 where `count` decides their number"),
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
        "ragged only: the sequences, the longest first, and behind the last one the number of all tiles (see "
        "attn/schedule/order_sequences.cuh); null in Hopper's forward where sequences are so few that each block orders them",
    ),
    (_MASK, "mask", ""),
    ("int", "batch, nheads_q, nheads_kv", ""),
    (
        "int",
        "section_keys",
        "keys of one kv head whose K and V fill the part of the L2 cache that blocks running at once should share",
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
    ("void*", "out", "its rows that belong to no sequence become 0; null where it is the caller's"),
    ("float*", "lse", "the same with -inf"),
    (STRIDES, "out_strides", ""),
    ("int64", "lse_batch, lse_head", ""),
    (SIDE_STRUCT, "side", ""),
    ("int", "batch, nheads, headdim, element_bytes", ""),
)
_STREAM_K = _struct(
    "StreamK",
    "The line at the end of a schedule: `tiles` query tiles of `units` units each, cut into pieces of `piece` units (see "
    "attn/schedule/stream_k.cuh). 0 tiles: none is split. A line has fewer than 2^31 units.",
    ("int", "tiles, piece, units", "for dense batches"),
    (
        "int",
        "rows, pieces",
        "for dense batches with unlike tiles: query tiles of each head in the line, the longest ones, and pieces of the line; "
        "0 rows where tiles are alike",
    ),
    (
        "int",
        "least_gain, least_piece",
        "for ragged batches: key tiles by which a piece must at least be shorter than a query tile, and the fewest that it has",
    ),
    (
        "int",
        "begin",
        "what the beginning of a query tile counts, in units; for ragged batches in 64ths of a key tile",
    ),
    (
        "int",
        "last_share",
        "what the last query tile of a head, which has few rows, counts in the line, in 64ths of another; 0: as much",
    ),
    (
        "int",
        "busy_consumers",
        "for ragged batches: how many consumers must have rows of each sequence for last_share to hold; 0: they have",
    ),
)
_KEY_MASK = _struct(
    "KeyMask",
    "A mask with a bool for each key, side by side, the same for all rows and heads of a sequence.",
    ("const unsigned char*", "data", ""),
    ("int64", "batch", "stride from a sequence to the next"),
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
        "by split query tile and warp: how many items are done; zero between launches",
    ),
    ("void*", "partials", "the partial results of items"),
    ("int", "row_bound_q, row_bound_k", "ragged only: where the row axes of the tensor maps end"),
    (
        "int",
        "kept_tiles",
        "causal dense batches: the shortest query tiles of each head, this many, come last of all",
    ),
    (
        "int",
        "next_page_k, next_page_v",
        "where boxes bring whole rows of pages: heads from a page to the next in the tensor maps",
    ),
    (_STREAM_K, "stream_k", ""),
    (_KEY_MASK, "key_mask", ""),
    (PADDING, "padding", "ragged only"),
)
_BIAS_GRADIENT = _struct(
    "BiasGradient",
    "The gradient of the bias, which is written to every element. Strides are in elements.",
    ("void*", "data", ""),
    (
        "float*",
        "partials",
        "the sums of each split, in C order; null where there is one split, which writes data",
    ),
    ("int64", "batch, head, row, key", ""),
    ("int", "batches, heads", "its extents; those of rows and keys are the bias's"),
    ("int", "splits", "blocks that share the scores over which an element is summed"),
    ("int", "strip", "key tiles of a block, one after the other"),
    (
        "int",
        "row_tiles, key_tiles",
        "of the longest sequences, where the bias has one row or key for all; else 1",
    ),
)
BACKWARD = _struct(
    "BackwardParams",
    "",
    (FORWARD, "forward", "`order` is here for key tiles (see attn/schedule/keys.cuh)"),
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
    ("int", "sink_rows", "keys of the tiles with sink tokens, where only these are shared; else 0"),
    (
        "int",
        "query_row_shift, key_row_shift",
        "for kernels that visit physical rows of queries, or of keys: log2 of the number of waves that share a row",
    ),
    (
        "void*",
        "captured_sums",
        "gradients of captured arrays, one after the other, in C order: floats, or ExactSums",
    ),
    ("int64", "captured_at[8]", "where the gradient of each array begins in captured_sums"),
    (
        "int",
        "section_queries",
        "query rows of a section, summed over its kv heads, which blocks running at once share in the L2 cache",
    ),
    (
        "int*",
        "found_nan",
        "not 0: gradients may have NaN of hidden keys or queries; null where none can be hidden from some rows alone",
    ),
)
CAPTURED_GRADIENT = _struct(
    "CapturedGradientParams",
    "Copies the gradient of a captured array out of its sums, and makes these zeros again.",
    ("void*", "sums", "`BackwardParams::captured_sums`"),
    ("void*", "to", ""),
    ("int64", "first, count", "where its elements begin among all sums, and how many they are"),
    ("int64", "strides[4]", "in elements"),
    ("int", "extents[4]", ""),
    ("int", "kind", "0: float32, 1: float16, 2: bfloat16"),
)
