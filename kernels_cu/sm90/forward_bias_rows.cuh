// A bias whose rows are not aligned as a tensor map requires, in Hopper's forward. Two warps of the producer's
// warpgroup copy it to the slots of a ring row by row, and consumers read each row from where its keys begin.
//
// A copy has 16 bytes and begins at a multiple of 16. So a row of a slot gets the pieces of 16 bytes that its keys lie
// in, and its first key is up to 14 bytes after the row's beginning. This offset is the same for all key tiles, since
// those begin at multiples of 16 keys. The bytes in front of the first key belong to something else and are never used.
// To read them is safe: memory is allocated from multiples of 16 bytes on, so they are in the allocation that holds the
// bias. An allocation may end anywhere, so nothing past the end of the row is read.
#pragma once

#include "sm90/forward_bias.cuh"
#include "sm90/forward_work.cuh"
#include "tile/either.cuh"

namespace forward {

// The address of a query's row of the bias. head: a query head; row: the query in the sequence, no further than the
// last row of the bias. Int: 32 bits are enough where only the low bits of the address count.
template <class Int = unsigned long long>
DEVICE Int bias_row(const Bias& bias, int sequence, int head, int row) {
  const Int of_sequence = Int(sequence) * Int(bias.batch), of_head = Int(head / bias.group) * Int(bias.head);
  const Int of_row = Int(kBiasRows == 1 ? 0 : row) * Int(bias.row);
  return Int(reinterpret_cast<unsigned long long>(bias.data)) + (of_sequence + of_head + of_row) * kBias;
}

// The rows of the bias that a piece of work copies, the same at every key tile, and how the threads of the two warps
// share them.
struct BiasRows {
  static constexpr int kThreads = kBiasWarps * target::kWave;
  // Pieces of 16 bytes of a row whose keys begin a piece; of other rows there is one more. kLastApart: the last piece
  // is copied in a loop of its own, since the others divide the threads evenly. kPerRow: threads for a row;
  // kRowsAtOnce: rows at a time.
  static constexpr int kPieces = kTileK * kBias / 16;
  static constexpr bool kLastApart = kPieces >= 8 && (kPieces & kPieces - 1) == 0;
  static constexpr int kPerRow = kLastApart ? kPieces : kPieces < 8 ? 8 : kPieces < 16 ? 16 : kPieces < 32 ? 32 : 64;
  static constexpr int kRowsAtOnce = kThreads / kPerRow;

  unsigned long long first;  // address of the first row
  int64 row_bytes, head_bytes;
  int rows;  // how many the bias has, from the first one on

  DEVICE BiasRows(const Bias& bias, const WorkTile& work)
      : first(bias_row(bias, work.sequence, work.head, first_query(work))),
        row_bytes(bias.row * kBias),
        head_bytes(bias.head * kBias),
        rows(kBiasRows == 1 ? 1 : bias.rows - first_query(work)) {}

  // Copies `bytes` of each row from its byte `begin` on. slot: the address of the slot in shared memory.
  DEVICE void copy(unsigned slot, int64 begin, int bytes, int thread) const {
    const int piece = thread % kPerRow, own = thread / kPerRow;
    UNROLL for (int head = 0; head < kBiasHeads; head++) {
      const unsigned long long from = first + begin + head * head_bytes;
      const unsigned to = slot + head * kBiasRows * kBiasPitch;
      if (piece <= kPieces) {
        unsigned long long at = from + own * row_bytes;
        unsigned into = to + own * kBiasPitch + piece * 16;
#pragma unroll 2
        for (int row = own; row < kBiasRows; row += kRowsAtOnce) {
          copy_piece(into, at, piece, bytes, row);
          at += kRowsAtOnce * row_bytes;
          into += kRowsAtOnce * kBiasPitch;
        }
      }
      if constexpr (kLastApart) {
#pragma unroll 1
        for (int row = thread; row < kBiasRows; row += kThreads) {
          copy_piece(to + row * kBiasPitch + kPieces * 16, from + row * row_bytes, kPieces, bytes, row);
        }
      }
    }
  }

