// The transfers of transfer.cuh for what most launches are: rows of one part, and numbers that 31 bits
// count. Their index arithmetic is 32-bit but for the addresses, so that short transfers begin sooner,
// and a few multiprocessors keep pace with the link to the host.
//
// Rows are as in transfer.cuh, in whole chunks:
//   chunk   moved row r of plane c = kv * layers + layer, of tokens - skip moved rows in each, lies
//             r + c * moved + (c + 1) * skip  rows after the chunk's row 0
//   paged   plane c begins at plane_ptrs[c + kv * layers_left_out]
// Items are vectors of moved rows, from `first_row` on, in that order. `address` is that of the chunk's
// row `first_row + skip`, so that item i of plane c lies at
//   address + i * sizeof(Vector) + c * skip_bytes
//
// Launch: one dimension of threads, a multiple of 32;
//   narrow_transfer_N   at most KV_NARROW_THREADS, gridDim.x >= ceil(items / blockDim.x): each block
//                       moves one tile of the chunk
//   narrow_transfers_N  the same for every chunk, gridDim.y = chunks
//   narrow_walk_N       at most KV_WALK_THREADS, any gridDim.x; the mapping is by slots, and
//                       layers_left_out is 0
//
// Reads, writes and preconditions are those of transfer.cuh. Besides, rows, slots and items are fewer
// than 2^31, and so are gridDim.x * blockDim.x * KV_WALK_UNROLL; strides are below 2^32.
#pragma once
#include "report.cuh"
#include "transfer.cuh"

struct NarrowPages {
    const u64* plane_ptrs; // from the chunks' first layer on
    u64* report;           // or null
    Divider31 row_vectors;
    Divider31 segment_vectors;
    Divider31 block_tokens;
    Divider31 layers; // of the chunks
    u32 places;       // slots, or blocks, that are ready
    u32 block_stride;
    u32 token_stride;
    u32 segment_stride;
    u32 layers_left_out; // of the paged memory, between a kv's last layer of the chunks and the next's first
    u32 direction;
    u32 mapping_kind;
    u32 chunks;
    u32 vector_bytes; // for the CPU reference, which serves every vector
    u32 reserved;
};

struct NarrowChunk {
    u64 address;
    const void* mapping;
    Divider31 moved;
    u32 skip;
    u32 skip_bytes; // skip * row bytes
    u32 first_row;
    u32 items;
    u32 reserved;
};

static_assert(sizeof(NarrowPages) == 104, "NarrowPages of crates/kv-kernels/src/narrow.rs");
static_assert(sizeof(NarrowChunk) == 48, "NarrowChunk of crates/kv-kernels/src/narrow.rs");

struct NarrowChunks {
    NarrowChunk chunk[KV_TRANSFER_CHUNKS];
};

// Where an item lies, before its place in the mapping is known.
struct NarrowItem {
    u32 vector; // of its row
    u32 plane;
    u32 token;

    __device__ __forceinline__ NarrowItem(const NarrowPages& pages, const NarrowChunk& chunk,
                                          u32 item) {
        const u32 moved_row = pages.row_vectors.quotient(item);
        const u32 row = chunk.first_row + moved_row;
        vector = item - moved_row * pages.row_vectors.divisor;
        plane = chunk.moved.quotient(row);
        token = chunk.skip + row - plane * chunk.moved.divisor;
    }
};

// Tells of those of a thread's items that begin a row whose place is not ready. This is rare, so it
// finds them once more instead of keeping what it needs.
template <bool WALK>
static __device__ __forceinline__ void report_items(const NarrowPages& pages, const NarrowChunk& chunk,
                                                 u32 first, u32 count) {
#pragma unroll 1
    for (u32 k = 0; k < count; ++k) {
        const NarrowItem item(pages, chunk, first + k * blockDim.x);
        if (item.vector != 0) continue;
        u32 entry = item.token;
        i64 place;
        if (WALK || pages.mapping_kind == KV_BY_SLOT) {
            place = static_cast<const i64*>(chunk.mapping)[entry];
        } else {
            entry = pages.block_tokens.quotient(entry);
            place = static_cast<const i32*>(chunk.mapping)[entry];
        }
        if (place >= pages.places) report_bad(pages.report, entry);
    }
}

