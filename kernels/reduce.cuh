// Sums over warps and over blocks of threads.
#pragma once
#include "kv.cuh"

// The sum over the threads of a warp, in its lane 0. Every thread of the warp calls it.
static __device__ __forceinline__ u64 sum_over_warp(u64 value) {
#pragma unroll
    for (u32 apart = KV_WARP / 2; apart > 0; apart /= 2) {
        value += __shfl_down_sync(0xFFFFFFFFu, value, apart);
    }
    return value;
}

// The sum over the threads of a block, in thread 0. Every thread of the block calls it, with room
// for a word of each warp in shared memory.
static __device__ __forceinline__ u64 sum_over_block(u64 value, u64* of_warp) {
    const u32 warp = threadIdx.x / KV_WARP;
    const u32 lane = threadIdx.x % KV_WARP;
    value = sum_over_warp(value);
    if (lane == 0) of_warp[warp] = value;
    __syncthreads();
    if (warp == 0) value = sum_over_warp(lane < blockDim.x / KV_WARP ? of_warp[lane] : 0);
    // Whoever calls next writes to the same room.
    __syncthreads();
    return value;
}
