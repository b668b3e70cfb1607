// Attention of few query rows to many keys (attn/decode.cuh), on Hopper: a wave asks TMA for its key tiles,
// whose requests reach the memory in an order that it serves faster than those of lanes (docs/notes/decode.md).
#include "attn/decode.cuh"
#include "attn/page_rows.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/rows.cuh"

namespace decode {

// A tile comes in boxes of kBoxRows rows, each from one page: a lane finds one and asks for it.
constexpr int kBoxes = kTileK / kBoxRows;
static_assert(kTileK % kBoxRows == 0 && kBoxRows % 8 == 0, "a box begins where the swizzle does");
static_assert(kPaged || kBoxes == 1, "only pages are in the way of a whole tile");
static_assert(kBoxes <= target::kWave, "a lane has one box");

// TMA's maps of keys and values.
struct Maps {
  ptx::TensorMap k, v;
};

// The keys of a kv head of a sequence in coordinates of the maps: those of a lane's box of a tile, behind the column.
template <bool kInPages>
struct MappedKeys {
  PageOfTile<kBoxRows, kPlainIntegers> found;
  int kv_head;

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : found(p.pages, segment.sequence, segment.k), kv_head(kv_head) {}

  DEVICE void look_up(int first_key, int lane) { found.look_up(first_key + lane % kBoxes * kBoxRows, lane); }
  template <class Use>
  DEVICE void tell(const Use& use) const {
    use(found.row, kv_head, 0, static_cast<int>(found.table.page_of(found.id)));
  }
};
template <>
struct MappedKeys<false> {
  NoPages found;
  sm90::MapRows rows;
  int kv_head;

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : rows(sm90::map_rows<kRagged, kPacked>(segment.sequence, segment.k, row_bound(p.k_side))), kv_head(kv_head) {}

  DEVICE void look_up(int first_key, int lane) { found.look_up(first_key, lane); }
  template <class Use>
  DEVICE void tell(const Use& use) const {
    use(rows.first + found.row, kv_head, rows.outer, rows.batch);
  }

 private:
  // Where the row axis of a ragged map ends, as in rawattn/_kernels/sm90/forward_steps.py.
  DEVICE static int row_bound(const Side& keys) {
    return power_of_two_from(1 + (keys.rows > 2 ? static_cast<int>(keys.rows) - 1 : 1));
  }
};

// The key tiles of a wave.
struct EngineRing {
  static constexpr int kColumns = SwizzledTile<kTileK, StoredKey>::kColumns;
  static constexpr int kBlocksQk = round_up(kHeadDim, kColumns) / kColumns;
  static constexpr int kBlocksV = round_up(kHeadDimV, kColumns) / kColumns;
  static constexpr int kBlockBytes = kTileK * 128;
  static constexpr bool kLoadsLate = true;  // one lane asks for a box after the other, while products are under way
  static constexpr int kTileBytes = (kBlocksQk + kBlocksV) * kBlockBytes;
  // A stage is larger than its tile where what rows come to then has room in it.
  static constexpr int kMore = 1024;
  static constexpr bool kWidened = kTileBytes < kPartialBytes && kPartialBytes <= kTileBytes + kMore;
  static constexpr int kStageBytes = kTileBytes + (kWidened ? kMore : 0);
  static constexpr int kMoreBytes = round_up(kStages * int(sizeof(ptx::Mbarrier)), 16);
  static_assert(kBlockBytes % 1024 == 0, "blocks begin where the swizzle does");
  static_assert(kStages <= 32, "a bit tells a slot's parity");

  using Source = MappedKeys<kPaged>;

  const Maps& maps;
  unsigned char* const ring;
  ptx::Mbarrier* const full;
  unsigned parities = 0;  // a bit for each slot

