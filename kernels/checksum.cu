// Reads every live KV row through the device's block table, as attention does, and sums it.
//
// Entry (s, b) covers the tokens of logical block b of sequence s: the wrapping sum, over tokens t
// of that block that the sequence has, planes p and 64-bit words w of a row, of
//   mixed(word, key_of((t * planes + p) * words_of_row + w))
// which mix.cuh has. Addition wraps, so the order of summing does not matter: the result is exact.
//
// Launch: gridDim.x over logical blocks, gridDim.y over sequences, both in grid strides, so any
// grid is correct; blockDim.x a multiple of 32 and at most KV_SUM_THREADS (best: that). Choose
//   gridDim.x = blocks of the longest sequence (at most table_stride), gridDim.y = min(sequences,
//   65535)
// A block beyond its sequence's length returns at once.
//
// Reads  seq_lens[0 .. sequences], the live entries of block_table, plane_ptrs[0 .. planes], and
//        the rows of every live block whose id is in 0 .. num_blocks.
// Writes checksums[s * table_stride + b] of live blocks; BAD_BLOCK where the id is out of range,
//        and then no row is read. Entries beyond a sequence's length are left as they are.
// The caller has checked: row_bytes, strides and plane addresses are multiples of 8, block_tokens
// is not 0, and rows of blocks below num_blocks lie in their plane.
#include "mix.cuh"
#include "reduce.cuh"

// What a vector adds whose first word has this key.
template <typename Words>
static __device__ __forceinline__ u64 sum_of_vector(Words vector, u64 key) {
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < Words::COUNT; ++i) sum += mixed(vector.word[i], key + i * GOLDEN);
    return sum;
}

// This thread's share of one row, whose first word has the index `index`. Four loads are in flight
// before the first is used; keys advance by addition.
template <typename Words>
static __device__ __forceinline__ u64 sum_row(u64 address, u64 row_bytes, u64 index,
                                              RowGroup group) {
    const Words* row = reinterpret_cast<const Words*>(address);
    const u64 count = row_bytes / sizeof(Words);
    const u64 step = group.width();
    const u64 key_step = step * Words::COUNT * GOLDEN;
    u64 at = group.lane;
    u64 key = key_of(index + at * Words::COUNT);
    u64 sum = 0;
    for (; at + 3 * step < count; at += 4 * step) {
        const Words a = row[at];
        const Words b = row[at + step];
        const Words c = row[at + 2 * step];
        const Words d = row[at + 3 * step];
        sum += sum_of_vector(a, key);
        sum += sum_of_vector(b, key + key_step);
        sum += sum_of_vector(c, key + 2 * key_step);
        sum += sum_of_vector(d, key + 3 * key_step);
        key += 4 * key_step;
    }
    for (; at < count; at += step) {
        sum += sum_of_vector(row[at], key);
        key += key_step;
    }
    return sum;
}

// This thread's share of the tokens of one block.
static __device__ __forceinline__ u64 sum_of_thread(u64 block, u64 tokens, const u64* plane_ptrs,
                                                    u32 planes, u64 row_bytes, PagedLayout paged,
                                                    RowGroup group) {
    const u64 words_of_row = row_bytes / 8;
    const u64 rows = tokens * planes;
    u64 sum = 0;
    // Plane by plane, so that the rows of a block that lie together are read together.
    for (u64 row = group.first_in_block(); row < rows; row += group.rows_of_block()) {
        const u64 plane = row / tokens;
        const u64 token = row - plane * tokens;
        const u64 address = plane_ptrs[plane] + paged.offset(block, token);
        const u64 index = (token * planes + plane) * words_of_row;
        if (aligned_16(address | row_bytes)) {
            sum += sum_row<Words2>(address, row_bytes, index, group);
        } else {
            sum += sum_row<Words1>(address, row_bytes, index, group);
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(KV_SUM_THREADS, KV_SUM_READERS)
paged_checksum(const i32* block_table, u64 table_stride, const u32* seq_lens, u32 sequences,
               const u64* plane_ptrs, u32 planes, u64 row_bytes, u64 block_tokens,
               u64 block_stride_bytes, u64 token_stride_bytes, u64 num_blocks, u64* checksums) {
    __shared__ u64 of_warp[KV_SUM_THREADS / KV_WARP];
    const PagedLayout paged{block_tokens, block_stride_bytes, token_stride_bytes};
    const RowGroup group = RowGroup::over(row_bytes);

    for (u64 sequence = blockIdx.y; sequence < sequences; sequence += gridDim.y) {
        const u64 length = seq_lens[sequence];
        for (u64 logical = blockIdx.x; logical < table_stride; logical += gridDim.x) {
            const u64 start = logical * block_tokens;
            if (start >= length) break;
            const u64 entry = sequence * table_stride + logical;
            const i32 block = block_table[entry];
            if (block < 0 || (u64)block >= num_blocks) {
                if (threadIdx.x == 0) checksums[entry] = BAD_BLOCK;
                continue;
            }
            const u64 left = length - start;
            const u64 tokens = left < block_tokens ? left : block_tokens;
            const u64 share =
                sum_of_thread((u64)block, tokens, plane_ptrs, planes, row_bytes, paged, group);
            const u64 sum = sum_over_block(share, of_warp);
            if (threadIdx.x == 0) checksums[entry] = sum;
        }
    }
}
