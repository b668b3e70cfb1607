// When a Hopper forward draws a tile's random words (attn/dropout.cuh): no score decides them, so any time will do.
//
// P V reads its left operand from registers, and what is drawn beside it waits for those. So of a tile of many keys
// half are drawn beside Q K^T, in front of P V, and the others among the exponentials, where the compiler interleaves
// both. Q K^T of fewer keys ends too early for that: there all are drawn once both products are under way.
#pragma once

#include "attn/dropout.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_block.cuh"

namespace forward {

struct RandomWords : RandomTile<C, 1, kKeyBlocks> {
  static constexpr bool kHalves = kKeyBlocks % 8 == 0;
  static constexpr int kHalf = kParts / 2;

  DEVICE void beside_scores(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && kHalves) draw_here<0, kHalf>(rule, first_row, first_key, lane);
  }
  DEVICE void beside_output(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && !kHalves) draw_here<0, kParts>(rule, first_row, first_key, lane);
  }
  DEVICE void beside_exponentials(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (kDropout && kHalves) draw_parts<kHalf, kParts>(rule, first_row, first_key, lane);
  }

 private:
  template <int kBegin, int kEnd>
  DEVICE void draw_here(const DropoutRule& rule, int first_row, int first_key, int lane) {
    ptx::compute_here(first_key);
    draw_parts<kBegin, kEnd>(rule, first_row, first_key, lane);
    ptx::compute_here(together<kBegin, kEnd>());
  }
};

}  // namespace forward
