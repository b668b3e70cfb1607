// Decoding on Hopper: attention of few query rows to many keys. The kernel's body is attn/decode.cuh. What this file
// adds is the ring in which each warp loads its key tiles by TMA. TMA's requests reach DRAM in an order that it serves
// faster than the requests of lanes that copy (docs/notes/decode.md).
#include "attn/decode.cuh"
#include "attn/page_rows.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/rows.cuh"
#include "tile/operand_tile.cuh"

namespace decode {

// A key tile comes in boxes of kBoxRows rows, each from one page. A lane finds a box and issues its load: of whole rows
// (kWholeRows), or of each block of columns.
constexpr int kBoxes = kTileK / kBoxRows;
static_assert(kTileK % kBoxRows == 0 && kBoxRows % 8 == 0, "a box begins where the swizzle does");
static_assert(kPaged || kBoxes == 1, "only pages are in the way of a whole tile");
static_assert(kBoxes <= target::kWave, "a lane has one box");

// Whether a block begins while earlier kernels still run. Wide tiles leave no registers for that.
constexpr bool kEarly = kTileRows <= 16;

// Tensor maps of keys and values.
struct Maps {
  ptx::TensorMap k, v;
};

// The keys of one kv head of a sequence as coordinates of the tensor maps. look_up() finds the lane's box of a key
// tile; with_coordinates() gives all coordinates but that of the column, for the tile before the last one that was
// looked up (attn/page_rows.cuh). Boxes of whole rows have other axes (whole_rows_of_pages() in
// rawattn/_kernels/sm90/forward_steps.py).
template <bool kInPages>
struct MappedKeys {
  PageOfTile<kBoxRows, kPlainIntegers> found;
  int kv_head;
  int next_page;  // where boxes bring whole rows: from a page to the next on the maps' last axis, in heads

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : found(p.pages, segment.sequence, segment.k), kv_head(kv_head), next_page(1) {
    if (kWholeRows && p.nheads_kv > 1)
      next_page = static_cast<int>(static_cast<unsigned>(p.k_strides.batch) / static_cast<unsigned>(p.k_strides.head));
  }

  DEVICE void look_up(int first_key, int lane) { found.look_up(first_key + lane % kBoxes * kBoxRows, lane); }
  template <class Use>
  DEVICE void with_coordinates(const Use& use) const {
    const int page = static_cast<int>(found.table.page_of(found.id));
    if constexpr (kWholeRows) {
      use(0, 0, found.row / 8, page * next_page + kv_head);
    } else {
      use(found.row, kv_head, 0, page);
    }
  }
};
template <>
struct MappedKeys<false> {
  UnpagedTile found;
  sm90::MapRows rows;
  int kv_head;

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : rows(sm90::map_rows<kRagged, kPacked>(segment.sequence, segment.k, row_bound(p.k_side))), kv_head(kv_head) {}

  DEVICE void look_up(int first_key, int lane) { found.look_up(first_key, lane); }
  template <class Use>
  DEVICE void with_coordinates(const Use& use) const {
    use(rows.first + found.row, kv_head, rows.outer, rows.batch);
  }

 private:
  // Where the row axis of a ragged map ends, as in rawattn/_kernels/sm90/forward_steps.py.
  DEVICE static int row_bound(const Side& keys) {
    return power_of_two_from(1 + (keys.rows > 2 ? static_cast<int>(keys.rows) - 1 : 1));
  }
};

// A warp's ring of key tiles, which TMA fills: the Ring of attn/decode.cuh.
struct TmaRing {
  static constexpr int kColumns = 128 / int(sizeof(StoredKey));  // of a block of the swizzle
  static constexpr int kBlocksQk = round_up(kHeadDim, kColumns) / kColumns;
  static constexpr int kBlocksV = round_up(kHeadDimV, kColumns) / kColumns;
  static constexpr int kBlockBytes = kTileK * 128;
  // The next tile is loaded after Q K^T has been issued: a lane issues one box after the other while products are
  // running.
  static constexpr bool kLoadsLate = true;
  static constexpr int kTileBytes = (kBlocksQk + kBlocksV) * kBlockBytes;
  // Bytes by which a stage is larger than its tile, if the partial result of the rows fits in a stage only then:
  // attn/decode.cuh leaves it in the free one.
  static constexpr int kWidening = 1024;
  static constexpr bool kWidened = kTileBytes < kPartialBytes && kPartialBytes <= kTileBytes + kWidening;
  static constexpr int kStageBytes = kTileBytes + (kWidened ? kWidening : 0);
  static constexpr int kExtraBytes = round_up(kStages * int(sizeof(ptx::Mbarrier)), 16);  // beside the stages: barriers
  static_assert(kBlockBytes % 1024 == 0, "blocks begin where the swizzle does");
  static_assert(kStages <= 32, "a bit tells a slot's parity");

  using Source = MappedKeys<kPaged>;
  // Boxes of whole rows lie one after the other, each with all of its columns. Otherwise all boxes of some columns do.
  template <int kBlocks>
  static constexpr int kDown = 8 * kColumns * (kWholeRows ? kBlocks : 1);
  static constexpr int kAcross = kColumns * (kWholeRows ? 8 : kTileK);
  template <int kBlocks>
  using Tile = SwizzledTile<kDown<kBlocks>, kAcross, StoredKey>;

  const Maps& maps;
  unsigned char* const ring;
  ptx::Mbarrier* const full;
  unsigned parities = 0;  // of the mbarrier phase to wait for next, a bit for each slot

