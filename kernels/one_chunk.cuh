// The transfer of transfer.cuh for what most launches are: one chunk, all of the device, and numbers that
// 32 bits count. It has no loop and no long division, so that short transfers begin sooner and more
// threads are resident.
//
// Rows are as in transfer.cuh, of one part. Items are vectors of moved rows, from `first_row` on.
//
// Launch: one dimension, blockDim.x at most KV_ONE_THREADS,
//   gridDim.x = ceil(items / (blockDim.x * KV_ONE_UNROLL))
// because each block moves one tile. `items` and a tile more, moved rows, and slots are below 2^32.
//
// Reads, writes and preconditions are those of transfer.cuh.
#pragma once
#include "report.cuh"
#include "transfer.cuh"

struct OneChunk {
    const u64* plane_ptrs;
    const void* mapping;
    u64* report; // or null
    u64 address;
    u64 kv_stride;
    u64 layer_stride;
    u64 row_stride;
    u64 block_stride;
    u64 token_stride;
    u64 segment_stride;
    Divider32 block_tokens;
    Divider32 row_vectors;
    Divider32 segment_vectors;
    Divider32 layers; // of the chunk
    Divider32 moved;
    u32 skip;
    u32 first_row;
    u32 items;
    u32 num_blocks;
    u32 num_slots;
    u32 plane_layers; // of the paged memory
    u32 first_layer;  // of the chunk, in the paged memory
    u32 direction;
    u32 mapping_kind;
    u32 vector_bytes; // for the CPU reference, which serves every vector
};

static_assert(sizeof(OneChunk) == 160, "OneChunk of crates/kv-kernels/src/one_chunk.rs");

// Where a token lies; false for one that does not move. `report` is for one thread of a row.
static __device__ __forceinline__ bool place_of(const OneChunk& one, u32 token, bool report,
                                                u32& block, u32& token_in_block) {
    if (one.mapping_kind == KV_BY_SLOT) {
        const i64 slot = static_cast<const i64*>(one.mapping)[token];
        if ((u64)slot >= one.num_slots) {
            if (slot >= 0 && report) report_bad(one.report, token);
            return false;
        }
        block = one.block_tokens.quotient((u32)slot);
        token_in_block = (u32)slot - block * one.block_tokens.divisor;
    } else {
        const u32 entry = one.block_tokens.quotient(token);
        const i32 id = static_cast<const i32*>(one.mapping)[entry];
        if ((u32)id >= one.num_blocks) {
            if (id >= 0 && report) report_bad(one.report, entry);
            return false;
        }
        block = (u32)id;
        token_in_block = token - entry * one.block_tokens.divisor;
    }
    return true;
}

template <typename Vector, bool PLAIN>
static __device__ __forceinline__ void transfer_one_tile(const OneChunk& one) {
    TransferEnds ends[KV_ONE_UNROLL];
    const u32 first = blockIdx.x * blockDim.x * KV_ONE_UNROLL + threadIdx.x;
#pragma unroll
    for (u32 k = 0; k < KV_ONE_UNROLL; ++k) {
        ends[k] = TransferEnds{0, 0};
        const u32 item = first + k * blockDim.x;
        if (item >= one.items) continue;
        const u32 moved_row = one.row_vectors.quotient(item);
        const u32 vector = item - moved_row * one.row_vectors.divisor;
        const u32 row = one.first_row + moved_row;
        const u32 plane = one.moved.quotient(row);
        const u32 token = one.skip + row - plane * one.moved.divisor;
        const u32 kv = one.layers.quotient(plane);
        const u32 layer = plane - kv * one.layers.divisor;
        const u64 in_plane = one.plane_ptrs[kv * one.plane_layers + one.first_layer + layer];
        u32 block;
        u32 token_in_block;
        if (!place_of(one, token, vector == 0, block, token_in_block)) continue;

        u64 in_pages = in_plane + block * one.block_stride + token_in_block * one.token_stride;
        if (PLAIN) {
            in_pages += vector * (u64)sizeof(Vector);
        } else {
            const u32 segment = one.segment_vectors.quotient(vector);
            const u32 rest = vector - segment * one.segment_vectors.divisor;
            in_pages += segment * one.segment_stride + rest * (u64)sizeof(Vector);
        }
        const u64 in_chunk = one.address + kv * one.kv_stride + layer * one.layer_stride +
                             token * one.row_stride + vector * (u64)sizeof(Vector);
        const bool to_paged = one.direction == KV_TO_PAGED;
        ends[k] = TransferEnds{to_paged ? in_chunk : in_pages, to_paged ? in_pages : in_chunk};
    }
    move_items<Vector, KV_ONE_UNROLL>(ends);
}

template <typename Vector>
static __device__ __forceinline__ void transfer_one(const OneChunk& one) {
    if (one.segment_vectors.divisor == one.row_vectors.divisor) {
        transfer_one_tile<Vector, true>(one);
    } else {
        transfer_one_tile<Vector, false>(one);
    }
}
