// Where the rows of a block lie, for kernels that take blocks apart into units: pieces that lie
// together on both sides.
//
// Vector v of unit (plane, token, segment) of block b lies at
//   plane(plane) + b * block_stride + token * token_stride + segment * segment_stride
//                + v * sizeof(vector)
// where plane(p) is plane_ptrs[p], or base + p * plane_stride where there is no table. `base` counts
// in both cases: beside a table it is what lies before the unit in its row.
#pragma once
#include "kv.cuh"

struct BlockSide {
    u64 base;
    const u64* plane_ptrs; // or null
    u64 plane_stride;
    u64 block_stride;
    u64 token_stride;
    u64 segment_stride;
    u64 num_blocks;

    __device__ __forceinline__ u64 at(u32 block, u32 plane, u32 token, u32 segment) const {
        const u64 start = plane_ptrs ? plane_ptrs[plane] : plane * plane_stride;
        return base + start + block * block_stride + token * token_stride +
               segment * segment_stride;
    }
};

// Units of a block, in the order in which they are numbered: planes slowest, segments fastest. A launch
// has fewer than 2^31 items, so that 32 bits count them and their grid strides.
struct BlockUnits {
    Divider31 planes;
    Divider31 tokens;
    Divider31 segments;
    Divider31 unit_vectors;

    __device__ __forceinline__ u32 vectors_of_block() const {
        return planes.divisor * tokens.divisor * segments.divisor * unit_vectors.divisor;
    }
};

static_assert(sizeof(BlockSide) == 56, "BlockSide of crates/kv-kernels/src/block_units.rs");
static_assert(sizeof(BlockUnits) == 48, "BlockUnits of crates/kv-kernels/src/block_units.rs");

// Which block goes where.
struct BlockPair {
    i32 source;
    i32 destination;

    __device__ __forceinline__ bool is_known(const BlockSide& to, const BlockSide& from) const {
        return source >= 0 && (u64)source < from.num_blocks && destination >= 0 &&
               (u64)destination < to.num_blocks;
    }
};

// Takes the remainder of a division by `count` off a number, which becomes the quotient. Axes of one
// place are common, and cost a branch that all threads take alike.
static __device__ __forceinline__ u32 take_digit(u32& number, const Divider31& count) {
    if (count.divisor == 1) return 0;
    const u32 quotient = count.quotient(number);
    const u32 digit = number - quotient * count.divisor;
    number = quotient;
    return digit;
}

// The number of an item taken apart.
struct UnitPlace {
    u32 pair;
    u32 plane;
    u32 token;
    u32 segment;
    u32 vector;

    static __device__ __forceinline__ UnitPlace of(const BlockUnits& units, u32 item) {
        UnitPlace place;
        place.vector = take_digit(item, units.unit_vectors);
        place.segment = take_digit(item, units.segments);
        place.token = take_digit(item, units.tokens);
        place.plane = take_digit(item, units.planes);
        place.pair = item;
        return place;
    }

    __device__ __forceinline__ bool is_first_of_pair() const {
        return (plane | token | segment | vector) == 0;
    }
};
