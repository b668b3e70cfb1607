// Sizes and types of the decoding kernels (attn/decode.cuh), which follow from the constants of their configuration.
#pragma once

#include "attn/added_scores.cuh"
#include "attn/mask_of_tile.cuh"
#include "attn/params.cuh"
#include "attn/row_partials.cuh"
#include "attn/row_rules.cuh"
#include "attn/schedule/line.cuh"
#include "attn/softmax.cuh"
#include "attn/visible.cuh"
#include "target/eight_rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/either.cuh"
#include "tile/multiply.cuh"

namespace decode {

using namespace config;
// Products of eight rows where blocks of sixteen would not fill a tile (decode_tiles.in_blocks_of_eight() of the host).
constexpr bool kEightRows = kTileRows % 16 != 0;
using M = Either<kEightRows, target::EightRowsMma, target::Mma<Operand>>::Type;
using C = M::C;

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowBlocks = kTileRows / C::kRows;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kOutBlocks = kDepthV / 16;
static_assert(kRowBlocks * C::kRows == kTileRows && kKeyBlocks * 16 == kTileK, "tiles are made of blocks");
static_assert(!kEightRows || kFloat8, "products of eight rows are of float8");
static_assert(!kEightRows || kBias == 0, "a bias may be loaded in pairs, of which a lane of such a block has none");
static_assert(kTileQ * kHeads <= kTileRows && kTileQ > 0, "a tile has room for its rows");
static_assert(kTileQ == 1 || !kFewerHeadsLast, "the rows of fewer heads are the first ones");
static_assert(kStages >= 2, "one tile is computed while others are on their way");

constexpr int kPitchQ = padded_pitch<Element>(kDepthQk);
constexpr int kPitchP = padded_pitch<Element>(kTileK);
constexpr int kRows = kTileQ * kHeads;  // the most rows of a tile that are real
using Partials = RowPartials<kRows, kDepthV>;
static_assert(sizeof(Partials) == kPartialBytes, "the host's is the same");

using CopyQ = RowCopy<Element, kTileRows, kHeadDim, kDepthQk, kPitchQ, kThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using RowsMask = TileMask<kBlockMask, C, kTileRows, kTileK, kHeads>;
using Rules = RowRules<C, kRowBlocks, kHeads>;
using Added = AddedScores<C, kRowBlocks, kKeyBlocks, false, kRowBlocks * kKeyBlocks <= 2>;
using Softmax = OnlineSoftmax<C, kRowBlocks>;
using BlockLine =
    Line<kRagged, kPaged, kPlainIntegers, Visible, kTileQ, kTileK, kHeads, kFewerHeadsLast, kWaves, kThreads>;

constexpr int kSteps = kDepthQk / M::kDepth;
// Whether queries stay in registers: where they take at most 128 bytes of each lane.
constexpr bool kHoldsQueries = kRowBlocks * kSteps * int(sizeof(typename M::A)) <= 128;
// Whether many rows leave too few registers for many float8 conversions at once: products are then unrolled less.
constexpr bool kRegistersShort = kFloat8 && kRowBlocks > 1 && !kHoldsQueries;
constexpr int kUnrolledSteps = M::kDepth != 16 ? 4 : kRegistersShort ? 2 : 16;

}  // namespace decode
