// Transfers in vectors of KV_WIDTH bytes, each thread one. See transfer.cuh for what they read and write.
#include "transfer.cuh"
#include "width.cuh"

// Shorter vectors than 16 bytes are too slow for the caches to matter.
template <bool PLAIN, bool TO_PAGED>
static __device__ __forceinline__ void move_one(const TransferPages& pages, const TransferChunk& chunk,
                                                u32 n) {
#if KV_WIDTH == 16
    if (pages.streams) {
        move_items<WidthVector, PLAIN, TO_PAGED, false, true, 1>(pages, chunk, n);
        return;
    }
#endif
    move_items<WidthVector, PLAIN, TO_PAGED, false, false, 1>(pages, chunk, n);
}

static __device__ __forceinline__ void transfer(const TransferPages& pages,
                                                const TransferChunk& chunk) {
    const u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= chunk.items) return;
    if (pages.direction == KV_TO_PAGED) {
        if (is_plain(pages)) {
            move_one<true, true>(pages, chunk, n);
        } else {
            move_one<false, true>(pages, chunk, n);
        }
    } else if (is_plain(pages)) {
        move_one<true, false>(pages, chunk, n);
    } else {
        move_one<false, false>(pages, chunk, n);
    }
}

// One chunk, whose description is short, because a launch takes longer the more it is given.
extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
KV_NAMED(transfer)(const __grid_constant__ TransferPages pages,
                   const __grid_constant__ TransferChunk chunk) {
    transfer(pages, chunk);
}

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
KV_NAMED(transfers)(const __grid_constant__ TransferPages pages,
                    const __grid_constant__ TransferChunks chunks) {
    transfer(pages, chunks.chunk[blockIdx.y]);
}
