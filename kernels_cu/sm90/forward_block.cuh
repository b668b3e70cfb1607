// What all parts of Hopper's forward (sm90/forward.cu) share: the shapes of tiles, the tensor maps, and the layout of a
// block's shared memory.
#pragma once

#include "attn/carried.cuh"
#include "attn/key_order.cuh"
#include "attn/late_softmax.cuh"
#include "attn/listed_tiles.cuh"
#include "attn/params.cuh"
#include "attn/schedule/order_sequences.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/schedule/stream_k.cuh"
#include "attn/search.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "attn/stored_keys.cuh"
#include "attn/visible.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/rows.cuh"
#include "sm90/tickets.cuh"
#include "target/target.cuh"
#include "tile/either.cuh"

namespace forward {

using namespace config;
using namespace sm90;
using M = target::Mma<Operand>;
using C = target::Accumulator;

constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kProducerLanes = kPaged ? target::kWave : 1;
constexpr bool kValuesApart = kPaged;         // values have a producer warp of their own
constexpr bool kCopiesRows = kPageRows == 1;  // lanes copy keys and values row by row, without tensor maps
constexpr int kConverters = kFloat8 ? 2 : 0;  // warps that convert keys and values
// Whether registers move from the producer to the consumers (setmaxnreg). They need not with one consumer, which may
// have the most registers that a thread can have from the start.
constexpr bool kSharesRegisters = config::kProducerRegisters != config::kConsumerRegisters;
static_assert(kConsumers > 1 || !kPingPong, "turns are taken among several");
// A tile is kTileQ query rows of each of kHeadsPerTile neighbouring heads with the same keys (sm90/rows.cuh).
constexpr int kTileRows = 64 * kConsumers;
template <bool kUsed>
struct RowsOf {
  using Type = TileRows<kTileRows, kHeadsPerTile>;
};
template <>
struct RowsOf<true> {
  using Type = InterleavedRows<kTileRows, kHeadsPerTile>;
};
using Rows = RowsOf<kInterleaved>::Type;
constexpr int kTileQ = Rows::kTileQ;
static_assert(!kInterleaved || !(kBias || kAlibi || kScoreMod || kDropout || kBlockMask || kSinkLogits || kFloat8),
              "what differs from head to head is known to a warp for one head");
static_assert(!kInterleaved || !kTensorStores, "boxes of the output are of one head");
// Query rows of each head that a cluster has. Its blocks work on neighbouring tiles, and each loads its part of the
// keys and values for all of them.
constexpr int kClusterQ = kTileQ * kCluster;
// Blocks of 16 keys or 16 columns are those of accumulators and of products' depths; kBlocksQk and kBlocksV count
// blocks of kColumns columns, as they lie in shared memory.
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kBlocksQk = round_up(kHeadDim, kColumns) / kColumns;
constexpr int kBlocksV = round_up(kHeadDimV, kColumns) / kColumns;
constexpr int kOutBlocks = kDepthV / 16;

constexpr int kQueryBytes = kBlocksQk * kTileRows * 128;
constexpr int kKeyBytes = kBlocksQk * kTileK * 128;
constexpr int kValueBytes = kBlocksV * kTileK * 128;
// Keys and values as the array stores them, in 16 or in 8 bits. Blocks of both have rows of 128 bytes. kStoredSlots:
// slots for tiles of 8 bits that wait to be converted, of keys and of values; the host counts them too (_STORED_SLOTS
// in rawattn/_kernels/sm90/forward_config.py).
constexpr int kStoredColumns = kFloat8 ? 128 : kColumns;
constexpr int kStoredBlocksQk = round_up(kHeadDim, kStoredColumns) / kStoredColumns;
constexpr int kStoredBlocksV = round_up(kHeadDimV, kStoredColumns) / kStoredColumns;
constexpr int kStoredSlots = 2;
static_assert(!kFloat8 || kPaged, "pages alone hold 8 bits");

// How a tile of keys or values lies in shared memory. Where boxes bring whole rows, the tile is made of groups of eight
// rows, and a group has its blocks of columns one after the other, 1024 bytes each. Else each block of columns has all
// rows of the tile.
static_assert(!kWholeRows || (kPaged && !kFloat8 && kHeadDim % kColumns == 0 && kHeadDimV % kColumns == 0),
              "boxes of pages do, whose rows are blocks of columns and no more");
constexpr int kBlockStride = kWholeRows ? 1024 : kTileK * 128;  // bytes from a block of columns to the next
// Bytes from eight rows to the next eight.
constexpr int kKeyGroupStride = kWholeRows ? kBlocksQk * 1024 : 1024;
constexpr int kValueGroupStride = kWholeRows ? kBlocksV * 1024 : 1024;

constexpr int kOutputBytes = kTensorStores ? kBlocksV * kTileRows * 128 : 0;

// A bias that is loaded to slots of a ring. A slot has kBiasRows rows, 1 if all query rows share one, of each of
// kBiasHeads heads, 1 if the heads of a tile share one. TMA loads boxes of kColumns keys (sm90/forward_bias.cuh), or,
// where rows are not aligned for that, two warps copy row by row (sm90/forward_bias_rows.cuh).
constexpr bool kBiasInSlots = kBiasRows > 0;
constexpr bool kBiasInBoxes = kBiasInSlots && !kBiasByRows;
constexpr int kBiasBoxes = round_up(kTileK, kColumns) / kColumns;
constexpr int kBiasBoxBytes = round_up(kBiasRows * kBiasHeads * 128, 1024);  // from one to the next
// Bytes from a copied row to the next: 16 more than its keys have, since copies of 16 bytes also bring what surrounds
// the keys. With this pitch eight rows lie in different banks.
constexpr int kBiasPitch = kTileK * kBias + 16;
constexpr int kBiasBytes = kBiasByRows ? kBiasRows * kBiasHeads * kBiasPitch : kBiasBoxes * kBiasBoxBytes;  // of a slot
constexpr int kBiasSlots = kBiasInSlots ? kBiasStages : 1;
static_assert(!kBiasInSlots || (sizeof(Element) == kBias && (kBiasRows == 1 || kBiasRows == kTileQ) &&
                                (kBiasHeads == 1 || kBiasHeads == kHeadsPerTile)),
              "the host makes such slots");
// The warps of the producer's warpgroup that copy rows of a bias.
constexpr int kFirstBiasWarp = 2, kBiasWarps = kBiasByRows ? 2 : 0;
static_assert(!kBiasByRows || !kFloat8, "those convert tiles of 8 bits");
// Whether two warps divide the boxes of key tiles that consumers share (sm90/forward_pages.cuh). Where whole query
// tiles are computed, what the second warp costs other tiles is more than it gains. With fewer slots it could not tell
// the rounds of a slot apart (produce_part).
constexpr bool kDividesBoxes = kStreamK && kSharesKeys && kPaged && !kCopiesRows && kTileK > kPageRows&& kStages >= 3;
// Warps that load keys, and as many load values. Two where rows are copied, unless warps 2 and 3 copy a bias or convert
// tiles of 8 bits.
constexpr int kLoadWarps = kDividesBoxes || (kCopiesRows && !kBiasByRows && !kFloat8) ? 2 : 1;
// Warps of the producer's warpgroup, beside the first one, that give work slots back once they have read them. (The
// warp that reads masks of keys gives none back: it passes work on to the consumers.)
constexpr int kWorkReadingWarps = kValuesApart + 2 * (kLoadWarps - 1) + kBiasWarps + kConverters;

using Qk = ptx::Wgmma<Operand, kTileK>;
using Pv = ptx::Wgmma<Operand, kDepthV>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using Meeting = MeetingTiles<kBlockMask, Visible, kClusterQ, kTileK, key_tile_order<Visible>()>;
using Keys = Meeting::Keys;
using Softmax = Either<kLateScaling, LateOnlineSoftmax<C, 1>, OnlineSoftmax<C, 1>>::Type;

// Dense batches whose last query rows see the most keys: stream-K counts the keys of each query tile there
// (UnequalTilesLine in attn/schedule/stream_k.cuh).
constexpr bool kUnequalTiles = kStreamK && !kRagged && !kBlockMask && kRight && !kLeft;
static_assert(!kBlockMask || kCluster == 1, "a mask's lists are of one block's tiles");
// Which keys of a sequence a mask of keys keeps, one bit for each key (sm90/forward_key_mask.cuh). first: the first
// kept key; behind: the key after the last kept one, 0 if none is kept.
struct KeptKeyBits {
  alignas(16) unsigned bits[kMostMaskedKeys / 32];
  int first, behind;
};
struct MaskedTile : WorkTile, KeptKeyBits {};
// A piece of work as it lies in a work slot: a query tile, under stream-K with its range of key tiles, under a mask of
// keys with the bits of its sequence.
template <bool kPartial, bool kMasked>
struct ItemOf {
  using Type = WorkTile;
};
template <>
struct ItemOf<true, false> {
  using Type = WorkItem;
};
template <>
struct ItemOf<false, true> {
  using Type = MaskedTile;
};
using Item = ItemOf<kStreamK, kKeyMask>::Type;

// The tensor maps, as the host lays them out: always that of q; those of k and v, of the output and of the bias where
// this configuration loads or stores them by TMA.
struct QueryMap {
  ptx::TensorMap q;
};
template <bool kUsed>
struct KeyMaps {
  DEVICE static const ptx::TensorMap* of_keys() { return nullptr; }
  DEVICE static const ptx::TensorMap* of_values() { return nullptr; }
  DEVICE static void prefetch() {}
};
template <>
struct KeyMaps<true> {
  ptx::TensorMap k, v;

