// What the host tells a kernel. Mirrored field by field by rawattn/_kernels/params.py: change both together.
#pragma once

#include "target/target.cuh"

// Integers the caller may keep on the GPU as int32 or int64; null when not given.
struct Integers {
  const void* data;
  int64 is_64bit;
};

// Where the sequences of one side (queries or keys) lie, and how much of each is real.
struct Side {
  Integers start;    // (batch + 1) physical starts; null in batch mode
  Integers length;   // (batch + 1) cumulative or (batch) logical lengths; null = physical
  int64 cumulative;  // whether `length` is cumulative
  int64 rows;        // rows of the array: seqlen in batch mode, total in packed mode
};

// Rows are addressed as base + batch * stride_batch + row * stride_row + head * stride_head, in elements; the last axis
// has stride 1.
struct Strides {
  int64 batch, row, head;
};

struct ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;  // unit stride along rows; null when not wanted
  Strides q_strides, k_strides, v_strides, out_strides;
  int64 lse_batch, lse_head;
  Side q_side, k_side;
  const int* order;       // ragged only: sequences, the longest first (see portable/schedule.cu)
  const int* first_tile;  // ragged only: query tiles before each sequence in that order, then their total
  int64 window_left, window_right, sink;
  int batch, nheads_q, nheads_kv;
  int section_keys;  // keys of one kv head whose K and V fill the share of L2 that concurrent blocks should live in
  float scale;       // of the scores
};

// How a schedule ends: `tiles` query tiles in pieces of `piece` key tiles, no more than a query tile has (see
// attn/schedule/stream_k.cuh). No tiles where all come whole. All of their key tiles are fewer than 2^31.
struct StreamK {
  int tiles, piece;
};

struct Sm90ForwardParams {
  ForwardParams forward;
  unsigned* next_work;           // a counter of work handed out and one of blocks done; zero between launches
  unsigned* arrived;             // by tile that is split and wave: how many of its items are done; likewise
  void* partials;                // what items of such tiles come to
  int row_bound_q, row_bound_k;  // ragged only: where the row axes of the tensor maps end
  int kept_tiles;                // of each head of a causal dense batch: the shortest, which come last of all
  StreamK stream_k;
};

struct BackwardParams {
  ForwardParams forward;  // order and first_tile count key tiles here (see attn/schedule/keys.cuh)
  const void* dout;
  const float* dlse;  // laid out as lse; null = zeros
  void* dq;
  void* dk;
  void* dv;
  float* row_delta;  // laid out as lse: dout . out - dlse; 0 where a row sees no key
  float* dq_sum;  // (batch, rows, nheads_q, dq_pitch), columns of 16 in the order of Accumulator::position(); null when
                  // not wanted
  Strides dout_strides, dq_strides, dk_strides, dv_strides;
  int section_queries;  // query rows of one kv head's group that fill the share of L2 that concurrent blocks should
                        // live in
};

struct ScheduleParams {
  Side q_side, k_side;
  int* order;
  int* first_tile;
  int batch, tile_q;
};

struct RepackParams {
  const void* from;
  void* to;         // (batch, rows, nheads, columns rounded up to 8), without gaps
  Strides strides;  // of `from`
  int64 rows;
  int batch, nheads;
};

struct PaddingParams {
  void* out;   // rows that belong to no sequence become 0 in out
  float* lse;  // and -inf in lse; either is null when it is not ours to fill
  Strides out_strides;
  int64 lse_batch, lse_head;
  Side side;
  int batch, nheads, headdim, element_bytes;
  int parts;  // blocks that share one gap between sequences
};