// Moves COUNT items, a block's width apart, from `first` on. Each step is taken for all of them, so
// that what they wait for overlaps: the tables, then the loads, then the stores.
template <typename Vector, bool WALK, bool PLAIN, bool TO_PAGED, u32 COUNT>
static __device__ __forceinline__ void move_narrow(const NarrowPages& pages,
                                                   const NarrowChunk& chunk, u32 first) {
    const bool by_slot = WALK || pages.mapping_kind == KV_BY_SLOT;
    u64 in_chunk[COUNT];
    u64 in_pages[COUNT];
    i64 places[COUNT];
    u32 vectors_in[COUNT];
    u32 tokens_in[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        const u32 n = first + k * blockDim.x;
        const NarrowItem item(pages, chunk, n);
        vectors_in[k] = item.vector;
        tokens_in[k] = 0;
        if (by_slot) {
            places[k] = static_cast<const i64*>(chunk.mapping)[item.token];
        } else {
            const u32 entry = pages.block_tokens.quotient(item.token);
            tokens_in[k] = item.token - entry * pages.block_tokens.divisor;
            places[k] = static_cast<const i32*>(chunk.mapping)[entry];
        }
        u32 plane = item.plane;
        if (!WALK && pages.layers_left_out) {
            plane += pages.layers.quotient(plane) * pages.layers_left_out;
        }
        in_pages[k] = pages.plane_ptrs[plane];
        if (PLAIN) in_pages[k] += (u64)item.vector * sizeof(Vector);
        in_chunk[k] =
            chunk.address + (u64)n * sizeof(Vector) + (u64)item.plane * chunk.skip_bytes;
    }
    bool ready[COUNT];
    bool all = true;
    Vector vectors[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        ready[k] = (u64)places[k] < pages.places;
        all = all && ready[k];
        u32 block = (u32)places[k];
        if (by_slot) {
            block = pages.block_tokens.quotient((u32)places[k]);
            tokens_in[k] = (u32)places[k] - block * pages.block_tokens.divisor;
        }
        in_pages[k] += (u64)block * pages.block_stride + (u64)tokens_in[k] * pages.token_stride;
        if (!PLAIN) {
            const u32 segment = pages.segment_vectors.quotient(vectors_in[k]);
            const u32 vector = vectors_in[k] - segment * pages.segment_vectors.divisor;
            in_pages[k] += (u64)segment * pages.segment_stride + (u64)vector * sizeof(Vector);
        }
        if (ready[k]) vectors[k] = load_streaming<Vector>(TO_PAGED ? in_chunk[k] : in_pages[k]);
    }
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ready[k]) store_streaming(TO_PAGED ? in_pages[k] : in_chunk[k], vectors[k]);
    }
    if (!all && pages.report) report_items<WALK>(pages, chunk, first, COUNT);
}

// Every item of every chunk, in grid strides.
template <typename Vector, bool PLAIN, bool TO_PAGED>
static __device__ __forceinline__ void walk_narrow(const NarrowPages& pages,
                                                   const NarrowChunks& chunks) {
    const u32 tile = blockDim.x * KV_WALK_UNROLL;
    for (u32 at = 0; at < pages.chunks; ++at) {
        const NarrowChunk& chunk = chunks.chunk[at];
        for (u32 first = blockIdx.x * tile; first < chunk.items; first += gridDim.x * tile) {
            u32 n = first + threadIdx.x;
            if (first + tile <= chunk.items) {
                move_narrow<Vector, true, PLAIN, TO_PAGED, KV_WALK_UNROLL>(pages, chunk, n);
                continue;
            }
#pragma unroll 1
            for (; n < chunk.items; n += blockDim.x) {
                move_narrow<Vector, true, PLAIN, TO_PAGED, 1>(pages, chunk, n);
            }
        }
    }
}

static __device__ __forceinline__ bool is_plain(const NarrowPages& pages) {
    return pages.segment_vectors.divisor == pages.row_vectors.divisor;
}

template <typename Vector>
static __device__ __forceinline__ void narrow_transfer(const NarrowPages& pages,
                                                       const NarrowChunk& chunk) {
    const u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= chunk.items) return;
    if (pages.direction == KV_TO_PAGED) {
        if (is_plain(pages)) {
            move_narrow<Vector, false, true, true, 1>(pages, chunk, n);
        } else {
            move_narrow<Vector, false, false, true, 1>(pages, chunk, n);
        }
    } else if (is_plain(pages)) {
        move_narrow<Vector, false, true, false, 1>(pages, chunk, n);
    } else {
        move_narrow<Vector, false, false, false, 1>(pages, chunk, n);
    }
}

template <typename Vector>
static __device__ __forceinline__ void narrow_walk(const NarrowPages& pages,
                                                   const NarrowChunks& chunks) {
    if (pages.direction == KV_TO_PAGED) {
        if (is_plain(pages)) {
            walk_narrow<Vector, true, true>(pages, chunks);
        } else {
            walk_narrow<Vector, false, true>(pages, chunks);
        }
    } else if (is_plain(pages)) {
        walk_narrow<Vector, true, false>(pages, chunks);
    } else {
        walk_narrow<Vector, false, false>(pages, chunks);
    }
}
