// Fills a chunk [kv, layer, token, row] with bytes that only its tokens can have, as a model's
// prefill would: word w of the row of token t in plane p = layer * kv_count + kv is
//   token_keys[t] + plane_word(p * words_of_row + w)
//
// Launch: one dimension, blockDim.x a multiple of 32 and at most KV_ROW_THREADS. Groups of threads
// (RowGroup) take rows in grid strides, so any gridDim.x is correct; one group for each row is
//   gridDim.x = ceil(planes * tokens * threads of a group / blockDim.x)
//
// Reads  token_keys[0 .. tokens].
// Writes every byte of the chunk, kv_count * layers * tokens * row_bytes.
// The caller has checked: row_bytes and the chunk's address are multiples of 8, and the chunk fits.
#include "kv.cuh"

enum : u64 { MIX = 0xD6E8FEB86659FD93ull };

// A mixed word for each word index of a token: the same for every token, different in each place.
static __device__ __forceinline__ u64 plane_word(u64 index) {
    u64 x = (index + 1) * MIX;
    x ^= x >> 32;
    x *= MIX;
    x ^= x >> 32;
    return x;
}

// Fills one row with the threads of a group.
template <typename Words>
static __device__ __forceinline__ void fill_row(u64 address, u64 row_bytes, u64 key, u64 index,
                                                RowGroup group) {
    Words* row = reinterpret_cast<Words*>(address);
    const u64 count = row_bytes / sizeof(Words);
    for (u64 at = group.lane; at < count; at += group.width()) {
        Words vector;
#pragma unroll
        for (u32 i = 0; i < Words::COUNT; ++i) {
            vector.word[i] = key + plane_word(index + at * Words::COUNT + i);
        }
        row[at] = vector;
    }
}

extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)
fill_pattern(u8* chunk, const u64* token_keys, u64 tokens, u32 layers, u32 kv_count,
             u64 row_bytes) {
    const u64 rows = tokens * layers * kv_count;
    const u64 words_of_row = row_bytes / 8;
    const RowGroup group = RowGroup::over(row_bytes);
    const u64 rows_of_grid = group.rows_of_grid();

    for (u64 row = group.first_in_grid(); row < rows; row += rows_of_grid) {
        const u64 plane_of_chunk = row / tokens; // kv * layers + layer
        const u64 token = row - plane_of_chunk * tokens;
        const u64 kv = plane_of_chunk / layers;
        const u64 layer = plane_of_chunk - kv * layers;
        const u64 key = token_keys[token];
        const u64 index = (layer * kv_count + kv) * words_of_row;
        const u64 address = reinterpret_cast<u64>(chunk) + row * row_bytes;
        if (aligned_16(address | row_bytes)) {
            fill_row<Words2>(address, row_bytes, key, index, group);
        } else {
            fill_row<Words1>(address, row_bytes, key, index, group);
        }
    }
}
