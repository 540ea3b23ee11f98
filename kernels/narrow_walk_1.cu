// Narrow transfers on few multiprocessors, in vectors of 1 byte. See narrow.cuh.
#include "narrow.cuh"

extern "C" __global__ void __launch_bounds__(KV_WALK_THREADS, 1)
narrow_walk_1(const __grid_constant__ NarrowPages pages,
              const __grid_constant__ NarrowChunks chunks) {
    narrow_walk<Bytes1>(pages, chunks);
}