  DEVICE EngineRing(unsigned char* ring, unsigned char* more, int lane, const Maps& maps)
      : maps(maps), ring(ring), full(reinterpret_cast<ptx::Mbarrier*>(more)) {
    if (lane == 0) {
      ptx::prefetch_tensormap(&maps.k);
      ptx::prefetch_tensormap(&maps.v);
      for (int n = 0; n < kStages; n++) ptx::mbarrier_init(&full[n], 1);
      ptx::fence_mbarrier_init();
    }
  }

  DEVICE unsigned char* bytes(int slot) const { return ring + slot * kStageBytes; }
  DEVICE auto keys(int slot) const { return tile(bytes(slot)); }
  DEVICE auto values(int slot) const { return tile(bytes(slot) + kBlocksQk * kBlockBytes); }

  // All rows of the tile come. Of those that no query row may see, keys are hidden, and values are cleared.
  template <class Real>
  DEVICE void load(const ForwardParams&, const Source& source, int slot, const Real&, int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect(&full[slot], kTileBytes);
    if (lane >= kBoxes) return;
    source.tell([&](int row, int head, int outer, int page) {
      UNROLL for (int b = 0; b < kBlocksQk + kBlocksV; b++) {
        const bool of_keys = b < kBlocksQk;
        const int column = (of_keys ? b : b - kBlocksQk) * kColumns;
        ptx::copy_tensor_5d_once(bytes(slot) + b * kBlockBytes + lane * kBoxRows * 128, of_keys ? &maps.k : &maps.v,
                                 &full[slot], column, row, head, outer, page);
      }
    });
  }
  DEVICE void commit() const {}
  DEVICE void wait_for_queries() const { target::copy_async_wait(); }
  DEVICE void wait(int slot) {
    ptx::mbarrier_wait(&full[slot], parities >> slot & 1);
    parities ^= 1u << slot;
  }
  // Past the end of a sequence in rows, its map has zeros.
  template <class Real>
  DEVICE void clear(int slot, const Real& real, int lane) const {
    if (!kPaged || all_real(real, kTileK)) return;
    unsigned char* const values = bytes(slot) + kBlocksQk * kBlockBytes;
    for (int n = lane; n < kBlocksV * kBlockBytes / 16; n += target::kWave) {
      if (!is_real(real, n / 8 % kTileK)) *reinterpret_cast<Chunk<16>*>(values + n * 16) = Chunk<16>{};
    }
    ptx::fence_copies();
  }
  DEVICE void clear_value(int slot, int row) const {
    UNROLL for (int b = kBlocksQk; b < kBlocksQk + kBlocksV; b++) {
      Chunk<16>* const first = reinterpret_cast<Chunk<16>*>(bytes(slot) + b * kBlockBytes + row * 128);
      UNROLL for (int n = 0; n < 8; n++) first[n] = Chunk<16>{};
    }
  }
  DEVICE void values_are_clean() const { ptx::fence_copies(); }
  // Barriers are there for all lanes, and earlier kernels' results are read from here on.
  DEVICE void wait_for_prerequisites() const {
    target::block_sync();
    target::wait_for_prerequisites();
  }
  // Only now may blocks of the next kernel come: those that wait for long come in an order that costs large batches 1 %
  // of the memory's speed (docs/notes/decode.md).
  DEVICE void launch_dependents() const { target::launch_dependents(); }
  // What threads have read and written in slots, they have done before the engine fills those anew.
  DEVICE void give_back() const { ptx::fence_copies(); }

 private:
  DEVICE static SwizzledTile<kTileK, StoredKey> tile(const unsigned char* bytes) {
    return {reinterpret_cast<const StoredKey*>(bytes)};
  }
};

}  // namespace decode

KERNEL LAUNCH_BOUNDS(decode::kThreads, config::kBlocksPerSm) void rawattn_sm90_decode(PARAMETER ForwardParams p,
                                                                                      PARAMETER decode::Maps maps) {
  SHARED_MEMORY_ALIGNED(shared, config::kSharedBytes, 1024);
  decode::attend<decode::EngineRing>(p, shared, maps);
}
