// A block of the backward (portable/backward.cu): its waves and their tiles, what lies where in shared memory, and
// which text each step has.
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
// One depth serves q, k and v, dout: the two roles are then one body.
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

// Elements of shared memory. dQ of a tile is computed when dS of the next one is there already.
constexpr int kPitch = padded_pitch<Element>(kDepth);
constexpr int kPitchP = padded_pitch<Element>(kTileQ);
constexpr int kKeysAt = 0;
constexpr int kValuesAt = kTileK * kPitch;
constexpr int kQueriesAt = 2 * kTileK * kPitch;
constexpr int kDoutsAt = kQueriesAt + kStages * kTileQ * kPitch;
constexpr int kProbabilitiesAt = kDoutsAt + kStages * kTileQ * kPitch;
constexpr int kScoreGradientsAt = kProbabilitiesAt + kTileK * kPitchP;
// And of a pair of heads, when both are there.
constexpr int kDsBuffers = kWithDq ? 2 + int(kPairs) : int(kSharesDs);
constexpr int kMoreWeightsAt = kScoreGradientsAt + kDsBuffers * kTileK * kPitchP;
// Weights lie where P would, if that is no operand, and where dS comes afterwards: what a wave reads there, it
// replaces.
using Weights = Handover<Element, !kFromRegisters, kPitchP>;
constexpr bool kMoreWeights = Weights::kTiles == 2 && !(kFromRegisters && kWithDq);
// The bias, a tile of query rows for each stage, where it is copied 16 bytes at a time. A pair of heads has one tile,
// which is replaced when all have read it.
constexpr bool kBiasTile = kBiasChunks && kBias == 2 && sizeof(Element) == 2;
constexpr int kPitchBias = padded_pitch<Element>(kTileK);
constexpr int kBiasAt = kMoreWeightsAt + int(kMoreWeights) * kTileK * kPitchP;
constexpr int kBiasStages = kPairs ? 1 : kStages;
constexpr int kElementsUsed = kBiasAt + int(kBiasTile) * kBiasStages * kTileQ * kPitchBias;
constexpr int kStatisticsBytes = kStages * 2 * kTileQ * int(sizeof(float));
static_assert(kElementsUsed * int(sizeof(Element)) + kStatisticsBytes == kSharedBytes,
              "the host computes the same size");

using CopyK = RowCopy<Element, kTileK, kHeadDim, kDepth, kPitch, kThreads, kCopyBytes>;
using CopyV = RowCopy<Element, kTileK, kHeadDimV, kDepth, kPitch, kThreads, kCopyBytes>;
using CopyQ = RowCopy<Element, kTileQ, kHeadDim, kDepth, kPitch, kRoleThreads, kCopyBytes>;
using CopyDout = RowCopy<Element, kTileQ, kHeadDimV, kDepth, kPitch, kRoleThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft>;
using Tiles = MeetingTiles<kBlockMask, Visible, kTileQ, kTileK>;

// Where key tiles are few, or few of them are met by many queries, they have several blocks, with a part of the turns.
DEVICE KeyPart find_part(const BackwardParams& p, int64 index) {
  constexpr bool kAllTold = kUnitShift != 0;  // of `OrderOfWaves`
  if constexpr (kSplitSinks) {
    return find_part_of_sinks<kRagged, kTileK, kAllTold>(p, index);
  } else if constexpr (kSplit) {
    return find_key_part<kRagged, kTileK, kAllTold>(p, index);
  } else {
    return {find_key_work_tile<kRagged, kTileK, kAllTold>(p, index), 0, 1};
  }
}
using Walk = Either<kBlockMask, ListedWalk, Either<kSplit, SharedWalk, WholeWalk>::Type>::Type;
using Dq = DqShare<M, Element, kTileQ, kTileK, kPitch, kPitchP, (kDqByHalf ? kRoleWaves : kWaves)>;
constexpr int kFirstDqWave = kDqByHalf ? kRoleWaves : 0;

// What dbias gets of a tile. Without it, another kernel makes dbias where it is wanted.
struct NoBiasGradient {
  static constexpr bool kWrites = false;
  template <class... Args>
  DEVICE static void clear(const Args&...) {}
  template <class... Args>
  DEVICE static void give(const Args&...) {}
};
using BiasTile =
    Either<(kDbias > 0), BiasGradientTile<M, Element, kTileQ, kTileK, kPitchP, kWaves>, NoBiasGradient>::Type;
static_assert(!kPairs || (kDbias > 0 && kArrivals < 2 && (kStages == 1 || kLateCopies)), "all have read the one bias");
static_assert(!kBiasOfKeys || (kBias > 0 && !kBiasTile && kDbias == 0), "a tile has rows, and so has its gradient");
static_assert(kDbias == 0 || (kWithDq && !kRagged && !kBlockMask && !ScoreRule::kRemakes),
              "all of dS lies in shared memory, and is the gradient of what is added");
constexpr bool kHasDerivative = ScoreRule::kHasDerivative;
// Probabilities of nothing but products: a text of their own, by which ptxas makes faster code.
constexpr bool kPlain = !ScoreRule::kRemakes && !ScoreRule::kAdds && !kDropout && !kBlockMask;
// Blocks of keys whose scores are finished together: what each needs besides its product takes registers.
constexpr int kAtOnce = ScoreRule::kRemakes || (kBias > 0 && !kBiasOfKeys) || (kAlibi && !kOneSided) ? 1 : kKeyBlocks;

// float32 products are many and small: all of them in a row would only be long.
constexpr int kUnroll = kSteps <= 16 ? kSteps : 4;
constexpr int kQueryUnroll = kQuerySteps <= 16 ? kQuerySteps : 4;

}  // namespace backward