  DEVICE TmaRing(unsigned char* ring, unsigned char* extra, int lane, const Maps& maps)
      : maps(maps), ring(ring), full(reinterpret_cast<ptx::Mbarrier*>(extra)) {
    if (lane == 0) {
      ptx::prefetch_tensormap(&maps.k);
      ptx::prefetch_tensormap(&maps.v);
      for (int n = 0; n < kStages; n++) ptx::mbarrier_init(&full[n], 1);
      ptx::fence_mbarrier_init();
    }
  }

  DEVICE unsigned char* bytes(int slot) const { return ring + slot * kStageBytes; }
  DEVICE Tile<kBlocksQk> keys(int slot) const { return {reinterpret_cast<const StoredKey*>(bytes(slot))}; }
  DEVICE Tile<kBlocksV> values(int slot) const {
    return {reinterpret_cast<const StoredKey*>(bytes(slot) + kBlocksQk * kBlockBytes)};
  }

  // Loads all rows of the tile. Rows that no query row may see are loaded too: their keys are masked, and clear()
  // zeroes their values.
  template <class Real>
  DEVICE void load(const ForwardParams&, const Source& source, int slot, const Real&, int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect(&full[slot], kTileBytes);
    for_each_box(source, lane, [&](const ptx::TensorMap* map, int offset, auto... coordinates) {
      ptx::copy_tensor_5d_evict_first(bytes(slot) + offset, map, &full[slot], coordinates...);
    });
  }
  // Asks for these rows in the L2 cache.
  DEVICE void prefetch(const Source& source, int lane) const {
    for_each_box(source, lane, [&](const ptx::TensorMap* map, int, auto... coordinates) {
      ptx::prefetch_tensor_5d(map, coordinates...);
    });
  }
  DEVICE void commit() const {}
  DEVICE void wait_for_queries() const { target::copy_async_wait(); }
  DEVICE void wait(int slot) {
    ptx::mbarrier_wait(&full[slot], parities >> slot & 1);
    parities ^= 1u << slot;
  }
  // Zeroes the values of rows that are not real. Without pages there is nothing to do: TMA delivers zeros past the end
  // of a sequence.
  template <class Real>
  DEVICE void clear(int slot, const Real& real, int lane) const {
    if (!kPaged || all_real(real, kTileK)) return;
    for (int n = lane; n < kBlocksV * kBlockBytes / 16; n += target::kWave) {
      const int row = n / (8 * kBlocksV);
      if (!is_real(real, row)) piece_of_values(slot, row, n % (8 * kBlocksV)) = Chunk<16>{};
    }
    ptx::fence_async_proxy();
  }
  DEVICE void clear_value(int slot, int row) const {
    UNROLL for (int n = 0; n < 8 * kBlocksV; n++) piece_of_values(slot, row, n) = Chunk<16>{};
  }
  DEVICE void publish_cleared_values() const { ptx::fence_async_proxy(); }
  // Makes the initialised barriers visible to all lanes, and waits for earlier kernels, whose results are read from
  // here on.
  DEVICE void wait_for_prior_kernels() const {
    target::block_sync();
    target::wait_for_prior_kernels();
  }
  // Lets blocks of the next kernel start.
  DEVICE void launch_dependents() const { target::launch_dependents(); }
  // Orders what this thread has read and written in slots before TMA fills them again.
  DEVICE void give_back() const { ptx::fence_async_proxy(); }

 private:
  // Calls `use` for each box that is the lane's, with its tensor map, where it lies in a slot, and its coordinates.
  template <class Use>
  DEVICE void for_each_box(const Source& source, int lane, const Use& use) const {
    if (lane >= kBoxes) return;
    source.with_coordinates([&](int row, int head, int outer, int page) {
      if constexpr (kWholeRows) {
        use(&maps.k, lane * kBoxRows * kBlocksQk * 128, 0, row, head, outer, page);
        use(&maps.v, (kTileK * kBlocksQk + lane * kBoxRows * kBlocksV) * 128, 0, row, head, outer, page);
      } else {
        UNROLL for (int b = 0; b < kBlocksQk + kBlocksV; b++) {
          const bool of_keys = b < kBlocksQk;
          const int column = (of_keys ? b : b - kBlocksQk) * kColumns;
          use(of_keys ? &maps.k : &maps.v, b * kBlockBytes + lane * kBoxRows * 128, column, row, head, outer, page);
        }
      }
    });
  }

  // The n-th 16 bytes of a row of values, in the order of memory.
  DEVICE Chunk<16>& piece_of_values(int slot, int row, int n) const {
    const int block = row / 8 * kDown<kBlocksV> + n / 8 * kAcross;  // elements
    unsigned char* const values = bytes(slot) + kBlocksQk * kBlockBytes + block * int(sizeof(StoredKey));
    return *reinterpret_cast<Chunk<16>*>(values + row % 8 * 128 + n % 8 * 16);
  }
};

}  // namespace decode

KERNEL LAUNCH_BOUNDS(decode::kThreads, config::kBlocksPerSm) void rawattn_sm90_decode(PARAMETER ForwardParams p,
                                                                                      PARAMETER decode::Maps maps) {
  SHARED_MEMORY_ALIGNED(shared, config::kSharedBytes, 1024);
  decode::attend<decode::TmaRing, decode::kEarly>(p, shared, decode::ring_of_wave<decode::TmaRing>(shared, maps));
}
