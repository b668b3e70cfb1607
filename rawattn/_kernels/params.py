"""Parameter structs of the kernels, field by field those of kernels_cu/attn/params.cuh: change both together."""

from __future__ import annotations

import numpy as np

POINTER = np.uint64

INTEGERS = np.dtype([("data", POINTER), ("is_64bit", np.int64)], align=True)
SIDE = np.dtype(
    [("start", INTEGERS), ("length", INTEGERS), ("cumulative", np.int64), ("rows", np.int64)],
    align=True,
)
STRIDES = np.dtype([("batch", np.int64), ("row", np.int64), ("head", np.int64)], align=True)

FORWARD = np.dtype(
    [
        ("q", POINTER),
        ("k", POINTER),
        ("v", POINTER),
        ("out", POINTER),
        ("lse", POINTER),
        ("q_strides", STRIDES),
        ("k_strides", STRIDES),
        ("v_strides", STRIDES),
        ("out_strides", STRIDES),
        ("lse_batch", np.int64),
        ("lse_head", np.int64),
        ("q_side", SIDE),
        ("k_side", SIDE),
        ("order", POINTER),
        ("first_tile", POINTER),
        ("window_left", np.int64),
        ("window_right", np.int64),
        ("sink", np.int64),
        ("batch", np.int32),
        ("nheads_q", np.int32),
        ("nheads_kv", np.int32),
        ("section_keys", np.int32),
        ("scale", np.float32),
    ],
    align=True,
)

BACKWARD = np.dtype(
    [
        ("forward", FORWARD),
        ("dout", POINTER),
        ("dlse", POINTER),
        ("dq", POINTER),
        ("dk", POINTER),
        ("dv", POINTER),
        ("row_delta", POINTER),
        ("dq_sum", POINTER),
        ("dout_strides", STRIDES),
        ("dq_strides", STRIDES),
        ("dk_strides", STRIDES),
        ("dv_strides", STRIDES),
        ("section_queries", np.int32),
    ],
    align=True,
)

SHARED_OUT = np.dtype([("tiles", np.int32), ("piece", np.int32)], align=True)

SM90_FORWARD = np.dtype(
    [
        ("forward", FORWARD),
        ("next_work", POINTER),
        ("arrived", POINTER),
        ("partials", POINTER),
        ("row_bound_q", np.int32),
        ("row_bound_k", np.int32),
        ("kept_tiles", np.int32),
        ("shared_out", SHARED_OUT),
    ],
    align=True,
)

SCHEDULE = np.dtype(
    [
        ("q_side", SIDE),
        ("k_side", SIDE),
        ("order", POINTER),
        ("first_tile", POINTER),
        ("batch", np.int32),
        ("tile_q", np.int32),
    ],
    align=True,
)

REPACK = np.dtype(
    [
        ("from", POINTER),
        ("to", POINTER),
        ("strides", STRIDES),
        ("rows", np.int64),
        ("batch", np.int32),
        ("nheads", np.int32),
    ],
    align=True,
)

PADDING = np.dtype(
    [
        ("out", POINTER),
        ("lse", POINTER),
        ("out_strides", STRIDES),
        ("lse_batch", np.int64),
        ("lse_head", np.int64),
        ("side", SIDE),
        ("batch", np.int32),
        ("nheads", np.int32),
        ("headdim", np.int32),
        ("element_bytes", np.int32),
        ("parts", np.int32),
    ],
    align=True,
)
