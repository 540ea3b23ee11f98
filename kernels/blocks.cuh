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

    __device__ __forceinline__ u64 at(u64 block, u64 plane, u64 token, u64 segment) const {
        const u64 start = plane_ptrs ? plane_ptrs[plane] : plane * plane_stride;
        return base + start + block * block_stride + token * token_stride +
               segment * segment_stride;
    }
};

// Units of a block, in the order in which they are numbered: planes slowest, segments fastest.
struct BlockUnits {
    u64 planes;
    u64 tokens;
    u64 segments;
    u64 unit_vectors;
};

static_assert(sizeof(BlockSide) == 56, "BlockSide of crates/kv-kernels/src/block_units.rs");
static_assert(sizeof(BlockUnits) == 32, "BlockUnits of crates/kv-kernels/src/block_units.rs");

// One number taken apart, fastest first; the host checks that each count but the last is below 2^31.
struct UnitPlace {
    u64 pair;
    u32 plane;
    u32 token;
    u32 segment;
    u32 vector;

    // Where item `first` lies. One division for each axis that has more than one place.
    static __device__ __forceinline__ UnitPlace of(const BlockUnits& units, u64 first) {
        UnitPlace place;
        place.vector = (u32)take(first, units.unit_vectors);
        place.segment = (u32)take(first, units.segments);
        place.token = (u32)take(first, units.tokens);
        place.plane = (u32)take(first, units.planes);
        place.pair = first;
        return place;
    }

    // The place `on` items further, where `on` is below 2^31.
    __device__ __forceinline__ UnitPlace plus(const BlockUnits& units, u32 on) const {
        UnitPlace place = *this;
        carry(place.vector, on, units.unit_vectors);
        carry(place.segment, on, units.segments);
        carry(place.token, on, units.tokens);
        carry(place.plane, on, units.planes);
        place.pair += on;
        return place;
    }

  private:
    static __device__ __forceinline__ u64 take(u64& number, u64 count) {
        if (count == 1) return 0;
        const u64 quotient = number / count;
        const u64 rest = number - quotient * count;
        number = quotient;
        return rest;
    }
    static __device__ __forceinline__ void carry(u32& digit, u32& on, u64 count) {
        if (on == 0) return;
        const u32 sum = digit + on;
        // Most steps stay within a unit or go on by a few.
        on = 0;
        if (sum < (u32)count) {
            digit = sum;
        } else {
            on = sum / (u32)count;
            digit = sum - on * (u32)count;
        }
    }
};
