// What the host tells a kernel. Generated from rawattn/_kernels/params.py, where it is declared: change that.
#pragma once

#include "target/target.cuh"

// Integers the caller may keep on the GPU as int32 or int64; null when not given.
struct Integers {
  const void* data;
  int64 is_64bit;
};

// Where the sequences of one side (queries or keys) lie, and how much of each is real.
struct Side {
  // (batch + 1) physical starts; null in batch mode
  Integers start;
  // (batch + 1) cumulative or (batch) logical lengths; null = physical
  Integers length;
  // whether `length` is cumulative
  int64 cumulative;
  // rows of the array: seqlen in batch mode, total in packed mode
  int64 rows;
};

// Rows are addressed as base + batch * stride_batch + row * stride_row + head * stride_head, in elements; the last axis
// has stride 1.
struct Strides {
  int64 batch, row, head;
};

// What becomes of q . k before the softmax: scaled, then capped.
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
  // of what is kept: 1 / (1 - dropout_p)
  float factor;
};

// Of each tile of one side's sequences and head, the tiles of the other side that meet it (see attn/listed_tiles.cuh).
struct TileLists {
  int* data;
  // of Hopper's forward: tiles by the lengths of their lists, the longest first; null where there are few
  int* order;
  // lists of a head between those of two sequences in batch mode; 0 where all share them
  int64 sequence;
  // that have lists of their own
  int nheads;
  // heads that share lists
  int group;
  // entries of a list
  int capacity;
};

// Keys that are hidden one by one. Bit n of a half-word is the key n of its 16; strides are in half-words.
struct BlockMask {
  const unsigned short* bits;
  int64 batch, head;
  // query heads that share a head of it
  int group;
  // its extents: what lies behind them is as the last row and the last 8 half-words of a row are
  int rows, words;
  // of the kernel's own tiles
  TileLists lists;
  // of each head one row of bits: the keys that any row sees
  const unsigned short* keys;
  // of a head of it the stride is `words`
  int64 keys_batch;
};

// An array that a score function reads. Strides are in elements.
struct Captured {
  const void* data;
  int64 strides[4];
  int extents[4];
};

// What a score function reads, in the order of its names.
struct CapturedArrays {
  Captured array0, array1, array2, array3, array4, array5, array6, array7;
  float scalars[8];
};

// Where keys and values lie that are in pages (attn/pages.cuh). Of them the strides of batches are those of pages.
// Other strides are in ids.
struct Pages {
  // of pages, a row of each sequence
  Integers ids;
  // (batch + 1): where the ids of each sequence begin in one row of all; null: a row of each
  Integers indptr;
  // strides of the rows and of the ids in one
  int64 row, entry;
  // ids of a row
  int64 capacity;
  // pages of the array
  int64 count;
  // keys of a page
  int page_size;
  // with shift: divides by it (tile/rows.cuh)
  unsigned inverse;
  int shift;
};

// What keys or values in 8 bits are multiplied with (attn/stored_keys.cuh).
struct KvScale {
  // for each kv head; null: the number, for all
  const float* data;
  // its stride in elements
  int64 head;
  float number;
};

// Which keys a query sees (attn/visible.cuh).
struct Mask {
  int64 window_left, window_right, sink;
};

// Query tiles whose keys several blocks share (attn/splits.cuh).
struct Splits {
  // by query tile: how many blocks are done; zero between launches
  unsigned* arrived;
  // what they come to
  void* partials;
  // blocks of a query tile
  int count;
  // key tiles of a piece, at least: of fewer keys there are fewer pieces
  int least;
  // heads whose blocks read the same keys at the same time (attn/schedule/line.cuh)
  int abreast;
  // query tiles beside each other that share keys; these four too are of a line
  int of_group;
  // of query tiles, as many abreast in each
  int ranks;
  // of those abreast one, where these decide how many parts a line has
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
  // ragged only: the longest first, and behind the last one their tiles together (see
  // attn/schedule/order_sequences.cuh); Hopper's forward has none where sequences are few and each block orders them
  // for itself
  OrderedSequence* order;
  Mask mask;
  int batch, nheads_q, nheads_kv;
  // keys of one kv head whose K and V fill the share of L2 that concurrent blocks should live in
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
  // rows that belong to no sequence become 0 in out
  void* out;
  // and -inf in lse; either is null when it is not ours to fill
  float* lse;
  Strides out_strides;
  int64 lse_batch, lse_head;
  Side side;
  int batch, nheads, headdim, element_bytes;
};

