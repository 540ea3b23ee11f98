// Moves tokens of every layer between a contiguous chunk and paged memory, in one launch.
//
//   chunk   [kv, layer, token, row], contiguous
//   paged   one plane for each (layer, kv); slot s of a plane is token s % block_tokens of block
//           s / block_tokens
//
// Launch: one dimension, blockDim.x a multiple of 32 and at most KV_ROW_THREADS. Groups of threads
// (RowGroup) take rows (plane, token) in grid strides, so any gridDim.x is correct; one group for
// each row is
//   gridDim.x = ceil(planes * (tokens - skip) * threads of a group / blockDim.x)
// and beyond a few thousand blocks more bring nothing.
//
// Reads  plane_ptrs[0 .. layers * kv_count], slot_mapping[skip .. tokens], and the rows to move.
// Writes the rows moved to, of tokens skip .. tokens with a slot in 0 .. num_slots. A skipped token
//        is neither read nor written on either side.
// The caller has checked: row_bytes, strides and addresses are multiples of 8; every range lies in
// its allocation; no two tokens that are stored share a slot; chunk and planes do not overlap.
#include "kv.cuh"

// Chunk to paged memory. Any other value of `direction` is paged memory to chunk.
#define KV_TO_PAGED 0

// Copies one row with the threads of a group. Four loads are in flight before the first store.
template <typename Words>
static __device__ __forceinline__ void copy_row(u64 dst, u64 src, u64 row_bytes, RowGroup group) {
    Words* to = reinterpret_cast<Words*>(dst);
    const Words* from = reinterpret_cast<const Words*>(src);
    const u64 count = row_bytes / sizeof(Words);
    const u64 step = group.width();
    u64 at = group.lane;
    for (; at + 3 * step < count; at += 4 * step) {
        const Words a = from[at];
        const Words b = from[at + step];
        const Words c = from[at + 2 * step];
        const Words d = from[at + 3 * step];
        to[at] = a;
        to[at + step] = b;
        to[at + 2 * step] = c;
        to[at + 3 * step] = d;
    }
    for (; at < count; at += step) to[at] = from[at];
}

extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)
multi_layer_transfer(u8* chunk, const u64* plane_ptrs, const i64* slot_mapping, u64 tokens,
                     u64 skip_prefix_n_tokens, u32 layers, u32 kv_count, u64 row_bytes,
                     u64 block_tokens, u64 block_stride_bytes, u64 token_stride_bytes,
                     u32 direction, u64 num_slots) {
    if (skip_prefix_n_tokens >= tokens) return;
    const u64 moved = tokens - skip_prefix_n_tokens;
    const u64 rows = moved * layers * kv_count;
    const PagedLayout paged{block_tokens, block_stride_bytes, token_stride_bytes};
    const RowGroup group = RowGroup::over(row_bytes);
    const u64 rows_of_grid = group.rows_of_grid();

    for (u64 row = group.first_in_grid(); row < rows; row += rows_of_grid) {
        const u64 plane_of_chunk = row / moved; // kv * layers + layer
        const u64 token = skip_prefix_n_tokens + (row - plane_of_chunk * moved);
        const i64 slot = slot_mapping[token];
        if (slot < 0 || (u64)slot >= num_slots) continue;

        const u64 kv = plane_of_chunk / layers;
        const u64 layer = plane_of_chunk - kv * layers;
        const u64 block = (u64)slot / block_tokens;
        const u64 token_in_block = (u64)slot - block * block_tokens;
        const u64 in_pages =
            plane_ptrs[layer * kv_count + kv] + paged.offset(block, token_in_block);
        const u64 in_chunk =
            reinterpret_cast<u64>(chunk) + (plane_of_chunk * tokens + token) * row_bytes;

        const u64 dst = direction == KV_TO_PAGED ? in_pages : in_chunk;
        const u64 src = direction == KV_TO_PAGED ? in_chunk : in_pages;
        if (aligned_16(dst | src | row_bytes)) {
            copy_row<Words2>(dst, src, row_bytes, group);
        } else {
            copy_row<Words1>(dst, src, row_bytes, group);
        }
    }
}
