// What the host tells a kernel. Generated from rawattn/_kernels/params.py: change it there.
#pragma once

#include "target/target.cuh"

// Integers that the caller may keep on the GPU as int32 or int64; null when not given.
struct Integers {
  const void* data;
  int64 is_64bit;
};

// Where the sequences of one side (queries or keys) lie, and how much of each is real.
struct Side {
  // (batch + 1) physical starts; null in batch mode
  Integers start;
  // (batch + 1) cumulative or (batch) logical lengths; null: physical ones
  Integers length;
  // whether `length` is cumulative
  int64 cumulative;
  // rows of the array: seqlen in batch mode, total in packed mode
  int64 rows;
  // (batch) positions of the first rows in the whole sequences; null: 0
  Integers position;
};

// Rows are addressed as base + batch * stride_batch + row * stride_row + head * stride_head, in elements; the last axis
// has stride 1.
struct Strides {
  int64 batch, row, head;
};

// What is done to q . k before the softmax: it is scaled, then soft-capped.
struct Scores {
  float scale, softcap;
};

// What is added to scores. Strides are in elements, 0 where the bias is the same for all.
struct Bias {
  const void* data;
  int64 batch, head, row, key;
  // query heads that share a head of it
  int group;
  // its extents: no row or key beyond them is read, whatever the lengths are
  int rows, keys;
};

// A number for each query head. Strides are in elements.
struct PerHead {
  const void* data;
  int64 batch, head;
  // 0: float32, 1: float16, 2: bfloat16
  int kind;
};

// Which probabilities are kept (docs/notes/dropout.md).
struct Dropout {
  // an integer on the device; null: seed_value
  const void* seed;
  int64 seed_value;
  int seed_is_64bit;
  unsigned threshold;
  // on probabilities that are kept: 1 / (1 - dropout_p)
  float factor;
};

// For each tile of one side's sequences and each head, the tiles of the other side that it meets (see
// attn/listed_tiles.cuh).
struct TileLists {
  int* data;
  // for Hopper's forward: the tiles, those with the longest lists first; null where tiles are few
  int* order;
  // in batch mode, how many lists of a head each sequence has; 0 where all sequences share them
  int64 sequence;
  // heads with lists of their own
  int nheads;
  // heads that share lists
  int group;
  // entries of a list
  int capacity;
};

// A mask that hides single keys. Bit n of a half-word is key n of its 16; strides are in half-words.
struct BlockMask {
  const unsigned short* bits;
  int64 batch, head;
  // query heads that share a head of it
  int group;
  // its extents: beyond them the last row, and the last 8 half-words of a row, are repeated
  int rows, words;
  // of the kernel's own tiles
  TileLists lists;
  // one row of bits for each head: the keys that any row sees
  const unsigned short* keys;
  // the stride of `keys` by batch; by head it is `words`
  int64 keys_batch;
};

// An array that a score function reads. Strides are in elements.
struct Captured {
  const void* data;
  int64 strides[4];
  int extents[4];
};

// The arrays and numbers that a score function captures, in the order of its names.
struct CapturedArrays {
  Captured array0, array1, array2, array3, array4, array5, array6, array7;
  float scalars[8];
};

// The block table of keys and values in pages (attn/pages.cuh). In the strides of k and v, `batch` is from page to
// page.
struct Pages {
  // page ids: a row for each sequence
  Integers ids;
  // (batch + 1): where each sequence begins in one row of all ids; null: rows are apart
  Integers indptr;
  // strides of `ids`, in ids: from row to row, and inside a row
  int64 row, entry;
  // ids of a row
  int64 capacity;
  // pages of the array
  int64 count;
  // keys of a page
  int page_size;
  // with shift: divides by page_size (tile/rows.cuh)
  unsigned inverse;
  int shift;
};

// The factor on 8-bit keys or values (attn/stored_keys.cuh).
struct KvScale {
  // a factor for each kv head; null: `number`, for all
  const float* data;
  // its stride in elements
  int64 head;
  float number;
};

// Which keys a query sees (attn/visible.cuh).
struct Mask {
  int64 window_left, window_right, sink;
};

// How the keys of query tiles are split among blocks: in pieces (attn/splits.cuh), or in a line that is cut into parts
// (attn/schedule/line.cuh).
struct Splits {
  // how many blocks are done, by query tile; of a line, by block; zero between launches
  unsigned* arrived;
  // the partial results of blocks
  void* partials;
  // pieces of a query tile; of a line, 0 where it is cut into equal parts or the GPU decides
  int count;
  // the fewest key tiles of a piece, or units of a part
  int least;
  // of a line: query tiles of different heads that a part has, each with a block
  int abreast;
  // of a line: query tiles that one query of a kv head's group takes
  int of_group;
  // of a line: sets of query tiles abreast that one query of all heads takes
  int ranks;
  // of a line: the most parts; 0 where `count` decides their number
  int blocks;
  // 1 / the number of parts that keep the memory busy
  float per_busy;
};

// A sequence of a ragged batch: the side whose tiles are handed out, and the other one.
struct OrderedSequence {
  // first physical rows, inside the batch entry in batch mode
  int64 tiled_start, other_start;
  // logical rows
  int tiled_length, other_length;
  int sequence;
  // tiles before it in the order
  int first_tile;
};

