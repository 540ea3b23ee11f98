// Converts blocks between a 16-bit and an 8-bit cache, on their way from one memory to another.
//
// For each pair (source, destination), plane p, token t, head h and element x of a head, with the
// scale s of (p, narrow block, t, h), where the narrow block is that of the 8-bit side:
//   quantize    to[destination][p][t][h][x] = narrow(wide(from[source][p][t][h][x]) * (1 / s))
//   dequantize  to[destination][p][t][h][x] = wide(narrow(from[source][p][t][h][x]) * s)
//   measure     s = max over the elements of its group of |wide(from[source]...)| / largest number,
//               at least 2^-126, and 1 where all elements are 0. NaN are left out; an infinity counts
//               as the largest finite 16-bit number.
// in single precision, each operation rounded once; see floats.cuh for the conversions. A unit is a
// head, or a piece of one. Scales lie at
//   scales[p * plane_stride + block * block_stride + t * token_stride + h * head_stride]
// where a stride of 0 means that the scale does not depend on that index. A group of `measure` is all
// elements that share a scale: all tokens where token_stride is 0, all heads where head_stride is 0.
//
// Launch: one dimension, blockDim.x a multiple of 32 and at most KV_ROW_THREADS; any gridDim.x of
// up to 2^31 threads is correct. A warp measures a group.
//
// Reads and writes as copy_blocks does (block_copy.cu), and reads the scales (measure writes them). A
// pair of which either id is out of range is passed over and its place reported (by measure too).
// The caller has checked what the head of block_copy.cu names, and that every scale lies in its array;
// for measure, that no two groups share a scale, and that the runs of a launch are all of a row.
#include "blocks.cuh"
#include "floats.cuh"
#include "report.cuh"

struct BlockPair {
    i32 source;
    i32 destination;
};

struct Scales {
    float* scales;
    u64 plane_stride;
    u64 block_stride;
    u64 token_stride;
    u64 head_stride;

    __device__ __forceinline__ float* at(u64 block, u64 plane, u64 token, u64 head) const {
        return scales + plane * plane_stride + block * block_stride + token * token_stride +
               head * head_stride;
    }
};

struct Formats {
    u32 wide;
    u32 narrow;
    u32 head_units; // units of a head
    u32 first_unit; // units of the row before those of this launch
};

static_assert(sizeof(Scales) == 40 && sizeof(Formats) == 16, "crates/kv-kernels/src/quantize.rs");

// Elements that lie together, in either width.
template <u32 COUNT>
struct __align__(2 * COUNT) WideVector {
    unsigned short code[COUNT];
};
template <u32 COUNT>
struct __align__(COUNT) NarrowVector {
    u8 code[COUNT];
};

static __device__ __forceinline__ bool is_known(BlockPair pair, const BlockSide& to,
                                                const BlockSide& from) {
    return pair.source >= 0 && (u64)pair.source < from.num_blocks && pair.destination >= 0 &&
           (u64)pair.destination < to.num_blocks;
}

// The elements of one vector.
template <u32 COUNT, bool QUANTIZE, u32 WIDE, u32 NARROW>
static __device__ __forceinline__ void convert_as(u64 target, u64 source, float scale) {
    if (QUANTIZE) {
        const WideVector<COUNT> wide = *reinterpret_cast<const WideVector<COUNT>*>(source);
        const float inverse = __frcp_rn(scale);
        NarrowVector<COUNT> narrow;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const float value = wide_to_float<WIDE>(wide.code[i]);
            narrow.code[i] = (u8)narrow_from_float<NARROW>(__fmul_rn(value, inverse));
        }
        *reinterpret_cast<NarrowVector<COUNT>*>(target) = narrow;
    } else {
        const NarrowVector<COUNT> narrow = *reinterpret_cast<const NarrowVector<COUNT>*>(source);
        WideVector<COUNT> wide;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const float value = narrow_to_float<NARROW>(narrow.code[i]);
            wide.code[i] = (unsigned short)wide_from_float<WIDE>(__fmul_rn(value, scale));
        }
        *reinterpret_cast<WideVector<COUNT>*>(target) = wide;
    }
}

// The formats are the same for all threads, so that only one branch is taken.
template <u32 COUNT, bool QUANTIZE>
static __device__ __forceinline__ void convert_vector(const Formats& formats, u64 target,
                                                      u64 source, float scale) {
    if (formats.wide == KV_BF16) {
        if (formats.narrow == KV_E4M3) {
            convert_as<COUNT, QUANTIZE, KV_BF16, KV_E4M3>(target, source, scale);
        } else if (formats.narrow == KV_E5M2) {
            convert_as<COUNT, QUANTIZE, KV_BF16, KV_E5M2>(target, source, scale);
        } else {
            convert_as<COUNT, QUANTIZE, KV_BF16, KV_INT8>(target, source, scale);
        }
    } else {
        if (formats.narrow == KV_E4M3) {
            convert_as<COUNT, QUANTIZE, KV_F16, KV_E4M3>(target, source, scale);
        } else if (formats.narrow == KV_E5M2) {
            convert_as<COUNT, QUANTIZE, KV_F16, KV_E5M2>(target, source, scale);
        } else {
            convert_as<COUNT, QUANTIZE, KV_F16, KV_INT8>(target, source, scale);
        }
    }
}

