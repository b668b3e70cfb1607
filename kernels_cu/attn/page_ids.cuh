// The page ids of a wave's key tiles, which lanes copy asynchronously to shared memory some tiles ahead. Registers
// would not do: from turn to turn of a loop an id moves from one to another, and what moves is waited for.
#pragma once

#include "attn/pages.cuh"
#include "target/target.cuh"
#include "tile/rows.cuh"

// Ids for boxes of kRows rows, of which a tile has kBoxes, each in one page. A lane has one box.
template <int kBoxes, int kRows, bool kPlain>
struct PageIds {
  static constexpr int kWords = kPlain ? 1 : 2;  // of an id
  static constexpr int kSlotBytes = kBoxes * kWords * 4;
  using Id = typename PageTable<kPlain>::Id;

  PageTable<kPlain> table;

  PageIds() = default;
  DEVICE PageIds(const Pages& pages, int sequence, const Span& keys)
      : table(page_table<kPlain>(pages, sequence, keys)) {}

  // The index of the lane's id in the table, of the tile that begins at a key.
  DEVICE int entry(int first_key, int lane) const { return table.entry(first_key + lane * kRows); }

  // Starts to copy the ids of this tile. Each lane may read its own once it has waited for its copies.
  DEVICE void look_up(unsigned* slot, int first_key, int lane) const {
    if (lane >= kBoxes) return;
    const bool is_wide = !kPlain && table.is_64bit;
    const unsigned* const from =
        static_cast<const unsigned*>(table.ids) + entry(first_key, lane) * table.stride * (is_wide ? 2 : 1);
    target::copy_async<4>(slot + lane * kWords, from, true);
    if (is_wide) target::copy_async<4>(slot + lane * kWords + 1, from + 1, true);
  }
  DEVICE Id copied(const unsigned* slot, int lane) const {
    const unsigned* const own = slot + lane * kWords;
    return {own[0], kPlain ? 0 : own[1]};
  }
};
