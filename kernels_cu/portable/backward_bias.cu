// The gradient of the bias by a kernel of its own, where the main kernel of the backward does not make it (see by_main
// in rawattn/_kernels/portable/backward_options.py). One block computes a few tiles of it, each a sum over all scores
// that share the tile.
//
// An element of the bias belongs to one score of every sequence and head that share it, or, where the bias has one row
// or one key for all, to many scores of each. A block walks these scores in tiles (Share), and computes S and dP anew:
//
//   S = Q K^T    P = exp(S - lse)    dP = dO V^T    dbias += P (dP + row_delta)
//
// The sum stays in registers and is written once, so its bits are the same run after run. Where the bias has fewer
// tiles than there are SMs, the shares of a tile are split among several blocks (`splits`), and
// portable/backward_bias_sum.cu adds up their sums.
//
// The next share's Q and K are copied under the product dO V^T, this share's dO and V under Q K^T.
#include "attn/added_scores.cuh"
#include "attn/dropout.cuh"
#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/sequence.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/multiply.cuh"

namespace backward_bias {

using namespace config;
using M = target::Mma<Element>;
using C = M::C;

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowWaves = kWaves / kColumnWaves;
constexpr int kRowBlocks = kTileQ / (16 * kRowWaves);
constexpr int kKeyBlocks = kTileK / (16 * kColumnWaves);
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
static_assert(kRowBlocks * 16 * kRowWaves == kTileQ && kKeyBlocks * 16 * kColumnWaves == kTileK,
              "tiles are made of 16 x 16 blocks");

// The layout of shared memory, in Elements. Where a tile is summed over its rows or keys in the end, it is put there
// from the start of shared memory on.
constexpr int kPitchQk = padded_pitch<Element>(kDepthQk);
constexpr int kPitchV = padded_pitch<Element>(kDepthV);
constexpr int kPitchSums = kTileK + 1;
constexpr int kKeysAt = kTileQ * kPitchQk;
constexpr int kDoutsAt = kKeysAt + kTileK * kPitchQk;
constexpr int kValuesAt = kDoutsAt + kTileQ * kPitchV;
constexpr int kBytesOfOperands = (kValuesAt + kTileK * kPitchV) * int(sizeof(Element));
constexpr int kBytesOfSums = kSumsRows || kSumsKeys ? kTileQ * kPitchSums * int(sizeof(float)) : 0;
static_assert((kBytesOfOperands > kBytesOfSums ? kBytesOfOperands : kBytesOfSums) == kSharedBytes,
              "the host computes the same size");

using CopyQ = RowCopy<Element, kTileQ, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyK = RowCopy<Element, kTileK, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyDout = RowCopy<Element, kTileQ, kHeadDimV, kDepthV, kPitchV, kThreads, kCopyBytes>;
using CopyV = RowCopy<Element, kTileK, kHeadDimV, kDepthV, kPitchV, kThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;

// X = own rows (queries or douts) times rows of the other side (keys or values)
template <int kDepth, int kPitch>
DEVICE void multiply(C (&x)[kRowBlocks][kKeyBlocks], const Element* own, const Element* other, int lane) {
  constexpr int kSteps = kDepth / M::kDepth;
  const auto operand = [&](int m, int step) {
    return M::load_a(own + m * 16 * kPitch + step * M::kDepth, kPitch, lane);
  };
  product_with_rows<M, kSteps, kSteps <= 16 ? kSteps : 4>(x, operand, pitched_tile<kPitch>(other), lane);
}

// A wave's part of one tile, with the members that finish_scores() asks of key tiles.
struct OneTile {
  const Visible& visible;
  int row, key;  // the first ones of the part

  DEVICE int first_key(int) const { return key; }
  DEVICE Edges edges(int) const {
    return visible.edges(key, key + kKeyBlocks * 16 - 1, row, row + kRowBlocks * 16 - 1);
  }
};

// What a block computes: `tiles` tiles side by side along the keys, from key_tile on, of one head and batch entry of
// the bias. split: which part of the shares of these tiles is its own.
struct Work {
  int batch, head, row_tile, key_tile, tiles, split;

