// Sums whole blocks of bytes, in an order that does not depend on their layout, so that a block that
// is stored elsewhere can be verified.
//
// The bytes of a block, planes slowest and then tokens and the bytes of a row, padded with zeros to
// whole words, are words w of 64 bits. The sum of block ids[n] is added to sums[n]:
//   the wrapping sum over all words of  word[w] * weight(w),  weight(w) = ((w + 1) * GOLDEN) | 1
// It is linear in the bytes, so units may be summed apart: unit (plane, token, segment) holds the
// bytes from dense.at(0, plane, token, segment) on. GOLDEN is odd, so that
//   weight(w) = (w + 1) * GOLDEN + w % 2
// and a thread adds up words times w + 1, a number of 32 bits, and multiplies by GOLDEN once.
//
// Launch: gridDim.x over slices of a block, gridDim.y over ids, both in grid strides, so any grid is
// correct with which items + gridDim.x * blockDim.x * KV_SUM_UNROLL stays below 2^32; blockDim.x a
// multiple of 32 and at most KV_ROW_THREADS.
//
// Reads  ids[0 .. count], the plane table and the units of the blocks named; all may lie in mapped host
//        memory.
// Writes sums[0 .. count], to which it adds: BAD_BLOCK where an id is not in 0 .. num_blocks and
//        `first` is not 0; its place is then reported too.
// The caller has checked: addresses, strides, unit lengths and places within the block are multiples of
// the vector; a block has fewer than 2^31 of them, in all of its units, and fewer than 2^32 words.
#include "blocks.cuh"
#include "reduce.cuh"
#include "report.cuh"

enum : u64 { GOLDEN = 0x9E3779B97F4A7C15ull, BAD_BLOCK = 0xBADB10C0BADB10C0ull };

// What words add to a sum, before the multiplication by GOLDEN.
struct Shares {
    u64 counted; // word[w] * (w + 1)
    u64 odd;     // word[w] where w is odd

    __device__ __forceinline__ u64 sum() const { return counted * GOLDEN + odd; }

    __device__ __forceinline__ void add_word(u64 word, u32 w) {
        counted += word * (w + 1);
        odd += w % 2 ? word : 0;
    }
    // Vector number n of a block.
    __device__ __forceinline__ void add(Words2 vector, u32 n) {
        counted += (vector.word[0] + vector.word[1]) * (2 * n + 1) + vector.word[1];
        odd += vector.word[1];
    }
    __device__ __forceinline__ void add(Words1 vector, u32 n) { add_word(vector.word[0], n); }
    __device__ __forceinline__ void add(Bytes4 vector, u32 n) {
        add_word((u64)vector.word << (32 * (n % 2)), n / 2);
    }
    __device__ __forceinline__ void add(Bytes2 vector, u32 n) {
        add_word((u64)vector.half << (16 * (n % 4)), n / 4);
    }
    __device__ __forceinline__ void add(Bytes1 vector, u32 n) {
        add_word((u64)vector.byte << (8 * (n % 8)), n / 8);
    }
};

// The number, within its block, of a vector of a unit.
template <typename Vector>
static __device__ __forceinline__ u32 number_in_block(const BlockSide& dense, const UnitPlace& place) {
    const u64 unit = dense.at(0, place.plane, place.token, place.segment);
    return (u32)(unit / sizeof(Vector)) + place.vector;
}

// Warps take tiles of KV_SUM_UNROLL vectors a thread. Most tiles lie within a unit, and have one address;
// vectors of less than 8 bytes are too slow for it to matter.
template <typename Vector>
static __device__ __forceinline__ void add_tile(const BlockSide& from, const BlockSide& dense,
                                                const BlockUnits& units, u32 block, u32 items,
                                                u32 first, Shares& shares) {
    const u32 lane = threadIdx.x % KV_WARP;
    Vector held[KV_SUM_UNROLL];
    u32 numbers[KV_SUM_UNROLL];
    const UnitPlace start = UnitPlace::of(units, first);
    if (sizeof(Vector) >= 8 &&
        start.vector + KV_WARP * KV_SUM_UNROLL <= units.unit_vectors.divisor) {
        const u64 at = from.at(block, start.plane, start.token, start.segment) +
                       (start.vector + lane) * (u64)sizeof(Vector);
        const u32 number = number_in_block<Vector>(dense, start) + lane;
#pragma unroll
        for (u32 k = 0; k < KV_SUM_UNROLL; ++k) {
            load_streaming(at + k * (KV_WARP * sizeof(Vector)), held[k]);
            numbers[k] = number + k * KV_WARP;
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < KV_SUM_UNROLL; ++k) {
            // A vector of zeros adds nothing, wherever it stood.
            held[k] = Vector{};
            numbers[k] = 0;
            const u32 item = first + lane + k * KV_WARP;
            if (item >= items) continue;
            const UnitPlace place = UnitPlace::of(units, item);
            const u64 unit = from.at(block, place.plane, place.token, place.segment);
            load_streaming(unit + place.vector * (u64)sizeof(Vector), held[k]);
            numbers[k] = number_in_block<Vector>(dense, place);
        }
    }
#pragma unroll
    for (u32 k = 0; k < KV_SUM_UNROLL; ++k) shares.add(held[k], numbers[k]);
}

template <typename Vector>
static __device__ __forceinline__ void sum_all(const BlockSide& from, const BlockSide& dense,
                                               const BlockUnits& units, const i32* ids, u64 count,
                                               u64* sums, u32 first, u64* report) {
    __shared__ u64 of_warp[KV_ROW_THREADS / KV_WARP];
    const u32 items = units.vectors_of_block();
    const u32 warp = blockIdx.x * blockDim.x + threadIdx.x - threadIdx.x % KV_WARP;
    const u32 step = gridDim.x * blockDim.x * KV_SUM_UNROLL;
    for (u64 place = blockIdx.y; place < count; place += gridDim.y) {
        const i32 block = ids[place];
        if (block < 0 || (u64)block >= from.num_blocks) {
            if (first != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
                atomicAdd(sums + place, (u64)BAD_BLOCK);
                report_bad(report, place);
            }
            continue;
        }
        Shares shares{0, 0};
        for (u32 tile = warp * KV_SUM_UNROLL; tile < items; tile += step) {
            add_tile<Vector>(from, dense, units, (u32)block, items, tile, shares);
        }
        const u64 sum = sum_over_block(shares.sum(), of_warp);
        if (threadIdx.x == 0) atomicAdd(sums + place, sum);
    }
}

#define SUM_BLOCKS(name, Vector)                                                                   \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS, KV_SUM_BLOCKS)                    \
    name(const __grid_constant__ BlockSide from, const __grid_constant__ BlockSide dense,          \
         const __grid_constant__ BlockUnits units, const i32* ids, u64 count, u64* sums,           \
         u32 first, u64* report) {                                                                 \
        sum_all<Vector>(from, dense, units, ids, count, sums, first, report);                      \
    }

SUM_BLOCKS(sum_blocks_16, Words2)
SUM_BLOCKS(sum_blocks_8, Words1)
SUM_BLOCKS(sum_blocks_4, Bytes4)
SUM_BLOCKS(sum_blocks_2, Bytes2)
SUM_BLOCKS(sum_blocks_1, Bytes1)
