// The constants and types of a block of the backward (portable/backward.cu): its waves and their tiles, the layout of
// its shared memory, and which code each of its steps uses.
#pragma once

#include "attn/listed_tiles.cuh"
#include "attn/schedule/keys.cuh"
#include "attn/score_rule.cuh"
#include "attn/visible.cuh"
#include "portable/backward_walk.cuh"
#include "portable/bias_gradient.cuh"
#include "portable/dq_share.cuh"
#include "portable/handover.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/either.cuh"

namespace backward {

using namespace config;
using M = target::Mma<Element>;
using C = M::C;

constexpr int kRoleWaves = kKeyWaves * kColumnWaves;
constexpr int kWaves = 2 * kRoleWaves;
constexpr int kThreads = kWaves * target::kWave;
constexpr int kRoleThreads = kThreads / 2;
constexpr int kKeyBlocks = kTileK / (16 * kKeyWaves);
constexpr int kQueryBlocks = kTileQ / (16 * kColumnWaves);
// Tiles of q and k have the depth of those of v and dout, so both roles run the same code.
constexpr int kDepth = round_up(kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV, 16 * kColumnWaves);
constexpr int kDepthBlocks = kDepth / (16 * kColumnWaves);
constexpr int kSteps = kDepth / M::kDepth;
constexpr int kQuerySteps = kTileQ / M::kDepth;
static_assert(kKeyBlocks * 16 * kKeyWaves == kTileK && kQueryBlocks * 16 * kColumnWaves == kTileQ,
              "tiles are made of 16 x 16 blocks");
static_assert(kStages == 1 || kStages == 2, "one or two stages of queries and douts");

// Whether a wave has all it needs of P or dS in its own accumulators, in the form of an operand.
constexpr bool kFromRegisters = M::kAccumulatorFeedsA && kColumnWaves == 1;
constexpr bool kSharesDs = kWithDq || !kFromRegisters;

// The layout of shared memory, in Elements.
constexpr int kPitch = padded_pitch<Element>(kDepth);
constexpr int kPitchP = padded_pitch<Element>(kTileQ);
constexpr int kKeysAt = 0;
constexpr int kValuesAt = kTileK * kPitch;
constexpr int kQueriesAt = 2 * kTileK * kPitch;
constexpr int kDoutsAt = kQueriesAt + kStages * kTileQ * kPitch;
constexpr int kProbabilitiesAt = kDoutsAt + kStages * kTileQ * kPitch;
constexpr int kScoreGradientsAt = kProbabilitiesAt + kTileK * kPitchP;
// Buffers of dS. With dQ there are two, since dQ of a tile is computed while dS of the next one is made. A pair of
// heads has a third, since dbias takes dS of both.
constexpr int kDsBuffers = kWithDq ? 2 + int(kPairs) : int(kSharesDs);
constexpr int kSecondWeightsAt = kScoreGradientsAt + kDsBuffers * kTileK * kPitchP;
// Where P is an operand in registers, weights lie in the tile of P, their second tile (kFloat32Weights) where dS comes
// afterwards. Else they lie where dS comes afterwards, or are P itself (!kOwnTile). A wave stores dS over weights only
// after it has read them. A second tile of weights for which no tile of dS is free has one of its own
// (kSecondWeightTile).
using Weights = Handover<Element, !kFromRegisters, kPitchP>;
constexpr bool kSecondWeightTile = Weights::kTiles == 2 && !(kFromRegisters && kWithDq);
// Where the bias can be copied 16 bytes at a time, it has a tile in shared memory for each stage; its rows are queries.
// A pair of heads has one tile, which is replaced when all waves have read it.
constexpr bool kBiasTile = kBiasChunks && kBias == 2 && sizeof(Element) == 2;
constexpr int kPitchBias = padded_pitch<Element>(kTileK);
constexpr int kBiasAt = kSecondWeightsAt + int(kSecondWeightTile) * kTileK * kPitchP;
constexpr int kBiasStages = kPairs ? 1 : kStages;
constexpr int kElementsUsed = kBiasAt + int(kBiasTile) * kBiasStages * kTileQ * kPitchBias;
constexpr int kStatisticsBytes = (kStages * 2 * kTileQ + kDeltaRows) * int(sizeof(float));
static_assert(kElementsUsed * int(sizeof(Element)) + kStatisticsBytes == kSharedBytes,
              "the host computes the same size");

using CopyK = RowCopy<Element, kTileK, kHeadDim, kDepth, kPitch, kThreads, kCopyBytes>;
using CopyV = RowCopy<Element, kTileK, kHeadDimV, kDepth, kPitch, kThreads, kCopyBytes>;
using CopyQ = RowCopy<Element, kTileQ, kHeadDim, kDepth, kPitch, kRoleThreads, kCopyBytes>;
using CopyDout = RowCopy<Element, kTileQ, kHeadDimV, kDepth, kPitch, kRoleThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using Tiles = MeetingTiles<kBlockMask, Visible, kTileQ, kTileK>;

// The key tile of a block, and which part of the tile's turns is the block's. Several blocks share a key tile where key
// tiles are few (kSplit), or where only those with sink tokens meet many queries (kSplitSinks).
DEVICE KeyPart find_part(const BackwardParams& p, int64 index) {
  constexpr bool kAllUniform = kUnitShift != 0;  // see `OrderOfWaves`
  if constexpr (kSplitSinks) {
    return find_part_of_sinks<kRagged, kTileK, kAllUniform>(p, index);
  } else if constexpr (kSplit) {
    return find_key_part<kRagged, kTileK, kAllUniform>(p, index);
  } else {
    return {find_key_work_tile<kRagged, kTileK, kAllUniform>(p, index), 0, 1};
  }
}
using Walk = Either<kBlockMask, ListedWalk, Either<kSplit, SharedWalk, WholeWalk>::Type>::Type;
using Dq = DqShare<M, Element, kTileQ, kTileK, kPitch, kPitchP, (kDqByHalf ? kRoleWaves : kWaves)>;
constexpr int kFirstDqWave = kDqByHalf ? kRoleWaves : 0;

// Stands for BiasGradientTile where this kernel does nothing for dbias: another kernel makes it, or it is not wanted.
struct NoBiasGradient {
  static constexpr bool kWrites = false;
  template <class... Args>
  DEVICE static void clear(const Args&...) {}
  template <class... Args>
  DEVICE static void give_out(const Args&...) {}
};
using DbiasTile =
    Either<(kDbias > 0), BiasGradientTile<M, Element, kTileQ, kTileK, kPitchP, kWaves>, NoBiasGradient>::Type;
static_assert(!kPairs || (kDbias > 0 && kArrivals < 2 && (kStages == 1 || kLateCopies)), "all have read the one bias");
static_assert(!kBiasOfKeys || (kBias > 0 && !kBiasTile && kDbias == 0), "a tile has rows, and so has its gradient");
static_assert(kDbias == 0 || (kWithDq && !kRagged && !kBlockMask && !ScoreRule::kTransforms),
              "all of dS lies in shared memory, and is the gradient of what is added");
constexpr bool kHasDerivative = ScoreRule::kHasDerivative;
// Whether probabilities come of products alone, without options, dropout or a block mask. This case has code of its
// own, of which ptxas makes faster machine code.
constexpr bool kProductsOnly = !ScoreRule::kTransforms && !ScoreRule::kAdds && !kDropout && !kBlockMask;
// How many key blocks have their scores finished together: one where scores need registers beside their products, else
// all.
constexpr int kKeyBlocksAtOnce =
    ScoreRule::kTransforms || (kBias > 0 && !kBiasOfKeys) || (kAlibi && !kOneSided) ? 1 : kKeyBlocks;

// How many steps of a product are unrolled. float32 products have many small steps: all unrolled would only be long.
constexpr int kUnroll = kSteps <= 16 ? kSteps : 4;
constexpr int kQueryUnroll = kQuerySteps <= 16 ? kQuerySteps : 4;

}  // namespace backward
