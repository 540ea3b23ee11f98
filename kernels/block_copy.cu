// Copies blocks, or the same part of every row of them, between two memories, by pairs of ids.
//
// For each pair (source, destination), plane p, token t, segment s and vector v of a unit:
//   to.at(destination, p, t, s)[v] = from.at(source, p, t, s)[v]
// with `at` of blocks.cuh. Which strides either side has is its layout: two different ones make it a
// change of layout, and bases within the row make it a change of heads.
//
// Launch: one dimension, blockDim.x at most KV_ROW_THREADS. Blocks take tiles of
// blockDim.x * VECTORS_IN_FLIGHT vectors in grid strides, so any gridDim.x is correct.
//
// Reads  pairs[0 .. count], the plane tables, and the units of the source blocks. All of these may lie
//        in mapped host memory or on a peer.
// Writes the same units of the destination blocks. A pair of which either id is not in 0 .. num_blocks
//        of its side is passed over, and its place is reported.
// The caller has checked: addresses, strides and unit lengths are multiples of the vector; every
// block below num_blocks lies in its memory; no block is a destination twice, or a source and a
// destination in the same memory; unit_vectors, segments, tokens and planes are below 2^31.
#include "blocks.cuh"
#include "report.cuh"

// Vectors that a thread reads before it writes the first.
#define VECTORS_IN_FLIGHT 2

struct BlockPair {
    i32 source;
    i32 destination;
};

template <typename Vector>
static __device__ __forceinline__ void copy_tile(const BlockSide& to, const BlockSide& from,
                                                 const BlockUnits& units, const BlockPair* pairs,
                                                 u64 items, u64 first, u64* report) {
    u64 target[VECTORS_IN_FLIGHT];
    Vector held[VECTORS_IN_FLIGHT];
    const UnitPlace start = UnitPlace::of(units, first);
    // Most tiles lie in one pair, and pairs may have to come over the bus.
    const BlockPair start_pair = pairs[start.pair];
#pragma unroll
    for (u32 k = 0; k < VECTORS_IN_FLIGHT; ++k) {
        target[k] = 0;
        const u32 on = k * blockDim.x + threadIdx.x;
        if (first + on >= items) continue;
        const UnitPlace place = start.plus(units, on);
        const BlockPair pair = place.pair == start.pair ? start_pair : pairs[place.pair];
        const bool known = pair.source >= 0 && (u64)pair.source < from.num_blocks &&
                           pair.destination >= 0 && (u64)pair.destination < to.num_blocks;
        if (!known) {
            if ((place.plane | place.token | place.segment | place.vector) == 0) {
                report_bad(report, place.pair);
            }
            continue;
        }
        const u64 within = (u64)place.vector * sizeof(Vector);
        target[k] = to.at(pair.destination, place.plane, place.token, place.segment) + within;
        held[k] = *reinterpret_cast<const Vector*>(
            from.at(pair.source, place.plane, place.token, place.segment) + within);
    }
#pragma unroll
    for (u32 k = 0; k < VECTORS_IN_FLIGHT; ++k) {
        if (target[k] != 0) *reinterpret_cast<Vector*>(target[k]) = held[k];
    }
}

template <typename Vector>
static __device__ __forceinline__ void copy_all(const BlockSide& to, const BlockSide& from,
                                                const BlockUnits& units, const BlockPair* pairs,
                                                u64 items, u64* report) {
    const u64 tile = (u64)blockDim.x * VECTORS_IN_FLIGHT;
    for (u64 first = blockIdx.x * tile; first < items; first += gridDim.x * tile) {
        copy_tile<Vector>(to, from, units, pairs, items, first, report);
    }
}

struct Words4 {
    u32 word;
};
struct Bytes {
    u8 byte;
};

#define COPY_BLOCKS(name, Vector)                                                                  \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u64 items,              \
         u64* report) {                                                                            \
        copy_all<Vector>(to, from, units, pairs, items, report);                                   \
    }

COPY_BLOCKS(copy_blocks_16, Words2)
COPY_BLOCKS(copy_blocks_4, Words4)
COPY_BLOCKS(copy_blocks_1, Bytes)
