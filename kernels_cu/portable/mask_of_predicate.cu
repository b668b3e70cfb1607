// Packs the mask of the keys of which the user's predicate is true.
#include "attn/mask_packing.cuh"

KERNEL LAUNCH_BOUNDS(mask_packing::kThreads, 1) void rawattn_mask_of_predicate(PARAMETER PredicateMaskParams p) {
  SHARED_MEMORY(flags, mask_packing::kSharedBytes);
  const auto half_word = [&](int batch, int head, int row, int word) {
    unsigned bits = 0;
#pragma unroll 4
    for (int n = 0; n < 16; n++) {
      const ScorePlace place{batch, head, head, row, word * 16 + n, p.seqlen_q, p.seqlen_k};
      bits |= unsigned(config::Predicate::holds(place, p)) << n;
    }
    return bits;
  };
  mask_packing::pack(p.packing, half_word, flags);
}
