// Writes the block mask (attn/mask_writing.cuh) of a user's predicate: a row sees the keys for which it is true.
#include "attn/mask_writing.cuh"

KERNEL LAUNCH_BOUNDS(mask_writing::kThreads, 1) void rawattn_mask_of_predicate(PARAMETER PredicateMaskParams p) {
  target::launch_dependents();
  target::wait_for_prior_kernels();
  SHARED_MEMORY(flags, mask_writing::kSharedBytes);
  const auto half_word = [&](int batch, int head, int row, int word) {
    unsigned bits = 0;
#pragma unroll 4
    for (int n = 0; n < 16; n++) {
      const ScorePosition position{batch, head, head, row, word * 16 + n, p.seqlen_q, p.seqlen_k};
      bits |= unsigned(config::Predicate::holds(position, p)) << n;
    }
    return bits;
  };
  mask_writing::write(p.written, half_word, flags);
}