  DEVICE const ptx::TensorMap* of_keys() const { return &k; }
  DEVICE const ptx::TensorMap* of_values() const { return &v; }
  DEVICE void prefetch() const {
    ptx::prefetch_tensormap(&k);
    ptx::prefetch_tensormap(&v);
  }
};
template <bool kUsed>
struct OutputMap {};
template <>
struct OutputMap<true> {
  ptx::TensorMap out;
};
template <bool kUsed>
struct BiasMap {};
template <>
struct BiasMap<true> {
  ptx::TensorMap bias;
};
struct Maps : QueryMap, KeyMaps<!kCopiesRows>, OutputMap<kTensorStores>, BiasMap<kBiasInBoxes> {};
static_assert(sizeof(Maps) == sizeof(ptx::TensorMap) * (1 + 2 * !kCopiesRows + kTensorStores + kBiasInBoxes),
              "the host lays them out so");

// The operands of a ramp: slopes of rows, and numbers of keys (sm90/forward_ramp.cuh). kRampSides: 2 for ALiBi with
// keys on both sides of the diagonal, where the keys of each side have numbers of their own. They lie in front of all
// tiles: compute-sanitizer takes an operand to be as many bytes side by side as it has elements, which is twice what a
// repeated one has, so at the end of shared memory it would report one as out of bounds.
constexpr int kRampSides = kAlibi && !kOneSided ? 2 : 1;
template <bool kUsed>
struct RampTile {};
template <>
struct RampTile<true> {
  struct alignas(16) Depth {
    float x[4];
  };
  Depth rows[kConsumers][64], keys[kRampSides][kTileK];
};
struct Tiles : RampTile<kRamp> {
  alignas(1024) unsigned char queries[kQuerySlots][kQueryBytes];
  unsigned char keys[kStages][kKeyBytes];
  unsigned char values[kStages][kValueBytes];
};
template <bool kUsed>
struct StoredTiles {};
template <>
struct StoredTiles<true> {
  alignas(1024) unsigned char stored_keys[kStoredSlots][kStoredBlocksQk * kTileK * 128];
  unsigned char stored_values[kStoredSlots][kStoredBlocksV * kTileK * 128];
};
// What only some configurations have, in this order: the output that TMA stores, the ring of the bias, tiles of
// 8 bits.
struct Boxes : SwizzledBytes<kOutputBytes + (kBiasInSlots ? kBiasSlots * kBiasBytes : 0)>, StoredTiles<kFloat8> {};
template <bool kUsed>
struct StoredBarriers {};
template <>
struct StoredBarriers<true> {
  ptx::Mbarrier keys_full[kStoredSlots], keys_empty[kStoredSlots], values_full[kStoredSlots],
      values_empty[kStoredSlots];
};
struct Params : Sm90ForwardParams, CarriedIntegers<kCarriedWords> {};
static_assert(sizeof(Params) == sizeof(Sm90ForwardParams) + 4 * kCarriedWords, "the host lays them out so");
// Where the sequences of a ragged batch of up to kMostOrdered of them lay when they were looked at, in shared memory.
template <bool kUsed>
struct SeenLengths {
  DEVICE bool look(const Params&, int) { return false; }
  DEVICE bool have_rows_for(int, int, int) const { return true; }
};
template <>
struct SeenLengths<true> {
  Span q[kMostOrdered], k[kMostOrdered];

