// Packs which of the kept keys each row sees: all that are keys, within the limits of the rows.
#include "attn/kept_keys.cuh"
#include "attn/mask_packing.cuh"

KERNEL LAUNCH_BOUNDS(mask_packing::kThreads, 1) void rawattn_mask_of_kept(PARAMETER KeptMaskParams p) {
  SHARED_MEMORY(flags, mask_packing::kSharedBytes);
  const auto half_word = [&](int batch, int head, int row, int word) {
    const KeptList kept(p.kept, batch, head);
    const int64 first = row + p.first;
    const int64 last = row + p.last;
    unsigned bits = 0;
    UNROLL for (int n = 0; n < 16; n++) {
      // One entry is packed as 128 of it.
      const int entry = word * 16 + n;
      const int key = kept.key(entry < kept.count ? entry : kept.count - 1);
      bits |= unsigned(key >= 0 && key <= last && (key >= first || key < p.sink)) << n;
    }
    return bits;
  };
  mask_packing::pack(p.packing, half_word, flags);
}
