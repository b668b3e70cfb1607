// When Hopper's forward generates the random words of a tile's dropout mask (attn/dropout.cuh). They do not depend on
// scores, so any time is possible.
//
// P V reads its left operand from registers, and arithmetic beside it waits for those. So for tiles of many keys, half
// of the words are generated beside Q K^T, before P V is issued, and the other half among the exponentials, where the
// compiler interleaves the two. With fewer keys Q K^T ends too early for that: there all words are generated once both
// products are running.
#pragma once

#include "attn/dropout.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

struct RandomWords : RandomTile<C, 1, kKeyBlocks> {
  static constexpr bool kHalves = kKeyBlocks % 8 == 0;
  static constexpr int kHalf = kParts / 2;

  DEVICE void beside_scores(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && kHalves) generate_here<0, kHalf>(rule, first_row, first_key, lane);
  }
  DEVICE void beside_output(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && !kHalves) generate_here<0, kParts>(rule, first_row, first_key, lane);
  }
  DEVICE void beside_exponentials(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && kHalves) generate_parts<kHalf, kParts>(rule, first_row, first_key, lane);
  }

 private:
  // Generates these parts where this is called, beside products (ptx/pin_computation.cuh). The first pin keeps the
  // arithmetic behind the products that are issued before it. The second one depends on all words, so that all of them
  // are computed before the wait for the products.
  template <int kBegin, int kEnd>
  DEVICE void generate_here(const DropoutRule& rule, int first_row, int first_key, int lane) {
    ptx::pin_computation(first_key);
    generate_parts<kBegin, kEnd>(rule, first_row, first_key, lane);
    ptx::pin_computation(xor_of_words<kBegin, kEnd>());
  }
};

}  // namespace forward
