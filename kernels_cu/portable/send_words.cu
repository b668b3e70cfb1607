// Writes what travels in the launch's own parameters: lengths that the host knows, on their way to kernels that read
// them from memory.
#include "attn/params.cuh"
#include "target/target.cuh"

KERNEL LAUNCH_BOUNDS(256, 1) void rawattn_send_words(PARAMETER WordsParams p) {
  for (int i = target::thread_index(); i < p.count; i += 256) p.to[i] = p.words[i];
}