struct ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  // unit stride along rows; null when not wanted
  float* lse;
  Strides q_strides, k_strides, v_strides, out_strides;
  int64 lse_batch, lse_head;
  Side q_side, k_side;
  // ragged only: the sequences, the longest first, and behind the last one the number of all tiles (see
  // attn/schedule/order_sequences.cuh); null in Hopper's forward where sequences are so few that each block orders them
  OrderedSequence* order;
  Mask mask;
  int batch, nheads_q, nheads_kv;
  // keys of one kv head whose K and V fill the part of the L2 cache that blocks running at once should share
  int section_keys;
  Scores scores;
  Bias bias;
  PerHead alibi_slopes, sink_logits;
  Dropout dropout;
  BlockMask block_mask;
  CapturedArrays captured;
  Pages pages;
  Splits splits;
  KvScale k_scale, v_scale;
};

struct PaddingParams {
  // its rows that belong to no sequence become 0; null where it is the caller's
  void* out;
  // the same with -inf
  float* lse;
  Strides out_strides;
  int64 lse_batch, lse_head;
  Side side;
  int batch, nheads, headdim, element_bytes;
};

// The line at the end of a schedule: `tiles` query tiles of `units` units each, cut into pieces of `piece` units (see
// attn/schedule/stream_k.cuh). 0 tiles: none is split. A line has fewer than 2^31 units.
struct StreamK {
  // for dense batches
  int tiles, piece, units;
  // for dense batches with unlike tiles: query tiles of each head in the line, the longest ones, and pieces of the
  // line; 0 rows where tiles are alike
  int rows, pieces;
  // for ragged batches: key tiles by which a piece must at least be shorter than a query tile, and the fewest that it
  // has
  int least_gain, least_piece;
  // what the beginning of a query tile counts, in units; for ragged batches in 64ths of a key tile
  int begin;
  // what the last query tile of a head, which has few rows, counts in the line, in 64ths of another; 0: as much
  int last_share;
  // for ragged batches: how many consumers must have rows of each sequence for last_share to hold; 0: they have
  int busy_consumers;
};

// A mask with a bool for each key, side by side, the same for all rows and heads of a sequence.
struct KeyMask {
  const unsigned char* data;
  // stride from a sequence to the next
  int64 batch;
  // its extent
  int keys;
};

struct Sm90ForwardParams {
  ForwardParams forward;
  // a counter of work handed out and one of blocks done; zero between launches
  unsigned* next_work;
  // by split query tile and warp: how many items are done; zero between launches
  unsigned* arrived;
  // the partial results of items
  void* partials;
  // ragged only: where the row axes of the tensor maps end
  int row_bound_q, row_bound_k;
  // causal dense batches: the shortest query tiles of each head, this many, come last of all
  int kept_tiles;
  // where boxes bring whole rows of pages: heads from a page to the next in the tensor maps
  int next_page_k, next_page_v;
  StreamK stream_k;
  KeyMask key_mask;
  // ragged only
  PaddingParams padding;
};

// The gradient of the bias, which is written to every element. Strides are in elements.
struct BiasGradient {
  void* data;
  // the sums of each split, in C order; null where there is one split, which writes data
  float* partials;
  int64 batch, head, row, key;
  // its extents; those of rows and keys are the bias's
  int batches, heads;
  // blocks that share the scores over which an element is summed
  int splits;
  // key tiles of a block, one after the other
  int strip;
  // of the longest sequences, where the bias has one row or key for all; else 1
  int row_tiles, key_tiles;
};

struct BackwardParams {
  // `order` is here for key tiles (see attn/schedule/keys.cuh)
  ForwardParams forward;
  const void* dout;
  // laid out as lse; null = zeros
  const float* dlse;
  void* dq;
  void* dk;
  void* dv;
  // laid out as lse: dlse - dout . out; 0 where a row sees no key
  float* row_delta;
  // (batch, rows, nheads_q, dq_pitch), columns of 16 in the order of Accumulator::position(); null when not wanted
  float* dq_sum;
  Strides dout_strides, dq_strides, dk_strides, dv_strides;
  // in the dtype of sink_logits
  void* dsink_logits;
  // its stride in elements
  int64 dsink_head;
  BiasGradient dbias;
  // dv, then dk: each (parts, batch, rows, nheads_kv, depth), columns of 16 in the order of Accumulator::position()
  float* part_sums;
  // blocks of a key tile, which share the turns of its walk
  int parts;
  // keys of the tiles with sink tokens, where only these are shared; else 0
  int sink_rows;
  // for kernels that visit physical rows of queries, or of keys: log2 of the number of waves that share a row
  int query_row_shift, key_row_shift;
  // gradients of captured arrays, one after the other, in C order: floats, or ExactSums
  void* captured_sums;
  // where the gradient of each array begins in captured_sums
  int64 captured_at[8];
  // query rows of a section, summed over its kv heads, which blocks running at once share in the L2 cache
  int section_queries;
  // not 0: gradients may have NaN of hidden keys or queries; null where none can be hidden from some rows alone
  int* found_nan;
};

// Copies the gradient of a captured array out of its sums, and makes these zeros again.
struct CapturedGradientParams {
  // `BackwardParams::captured_sums`
  void* sums;
  void* to;
  // where its elements begin among all sums, and how many they are
  int64 first, count;
  // in elements
  int64 strides[4];
  int extents[4];
  // 0: float32, 1: float16, 2: bfloat16
  int kind;
};
