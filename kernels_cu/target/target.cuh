// The machine under a portable kernel. Each target file defines the same names:
//
//   macros     DEVICE, KERNEL, LAUNCH_BOUNDS(threads, blocks), CLUSTER(blocks), PARAMETER, UNROLL,
//              SHARED_MEMORY(name, bytes), SHARED_MEMORY_ALIGNED(name, bytes, alignment), OFFSET_OF(type, field)
//   types      float16, bfloat16, float8 (e4m3); int64
//   index      thread_index(), block_index(), grid_size(), kWave
//   numbers    infinity()
//   order      block_sync(), wave_sync(), barrier_sync(id, threads), barrier_arrive(id, threads)
//   exchange   shuffle(x, lane), shuffle_xor(x, mask), wave_any(predicate), wave_max(x), wave_uniform(x)
//   maths      exp2(x), log2(x), tanh(x), reciprocal(x) (to a few bits less), bits_of(x), float_of(bits), to_float(x),
//   from_float<T>(x)
//              exp(x), log(x), sin(x), cos(x), sqrt(x), floor(x), fmod(x, y), pow(x, y)
//   sums       atomic_add(address, x), fetch_add(counter, x), fetch_increment(counter)
//   copies     copy_async<bytes>(shared, global, valid), copy_async_commit(), copy_async_wait<pending>()
//   product    Mma<T>: fragments of a 16 x 16 x kDepth product, how they are loaded, which row and column a lane holds;
//              those of tiles of float8 have the columns of a block in another order (column_of_float8)
//
//   Hopper's   shared_address(pointer), stmatrix(row, pairs), thread_index_anew()
//
// and nothing else, so that an algorithm written against them runs on every machine.
#pragma once

typedef long long int64;

#if defined(RAWATTN_TARGET_HOST)
#include "target/host.cuh"
#include "target/host_product.cuh"
#else
#include "target/cuda.cuh"
#include "target/cuda_product.cuh"
#endif
