// Decoding on any target: attention of few query rows to many keys. attn/decode.cuh has the algorithm. This file has
// its ring of key tiles, which the lanes of a wave fill by asynchronous copies.
#include "attn/decode.cuh"
#include "attn/page_rows.cuh"
#include "tile/either.cuh"
#include "tile/wave_copy.cuh"

namespace decode {

// How the rows of a key tile are found: without pages, all in one page, or each in its page (attn/page_rows.cuh).
using Found = typename Either<
    !kPaged, UnpagedTile,
    typename Either<kTileInPage, PageOfTile<kTileK, kPlainIntegers>, PageRows<kTileK, kPlainIntegers>>::Type>::Type;

// The ring of a wave: kStages slots, each with the keys and then the values of a key tile. Its members are what
// attn/decode.cuh asks of a `Ring`.
struct WaveRing {
  static constexpr int kPitchK = padded_pitch<StoredKey>(kDepthQk);
  static constexpr int kPitchV = padded_pitch<StoredKey>(kDepthV);
  static constexpr int kStageElements = kTileK * (kPitchK + kPitchV);
  static constexpr int kStageBytes = kStageElements * int(sizeof(StoredKey));
  static constexpr bool kLoadsLate = false;  // the next tile is loaded before Q K^T
  static constexpr bool kLoadsAllRows = false;
  static constexpr int kLooksAhead = 2;  // the pages of a tile are looked up so many turns before it is loaded
  static constexpr int kExtraBytes = kPaged && !kTileInPage ? 2 * kTileK * 8 : 0;  // offsets of a tile's rows
  using CopyK = WaveCopy<StoredKey, kTileK, kHeadDim, kDepthQk, kPitchK, kKeyBytes>;
  using CopyV = WaveCopy<StoredKey, kTileK, kHeadDimV, kDepthV, kPitchV, kKeyBytes>;

  // Keys and values of a kv head of a sequence. k, v: the first row; with pages, the first row of the array's first
  // page.
  struct Source {
    const StoredKey *k, *v;
    Found found;

    Source() = default;
    DEVICE Source(const ForwardParams& p, const Segment& segment, int kv_head)
        : k(first(p, p.k, p.k_strides, segment, kv_head)),
          v(first(p, p.v, p.v_strides, segment, kv_head)),
          found(p.pages, segment.sequence, segment.k) {}

   private:
    DEVICE static const StoredKey* first(const ForwardParams& p, const void* array, const Strides& strides,
                                         const Segment& segment, int kv_head) {
      return rows_of_keys<kPaged, const StoredKey>(array, strides, p.pages, segment.sequence, segment.k, kv_head).first;
    }
  };

  StoredKey* const ring;
  int64* const offsets;

  DEVICE WaveRing(unsigned char* ring, unsigned char* extra, int)
      : ring(reinterpret_cast<StoredKey*>(ring)), offsets(reinterpret_cast<int64*>(extra)) {}

  DEVICE unsigned char* bytes(int slot) const { return reinterpret_cast<unsigned char*>(at(slot)); }
  DEVICE auto keys(int slot) const { return pitched_tile<kPitchK>(at(slot)); }
  DEVICE auto values(int slot) const { return pitched_tile<kPitchV>(at(slot) + kTileK * kPitchK); }

  // Starts to look up the pages of a tile. One that is not there has those of the last.
  DEVICE void look_up(Source& source, int, int first_key, bool, int lane) const {
    source.found.look_up(first_key, lane);
  }
  // Starts the copies of the last tile but one that was looked up. Rows that are not real become zeros.
  template <class Real>
  DEVICE void load(const ForwardParams& p, const Source& source, int slot, int, int, const Real& real, int lane) const {
    StoredKey* const keys = at(slot);
    StoredKey* const values = keys + kTileK * kPitchK;
    source.found.write_offsets(offsets, p.k_strides, p.v_strides, lane);
    source.found.template load<CopyK, false>(keys, source.k, p.k_strides, offsets, real, lane);
    source.found.template load<CopyV, true>(values, source.v, p.v_strides, offsets, real, lane);
  }
  DEVICE void commit() const { target::copy_async_commit(); }
  DEVICE void commit_first_pages() const {}
  DEVICE void wait_for_first_pages() const {}
  DEVICE void wait_for_pages() const {}
  template <int, class FirstKey>
  DEVICE void prefetch(const Source&, const FirstKey&, int, int) const {}
  DEVICE void wait_for_prior_kernels() const {}  // the kernel is not launched early (`Step.early`)
  DEVICE void launch_dependents() const {}
  DEVICE void wait_for_queries() const { target::copy_async_wait<kStages - 1>(); }
  // Waits for the lane's own copies of the oldest tile, the one in the slot.
  DEVICE void wait(int) const { target::copy_async_wait<kStages - 2>(); }
  template <class Real>
  DEVICE void clear(int, const Real&, int) const {}
  DEVICE void clear_value(int slot, int row) const {
    Chunk<16>* const first = reinterpret_cast<Chunk<16>*>(at(slot) + kTileK * kPitchK + row * kPitchV);
    UNROLL for (int n = 0; n < kPitchV * int(sizeof(StoredKey)) / 16; n++) first[n] = Chunk<16>{};
  }
  DEVICE void publish_cleared_values() const {}
  DEVICE void give_back() const {}

 private:
  DEVICE StoredKey* at(int slot) const { return ring + slot * kStageElements; }
};

}  // namespace decode

KERNEL LAUNCH_BOUNDS(decode::kThreads, config::kBlocksPerSm) void rawattn_decode(PARAMETER ForwardParams p) {
  SHARED_MEMORY(shared, config::kSharedBytes);
  decode::attend<decode::WaveRing, false>(p, shared, decode::ring_of_wave<decode::WaveRing>(shared));
}