  DEVICE Work(const BackwardParams& p, int64 index) {
    const Bias& bias = p.forward.bias;
    const int rows = kSumsRows ? 1 : (bias.rows + kTileQ - 1) / kTileQ;
    const int all = kSumsKeys ? 1 : (bias.keys + kTileK - 1) / kTileK;
    const int strips = (all + p.dbias.strip - 1) / p.dbias.strip;
    split = static_cast<int>(index % p.dbias.splits);
    index /= p.dbias.splits;
    key_tile = static_cast<int>(index % strips) * p.dbias.strip;
    tiles = all - key_tile < p.dbias.strip ? all - key_tile : p.dbias.strip;
    index /= strips;
    row_tile = static_cast<int>(index % rows);
    index /= rows;
    head = static_cast<int>(index % p.dbias.heads);
    batch = static_cast<int>(index / p.dbias.heads);
  }
};

// One tile of scores of those that a tile of the bias sums. tile: the tile's number in the block. number: the share's
// number among those of the tile.
struct Share {
  int tile;
  int64 number;
  int sequence, head, first_row, first_key;
  Span q, k;
};

}  // namespace backward_bias

KERNEL LAUNCH_BOUNDS(backward_bias::kThreads,
                     config::kBlocksPerSm) void rawattn_backward_bias(PARAMETER BackwardParams p) {
  using namespace backward_bias;
  SHARED_MEMORY(shared, kSharedBytes);
  Element* const elements = reinterpret_cast<Element*>(shared);
  const ForwardParams& f = p.forward;
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;
  const int wave_row = wave / kColumnWaves * kRowBlocks * 16;
  const int wave_key = wave % kColumnWaves * kKeyBlocks * 16;

  const Work work(p, target::block_index());
  const int sequences = p.dbias.batches == 1 ? f.batch : 1;
  const int row_tiles = kSumsRows ? p.dbias.row_tiles : 1;
  const int key_tiles = kSumsKeys ? p.dbias.key_tiles : 1;
  const int64 shares = int64(sequences) * row_tiles * key_tiles * f.bias.group;
  const int64 first_share = shares * work.split / p.dbias.splits;
  const int64 last_share = shares * (work.split + 1) / p.dbias.splits;

  // The first share from this one on in which any key is seen. If there is none, its `tile` is work.tiles.
  const auto find = [&](Share share) {
    for (; share.tile < work.tiles; share.tile++, share.number = first_share) {
      for (; share.number < last_share; share.number++) {
        int64 n = share.number;
        share.head = work.head * f.bias.group + static_cast<int>(n % f.bias.group);
        n /= f.bias.group;
        share.first_key = kTileK * (kSumsKeys ? static_cast<int>(n % key_tiles) : work.key_tile + share.tile);
        n /= key_tiles;
        share.first_row = kTileQ * (kSumsRows ? static_cast<int>(n % row_tiles) : work.row_tile);
        share.sequence = work.batch + static_cast<int>(n / row_tiles);
        share.q = span_of(f.q_side, share.sequence);
        share.k = span_of(f.k_side, share.sequence);
        const int rows = share.q.length - share.first_row < kTileQ ? share.q.length - share.first_row : kTileQ;
        if (rows <= 0 || share.first_key >= share.k.length) continue;
        const Visible visible(f, share.sequence, share.q.length, share.k.length);
        if (share.first_key > visible.row(share.first_row + rows - 1).right) continue;
        if (kLeft && share.first_key >= visible.sink && share.first_key + kTileK <= visible.row(share.first_row).left) {
          continue;
        }
        return share;
      }
    }
    return share;
  };
  const int group = f.nheads_q / f.nheads_kv;
  const auto load_queries_and_keys = [&](const Share& share) {
    const auto q = rows_of<const Element>(f.q, f.q_strides, share.sequence, share.q, share.head, share.first_row);
    const auto k =
        rows_of<const Element>(f.k, f.k_strides, share.sequence, share.k, share.head / group, share.first_key);
    CopyQ::load(elements, q, share.q.length - share.first_row, thread);
    CopyK::load(elements + kKeysAt, k, share.k.length - share.first_key, thread);
    target::copy_async_commit();
  };
  const auto load_douts_and_values = [&](const Share& share) {
    const auto dout =
        rows_of<const Element>(p.dout, p.dout_strides, share.sequence, share.q, share.head, share.first_row);
    const auto v =
        rows_of<const Element>(f.v, f.v_strides, share.sequence, share.k, share.head / group, share.first_key);
    CopyDout::load(elements + kDoutsAt, dout, share.q.length - share.first_row, thread);
    CopyV::load(elements + kValuesAt, v, share.k.length - share.first_key, thread);
    target::copy_async_commit();
  };
  // After this, all copies issued so far have landed for all threads, and no thread still reads what it read before.
  const auto wait_copies_and_sync = [] {
    target::copy_async_wait();
    target::block_sync();
  };

  const auto put = [&](int i, int j, float x) {
    if (x != x) *p.found_nan = 1;  // of a hidden key or row, perhaps: `finish` looks
    if (p.dbias.splits > 1) {
      const int64 entry = (int64(work.split) * p.dbias.batches + work.batch) * p.dbias.heads + work.head;
      p.dbias.partials[(entry * f.bias.rows + i) * f.bias.keys + j] = x;
    } else {
      const int64 at = work.batch * p.dbias.batch + work.head * p.dbias.head + i * p.dbias.row + j * p.dbias.key;
      static_cast<BiasElement*>(p.dbias.data)[at] = target::from_float<BiasElement>(x);
    }
  };
  C sum[kRowBlocks][kKeyBlocks];
  const auto clear = [&] {
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int n = 0; n < kKeyBlocks; n++) sum[m][n] = C{}; }
  };
  // Writes the tiles [begin, end). The first one has its sum in the registers; the others had no share and are 0.
  const auto write_tiles = [&](int begin, int end) {
    for (int tile = begin; tile < end; tile++) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            const int i = work.row_tile * kTileQ + wave_row + m * 16 + C::row(lane, C::slot(e));
            const int j = (work.key_tile + tile) * kTileK + wave_key + n * 16 + C::column(lane, e);
            if (i < f.bias.rows && j < f.bias.keys) put(i, j, sum[m][n].x[e]);
          }
        }
      }
      clear();
    }
  };

  clear();
  Share now = find(Share{0, first_share, 0, 0, 0, 0, {0, 0}, {0, 0}});
  if constexpr (!kSumsRows && !kSumsKeys) write_tiles(0, now.tile);
  if (now.tile < work.tiles) load_queries_and_keys(now);
  // All shares of a tile have the same bias, of which those held have lost what their rows do not see (bias_clearer).
  // It is loaded anew only where the tile, the lengths or the diagonal, on which that depends, are not those of the
  // bias held.
  AddedScores<C, kRowBlocks, kKeyBlocks> added;
  int held = -1, held_q = 0, held_k = 0, held_offset = 0, held_sink = 0;