// How a schedule ends: `tiles` query tiles of `units` each, in pieces of `piece` units, no more than a query tile has
// (see attn/schedule/stream_k.cuh). No tiles where all come whole. All of their units are fewer than 2^31.
struct StreamK {
  // of a dense batch
  int tiles, piece, units;
  // of one whose tiles are unlike: query tiles of each head in the line, the longest, and pieces of the line; no rows
  // where tiles are alike
  int rows, pieces;
  // of a ragged one: key tiles by which a piece must be shorter than a tile, and which it has at least
  int least_gain, least_piece;
};

// A bool of each key, side by side, the same for all rows and heads of a sequence.
struct KeyMask {
  const unsigned char* data;
  // from a sequence to the next
  int64 batch;
  // its extent
  int keys;
};

struct Sm90ForwardParams {
  ForwardParams forward;
  // a counter of work handed out and one of blocks done; zero between launches
  unsigned* next_work;
  // by tile that is split and wave: how many of its items are done; likewise
  unsigned* arrived;
  // what items of such tiles come to
  void* partials;
  // ragged only: where the row axes of the tensor maps end
  int row_bound_q, row_bound_k;
  // of each head of a causal dense batch: the shortest, which come last of all
  int kept_tiles;
  // keys in pages whose boxes bring whole rows: heads from a page to the next in the tensor maps
  int next_page_k, next_page_v;
  StreamK stream_k;
  KeyMask key_mask;
  // ragged only
  PaddingParams padding;
};

// Where the gradient of the bias is written, all of it. Strides are in elements.
struct BiasGradient {
  void* data;
  // of each split a sum of its own, in C order; null where there is one split, which writes data
  float* partials;
  int64 batch, head, row, key;
  // its extents, beside those of the bias
  int batches, heads;
  // of what an element is summed over
  int splits;
  // key tiles of a block, one after the other
  int strip;
  // of the longest sequences, where the bias has no axis for them
  int row_tiles, key_tiles;
};

struct BackwardParams {
  // the order is that of key tiles here (see attn/schedule/keys.cuh)
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
  // where only key tiles with sink tokens have so many: the keys of those
  int sink_rows;
  // of kernels that visit physical rows of queries, or of keys: the logarithm of how many waves share a row
  int query_row_shift, key_row_shift;
  // gradients of captured arrays, one after the other, in C order: floats, or ExactSums
  void* captured_sums;
  // where that of each begins
  int64 captured_at[8];
  // query rows of one kv head's group that fill the share of L2 that concurrent blocks should live in
  int section_queries;
};

// A gradient of a captured array is given out, and its sums are zeros again.
struct CapturedGradientParams {
  // as `BackwardParams::captured_sums`
  void* sums;
  void* to;
  // of its elements among all sums
  int64 first, count;
  // in elements
  int64 strides[4];
  int extents[4];
  // 0: float32, 1: float16, 2: bfloat16
  int kind;
};

struct ScheduleParams {
  Side tiled, other;
  OrderedSequence* order;
  int batch, tile;
};

struct AlignRowsParams {
  const void* from;
  // (batch, rows, nheads, columns rounded up to 8), without gaps
  void* to;
  // of `from`
  Strides strides;
  int64 rows;
  int batch, nheads;
};

struct AlignBiasParams {
  const void* from;
  // (batches, nheads, rows, keys rounded up to 8), without gaps
  void* to;
  // strides of `from`, in elements
  int64 batch, head, row;
  // rows of all heads and batches
  int64 lines;
  int nheads, rows, keys;
};

// Partial results over disjoint keys become one. Strides are in elements.
struct CombineParams {
  // listed: each; else the first
  const void* outs[64];
  // likewise
  const float* lses[64];
  void* out;
  // (batch, nheads, rows), without gaps
  float* lse;
  // from one to the next, 0 where they are listed
  int64 outs_partial, lses_partial;
  Strides outs_strides, lses_strides, out_strides;
  int64 rows;
  int batch, nheads, partials;
  int outs_listed, lses_listed;
};

struct AppendParams {
  // null where there is none
  const void* q;
  const void* k;
  const void* v;
  void* k_pages;
  void* v_pages;
  // the rows of q, turned
  void* out;
  Strides q_strides, k_strides, v_strides, out_strides;
  // those of batches are those of pages
  Strides k_pages_strides, v_pages_strides;
  // of the new rows
  Side side;
  // the keys of each sequence, the new ones among them
  Integers seqlen_k;
  Pages pages;
  // by position and plane
  const void* cos;
  const void* sin;
  // their strides in elements
  int64 cos_row, sin_row;
  // their rows
  int64 positions;
  // of all new rows, padding among them
  int64 rows;
  // nheads_q: 0 without q
  int batch, nheads_q, nheads_kv;
  // whether rows of out that belong to no sequence become 0
  int fill;
  KvScale k_scale, v_scale;
};

