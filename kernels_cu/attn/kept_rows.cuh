// Copies rows of K and V between arrays of all keys and arrays of kept keys, the keys that a list of attn/kept_keys.cuh
// has. portable/kept_setup.cu gathers K and V with it, portable/scatter_keys.cu scatters dK and dV. One wave copies a
// row of all heads; each of its lanes takes every kWave-th access.
#pragma once

#include "attn/kept_keys.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace kept_rows {

constexpr int kThreads = config::kThreads;
constexpr int kWaves = kThreads / target::kWave;

// For keys or for values. kRowBytes: of one head's row; kCopyBytes: the widest access that the array of all keys
// allows.
template <int kRowBytes, int kCopyBytes>
struct KeptRows {
  static constexpr int kChunks = kRowBytes / kCopyBytes;
  static constexpr int kPitch = round_up(kRowBytes, 16);
  static_assert(kRowBytes % kCopyBytes == 0, "an access must not straddle the end of a row");
  using Access = Chunk<kCopyBytes>;

  const KeptArray& array;
  const KeptKeys& kept;
  int nheads;

  // Where a head's row begins, in the array of all keys (`full_row`) and in that of the kept keys (`kept_row`).
  DEVICE char* full_row(int64 batch, int key, int head) const {
    const Strides& strides = array.strides;
    const int64 element = batch * strides.batch + key * strides.row + head * strides.head;
    return static_cast<char*>(array.all) + element * config::kElementBytes;
  }
  DEVICE char* kept_row(int64 batch, int entry, int head) const {
    return static_cast<char*>(array.kept) + ((batch * nheads + head) * kept.count + entry) * kPitch;
  }

  // Copies the row of a list's entry to the kept keys; zeros where the entry is no key.
  DEVICE void gather(int64 batch, int entry, int lane) const {
    copy(
        [&](int head) -> const char* {
          const int key = KeptList(kept, batch, head).key(entry);
          return key < 0 ? nullptr : full_row(batch, key, head);
        },
        [&](int head) { return kept_row(batch, entry, head); }, lane);
  }
  // Writes the row of a key among all keys, from entry entry_of(head) of each head; zeros where that is negative.
  template <class EntryOf>
  DEVICE void scatter(int64 batch, int key, const EntryOf& entry_of, int lane) const {
    copy(
        [&](int head) -> const char* {
          const int entry = entry_of(head);
          return entry < 0 ? nullptr : kept_row(batch, entry, head);
        },
        [&](int head) { return full_row(batch, key, head); }, lane);
  }

 private:
  // from(head): where a head's row is read, null for zeros; to(head): where it is written.
  template <class From, class To>
  DEVICE void copy(const From& from, const To& to, int lane) const {
    // Several loads are in flight at once, since each is small.
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
