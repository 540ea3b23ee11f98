// Narrow transfers on few multiprocessors, in vectors of 16 bytes. See narrow.cuh.
#include "narrow.cuh"

extern "C" __global__ void __launch_bounds__(KV_WALK_THREADS, 1)
narrow_walk_16(const __grid_constant__ NarrowPages pages,
               const __grid_constant__ NarrowChunks chunks) {
    narrow_walk<Words2>(pages, chunks);
}