// What is written of a mask (see attn/mask_writing.cuh).
struct WrittenMask {
  // (batch, nheads, rows, words)
  unsigned short* bits;
  // of granules, (batch, nheads, rows / 64, words / 4), rounded up
  unsigned char* map;
  // that any row of 64 sees, (batch, nheads, rows / 64, words)
  unsigned short* band_keys;
  int rows, keys, words;
  int nheads;
};

struct BoolsMaskParams {
  WrittenMask written;
  // True is not 0
  const unsigned char* from;
  // its strides, 0 where it is the same for all
  int64 batch, head, row, key;
};

struct RangesMaskParams {
  WrittenMask written;
  // (batch, rows, count, 2): the keys [begin, end) that a row sees
  Integers ranges;
  int count;
};

struct MaskKeysParams {
  // of each plane `bands` rows of words
  const unsigned short* band_keys;
  // of each plane one
  unsigned short* keys;
  int planes, bands, words;
};

// Of each head the keys that all rows share: ascending, -1 behind the last one (see attn/kept_keys.cuh).
struct KeptKeys {
  const int* data;
  // strides; 0 where all have the same list
  int64 batch, head;
  // entries of a list
  int count;
  // of the arrays that hold those keys: an entry that is none of them counts for nothing
  int rows;
};

// Keys or values.
struct KeptArray {
  // those of all keys
  void* all;
  // (batch, nheads, count, bytes rounded up to 16), without gaps
  void* kept;
  // of the former
  Strides strides;
};

// Arrays of all keys, and of those that are kept.
struct KeptRowsParams {
  KeptKeys kept;
  KeptArray k, v;
  int batch, nheads;
};

// What rows of queries see, but for the list of keys.
struct KeptLimits {
  // row i sees the keys [i + first, i + last]
  int64 first, last;
  // and those below it, but none beyond i + last
  int64 sink;
  // 1 where all are alike
  int rows;
};

// Which of the kept keys each row sees. Of it, and of the next ones, `blocks` take part in a launch.
struct KeptMaskParams {
  // (batch, nheads, rows, words)
  unsigned short* bits;
  // that any row sees, (batch, nheads, words)
  unsigned short* keys;
  int nheads, words;
  int blocks;
};

// Lists of tiles of a call that has kept keys alone.
struct KeptListsParams {
  TileLists lists;
  // whether they are those of tiles of keys
  int of_keys;
  int tile_q, tile_k;
  // that have lists of their own
  int sequences;
  // of a sequence
  int tiles;
  // tiles of the other side
  int others;
  // heads whose tiles a list has, one head after the other
  int parts;
  int blocks;
};

// How many keys each list has.
struct KeptLengths {
  // (batch, nheads)
  int* lengths;
  int64 lists;
  int nheads;
  int blocks;
};

struct KeptSetupParams {
  KeptRowsParams rows;
  KeptLimits limits;
  KeptMaskParams mask;
  KeptListsParams lists0, lists1;
  KeptLengths lengths;
  // of keys, and as many of values
  int gather_blocks;
};

struct PredicateMaskParams {
  WrittenMask written;
  int seqlen_q, seqlen_k;
  CapturedArrays captured;
};

struct MaskTilesParams {
  // its lists are written
  ForwardParams forward;
  // of granules
  const unsigned char* map;
  // its strides
  int64 map_batch, map_head, map_row;
  // its extents: what lies behind them is as the last ones are
  int map_rows, map_keys;
  // that have lists of their own
  int sequences;
  // of a sequence; one of a device's lengths may have more
  int tiles;
  // heads whose tiles a list has, one head after the other
  int parts;
  // heads, counted like parts of all lists, that share a head of the mask
  int group;
  // by sequence and head: waves that are done; zero between launches
  unsigned* listed;
};

// Of a ragged call, what follows from its lengths alone (portable/ragged_setup.cuh).
struct RaggedSetupParams {
  // `schedules` of them, each by `schedule_blocks`
  ScheduleParams schedule0, schedule1;
  // likewise, each filled by `padding_blocks`
  PaddingParams padding0, padding1, padding2;
  int schedules, schedule_blocks, paddings, padding_blocks;
};

// A setup and the first step of the backward in one launch (portable/backward_setup.cu).
struct BackwardSetupParams {
  BackwardParams backward;
  RaggedSetupParams setup;
  // which come first
  int setup_blocks;
};

// A setup that brings integers of the host.
struct CarryingSetupParams {
  // its sides say where the integers will be
  RaggedSetupParams setup;
  // where they go, at a multiple of 8 bytes
  unsigned* to;
  // of the words that come
  int64 count;
  // whole arrays of integers, where a schedule or padding reads them
  unsigned words[870];
};
