// Copies blocks, or the same part of every row of them, between two memories, by pairs of ids.
//
// For each pair (source, destination), plane p, token t, segment s and vector v of a unit:
//   to.at(destination, p, t, s)[v] = from.at(source, p, t, s)[v]
// with `at` of blocks.cuh. Which strides either side has is its layout: two different ones make it a
// change of layout, and bases within the row make it a change of heads. Where `ids` of a side is 0, and not
// all ones, its block of a pair is the number of the pair in this launch, whatever the pair says.
//
// Launch: one dimension, blockDim.x at most KV_COPY_THREADS. Blocks take tiles of
// blockDim.x * KV_COPY_UNROLL vectors in grid strides, so any gridDim.x is correct with which
// items + gridDim.x * blockDim.x * KV_COPY_UNROLL stays below 2^32.
//
// Reads  pairs[0 .. count], the plane tables, and the units of the source blocks. All of these may lie
//        in mapped host memory or on a peer.
// Writes the same units of the destination blocks. A pair of which either block is not in 0 .. num_blocks
//        of its side is passed over, and its place, counted from first_pair, is reported.
// The caller has checked: addresses, strides and unit lengths are multiples of the vector; every
// block below num_blocks lies in its memory; no block is a destination twice, or a source and a
// destination in the same memory.
#include "blocks.cuh"
#include "report.cuh"

// Whether blocks of a side are named by ids: all ones where they are, 0 where the place of a pair counts.
struct NamedByIds {
    u32 source;
    u32 destination;

    // Without a branch, because nearly all launches have ids on both sides.
    __device__ __forceinline__ BlockPair named(const BlockPair& pair, u32 place) const {
        return BlockPair{(i32)(((u32)pair.source & source) | (place & ~source)),
                         (i32)(((u32)pair.destination & destination) | (place & ~destination))};
    }
};

static_assert(sizeof(NamedByIds) == 8, "crates/kv-kernels/src/block_copy.rs");

template <typename Vector>
static __device__ __forceinline__ void copy_tile(const BlockSide& to, const BlockSide& from,
                                                 const BlockUnits& units, const BlockPair* pairs,
                                                 u32 items, const NamedByIds& ids, u32 first,
                                                 u64 first_pair, u64* report) {
    u64 target[KV_COPY_UNROLL];
    Vector held[KV_COPY_UNROLL];
#pragma unroll
    for (u32 k = 0; k < KV_COPY_UNROLL; ++k) {
        target[k] = 0;
        const u32 item = first + k * blockDim.x;
        if (item >= items) continue;
        const UnitPlace place = UnitPlace::of(units, item);
        const BlockPair pair = ids.named(pairs[place.pair], place.pair);
        if (!pair.is_known(to, from)) {
            if (place.is_first_of_pair()) report_bad(report, first_pair + place.pair);
            continue;
        }
        const u64 within = place.vector * (u64)sizeof(Vector);
        target[k] = to.at(pair.destination, place.plane, place.token, place.segment) + within;
        held[k] = *reinterpret_cast<const Vector*>(
            from.at(pair.source, place.plane, place.token, place.segment) + within);
    }
#pragma unroll
    for (u32 k = 0; k < KV_COPY_UNROLL; ++k) {
        if (target[k] != 0) *reinterpret_cast<Vector*>(target[k]) = held[k];
    }
}

template <typename Vector>
static __device__ __forceinline__ void copy_all(const BlockSide& to, const BlockSide& from,
                                                const BlockUnits& units, const BlockPair* pairs,
                                                u32 items, const NamedByIds& ids, u64 first_pair,
                                                u64* report) {
    const u32 tile = blockDim.x * KV_COPY_UNROLL;
    for (u32 first = blockIdx.x * tile + threadIdx.x; first < items; first += gridDim.x * tile) {
        copy_tile<Vector>(to, from, units, pairs, items, ids, first, first_pair, report);
    }
}

#define COPY_BLOCKS(name, Vector)                                                                  \
    extern "C" __global__ void __launch_bounds__(KV_COPY_THREADS)                                  \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u32 items,              \
         const __grid_constant__ NamedByIds ids, u64 first_pair, u64* report) {                    \
        copy_all<Vector>(to, from, units, pairs, items, ids, first_pair, report);                  \
    }

COPY_BLOCKS(copy_blocks_16, Words2)
COPY_BLOCKS(copy_blocks_8, Words1)
COPY_BLOCKS(copy_blocks_4, Bytes4)
COPY_BLOCKS(copy_blocks_2, Bytes2)
COPY_BLOCKS(copy_blocks_1, Bytes1)
