// Gradients of the arrays that a score function captured, for portable/backward_dq.cu with kCaptured: every score adds
// its own gradient (dS) times a partial derivative to the element that it read.
//
// Where all scores of a wave's tiles, of a row or of a key read the same element, what they add is summed before it
// goes to memory. Additions to memory are atomic, in no defined order; exact sums (portable/exact_sum.cuh) give the
// same bits in any order.
#pragma once

#include "attn/score_rule.cuh"
#include "portable/exact_sum.cuh"
#include "target/target.cuh"

// Stands for CapturedGradients in kernels that compute none.
struct NoCapturedGradients {
  DEVICE NoCapturedGradients(const BackwardParams&, const ScoreRule&, int) {}
  template <class... T>
  DEVICE void add(const T&...) {}
  DEVICE void finish() {}
};

// The gradients of captured arrays that come of a wave's tiles of one query head. The rows of these tiles are queries.
template <class C, int kRowBlocks, int kKeyBlocks, class Mod = config::ScoreMod>
struct CapturedGradients {
  static constexpr int kPartials = Mod::kPartials;

  const BackwardParams& p;
  const ScoreRule& rule;
  int lane;
  // Sums of partials whose element is the same for all of these tiles.
  float common_sums[kPartials > 0 ? kPartials : 1];

  DEVICE CapturedGradients(const BackwardParams& p, const ScoreRule& rule, int lane) : p(p), rule(rule), lane(lane) {
    UNROLL for (int n = 0; n < kPartials; n++) common_sums[n] = 0.0f;
  }

  // Adds what a tile gives. gradients: dS, 0 where a key is not seen. capped: see transform_scores().
  template <int n = 0>
  DEVICE void add(const C (&gradients)[kRowBlocks][kKeyBlocks], const C (&capped)[kRowBlocks][kKeyBlocks],
                  int first_row, int first_key) {
    if constexpr (n < kPartials) {
      constexpr bool kByRow = config::kPartialsByRow >> n & 1, kByKey = config::kPartialsByKey >> n & 1;
      float of_key[kKeyBlocks][C::kRun] = {};
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int i = first_row + m * 16 + C::row(lane, slot);
          float of_row = 0.0f;
          UNROLL for (int b = 0; b < kKeyBlocks; b++) {
            UNROLL for (int r = 0; r < C::kRun; r++) {
              const int e = C::element(slot, r);
              const int j = first_key + b * 16 + C::column(lane, e);
              const float gradient = gradients[m][b].x[e];
              // A hidden key adds nothing, whatever the derivative is there.
              if (gradient == 0.0f || i >= rule.len_q) continue;
              const ScorePosition at = rule.position(i, j);
              const float x = gradient * mod().template partial<n>(capped[m][b].x[e], at, rule.p);
              if constexpr (kByRow && kByKey) {
                put<n>(capped[m][b].x[e], at, x);
              } else if constexpr (kByRow) {
                of_row += x;
              } else if constexpr (kByKey) {
                of_key[b][r] += x;
              } else {
                common_sums[n] += x;
              }
            }
          }
          if constexpr (kByRow && !kByKey) {
            of_row = C::row_sum(of_row);
            if (C::column(lane, 0) == 0) put<n>(0.0f, rule.position(i, first_key), of_row);
          }
        }
      }
      if constexpr (kByKey && !kByRow) {
        UNROLL for (int b = 0; b < kKeyBlocks; b++) {
          UNROLL for (int r = 0; r < C::kRun; r++) {
            const int j = first_key + b * 16 + C::column(lane, C::element(0, r));
            put<n>(0.0f, rule.position(first_row, j), of_key[b][r]);
          }
        }
      }
      add<n + 1>(gradients, capped, first_row, first_key);
    }
  }

  // Adds `common_sums` to memory. The whole wave calls it after its last tile.
  template <int n = 0>
  DEVICE void finish() {
    if constexpr (n < kPartials) {
      constexpr unsigned kByRowOrKey = config::kPartialsByRow | config::kPartialsByKey;
      if constexpr ((kByRowOrKey >> n & 1) == 0) {
        UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) {
          common_sums[n] += target::shuffle_xor(common_sums[n], mask);
        }
        if (lane == 0) put<n>(0.0f, rule.position(0, 0), common_sums[n]);
      }
      finish<n + 1>();
    }
  }

 private:
  // Its type is the template parameter Mod, so that this compiles where no score function has partials.
  DEVICE const Mod& mod() const { return rule.mod; }
  // Adds x to the element that partial n of the score at a position belongs to. score: the capped one, which counts
  // only where each score has an element of its own.
  template <int n>
  DEVICE void put(float score, const ScorePosition& at, float x) const {
    if (x == 0.0f) return;
    const int64 array = p.captured_at[Mod::template partial_array<n>()];
    const int64 element = array + mod().template partial_index<n>(score, at, rule.p);
    if constexpr (config::kExactSums) {
      static_cast<ExactSum*>(p.captured_sums)[element].add(x);
    } else {
      const float one[1] = {x};
      target::atomic_add(static_cast<float*>(p.captured_sums) + element, one);
    }
  }
};
