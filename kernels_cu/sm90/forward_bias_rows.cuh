// A bias whose rows begin anywhere, as no tensor map can say: two warps of the producer's warpgroup copy each row of a
// slot, and consumers read it from where it begins.
//
// A copy has 16 bytes from a multiple of 16. A row of a slot gets those that its keys lie among, so that they begin up
// to 14 bytes behind its beginning, at every key tile alike: key tiles begin at multiples of 16 keys. What comes before
// them belongs to neighbours, and so may be anything; nothing of it is used. It shares 16 bytes with the bias, and so
// is memory that may be read: memory is given out in multiples of them from where it begins, but not to its end, so
// nothing is read behind the row.
#pragma once

#include "sm90/forward_bias.cuh"
#include "sm90/forward_block.cuh"

namespace forward {

// Where the row of a query begins in memory. head: of queries; row: in the sequence, not behind the bias's last one.
// Int: of 32 bits where the last ones of the address are all that counts.
template <class Int = unsigned long long>
DEVICE Int bias_row(const Bias& bias, int sequence, int head, int row) {
  const Int of_sequence = Int(sequence) * Int(bias.batch), of_head = Int(head / bias.group) * Int(bias.head);
  const Int of_row = Int(kBiasRows == 1 ? 0 : row) * Int(bias.row);
  return Int(reinterpret_cast<unsigned long long>(bias.data)) + (of_sequence + of_head + of_row) * kBias;
}

// What a tile's work copies of a bias: at every key tile the same rows.
struct BiasRows {
  static constexpr int kThreads = kBiasWarps * target::kWave;
  // Pieces of a row that begins one; else it has one more, which is apart where the others fill their threads.
  static constexpr int kPieces = kTileK * kBias / 16;
  static constexpr bool kLastApart = kPieces >= 8 && (kPieces & kPieces - 1) == 0;
  static constexpr int kOfRow = kLastApart ? kPieces : kPieces < 8 ? 8 : kPieces < 16 ? 16 : kPieces < 32 ? 32 : 64;
  static constexpr int kAtOnce = kThreads / kOfRow;

  unsigned long long first;  // where the first row begins
  int64 row_bytes, head_bytes;
  int rows;  // that there are

  DEVICE BiasRows(const Bias& bias, const WorkTile& work)
      : first(bias_row(bias, work.sequence, work.head, first_query(work))),
        row_bytes(bias.row * kBias),
        head_bytes(bias.head * kBias),
        rows(kBiasRows == 1 ? 1 : bias.rows - first_query(work)) {}

  // Of keys from byte `begin` of a row on, so many bytes. slot: the address of its first row.
  DEVICE void copy(unsigned slot, int64 begin, int bytes, int thread) const {
    const int piece = thread % kOfRow, own = thread / kOfRow;
    UNROLL for (int head = 0; head < kBiasHeads; head++) {
      const unsigned long long from = first + begin + head * head_bytes;
      const unsigned to = slot + head * kBiasRows * kBiasPitch;
      if (piece <= kPieces) {
        unsigned long long at = from + own * row_bytes;
        unsigned into = to + own * kBiasPitch + piece * 16;
#pragma unroll 2
        for (int row = own; row < kBiasRows; row += kAtOnce) {
          copy_piece(into, at, piece, bytes, row);
          at += kAtOnce * row_bytes;
          into += kAtOnce * kBiasPitch;
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
  // at: where the row's keys begin.
  DEVICE void copy_piece(unsigned into, unsigned long long at, int piece, int bytes, int row) const {
    const int before = static_cast<int>(static_cast<unsigned>(at) & 15);
    const int rest = row < rows ? before + bytes - piece * 16 : 0;
    const int readable = rest < 0 ? 0 : rest > 16 ? 16 : rest;
    ptx::copy_async_partly(into, reinterpret_cast<const void*>((at & ~15ull) + piece * 16), readable);
  }
};

// What the two warps do, which learn of work as consumers do.
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
    target::wave_sync();  // all lanes have read the slot
    if (thread % target::kWave == 0) ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
}

// A consumer warp's part: the bias of its 16 rows.
struct BiasRowReader : BiasRing {
  // In the first slot, the address of the lane's first key in its first row. The other row is eight below: it begins as
  // far behind its row of the slot, by eight strides of 2 bytes, which are whole 16 bytes.
  unsigned first;
  static constexpr int kBetween = kBiasRows > 1 ? 8 * kBiasPitch : 0;
  static_assert(C::kSlots == 2, "a lane has two rows");

  template <class SharedMemory>
  DEVICE BiasRowReader(SharedMemory&, const TileRow&, int) {}

  // Of a tile's work. own: where the warp's rows begin; first_row: the first of them in the sequence.
  template <class SharedMemory>
  DEVICE void begin(SharedMemory& s, const Bias& bias, const WorkTile& work, const TileRow& own, int first_row,
                    int lane) {
    const int row = C::row(lane, 0), line = line_of_slot(own) + (kBiasRows > 1 ? row : 0);
    const unsigned begins = bias_row<unsigned>(bias, work.sequence, work.head + own.head, first_row + row);
    first = target::shared_address(s.boxes.bytes) + kOutputBytes + line * kBiasPitch + begins % 16 +
            C::column(lane, 0) * kBias;
  }

  // Of the tile in the ring's slot, which is given back.
  template <class Added, class SharedMemory>
  DEVICE void read(Added& added, SharedMemory& s, int lane) {
    wait(s);
    read_words<0>(added.bias);
    release(s, lane);
  }

 private:
  // Each pair of neighbouring keys.
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