 private:
  // at: the address of the row's first key.
  DEVICE void copy_piece(unsigned into, unsigned long long at, int piece, int bytes, int row) const {
    const int before = static_cast<int>(static_cast<unsigned>(at) & 15);
    const int rest = row < rows ? before + bytes - piece * 16 : 0;
    const int readable = rest < 0 ? 0 : rest > 16 ? 16 : rest;
    ptx::copy_async_partly(into, reinterpret_cast<const void*>((at & ~15ull) + piece * 16), readable);
  }
};

// Main loop of the two warps that copy rows. They wait for work and give its slot back as consumers do.
template <class SharedMemory>
DEVICE void produce_bias_rows(const ForwardParams& p, SharedMemory& s, int thread) {
  const unsigned slots = target::shared_address(s.boxes.bytes) + kOutputBytes;
  Ring<kBiasSlots> ring;
  Ring<2> slot;
  for (;;) {
    ptx::mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Item& work = s.work[slot.slot];
    if (!work.exists) return;
    const Keys key_tiles = key_tiles_of(p, work);
    const TileSpan span = span_of_item(key_tiles, work);
    const BiasRows rows(p.bias, work);
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      const int first_key = key_tiles.first_key(n);
      const int behind = p.bias.keys - first_key;
      ptx::mbarrier_wait(&s.bias_empty[ring.slot], ring.parity ^ 1);
      rows.copy(slots + ring.slot * kBiasBytes, int64(first_key) * kBias, (behind < kTileK ? behind : kTileK) * kBias,
                thread);
      ptx::mbarrier_arrive_behind_copies(&s.bias_full[ring.slot]);
      ring.advance();
    }
    target::wave_sync();  // all lanes have read the work slot
    if (thread % target::kWave == 0) ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
}

// Reads the bias of a consumer warp's 16 rows.
struct BiasRowReader : BiasRing {
  // The address of the lane's first key in its first row, in the first slot. The lane's other row is eight below. Its
  // keys have the same offset from the beginning of their row of the slot: eight strides of 2-byte elements are a
  // multiple of 16 bytes.
  unsigned first;
  static constexpr int kBetween = kBiasRows > 1 ? 8 * kBiasPitch : 0;
  static_assert(C::kSlots == 2, "a lane has two rows");

  template <class SharedMemory>
  DEVICE BiasRowReader(SharedMemory&, const TileRow&, int) {}

  // Called for each piece of work. own: the warp's first row in the tile; first_row: the same row in the sequence.
  template <class SharedMemory>
  DEVICE void begin(SharedMemory& s, const Bias& bias, const WorkTile& work, const TileRow& own, int first_row,
                    int lane) {
    const int row = C::row(lane, 0), line = slot_row(own) + (kBiasRows > 1 ? row : 0);
    const unsigned begins = bias_row<unsigned>(bias, work.sequence, work.head + own.head, first_row + row);
    first = target::shared_address(s.boxes.bytes) + kOutputBytes + line * kBiasPitch + begins % 16 +
            C::column(lane, 0) * kBias;
  }

  // Reads the bias of the key tile in the ring's current slot, and gives the slot back.
  template <class Added, class SharedMemory>
  DEVICE void read(Added& added, SharedMemory& s, int lane) {
    wait(s);
    read_words<0>(added.bias);
    release(s, lane);
  }

 private:
  // Reads pairs of neighbouring keys from kPair on. Where a pair may lie across two words (no kBiasPairs), reads both
  // words and shifts.
  template <int kPair, class Word, int kBlocks, int kWords>
  DEVICE void read_words(Word (&bias)[kBlocks][kWords]) {
    constexpr int kPairs = C::kElements / 2;
    if constexpr (kPair < kBlocks * kPairs) {
      constexpr int kElement = kPair % kPairs * 2;
      constexpr int kKey = kPair / kPairs * 16 + C::column(0, kElement);
      constexpr int kOffset = kKey * kBias + C::slot(kElement) * kBetween;
      const unsigned from = (first & ~3u) + ring.slot * kBiasBytes;
      auto& block = bias[kPair / kPairs];
      if constexpr (kBiasPairs) {
        block[kElement / 2] = ptx::load_shared<kOffset>(from);
      } else {
        const unsigned long long low = ptx::load_shared<kOffset>(from), high = ptx::load_shared<kOffset + 4>(from);
        block[kElement / 2] = static_cast<unsigned>((high << 32 | low) >> (first & 3) * 8);
      }
      read_words<kPair + 1>(bias);
    }
  }
};

using OwnBias = typename Either<kBiasByRows, BiasRowReader, BiasReader>::Type;

}  // namespace forward
