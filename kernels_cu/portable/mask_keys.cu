// Writes which keys any row of a block mask sees: those that any row of any band of granules sees, by what
// attn/mask_writing.cuh has written for each band. One thread takes one half-word of 16 keys.
#include "attn/helper_params.cuh"
#include "target/target.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_mask_keys(PARAMETER MaskKeysParams p) {
  target::launch_dependents();
  target::wait_for_prior_kernels();
  const int64 index = int64(target::block_index()) * config::kThreads + target::thread_index();
  if (index >= int64(p.planes) * p.words) return;
  const int64 plane = index / p.words;
  const unsigned short* const bands = p.band_keys + plane * p.bands * p.words + index % p.words;
  unsigned any = 0;
#pragma unroll 8
  for (int band = 0; band < p.bands; band++) any |= bands[int64(band) * p.words];
  p.keys[index] = static_cast<unsigned short>(any);
}