  DEVICE Span of_tiled(int sequence) const { return q[sequence]; }
  DEVICE Span of_other(int sequence) const { return k[sequence]; }

  // Looks at them again: each lane of a warp at some. Returns whether one of these lay elsewhere before.
  DEVICE bool look(const Params& p, int lane) {
    // References, so that a kernel that carries no integers makes no copies of its parameters.
    const Side &side_q = p.resolve(p.forward.q_side), &side_k = p.resolve(p.forward.k_side);
    bool differ = false;
    for (int n = lane; n < p.forward.batch; n += target::kWave) {
      differ |= replace(q[n], span_of(side_q, n));
      differ |= replace(k[n], span_of(side_k, n));
    }
    return differ;
  }
  // Whether each sequence has rows for so many consumers, in all tiles of a head together. All lanes of a warp call it.
  DEVICE bool have_rows_for(int consumers, int batch, int lane) const {
    bool differ = false;
    for (int n = lane; n < batch; n += target::kWave) {
      const int tiles = q[n].length / kTileQ, rest = q[n].length - tiles * kTileQ;
      differ |= tiles * kConsumers + (rest * kHeadsPerTile + 63) / 64 != consumers;
    }
    return !target::wave_any(differ);
  }

 private:
  DEVICE static bool replace(Span& old, const Span& now) {
    const bool differ = old.start != now.start || old.length != now.length;
    old = now;
    return differ;
  }
};
// The order of such a batch, which each block finds for itself, in shared memory. That takes less time than a launch
// before this one would, and the order lies nearer than in global memory.
template <bool kUsed>
struct OwnOrder {
  DEVICE void find(const Params&, const SeenLengths<kUsed>&, unsigned char*) {}
};
template <>
struct OwnOrder<true> {
  int sequences[kMostOrdered], first_tiles[kMostOrdered + 1];

