// What the warps of a Hopper forward block share: shapes, shared memory, and which rows and keys its work has.
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
#include "tile/copy.cuh"

namespace forward {

using namespace config;
using namespace sm90;
using M = target::Mma<Operand>;
using C = target::Accumulator;

constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kProducerLanes = kPaged ? target::kWave : 1;
constexpr bool kValuesApart = kPaged;         // have a producer of their own
constexpr bool kCopiesRows = kPageRows == 1;  // of keys and values, which then need no maps
constexpr int kConverters = kFloat8 ? 2 : 0;  // warps that convert keys and values
// A lone consumer may have as many registers from the start as a thread can have.
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
// The blocks of a cluster work on neighbouring tiles, and each loads its part of the keys and values for all of them.
constexpr int kClusterQ = kTileQ * kCluster;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kBlocksQk = round_up(kHeadDim, kColumns) / kColumns;
constexpr int kBlocksV = round_up(kHeadDimV, kColumns) / kColumns;
constexpr int kOutBlocks = kDepthV / 16;

constexpr int kQueryBytes = kBlocksQk * kTileRows * 128;
constexpr int kKeyBytes = kBlocksQk * kTileK * 128;
constexpr int kValueBytes = kBlocksV * kTileK * 128;
// A block of keys or values as they are stored has rows of 128 bytes, too. How many tiles of 8 bits wait to be
// converted, the host knows as well.
constexpr int kStoredColumns = kFloat8 ? 128 : kColumns;
constexpr int kStoredBlocksQk = round_up(kHeadDim, kStoredColumns) / kStoredColumns;
constexpr int kStoredBlocksV = round_up(kHeadDimV, kStoredColumns) / kStoredColumns;
constexpr int kStoredSlots = 2;
static_assert(!kFloat8 || kPaged, "pages alone hold 8 bits");

// Where a box brings whole rows, eight of them follow each other in each block of columns, and then the next eight.
// Else all rows of a tile do.
static_assert(!kWholeRows || (kPaged && !kFloat8 && kHeadDim % kColumns == 0 && kHeadDimV % kColumns == 0),
              "boxes of pages do, whose rows are blocks of columns and no more");
constexpr int kNextBlock = kWholeRows ? 1024 : kTileK * 128;  // from a block of columns to the next
constexpr int kNextKeys = kWholeRows ? kBlocksQk * 1024 : 1024, kNextValues = kWholeRows ? kBlocksV * 1024 : 1024;

constexpr int kOutputBytes = kTensorStores ? kBlocksV * kTileRows * 128 : 0;

// A bias that comes to slots: of kBiasRows query rows, 1 where all rows share one, in each of kBiasHeads heads,
// 1 where the tile's heads share one. It comes in boxes of kColumns keys, or, where its rows begin anywhere, row by row
// (sm90/forward_bias_rows.cuh).
constexpr bool kBiasInSlots = kBiasRows > 0;
constexpr bool kBiasInBoxes = kBiasInSlots && !kBiasByRows;
constexpr int kBiasBoxes = round_up(kTileK, kColumns) / kColumns;
constexpr int kBiasBoxBytes = round_up(kBiasRows * kBiasHeads * 128, 1024);  // from one to the next
// From a row to the next: 16 bytes more than its keys have, for what surrounds them. So eight rows lie in other banks.
constexpr int kBiasPitch = kTileK * kBias + 16;
constexpr int kBiasBytes = kBiasByRows ? kBiasRows * kBiasHeads * kBiasPitch : kBiasBoxes * kBiasBoxBytes;  // of a slot
constexpr int kBiasSlots = kBiasInSlots ? kBiasStages : 1;
static_assert(!kBiasInSlots || (sizeof(Element) == kBias && (kBiasRows == 1 || kBiasRows == kTileQ) &&
                                (kBiasHeads == 1 || kBiasHeads == kHeadsPerTile)),
              "the host makes such slots");
// The warps that bring rows.
constexpr int kFirstBiasWarp = 2, kBiasWarps = kBiasByRows ? 2 : 0;
static_assert(!kBiasByRows || !kFloat8, "those convert tiles of 8 bits");
// The warps that copy keys, and as many values, where rows are copied. Those that bring a bias or convert are not free.
constexpr int kRowWarps = kCopiesRows && !kBiasByRows && !kFloat8 ? 2 : 1;
// Warps of the producer's group beside the first one.
constexpr int kHelpers = kValuesApart + 2 * (kRowWarps - 1) + kBiasWarps + kConverters;

using Qk = ptx::Wgmma<Operand, kTileK>;
using Pv = ptx::Wgmma<Operand, kDepthV>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft>;
using Meeting = MeetingTiles<kBlockMask, Visible, kClusterQ, kTileK, order_of_keys<Visible>()>;
using Keys = Meeting::Keys;
template <bool kLate>
struct SoftmaxOf {
  using Type = OnlineSoftmax<C, 1>;
};
template <>
struct SoftmaxOf<true> {
  using Type = LateOnlineSoftmax<C, 1>;
};
using Softmax = SoftmaxOf<kLateScaling>::Type;

// A dense batch whose last query rows see the most keys.
constexpr bool kUnlike = kStreamK && !kRagged && !kBlockMask && kRight && !kLeft;
static_assert(!kBlockMask || kCluster == 1, "a mask's lists are of one block's tiles");
// The keys of a sequence that a mask of keys keeps, a bit of each (sm90/forward_key_mask.cuh); first, behind: of the
// first one, and behind the last one.
struct KeptBits {
  alignas(16) unsigned bits[kMostMaskedKeys / 32];
  int first, behind;
};
struct MaskedTile : WorkTile, KeptBits {};
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

// TMA's maps: of what it loads and stores in every call, and of what it does in this one.
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

struct Tiles {
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
// Slopes of rows and numbers of keys: see sm90/forward_ramp.cuh. Of ALiBi keys on either side of the diagonal have
// their own.
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
// The output's boxes first, then the ring of the bias; tiles of 8 bits; a ramp.
struct Boxes : SwizzledBytes<kOutputBytes + (kBiasInSlots ? kBiasSlots * kBiasBytes : 0)>,
               StoredTiles<kFloat8>,
               RampTile<kRamp> {};
template <bool kUsed>
struct StoredBarriers {};
template <>
struct StoredBarriers<true> {
  ptx::Mbarrier keys_full[kStoredSlots], keys_empty[kStoredSlots], values_full[kStoredSlots],
      values_empty[kStoredSlots];
};
struct Params : Sm90ForwardParams, CarriedIntegers<kCarriedWords> {};
static_assert(sizeof(Params) == sizeof(Sm90ForwardParams) + 4 * kCarriedWords, "the host lays them out so");
// The order of a ragged batch of few sequences, which each block finds for itself: it takes less time than a launch
// before this one, and what is found there lies nearer.
template <bool kUsed>
struct OwnOrder {
  DEVICE void find(const Params&, unsigned char*) {}
};
template <>
struct OwnOrder<true> {
  int sequences[kMostOrdered], first_tiles[kMostOrdered + 1];

