// Narrow transfers in vectors of 8 bytes. See narrow.cuh for what they read and write.
#include "narrow.cuh"

// One chunk, whose description is short, because a launch takes longer the more it is given.
extern "C" __global__ void __launch_bounds__(KV_NARROW_THREADS)
narrow_transfer_8(const __grid_constant__ NarrowPages pages,
                  const __grid_constant__ NarrowChunk chunk) {
    narrow_transfer<Words1>(pages, chunk);
}

extern "C" __global__ void __launch_bounds__(KV_NARROW_THREADS)
narrow_transfers_8(const __grid_constant__ NarrowPages pages,
                   const __grid_constant__ NarrowChunks chunks) {
    narrow_transfer<Words1>(pages, chunks.chunk[blockIdx.y]);
}
