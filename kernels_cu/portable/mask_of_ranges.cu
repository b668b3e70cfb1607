// Writes the block mask (attn/mask_writing.cuh) whose rows each see p.count given ranges of keys, [begin, end).
#include "attn/mask_writing.cuh"

KERNEL LAUNCH_BOUNDS(mask_writing::kThreads, 1) void rawattn_mask_of_ranges(PARAMETER RangesMaskParams p) {
  target::launch_dependents();
  target::wait_for_prior_kernels();
  SHARED_MEMORY(flags, mask_writing::kSharedBytes);
  const auto half_word = [&](int batch, int, int row, int word) {
    const int64 first = (int64(batch) * p.written.rows + row) * p.count * 2;
    const int64 key = int64(word) * 16;
    unsigned bits = 0;
    for (int n = 0; n < p.count; n++) {
      const int64 begin = clamp(integer_at(p.ranges, first + 2 * n), key, key + 16) - key;
      const int64 end = clamp(integer_at(p.ranges, first + 2 * n + 1), key, key + 16) - key;
      if (begin < end) bits |= (1u << end) - (1u << begin);
    }
    return bits;
  };
  mask_writing::write(p.written, half_word, flags);
}
