// Decoding on Hopper: attention of few query rows to many keys. The kernel's body is attn/decode.cuh. What this file
// adds is the ring in which each warp loads its key tiles by TMA. TMA's requests reach DRAM in an order that it serves
// faster than the requests of lanes that copy (docs/notes/decode.md).
#include "attn/decode.cuh"
#include "attn/page_ids.cuh"
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

// The keys of one kv head of a sequence as coordinates of the tensor maps. with_coordinates() gives all coordinates but
// that of the column, of the lane's box of a key tile, whose page id it is given. Boxes of whole rows have other axes
// (whole_rows_of_pages() in rawattn/_kernels/sm90/forward_steps.py).
template <bool kInPages>
struct MappedKeys {
  using Ids = PageIds<kBoxes, kBoxRows, kPlainIntegers>;
  using Id = typename Ids::Id;
  static constexpr int kSlotBytes = Ids::kSlotBytes;

  Ids ids;
  int kv_head;
  int next_page;  // where boxes bring whole rows: from a page to the next on the maps' last axis, in heads

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : ids(p.pages, segment.sequence, segment.k), kv_head(kv_head), next_page(1) {
    if (kWholeRows && p.nheads_kv > 1)
      next_page = static_cast<int>(static_cast<unsigned>(p.k_strides.batch) / static_cast<unsigned>(p.k_strides.head));
  }

  DEVICE void look_up(unsigned* slot, int first_key, int lane) const { ids.look_up(slot, first_key, lane); }
  // The id of the lane's box: as copied to a slot, and from the table.
  DEVICE Id id(const unsigned* slot, int lane) const { return ids.copied(slot, lane); }
  DEVICE Id id(int first_key, int lane) const { return ids.table.id(ids.entry(first_key, lane)); }
  template <class Use>
  DEVICE void with_coordinates(const Id& id, int first_key, int lane, const Use& use) const {
    const int row = first_key + lane * kBoxRows - ids.entry(first_key, lane) * ids.table.page_rows;
    const int page = static_cast<int>(ids.table.page_of(id));
    if constexpr (kWholeRows) {
      use(0, 0, row / 8, page * next_page + kv_head);
    } else {
      use(row, kv_head, 0, page);
    }
  }
};
template <>
struct MappedKeys<false> {
  struct Id {};
  static constexpr int kSlotBytes = 0;

  sm90::MapRows rows;
  int kv_head;

  MappedKeys() = default;
  DEVICE MappedKeys(const ForwardParams& p, const Segment& segment, int kv_head)
      : rows(sm90::map_rows<kRagged, kPacked>(segment.sequence, segment.k, row_bound(p.k_side))), kv_head(kv_head) {}

  DEVICE void look_up(unsigned*, int, int) const {}
  DEVICE Id id(const unsigned*, int) const { return {}; }
  DEVICE Id id(int, int) const { return {}; }
  template <class Use>
  DEVICE void with_coordinates(const Id&, int first_key, int, const Use& use) const {
    use(rows.first + first_key, kv_head, rows.outer, rows.batch);
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
  static constexpr bool kLoadsAllRows = true;  // rows that no query row may see too: see clear()
  // Page ids are looked up as many turns ahead as tiles are loaded. Of two stages that is one turn, and blocks that
  // begin early are faster with two, others are slower (docs/notes/decode.md). Ids lie in shared memory beside the
  // ring, those of turn n in slot n % kIdSlots.
  static constexpr int kLooksAhead = kEarly && kStages < 3 ? 2 : kStages - 1;
  static constexpr int kIdSlots = power_of_two_from(kLooksAhead + 1);
  static constexpr int kTileBytes = (kBlocksQk + kBlocksV) * kBlockBytes;
  // Bytes by which a stage is larger than its tile, if the partial result of the rows fits in a stage only then:
  // attn/decode.cuh leaves it in the free one.
  static constexpr int kWidening = 1024;
  static constexpr bool kWidened = kTileBytes < kPartialBytes && kPartialBytes <= kTileBytes + kWidening;
  static constexpr int kStageBytes = kTileBytes + (kWidened ? kWidening : 0);
  using Source = MappedKeys<kPaged>;
  // Beside the stages: mbarriers, and the page ids of tiles.
  static constexpr int kExtraBytes = round_up(kStages * int(sizeof(ptx::Mbarrier)) + kIdSlots * Source::kSlotBytes, 16);
  static_assert(kBlockBytes % 1024 == 0, "blocks begin where the swizzle does");
  static_assert(kStages <= 32, "a bit tells a slot's parity");

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

  // Starts to look up the pages of the tile of turn n, if it is there.
  DEVICE void look_up(const Source& source, int n, int first_key, bool is_there, int lane) const {
    if (kPaged && is_there) source.look_up(ids_of(n), first_key, lane);
  }
  // Loads the tile of turn n, whose pages are known.
  DEVICE void load(const ForwardParams&, const Source& source, int slot, int n, int first_key, AllReal,
                   int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect(&full[slot], kTileBytes);
    if (lane >= kBoxes) return;
    for_each_box(source, source.id(ids_of(n), lane), first_key, lane,
                 [&](const ptx::TensorMap* map, int offset, auto... coordinates) {
                   ptx::copy_tensor_5d_evict_first(bytes(slot) + offset, map, &full[slot], coordinates...);
                 });
  }
  // Asks for up to kCount tiles in the L2 cache, those of `count` that there are. first_key(n): the first key of the
  // n-th.
  template <int kCount, class FirstKey>
  DEVICE void prefetch(const Source& source, const FirstKey& first_key, int count, int lane) const {
    if (lane >= kBoxes) return;
    typename Source::Id ids[kCount];
    UNROLL for (int n = 0; n < kCount; n++) ids[n] = source.id(first_key(n), lane);
    UNROLL for (int n = 0; n < kCount; n++) {
      if (n >= count) break;
      for_each_box(source, ids[n], first_key(n), lane, [&](const ptx::TensorMap* map, int, auto... coordinates) {
        ptx::prefetch_tensor_5d(map, coordinates...);
      });
    }
  }
  // What lanes copy asynchronously are page ids, and the queries between those of the first tiles and of others.
  DEVICE void commit() const {
    if constexpr (kPaged) target::copy_async_commit();
  }
  DEVICE void commit_first_pages() const { commit(); }
  DEVICE void wait_for_first_pages() const {
    if constexpr (kPaged) target::copy_async_wait<1>();
  }
  DEVICE void wait_for_queries() const { target::copy_async_wait<kPaged ? kStages - 1 : 0>(); }
  DEVICE void wait(int slot) {
    ptx::mbarrier_wait(&full[slot], parities >> slot & 1);
    parities ^= 1u << slot;
  }
  // Waits for the pages of the tile that is to be loaded.
  DEVICE void wait_for_pages() const {
    if constexpr (kPaged) target::copy_async_wait<kLooksAhead - 1>();
  }
  // Zeroes the values of rows that are not real, whose keys are masked. Without pages there is nothing to do: TMA
  // delivers zeros past the end of a sequence.
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
  DEVICE unsigned* ids_of(int n) const {
    return reinterpret_cast<unsigned*>(full + kStages) + n % kIdSlots * (Source::kSlotBytes / 4);
  }

  // Calls `use` for each box of a tile that is the lane's, with its tensor map, where it lies in a slot, and its
  // coordinates.
  template <class Use>
  DEVICE void for_each_box(const Source& source, const typename Source::Id& id, int first_key, int lane,
                           const Use& use) const {
    source.with_coordinates(id, first_key, lane, [&](int row, int head, int outer, int page) {
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