template <u32 COUNT, bool QUANTIZE>
static __device__ __forceinline__ void convert_all(const BlockSide& to, const BlockSide& from,
                                                   const BlockUnits& units,
                                                   const BlockPair* pairs, u64 items,
                                                   const Scales& scales, const Formats& formats,
                                                   u64* report) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 source_bytes = QUANTIZE ? 2 * COUNT : COUNT;
    const u64 target_bytes = QUANTIZE ? COUNT : 2 * COUNT;
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    UnitPlace place = UnitPlace::of(units, item);
    for (; item < items; item += threads, place = place.plus(units, (u32)threads)) {
        const BlockPair pair = pairs[place.pair];
        if (!is_known(pair, to, from)) {
            if ((place.plane | place.token | place.segment | place.vector) == 0) {
                report_bad(report, place.pair);
            }
            continue;
        }
        const u64 source = from.at(pair.source, place.plane, place.token, place.segment) +
                           place.vector * source_bytes;
        const u64 target = to.at(pair.destination, place.plane, place.token, place.segment) +
                           place.vector * target_bytes;
        const u32 head = (formats.first_unit + place.segment) / formats.head_units;
        const u64 narrow_block = QUANTIZE ? pair.destination : pair.source;
        const float scale = *scales.at(narrow_block, place.plane, place.token, head);
        convert_vector<COUNT, QUANTIZE>(formats, target, source, scale);
    }
}

#define CONVERT(name, COUNT, QUANTIZE)                                                             \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u64 items,              \
         const __grid_constant__ Scales scales, const __grid_constant__ Formats formats,           \
         u64* report) {                                                                            \
        convert_all<COUNT, QUANTIZE>(to, from, units, pairs, items, scales, formats, report);      \
    }

CONVERT(quantize_blocks_8, 8, true)
CONVERT(quantize_blocks_1, 1, true)
CONVERT(dequantize_blocks_8, 8, false)
CONVERT(dequantize_blocks_1, 1, false)

// The magnitude of an element as its code without the sign, which is ordered as the numbers are: 0 of a
// NaN, and of an infinity that of the largest finite number.
static __device__ __forceinline__ u32 magnitude_of(u32 code, u32 infinity) {
    const u32 magnitude = code & 0x7FFF;
    const u32 finite = magnitude < infinity ? magnitude : infinity - 1;
    return magnitude > infinity ? 0 : finite;
}

template <u32 COUNT>
static __device__ __forceinline__ void
measure_all(const BlockSide& to, const BlockSide& from, const BlockUnits& units,
            const BlockPair* pairs, u64 count, const Scales& scales, const Formats& formats,
            u64* report) {
    const u64 heads = units.segments / formats.head_units;
    const u64 token_groups = scales.token_stride != 0 ? units.tokens : 1;
    const u64 head_groups = scales.head_stride != 0 ? heads : 1;
    const u64 groups = count * units.planes * token_groups * head_groups;
    const u64 tokens = units.tokens / token_groups;
    const u64 segments = units.segments / head_groups;
    const u32 infinity = formats.wide == KV_BF16 ? 0x7F80 : 0x7C00;
    const u32 lane = threadIdx.x % KV_WARP;
    const u64 warps = (u64)gridDim.x * blockDim.x / KV_WARP;
    const u64 vectors = tokens * segments * units.unit_vectors;
    const BlockUnits axes{units.planes, token_groups, head_groups, 1};
    const BlockUnits inner{1, tokens, segments, units.unit_vectors};
    u64 group = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / KV_WARP;
    UnitPlace place = UnitPlace::of(axes, group);
    for (; group < groups; group += warps, place = place.plus(axes, (u32)warps)) {
        const BlockPair pair = pairs[place.pair];
        if (!is_known(pair, to, from)) {
            if (lane == 0 && (place.plane | place.token | place.segment) == 0) {
                report_bad(report, place.pair);
            }
            continue;
        }
        u32 largest = 0;
        UnitPlace at = UnitPlace::of(inner, lane);
        for (u64 vector = lane; vector < vectors; vector += KV_WARP, at = at.plus(inner, KV_WARP)) {
            const u64 address =
                from.at(pair.source, place.plane, place.token * tokens + at.token,
                        place.segment * segments + at.segment);
            const WideVector<COUNT> held =
                reinterpret_cast<const WideVector<COUNT>*>(address)[at.vector];
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                const u32 magnitude = magnitude_of(held.code[i], infinity);
                largest = magnitude > largest ? magnitude : largest;
            }
        }
#pragma unroll
        for (u32 apart = KV_WARP / 2; apart > 0; apart /= 2) {
            const u32 other = __shfl_down_sync(0xFFFFFFFFu, largest, apart);
            largest = other > largest ? other : largest;
        }
        if (lane != 0) continue;
        const float most = formats.wide == KV_BF16 ? wide_to_float<KV_BF16>(largest)
                                                   : wide_to_float<KV_F16>(largest);
        float scale = __fdiv_rn(most, narrow_max(formats.narrow));
        if (__float_as_uint(scale) < 0x00800000) scale = float_of(0x00800000);
        if (largest == 0) scale = 1.0f;
        *scales.at(pair.destination, place.plane, place.token, place.segment) = scale;
    }
}

#define MEASURE(name, COUNT)                                                                       \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u64 count,              \
         const __grid_constant__ Scales scales, const __grid_constant__ Formats formats,           \
         u64* report) {                                                                            \
        measure_all<COUNT>(to, from, units, pairs, count, scales, formats, report);                \
    }

MEASURE(measure_scales_8, 8)
MEASURE(measure_scales_1, 1)
