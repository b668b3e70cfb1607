"""Parameter structs of the kernels around attention: schedules, copies, pages, masks, merges."""

from __future__ import annotations

from functools import partial

from rawattn._kernels import structs
from rawattn._kernels.params import (
    BACKWARD,
    CAPTURED_ARRAYS,
    FORWARD,
    INTEGERS,
    KV_SCALE,
    PADDING,
    PAGES,
    SIDE_STRUCT,
    STRIDES,
    TILE_LISTS,
)
from rawattn._kernels.structs import Struct

STRUCTS: list[Struct] = []
_struct = partial(structs.declare, STRUCTS)


SCHEDULE = _struct(
    "ScheduleParams",
    "",
    (SIDE_STRUCT, "tiled, other", ""),
    ("OrderedSequence*", "order", ""),
    ("int", "batch, tile", ""),
)
ALIGN_ROWS = _struct(
    "AlignRowsParams",
    "",
    ("const void*", "from", ""),
    ("void*", "to", "(batch, rows, nheads, columns rounded up to 8), without gaps"),
    (STRIDES, "strides", "of `from`"),
    ("int64", "rows", ""),
    ("int", "batch, nheads", ""),
)
ALIGN_BIAS = _struct(
    "AlignBiasParams",
    "",
    ("const void*", "from", ""),
    ("void*", "to", "(batches, nheads, rows, keys rounded up to 8), without gaps"),
    ("int64", "batch, head, row", "strides of `from`, in elements"),
    ("int64", "lines", "rows of all heads and batches"),
    ("int", "nheads, rows, keys", ""),
)
# The most partial results whose addresses a launch of `combine` is given one by one. More must lie in one array.
MAX_LISTED = 64
COMBINE = _struct(
    "CombineParams",
    "Partial results over disjoint keys are merged into one. Strides are in elements.",
    (
        "const void*",
        f"outs[{MAX_LISTED}]",
        "where outs_listed, each partial's; else the first's alone",
    ),
    ("const float*", f"lses[{MAX_LISTED}]", "the same by lses_listed"),
    ("void*", "out", ""),
    ("float*", "lse", "(batch, nheads, rows), without gaps"),
    ("int64", "outs_partial, lses_partial", "strides by partial, 0 where they are listed"),
    (STRIDES, "outs_strides, lses_strides, out_strides", ""),
    ("int64", "rows", ""),
    ("int", "batch, nheads, partials", ""),
    ("int", "outs_listed, lses_listed", ""),
)
APPEND = _struct(
    "AppendParams",
    "",
    ("const void*", "q", "null where there is none"),
    ("const void*", "k", ""),
    ("const void*", "v", ""),
    ("void*", "k_pages", ""),
    ("void*", "v_pages", ""),
    ("void*", "out", "the rows of q with rotary embedding"),
    (STRIDES, "q_strides, k_strides, v_strides, out_strides", ""),
    (STRIDES, "k_pages_strides, v_pages_strides", "`batch` is from page to page"),
    (SIDE_STRUCT, "side", "of the new rows"),
    (INTEGERS, "seqlen_k", "the number of keys of each sequence, the new ones included"),
    (PAGES, "pages", ""),
    ("const void*", "cos", "(positions, rotary_dim / 2)"),
    ("const void*", "sin", "the same"),
    ("int64", "cos_row, sin_row", "their strides by position, in elements"),
    ("int64", "positions", "their rows"),
    ("int64", "rows", "all new rows, padding included"),
    ("int", "batch, nheads_q, nheads_kv", "nheads_q: 0 without q"),
    ("int", "fill", "whether rows of out that belong to no sequence become 0"),
    (KV_SCALE, "k_scale, v_scale", ""),
)
_WRITTEN_MASK = _struct(
    "WrittenMask",
    "The arrays that a mask is written to (see attn/mask_writing.cuh).",
    ("unsigned short*", "bits", "(batch, nheads, rows, words)"),
    ("unsigned char*", "map", "of granules, (batch, nheads, rows / 64, words / 4), rounded up"),
    (
        "unsigned short*",
        "band_keys",
        "keys that any of 64 rows sees, (batch, nheads, rows / 64, words)",
    ),
    ("int", "rows, keys, words", ""),
    ("int", "nheads", ""),
)
BOOLS_MASK = _struct(
    "BoolsMaskParams",
    "",
    (_WRITTEN_MASK, "written", ""),
    ("const unsigned char*", "from", "True is not 0"),
    ("int64", "batch, head, row, key", "strides of `from`, 0 where the mask is the same for all"),
)
RANGES_MASK = _struct(
    "RangesMaskParams",
    "",
    (_WRITTEN_MASK, "written", ""),
    (INTEGERS, "ranges", "(batch, rows, count, 2): the keys [begin, end) that a row sees"),
    ("int", "count", ""),
)
MASK_KEYS = _struct(
    "MaskKeysParams",
    "",
    (
        "const unsigned short*",
        "band_keys",
        "(planes, bands, words); a plane is a head of a sequence",
    ),
    ("unsigned short*", "keys", "(planes, words)"),
    ("int", "planes, bands, words", ""),
)
_KEPT_KEYS = _struct(
    "KeptKeys",
    "For each head the list of keys that all rows share: ascending, -1 behind the last one (see attn/kept_keys.cuh).",
    ("const int*", "data", ""),
    ("int64", "batch, head", "strides; 0 where all have the same list"),
    ("int", "count", "entries of a list"),
    (
        "int",
        "rows",
        "of the arrays that hold those keys: an entry outside of them is ignored",
    ),
)
_KEPT_ARRAY = _struct(
    "KeptArray",
    "Keys or values, or their gradients.",
    ("void*", "all", "the array with all keys"),
    ("void*", "kept", "(batch, nheads, count, bytes rounded up to 16), without gaps"),
    (STRIDES, "strides", "of `all`"),
)
KEPT_ROWS = _struct(
    "KeptRowsParams",
    "Arrays of all keys, and of the kept keys.",
    (_KEPT_KEYS, "kept", ""),
    (_KEPT_ARRAY, "k, v", ""),
    ("int", "batch, nheads", ""),
)
_KEPT_LIMITS = _struct(
    "KeptLimits",
    "The keys that window and diagonal leave each row of queries.",
    ("int64", "first, last", "row i sees the keys [i + first, i + last]"),
    ("int64", "sink", "it also sees the keys below this, but none beyond i + last"),
    ("int", "rows", "1 where all rows see the same keys"),
)
_KEPT_MASK = _struct(
    "KeptMaskParams",
    "Which of the kept keys each row sees. Here and in the next two structs, `blocks` blocks of a launch do the task.",
    ("unsigned short*", "bits", "(batch, nheads, rows, words)"),
    ("unsigned short*", "keys", "keys that any row sees, (batch, nheads, words)"),
    ("int", "nheads, words", ""),
    ("int", "blocks", ""),
)
_KEPT_LISTS = _struct(
    "KeptListsParams",
    "Lists of tiles for attention to kept keys.",
    (TILE_LISTS, "lists", ""),
    ("int", "of_keys", "whether they list the query tiles of key tiles"),
    ("int", "tile_q, tile_k", ""),
    ("int", "sequences", "sequences with lists of their own"),
    ("int", "tiles", "of a sequence"),
    ("int", "others", "tiles of the other side"),
    ("int", "parts", "heads whose tiles a list has, one head after the other"),
    ("int", "blocks", ""),
)
_KEPT_LENGTHS = _struct(
    "KeptLengths",
    "How many keys each list has.",
    ("int*", "lengths", "(batch, nheads)"),
    ("int64", "lists", ""),
    ("int", "nheads", ""),
    ("int", "blocks", ""),
)
KEPT_SETUP = _struct(
    "KeptSetupParams",
    "",
    (KEPT_ROWS, "rows", ""),
    (_KEPT_LIMITS, "limits", ""),
    (_KEPT_MASK, "mask", ""),
    (_KEPT_LISTS, "lists0, lists1", ""),
    (_KEPT_LENGTHS, "lengths", ""),
    ("int", "gather_blocks", "blocks that gather keys; as many gather values"),
)
PREDICATE_MASK = _struct(
    "PredicateMaskParams",
    "",
    (_WRITTEN_MASK, "written", ""),
    ("int", "seqlen_q, seqlen_k", ""),
    (CAPTURED_ARRAYS, "captured", ""),
)
MASK_TILES = _struct(
    "MaskTilesParams",
    "",
    (FORWARD, "forward", "`block_mask.lists` are written"),
    ("const unsigned char*", "map", "of granules"),
    ("int64", "map_batch, map_head, map_row", "its strides"),
    ("int", "map_rows, map_keys", "its extents: beyond them the last row and key are repeated"),
    ("int", "sequences", "sequences with lists of their own"),
    ("int", "tiles", "of a sequence; with lengths on the device, one may have more"),
    ("int", "parts", "heads whose tiles a list has, one head after the other"),
    ("int", "group", "heads, counted as the parts of all lists, that share a head of the mask"),
    ("unsigned*", "listed", "by sequence and head: waves that are done; zero between launches"),
)
SETUP = _struct(
    "RaggedSetupParams",
    "The setup of a ragged call, which depends on its lengths alone (portable/ragged_setup.cuh).",
    (
        SCHEDULE,
        "schedule0, schedule1",
        "the first `schedules`, each made by `schedule_blocks` blocks",
    ),
    (
        PADDING,
        "padding0, padding1, padding2",
        "the first `paddings`, each by `padding_blocks` blocks",
    ),
    ("int", "schedules, schedule_blocks, paddings, padding_blocks", ""),
)
BACKWARD_SETUP = _struct(
    "BackwardSetupParams",
    "A setup and the first step of the backward in one launch (portable/backward_setup.cu).",
    (BACKWARD, "backward", ""),
    (SETUP, "setup", ""),
    ("int", "setup_blocks", "the first blocks of the launch, which do the setup"),
)
# Launches carry at most 4096 bytes of parameters on every driver that this library runs with.
WORDS_A_LAUNCH = (4096 - SETUP.dtype.itemsize - 16) // 8 * 2
CARRYING_SETUP = _struct(
    "CarryingSetupParams",
    "A setup that carries integers of the host in its parameters.",
    (SETUP, "setup", "its sides have the addresses that the integers are written to"),
    ("unsigned*", "to", "where the words are written, at a multiple of 8 bytes"),
    ("int64", "count", "the number of words carried"),
    (
        "unsigned",
        f"words[{WORDS_A_LAUNCH}]",
        "whole arrays of integers, if a schedule or padding of this launch reads them",
    ),
)
