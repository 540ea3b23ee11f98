// Sums whole blocks of bytes, in an order that does not depend on their layout, so that a block that
// is stored elsewhere can be verified.
//
// The bytes of a block, planes slowest and then tokens and the bytes of a row, padded with zeros to
// whole words, are words w of 64 bits. The sum of block ids[n] is added to sums[n]:
//   the wrapping sum over all words of  word[w] * weight(w),  weight(w) = ((w + 1) * GOLDEN) | 1
// It is linear in the bytes, so units may be summed apart: unit (plane, token, segment) holds the
// bytes from dense.at(0, plane, token, segment) on.
//
// Launch: gridDim.x over slices of a block, gridDim.y over ids, both in grid strides, so any grid is
// correct, of up to 2^29 threads for an id; blockDim.x a multiple of 32 and at most KV_ROW_THREADS.
//
// Reads  ids[0 .. count], the plane table and the units of the blocks named; all may lie in mapped host
//        memory.
// Writes sums[0 .. count], to which it adds: BAD_BLOCK where an id is not in 0 .. num_blocks and
//        `first` is not 0; its place is then reported too.
// The caller has checked: addresses, strides, unit lengths and places within the block are multiples of
// the vector; a block has fewer than 2^31 of them.
#include "blocks.cuh"
#include "reduce.cuh"
#include "report.cuh"

// Vectors that a thread reads before it adds the first.
#define SUMMED_IN_FLIGHT 2

enum : u64 { GOLDEN = 0x9E3779B97F4A7C15ull, BAD_BLOCK = 0xBADB10C0BADB10C0ull };

static __device__ __forceinline__ u64 weight(u64 index) { return ((index + 1) * GOLDEN) | 1; }

// What a vector at byte `at` of a block adds to its sum.
static __device__ __forceinline__ u64 share_of(Words2 vector, u64 at) {
    return vector.word[0] * weight(at / 8) + vector.word[1] * weight(at / 8 + 1);
}
static __device__ __forceinline__ u64 share_of(Words1 vector, u64 at) {
    return vector.word[0] * weight(at / 8);
}
static __device__ __forceinline__ u64 share_of(Bytes4 vector, u64 at) {
    return ((u64)vector.word << (8 * (at % 8))) * weight(at / 8);
}
static __device__ __forceinline__ u64 share_of(Bytes2 vector, u64 at) {
    return ((u64)vector.half << (8 * (at % 8))) * weight(at / 8);
}
static __device__ __forceinline__ u64 share_of(Bytes1 vector, u64 at) {
    return ((u64)vector.byte << (8 * (at % 8))) * weight(at / 8);
}

template <typename Vector>
static __device__ __forceinline__ void sum_all(const BlockSide& from, const BlockSide& dense,
                                               const BlockUnits& units, const i32* ids, u64 count,
                                               u64* sums, u32 first, u64* report) {
    __shared__ u64 of_warp[KV_ROW_THREADS / KV_WARP];
    const u32 items = units.vectors_of_block();
    const u32 threads = gridDim.x * blockDim.x;
    for (u64 place = blockIdx.y; place < count; place += gridDim.y) {
        const i32 block = ids[place];
        if (block < 0 || (u64)block >= from.num_blocks) {
            if (first != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
                atomicAdd(sums + place, (u64)BAD_BLOCK);
                report_bad(report, place);
            }
            continue;
        }
        u64 sum = 0;
        const u32 step = SUMMED_IN_FLIGHT * threads;
        for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < items; first += step) {
            Vector held[SUMMED_IN_FLIGHT];
            u64 in_block[SUMMED_IN_FLIGHT];
#pragma unroll
            for (u32 k = 0; k < SUMMED_IN_FLIGHT; ++k) {
                // A vector of zeros adds nothing, wherever it stood.
                held[k] = Vector{};
                in_block[k] = 0;
                const u32 item = first + k * threads;
                if (item >= items) continue;
                const UnitPlace unit = UnitPlace::of(units, item);
                const u64 within = unit.vector * (u64)sizeof(Vector);
                in_block[k] = dense.at(0, unit.plane, unit.token, unit.segment) + within;
                held[k] = *reinterpret_cast<const Vector*>(
                    from.at((u32)block, unit.plane, unit.token, unit.segment) + within);
            }
#pragma unroll
            for (u32 k = 0; k < SUMMED_IN_FLIGHT; ++k) sum += share_of(held[k], in_block[k]);
        }
        sum = sum_over_block(sum, of_warp);
        if (threadIdx.x == 0) atomicAdd(sums + place, sum);
    }
}

#define SUM_BLOCKS(name, Vector)                                                                   \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
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