  // Called by the lanes of the first warp. shared: memory that is not in use yet.
  DEVICE void find(const Params& p, const SeenLengths<true>& lengths, unsigned char* shared) {
    if (p.forward.batch == 1) {  // the block's first loads wait for it
      if (target::thread_index() == 0) {
        put(0, 0, lengths.q[0], lengths.k[0], 0);
        put_total(1, (lengths.q[0].length + kClusterQ - 1) / kClusterQ);
      }
      target::wave_sync();
      return;
    }
    const OrderSequences<target::kWave, SeenLengths<true>, OwnOrder, true> order{lengths, p.forward.batch, kClusterQ,
                                                                                 *this};
    for (int n = 0; n * target::kWave < p.forward.batch; n++) order(n, shared);
    target::wave_sync();
  }
  DEVICE void put(int position, int sequence, const Span&, const Span&, int first_tile) {
    sequences[position] = sequence;
    first_tiles[position] = first_tile;
  }
  DEVICE void put_total(int batch, int tiles) { first_tiles[batch] = tiles; }
};
// The order of a ragged batch, for the producer: from global memory (data) where a launch has left one, else this
// block's own. kSeen: where its sequences lie is known from `seen`, and memory is not read, since an earlier kernel may
// still write it.
template <bool kUsed, bool kSeen>
struct OrderOfBlock {
  OrderedSequence* data;
  const OwnOrder<kUsed>& own;
  const Params& params;
  const SeenLengths<kUsed>* seen = nullptr;

  DEVICE int first_tile(int position) const {
    return data != nullptr ? data[position].first_tile : own.first_tiles[position];
  }
  DEVICE int position(int batch, int tile) const {
    return last_of(batch, [&](int n) { return first_tile(n) <= tile; });
  }
  DEVICE OrderedSequence at(const ForwardParams& p, int position) const {
    if (data != nullptr) return data[position];
    const int sequence = own.sequences[position];
    Span q, k;
    if constexpr (kSeen) {
      q = seen->q[sequence];
      k = seen->k[sequence];
    } else {
      q = span_of(params.resolve(p.q_side), sequence);
      k = span_of(params.resolve(p.k_side), sequence);
    }
    return {q.start, k.start, q.length, k.length, sequence, own.first_tiles[position]};
  }
};
using BlockOrder = OrderOfBlock<kRagged, false>;
using SeenOrder = OrderOfBlock<kRagged, true>;
struct SharedMemory : Tiles {
  // keys_full and keys_empty come first: `Consumer` relies on their offsets.
  ptx::Mbarrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
  ptx::Mbarrier queries_full[kQuerySlots], queries_empty[kQuerySlots];
  ptx::Mbarrier bias_full[kBiasSlots], bias_empty[kBiasSlots];
  // Two slots: the producer decides on the next work while the consumers are busy with this one.
  ptx::Mbarrier work_full[2], work_empty[2];
  ptx::Mbarrier work_found[2];  // under a mask of keys: work is known, and its mask is still to be read
  Item work[2];
  TicketBox tickets;
  OwnOrder<kRagged> own_order;
  StreamLine line;  // with kStreamK
  StoredBarriers<kFloat8> stored_barriers;
  Boxes boxes;
};
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the host reserves enough");

enum NamedBarrier { kTurn = 1 };  // kTurn + c: consumer c may issue its products

}  // namespace forward
