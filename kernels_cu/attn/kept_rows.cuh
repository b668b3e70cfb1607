// Rows of kept keys, of all heads, and those of arrays of all keys: what gathering and scattering share. One wave takes
// a row, of which a lane takes every kWave-th access.
#pragma once

#include "attn/kept_keys.cuh"
#include "attn/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace kept_rows {

constexpr int kThreads = config::kThreads;
constexpr int kWaves = kThreads / target::kWave;

// Of keys, or of values. kRowBytes: of a head; kCopyBytes: the widest access that the array of all keys allows.
template <int kRowBytes, int kCopyBytes>
struct KeptRows {
  static constexpr int kChunks = kRowBytes / kCopyBytes;
  static constexpr int kPitch = round_up(kRowBytes, 16);
  static_assert(kRowBytes % kCopyBytes == 0, "an access must not straddle the end of a row");
  using Access = Chunk<kCopyBytes>;

  const KeptArray& array;
  const KeptKeys& kept;
  int nheads;

  // Where a head begins: of the array of all keys, of that of the kept ones.
  DEVICE char* all(int64 batch, int key, int head) const {
    const Strides& strides = array.strides;
    const int64 element = batch * strides.batch + key * strides.row + head * strides.head;
    return static_cast<char*>(array.all) + element * config::kElementBytes;
  }
  DEVICE char* few(int64 batch, int entry, int head) const {
    return static_cast<char*>(array.kept) + ((batch * nheads + head) * kept.count + entry) * kPitch;
  }

  // The row of an entry; zeros where it is no key.
  DEVICE void gather(int64 batch, int entry, int lane) const {
    copy(
        [&](int head) -> const char* {
          const int key = KeptList(kept, batch, head).key(entry);
          return key < 0 ? nullptr : all(batch, key, head);
        },
        [&](int head) { return few(batch, entry, head); }, lane);
  }
  // The row of a key; zeros where entry_of(head) is none.
  template <class EntryOf>
  DEVICE void scatter(int64 batch, int key, const EntryOf& entry_of, int lane) const {
    copy(
        [&](int head) -> const char* {
          const int entry = entry_of(head);
          return entry < 0 ? nullptr : few(batch, entry, head);
        },
        [&](int head) { return all(batch, key, head); }, lane);
  }

 private:
  // from(head): where a head is read, null for zeros; to(head): where it is written.
  template <class From, class To>
  DEVICE void copy(const From& from, const To& to, int lane) const {
    // Several accesses at a time are under way: each one is small.
    constexpr int kAtOnce = 4;
    const int count = nheads * kChunks;
    for (int base = lane; base < count; base += kAtOnce * target::kWave) {
      Access piece[kAtOnce];
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        const int i = base + n * target::kWave;
        const char* const source = i < count ? from(i / kChunks) : nullptr;
        piece[n] = source != nullptr ? *reinterpret_cast<const Access*>(source + i % kChunks * kCopyBytes) : Access{};
      }
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        const int i = base + n * target::kWave;
        if (i < count) *reinterpret_cast<Access*>(to(i / kChunks) + i % kChunks * kCopyBytes) = piece[n];
      }
    }
  }
};
using Keys = KeptRows<config::kKeyBytes, config::kKeyCopyBytes>;
using Values = KeptRows<config::kValueBytes, config::kValueCopyBytes>;

}  // namespace kept_rows