  // By all threads, before a barrier. shared: memory that nobody uses yet.
  DEVICE void find(const Params& p, unsigned char* shared) {
    const ForwardParams& f = p.forward;
    if (f.order != nullptr) return;
    // References: so a kernel that carries nothing has no copies of what is in its parameters already.
    const Side &q = p.found(f.q_side), &k = p.found(f.k_side);
    OrderSequences<kThreads, OwnOrder>{q, k, f.batch, kClusterQ, *this}(0, shared);
    ptx::fence_copies();  // TMA writes there next
  }
  DEVICE void put(int position, int sequence, const Span&, const Span&, int first_tile) {
    sequences[position] = sequence;
    first_tiles[position] = first_tile;
  }
  DEVICE void put_total(int batch, int tiles) { first_tiles[batch] = tiles; }
};
// The order that there is.
template <bool kUsed>
struct OrderOfBlock {
  OrderedSequence* data;
  const OwnOrder<kUsed>& own;
  const Params& params;

  DEVICE int first_tile(int position) const {
    return data != nullptr ? data[position].first_tile : own.first_tiles[position];
  }
  DEVICE int position(int batch, int tile) const {
    return last_of(batch, [&](int n) { return first_tile(n) <= tile; });
  }
  DEVICE OrderedSequence at(const ForwardParams& p, int position) const {
    if (data != nullptr) return data[position];
    const int sequence = own.sequences[position];
    const Span q = span_of(params.found(p.q_side), sequence), k = span_of(params.found(p.k_side), sequence);
    return {q.start, k.start, q.length, k.length, sequence, own.first_tiles[position]};
  }
};
using BlockOrder = OrderOfBlock<kRagged>;
struct SharedMemory : Tiles {
  // These two first: `Consumer` counts on their offsets.
  ptx::Mbarrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
  ptx::Mbarrier queries_full[kQuerySlots], queries_empty[kQuerySlots];
  ptx::Mbarrier bias_full[kBiasSlots], bias_empty[kBiasSlots];
  // Two slots: the producer decides on the next work while the consumers are busy with this one.
  ptx::Mbarrier work_full[2], work_empty[2];
  ptx::Mbarrier work_found[2];  // of work whose mask is still to be read
  Item work[2];
  TicketBox tickets;
  OwnOrder<kRagged> own_order;
  StoredBarriers<kFloat8> stored_barriers;
  Boxes boxes;
};
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the host reserves enough");

enum NamedBarrier { kTurn = 1 };  // kTurn + c: consumer c may issue its products

DEVICE int rank() { return cluster_rank<kCluster>(); }

// The first query row of this block's tile in each head.
DEVICE int first_query(const WorkTile& work) { return work.tile * kClusterQ + rank() * kTileQ; }

DEVICE TileRow tile_row(int n) { return Rows::at(n); }

// Where rows that follow a warp's first one are: rows of the sequence, of one head, or of the tile where heads are
// interleaved.
DEVICE int first_row_of(const WorkTile& work, int n, const TileRow& own) {
  return kInterleaved ? n : first_query(work) + own.row;
}
// The n-th of the warp's. real: it is one of the tile's and of the sequence's.
struct RowPlace {
  int row, head;
  bool real;
};
DEVICE RowPlace place_of(const WorkTile& work, int head, int first_row, int n) {
  if constexpr (kInterleaved) {
    const TileRow own = tile_row(first_row + n);
    const int row = first_query(work) + own.row;
    return {row, work.head + own.head, own.row < kTileQ && row < work.q.length};
  } else {
    const int row = first_row + n;
    return {row, head, row < work.q.length};
  }
}

DEVICE MapRows map_rows(const WorkTile& work, const Span& span, int bound) {
  return sm90::map_rows<kRagged, kPacked>(work.sequence, span, bound);
}

// The key tiles that any block of the cluster needs: all of them visit all of these.
DEVICE Keys key_tiles_of(const ForwardParams& p, const WorkTile& work) {
  const Visible visible(p, work.q.length, work.k.length);
  return Meeting::keys(p, visible, work.sequence, work.q, work.head, work.tile);
}
// Under a mask of keys those up to the last key that is kept; the first one is asked for before that is known.
DEVICE Keys key_tiles_of(const ForwardParams& p, const MaskedTile& work) {
  Visible visible(p, work.q.length, work.k.length);
  visible.len_k = work.behind;
  Keys found = Meeting::keys(p, visible, work.sequence, work.q, work.head, work.tile);
  if (found.end == 0 && key_tiles_of(p, static_cast<const WorkTile&>(work)).end > 0) found.end = 1;
  return found;
}
// Those of this item.
DEVICE TileSpan span_of_item(const Keys& key_tiles, const WorkTile&) { return key_tiles; }
DEVICE TileSpan span_of_item(const Keys&, const WorkItem& work) { return work.keys; }
// Whether there are any. Of a whole tile they begin at 0.
DEVICE bool has_tiles(const TileSpan& span) { return kStreamK ? span.begin < span.end : span.end > 0; }
// Of an item's key tiles those that some of its rows see.
template <class OwnKeys>
DEVICE TileSpan seen_of_item(const OwnKeys& own, const Keys& all, const TileSpan& span) {
  if constexpr (!kStreamK || !(kLeft || kRight)) {
    return own.seen(span);
  } else {
    const TileSpan seen = own.seen(all);
    const int begin = seen.begin < span.begin ? span.begin : seen.begin < span.end ? seen.begin : span.end;
    return {begin, seen.end < begin ? begin : seen.end < span.end ? seen.end : span.end};
  }
}
// Under a mask of keys none in front of the first one that is kept.
DEVICE TileSpan kept_of_item(const TileSpan& seen, const WorkTile&) { return seen; }
DEVICE TileSpan kept_of_item(TileSpan seen, const MaskedTile& work) {
  if constexpr (!kLeft) {  // else tiles are left out before a window, and have other numbers
    const int first = work.first / kTileK;
    if (seen.begin < first) seen.begin = first < seen.end ? first : seen.end;
  }
  return seen;
}

}  // namespace forward
