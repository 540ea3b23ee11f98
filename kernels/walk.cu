// Transfers in vectors of KV_WIDTH bytes by any number of blocks, which walk the items in grid strides: on
// few multiprocessors, and of wide rows. See transfer.cuh for what they read and write.
#include "transfer.cuh"
#include "width.cuh"

// Whether the mapping is by slots. The compiler is kept from knowing that all tiles have it alike, or it
// would make a loop for each kind.
static __device__ __forceinline__ bool is_by_slot(const TransferPages& pages) {
    u32 kind;
    asm volatile("mov.u32 %0, %1;" : "=r"(kind) : "r"(pages.mapping_kind));
    return kind == KV_BY_SLOT;
}

// Every item of every chunk, by `move<COUNT>(chunk, first)`.
template <typename Move>
static __device__ __forceinline__ void walk_items(const TransferChunks& chunks, u32 count,
                                                  const Move& move) {
    const u32 tile = blockDim.x * Move::UNROLL;
    for (u32 at = 0; at < count; ++at) {
        const TransferChunk& chunk = chunks.chunk[at];
        for (u32 first = blockIdx.x * tile; first < chunk.items; first += gridDim.x * tile) {
            u32 n = first + threadIdx.x;
            if (first + tile <= chunk.items) {
                move.template of<Move::UNROLL>(chunk, n);
                continue;
            }
#pragma unroll 1
            for (; n < chunk.items; n += blockDim.x) move.template of<1>(chunk, n);
        }
    }
}

template <bool PLAIN, bool TO_PAGED> struct MoveItems {
    enum : u32 { UNROLL = KV_WALK_UNROLL };
    const TransferPages& pages;

    template <u32 COUNT>
    __device__ __forceinline__ void of(const TransferChunk& chunk, u32 first) const {
        move_items<WidthVector, PLAIN, TO_PAGED, true, true, COUNT>(pages, chunk, first);
    }
};

struct MoveWide {
    // Its numbers take two registers each.
    enum : u32 { UNROLL = KV_WALK_UNROLL / 2 };
    const TransferPages& pages;
    const WideRows& rows;

    template <u32 COUNT>
    __device__ __forceinline__ void of(const TransferChunk& chunk, u32 first) const {
        move_wide<WidthVector, COUNT>(pages, rows, chunk, is_by_slot(pages), first);
    }
};

extern "C" __global__ void __launch_bounds__(KV_WALK_THREADS, 1)
KV_NAMED(walk)(const __grid_constant__ TransferPages pages, const __grid_constant__ WideRows rows,
               const __grid_constant__ TransferChunks chunks) {
    const bool to_paged = pages.direction == KV_TO_PAGED;
    if (rows.first_vectors != 0) {
        walk_items(chunks, pages.chunks, MoveWide{pages, rows});
    } else if (is_plain(pages)) {
        if (to_paged) {
            walk_items(chunks, pages.chunks, MoveItems<true, true>{pages});
        } else {
            walk_items(chunks, pages.chunks, MoveItems<true, false>{pages});
        }
    } else if (to_paged) {
        walk_items(chunks, pages.chunks, MoveItems<false, true>{pages});
    } else {
        walk_items(chunks, pages.chunks, MoveItems<false, false>{pages});
    }
}
