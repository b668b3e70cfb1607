// Writes the block mask (attn/mask_writing.cuh) of an array of bools, which may have any strides. A thread makes a
// half-word of 16 keys; 16 bools that lie next to each other (kDense) it reads in one access.
#include "attn/mask_writing.cuh"
#include "tile/copy.cuh"

namespace mask_of_bools {

// Packs four bools: bit n of the result says whether byte n of x is not 0.
DEVICE unsigned bits_of_bytes(unsigned x) {
  x |= x >> 4 & 0x0f0f0f0fu;
  x |= x >> 2 & 0x03030303u;
  x |= x >> 1 & 0x01010101u;
  // No two terms of the product meet in a bit, so nothing is carried into its highest four bits, the result.
  return (x & 0x01010101u) * 0x10204080u >> 28;
}

}  // namespace mask_of_bools

KERNEL LAUNCH_BOUNDS(mask_writing::kThreads, 1) void rawattn_mask_of_bools(PARAMETER BoolsMaskParams p) {
  target::launch_dependents();
  target::wait_for_prior_kernels();
  using namespace mask_of_bools;
  SHARED_MEMORY(flags, mask_writing::kSharedBytes);
  const auto half_word = [&](int batch, int head, int row, int word) {
    const unsigned char* const from = p.from + batch * p.batch + head * p.head + row * p.row + int64(word) * 16 * p.key;
    const int count = p.written.keys - word * 16 < 16 ? p.written.keys - word * 16 : 16;
    unsigned bits = 0;
    if (config::kDense && count == 16) {
      const Chunk<16> chunk = *reinterpret_cast<const Chunk<16>*>(from);
      bits = bits_of_bytes(chunk.x) | bits_of_bytes(chunk.y) << 4 | bits_of_bytes(chunk.z) << 8 |
             bits_of_bytes(chunk.w) << 12;
    } else {
      for (int n = 0; n < count; n++) bits |= unsigned(from[n * p.key] != 0) << n;
    }
    return bits;
  };
  mask_writing::write(p.written, half_word, flags);
}
