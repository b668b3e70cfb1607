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

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowBlocks = kTileRows / 16;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kOutBlocks = kDepthV / 16;
static_assert(kRowBlocks * 16 == kTileRows && kKeyBlocks * 16 == kTileK, "tiles are made of 16 x 16 blocks");
static_assert(kTileQ * kHeads <= kTileRows && kTileQ > 0, "a tile has room for its rows");
static_assert(kTileQ == 1 || !kFewerHeadsLast, "the rows of fewer heads are the first ones");
static_assert(kStages >= 2, "one tile is computed while others are on their way");

constexpr int kPitchQ = padded_pitch<Element>(kDepthQk);
constexpr int kPitchP = padded_pitch<Element>(kTileK);
constexpr int kRows = kTileQ * kHeads;  // the most rows of a tile that are real
// Float8 takes twice the products for each byte that is read, so products of no more rows than are real save time (for
// 16 bits they do not). Where a bias is loaded in pairs, a lane's elements of a row must be neighbours.
constexpr bool kEightRows = kFloat8 && target::kHasEightRows && kRows <= 8 && sizeof(Operand) == 2 && kBias == 0;
using M = Either<kEightRows, target::EightRowsMma, target::Mma<Operand>>::Type;
using C = M::C;

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
