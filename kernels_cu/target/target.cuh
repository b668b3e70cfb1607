// The hardware under every kernel, behind one set of names. target/cuda.cuh and cuda_product.cuh define them for NVIDIA
// GPUs from Ampere on; target/host.cuh and host_product.cuh for a GPU simulated in plain C++, for tests:
//
//   macros     DEVICE, OUT_OF_LINE, KERNEL, LAUNCH_BOUNDS(threads, blocks), CLUSTER(blocks), PARAMETER, UNROLL,
//              SHARED_MEMORY(name, bytes), SHARED_MEMORY_ALIGNED(name, bytes, alignment), OFFSET_OF(type, field)
//   types      float16, bfloat16, float8 (e4m3); int64
//   index      thread_index(), reload_thread_index(), block_index(), grid_size(), kWave (lanes of a wave),
//              kThreadsOfSm (threads that an SM holds at once)
//   numbers    infinity()
//   order      block_sync(), block_any(predicate), wave_sync(), barrier_sync(id, threads), barrier_arrive(id, threads),
//              fence_device()
//   launches   launch_dependents(), wait_for_prior_kernels()
//   exchange   shuffle(x, lane), shuffle_xor(x, mask), wave_any(predicate), wave_max(x), wave_count(predicate),
//              wave_uniform(x)
//   maths      exp2(x), reciprocal(x), quick_log2(x) (a few bits less accurate), log2(x), exp(x), log(x), tanh(x),
//              sin(x), cos(x), sqrt(x), floor(x), fmod(x, y), pow(x, y)
//   convert    bits_of(x), float_of(bits), to_float(x), from_float<T>(x), float16_pairs(pairs, x)
//   sums       atomic_add(address, x), add_pairs(address, x), fetch_add(counter, x), fetch_add_acq_rel(counter, x),
//              fetch_increment_deferred(counter), add_release(counter, x), load_acquire(counter)
//   memory     prefetch(address), store_streaming(address, x), shared_address(pointer)
//   copies     copy_async<bytes>(shared, global, valid), copy_async_evict_first<bytes>(shared, global, valid),
//              copy_async_commit(), copy_async_wait<pending>()
//   product    Mma<T>: fragments of a 16 x 16 x kDepth product, how they are loaded, which row and column a lane holds.
//              Fragments of float8 tiles have the columns of a block in another order (column_of_float8). stmatrix()
//              is there on Hopper and in the simulation.
//
// Portable kernels use nothing else of the hardware, so they run on every target. Kernels in sm90/ add ptx/.
#pragma once

typedef long long int64;

#if defined(RAWATTN_TARGET_HOST)
#include "target/host.cuh"
#include "target/host_product.cuh"
#else
#include "target/cuda.cuh"
#include "target/cuda_product.cuh"
#endif
