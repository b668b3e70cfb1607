// What the host tells a kernel. Generated from rawattn/_kernels/helper_params.py: change it there.
#pragma once

#include "attn/params.cuh"

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

// Partial results over disjoint keys are merged into one. Strides are in elements.
struct CombineParams {
  // where outs_listed, each partial's; else the first's alone
  const void* outs[64];
  // the same by lses_listed
  const float* lses[64];
  void* out;
  // (batch, nheads, rows), without gaps
  float* lse;
  // strides by partial, 0 where they are listed
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
  // the rows of q with rotary embedding
  void* out;
  Strides q_strides, k_strides, v_strides, out_strides;
  // `batch` is from page to page
  Strides k_pages_strides, v_pages_strides;
  // of the new rows
  Side side;
  // the number of keys of each sequence, the new ones included
  Integers seqlen_k;
  Pages pages;
  // (positions, rotary_dim / 2)
  const void* cos;
  // the same
  const void* sin;
  // their strides by position, in elements
  int64 cos_row, sin_row;
  // their rows
  int64 positions;
  // all new rows, padding included
  int64 rows;
  // nheads_q: 0 without q
  int batch, nheads_q, nheads_kv;
  // whether rows of out that belong to no sequence become 0
  int fill;
  KvScale k_scale, v_scale;
};

// The arrays that a mask is written to (see attn/mask_writing.cuh).
struct WrittenMask {
  // (batch, nheads, rows, words)
  unsigned short* bits;
  // of granules, (batch, nheads, rows / 64, words / 4), rounded up
  unsigned char* map;
  // keys that any of 64 rows sees, (batch, nheads, rows / 64, words)
  unsigned short* band_keys;
  int rows, keys, words;
  int nheads;
};

struct BoolsMaskParams {
  WrittenMask written;
  // True is not 0
  const unsigned char* from;
  // strides of `from`, 0 where the mask is the same for all
  int64 batch, head, row, key;
};

struct RangesMaskParams {
  WrittenMask written;
  // (batch, rows, count, 2): the keys [begin, end) that a row sees
  Integers ranges;
  int count;
};

struct MaskKeysParams {
  // (planes, bands, words); a plane is a head of a sequence
  const unsigned short* band_keys;
  // (planes, words)
  unsigned short* keys;
  int planes, bands, words;
};

// For each head the list of keys that all rows share: ascending, -1 behind the last one (see attn/kept_keys.cuh).
struct KeptKeys {
  const int* data;
  // strides; 0 where all have the same list
  int64 batch, head;
  // entries of a list
  int count;
  // of the arrays that hold those keys: an entry outside of them is ignored
  int rows;
};

// Keys or values, or their gradients.
struct KeptArray {
  // the array with all keys
  void* all;
  // (batch, nheads, count, bytes rounded up to 16), without gaps
  void* kept;
  // of `all`
  Strides strides;
};

// Arrays of all keys, and of the kept keys.
struct KeptRowsParams {
  KeptKeys kept;
  KeptArray k, v;
  int batch, nheads;
};

// The keys that window and diagonal leave each row of queries.
struct KeptLimits {
  // row i sees the keys [i + first, i + last]
  int64 first, last;
  // it also sees the keys below this, but none beyond i + last
  int64 sink;
  // 1 where all rows see the same keys
  int rows;
};

// Which of the kept keys each row sees. Here and in the next two structs, `blocks` blocks of a launch do the task.
struct KeptMaskParams {
  // (batch, nheads, rows, words)
  unsigned short* bits;
  // keys that any row sees, (batch, nheads, words)
  unsigned short* keys;
  int nheads, words;
  int blocks;
};

// Lists of tiles for attention to kept keys.
struct KeptListsParams {
  TileLists lists;
  // whether they list the query tiles of key tiles
  int of_keys;
  int tile_q, tile_k;
  // sequences with lists of their own
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
  // blocks that gather keys; as many gather values
  int gather_blocks;
};

struct PredicateMaskParams {
  WrittenMask written;
  int seqlen_q, seqlen_k;
  CapturedArrays captured;
};

struct MaskTilesParams {
  // `block_mask.lists` are written
  ForwardParams forward;
  // of granules
  const unsigned char* map;
  // its strides
  int64 map_batch, map_head, map_row;
  // its extents: beyond them the last row and key are repeated
  int map_rows, map_keys;
  // sequences with lists of their own
  int sequences;
  // of a sequence; with lengths on the device, one may have more
  int tiles;
  // heads whose tiles a list has, one head after the other
  int parts;
  // heads, counted as the parts of all lists, that share a head of the mask
  int group;
  // by sequence and head: waves that are done; zero between launches
  unsigned* listed;
};

// The setup of a ragged call, which depends on its lengths alone (portable/ragged_setup.cuh).
struct RaggedSetupParams {
  // the first `schedules`, each made by `schedule_blocks` blocks
  ScheduleParams schedule0, schedule1;
  // the first `paddings`, each by `padding_blocks` blocks
  PaddingParams padding0, padding1, padding2;
  int schedules, schedule_blocks, paddings, padding_blocks;
};

// A setup and the first step of the backward in one launch (portable/backward_setup.cu).
struct BackwardSetupParams {
  BackwardParams backward;
  RaggedSetupParams setup;
  // the first blocks of the launch, which do the setup
  int setup_blocks;
};

// A setup that carries integers of the host in its parameters.
struct CarryingSetupParams {
  // its sides have the addresses that the integers are written to
  RaggedSetupParams setup;
  // where the words are written, at a multiple of 8 bytes
  unsigned* to;
  // the number of words carried
  int64 count;
  // whole arrays of integers, if a schedule or padding of this launch reads them
  unsigned words[842];
};