#pragma unroll 1
  while (now.tile < work.tiles) {
    const Visible visible(f, now.sequence, now.q.length, now.k.length);
    const OneTile tile{visible, now.first_row + wave_row, now.first_key + wave_key};
    const ScoreRule rule(f, now.sequence, now.head, now.q.length, now.k.length, visible.offset);
    RowProbability<Element, kRowBlocks, C::kSlots> probability(ScoreRule::kGivesScaledScores ? 1.0f : f.scores.scale);
    float delta[kRowBlocks][C::kSlots];
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int row = tile.row + m * 16 + C::row(lane, slot);
        const int64 at = now.sequence * f.lse_batch + now.head * f.lse_head + now.q.start + row;
        const bool real = row < now.q.length;
        probability.set(m, slot, real ? f.lse[at] : target::infinity());
        delta[m][slot] = real ? p.row_delta[at] : 0.0f;
      }
    }
    const bool moved = kPositions && (visible.offset != held_offset || visible.sink != held_sink);
    if (kSumsRows || kSumsKeys || now.tile != held || now.q.length != held_q || now.k.length != held_k || moved) {
      added.load(rule, tile.row, tile.key, lane);
      held = now.tile, held_q = now.q.length, held_k = now.k.length;
      held_offset = visible.offset, held_sink = visible.sink;
    } else {
      added.load_distances(rule, tile.row, tile.key, lane);
    }
    DropoutMask<C, kRowBlocks, kKeyBlocks> kept;
    kept.generate(DropoutRule(f, now.sequence, now.head), tile.row, tile.key, lane);
    TileMaskBits<kBlockMask, C, kRowBlocks, kKeyBlocks> seen;
    seen.load_bits(f.block_mask, now.sequence, now.head, tile.row, tile.key, lane);

    wait_copies_and_sync();
    load_douts_and_values(now);
    C s[kRowBlocks][kKeyBlocks];
    multiply<kDepthQk, kPitchQk>(s, elements + wave_row * kPitchQk, elements + kKeysAt + wave_key * kPitchQk, lane);
    finish_scores(s, rule, added, probability, tile, 0, tile.row, lane);
    seen.hide(s, 0.0f, lane);

    wait_copies_and_sync();
    Share next = now;
    next.number++;
    next = find(next);
    if (next.tile < work.tiles) load_queries_and_keys(next);
    C dp[kRowBlocks][kKeyBlocks];
    multiply<kDepthV, kPitchV>(dp, elements + kDoutsAt + wave_row * kPitchV, elements + kValuesAt + wave_key * kPitchV,
                               lane);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const int slot = C::slot(e);
          float x = dp[m][n].x[e];
          if constexpr (kDropout) x = kept.at(m, n, e) ? x * f.dropout.factor : 0.0f;
          x = s[m][n].x[e] * (x + delta[m][slot]);
          // A value that the row does not see may be anything, NaN too, and so may x.
          if constexpr (kBlockMask) x = s[m][n].x[e] == 0.0f ? 0.0f : x;
          // Behind the end of the sequence the bias may hold anything, and x may come of that.
          sum[m][n].x[e] += tile.row + m * 16 + C::row(lane, slot) < now.q.length ? x : 0.0f;
        }
      }
    }
    if constexpr (!kSumsRows && !kSumsKeys) write_tiles(now.tile, next.tile);
    now = next;
  }

  if constexpr (kSumsRows || kSumsKeys) {
    target::block_sync();
    float* const sums = reinterpret_cast<float*>(shared);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const int i = wave_row + m * 16 + C::row(lane, C::slot(e));
          sums[i * kPitchSums + wave_key + n * 16 + C::column(lane, e)] = sum[m][n].x[e];
        }
      }
    }
    target::block_sync();
    if constexpr (kSumsRows) {
      for (int j = thread; j < kTileK; j += kThreads) {
        for (int i = 1; i < kTileQ; i++) sums[j] += sums[i * kPitchSums + j];
      }
    }
    if constexpr (kSumsRows && kSumsKeys) target::block_sync();
    if constexpr (kSumsKeys) {
      for (int i = thread; i < (kSumsRows ? 1 : kTileQ); i += kThreads) {
        for (int j = 1; j < kTileK; j++) sums[i * kPitchSums] += sums[i * kPitchSums + j];
      }
    }
    target::block_sync();
    const int first_row = kSumsRows ? 0 : work.row_tile * kTileQ;
    const int first_key = kSumsKeys ? 0 : work.key_tile * kTileK;
    constexpr int kRows = kSumsRows ? 1 : kTileQ;
    constexpr int kKeys = kSumsKeys ? 1 : kTileK;
    for (int at = thread; at < kRows * kKeys; at += kThreads) {
      const int i = at / kKeys, j = at % kKeys;
      if (first_row + i < f.bias.rows && first_key + j < f.bias.keys) {
        put(first_row + i, first_key + j, sums[i * kPitchSums + j]);
      }
    }
  }
}
