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
// Launch: one dimension, blockDim.x a multiple of 32 and at most KV_ROW_THREADS.
//   quantize, dequantize  gridDim.x = ceil(items / (blockDim.x * KV_CONVERT_UNROLL))
//   measure               gridDim.x = ceil(items * lanes / blockDim.x)
// where items, and items * lanes, are at most 2^31. Items are those of whole pairs, and `lanes`
// neighbouring threads measure a group.
//
// Reads and writes as copy_blocks does (block_copy.cu), and reads the scales (measure writes them). A
// pair of which either id is out of range is passed over and its place reported (by measure too).
// The caller has checked what the head of block_copy.cu names, and that every scale lies in its array;
// for measure, that no two groups share a scale, and that the runs of a launch are all of a row.
#include "blocks.cuh"
#include "floats.cuh"
#include "report.cuh"

struct Scales {
    float* scales;
    u64 plane_stride;
    u64 block_stride;
    u64 token_stride;
    u64 head_stride;

    __device__ __forceinline__ float* at(u32 block, u32 plane, u32 token, u32 head) const {
        return scales + plane * plane_stride + block * block_stride + token * token_stride +
               head * head_stride;
    }
};

struct Formats {
    u32 wide;
    u32 narrow;
    Divider31 head_units; // units of a head
    u32 first_unit;       // units of the row before those of this launch
};

static_assert(sizeof(Scales) == 40 && sizeof(Formats) == 24, "crates/kv-kernels/src/quantize.rs");

// Elements that lie together, in pairs. One alone is the lower of its pair.
template <u32 COUNT> struct __align__(2 * COUNT) WideVector {
    u32 pair[COUNT / 2];
};
template <u32 COUNT> struct __align__(COUNT) NarrowVector {
    unsigned short pair[COUNT / 2];
};
template <> struct WideVector<1> {
    unsigned short pair[1];
};
template <> struct NarrowVector<1> {
    u8 pair[1];
};

// What a conversion reads and writes at once.
template <u32 COUNT, bool QUANTIZE> struct Converted {
    typedef WideVector<COUNT> Source;
    typedef NarrowVector<COUNT> Target;
};
template <u32 COUNT> struct Converted<COUNT, false> {
    typedef NarrowVector<COUNT> Source;
    typedef WideVector<COUNT> Target;
};

// The numbers of a vector, in pairs. The formats are the same for all threads, so that one branch is taken.
template <u32 COUNT> struct Numbers {
    enum : u32 { PAIRS = (COUNT + 1) / 2 };
    Pair pair[PAIRS];

    __device__ __forceinline__ Numbers(const WideVector<COUNT>& codes, const Formats& formats) {
        if (formats.wide == KV_BF16) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) pair[i] = wide_decoded<KV_BF16>(codes.pair[i]);
        } else {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) pair[i] = wide_decoded<KV_F16>(codes.pair[i]);
        }
    }
    __device__ __forceinline__ Numbers(const NarrowVector<COUNT>& codes, const Formats& formats) {
        if (formats.narrow == KV_E4M3) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) pair[i] = narrow_decoded<KV_E4M3>(codes.pair[i]);
        } else if (formats.narrow == KV_E5M2) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) pair[i] = narrow_decoded<KV_E5M2>(codes.pair[i]);
        } else {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) pair[i] = narrow_decoded<KV_INT8>(codes.pair[i]);
        }
    }

    __device__ __forceinline__ void multiply(float factor) {
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) {
            pair[i] = Pair{__fmul_rn(pair[i].low, factor), __fmul_rn(pair[i].high, factor)};
        }
    }

    __device__ __forceinline__ void encode(WideVector<COUNT>& codes, const Formats& formats) const {
        if (formats.wide == KV_BF16) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) codes.pair[i] = wide_encoded<KV_BF16>(pair[i]);
        } else {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) codes.pair[i] = wide_encoded<KV_F16>(pair[i]);
        }
    }
    __device__ __forceinline__ void encode(NarrowVector<COUNT>& codes, const Formats& formats) const {
        if (formats.narrow == KV_E4M3) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) codes.pair[i] = narrow_encoded<KV_E4M3>(pair[i]);
        } else if (formats.narrow == KV_E5M2) {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) codes.pair[i] = narrow_encoded<KV_E5M2>(pair[i]);
        } else {
#pragma unroll
            for (u32 i = 0; i < PAIRS; ++i) codes.pair[i] = narrow_encoded<KV_INT8>(pair[i]);
        }
    }
};

// The vectors that a thread holds. All of its loads are in flight before its first store.
template <u32 COUNT, bool QUANTIZE> struct Held {
    typename Converted<COUNT, QUANTIZE>::Source source;
    u64 target; // 0 where there is none
    float scale;
};

template <u32 COUNT, bool QUANTIZE>
static __device__ __forceinline__ void
store_all(const Formats& formats, const Held<COUNT, QUANTIZE> (&held)[KV_CONVERT_UNROLL]) {
    typedef typename Converted<COUNT, QUANTIZE>::Target Target;
#pragma unroll
    for (u32 k = 0; k < KV_CONVERT_UNROLL; ++k) {
        if (held[k].target == 0) continue;
        Numbers<COUNT> numbers(held[k].source, formats);
        numbers.multiply(QUANTIZE ? __frcp_rn(held[k].scale) : held[k].scale);
        Target codes;
        numbers.encode(codes, formats);
        *reinterpret_cast<Target*>(held[k].target) = codes;
    }
}

// Where an item of `count` pairs lies. Items are numbered pair by pair, or plane by plane where the blocks of
// the destination lie apart in every plane: fewer pages of memory are then written at once.
template <typename Target>
static __device__ __forceinline__ UnitPlace place_of(const BlockSide& to, const BlockUnits& units,
                                                     u32 count, u32 item) {
    UnitPlace place = UnitPlace::of(units, item);
    if (to.block_stride < units.vectors_of_block() * (u64)sizeof(Target)) {
        const u32 part = place.pair * units.planes.divisor + place.plane;
        place.plane = part / count;
        place.pair = part - place.plane * count;
    }
    return place;
}

// Warps take tiles of KV_CONVERT_UNROLL vectors a thread. In most tiles all vectors are of one plane of one
// pair, which is then found once.
template <u32 COUNT, bool QUANTIZE>
static __device__ __forceinline__ void
convert_tile(const BlockSide& to, const BlockSide& from, const BlockUnits& units,
             const BlockPair* pairs, u32 items, u64 first_pair, const Scales& scales,
             const Formats& formats, u64* report) {
    typedef typename Converted<COUNT, QUANTIZE>::Source Source;
    typedef typename Converted<COUNT, QUANTIZE>::Target Target;
    const u32 lane = threadIdx.x % KV_WARP;
    const u32 tile = KV_WARP * KV_CONVERT_UNROLL;
    const u32 first = (blockIdx.x * blockDim.x + threadIdx.x - lane) * KV_CONVERT_UNROLL;
    if (first >= items) return;
    Held<COUNT, QUANTIZE> held[KV_CONVERT_UNROLL];
    const u32 count = items / units.vectors_of_block();
    const UnitPlace start = place_of<Target>(to, units, count, first);
    const u32 unit_vectors = units.unit_vectors.divisor;
    const u32 segments = units.segments.divisor;
    const u32 in_plane = (start.token * segments + start.segment) * unit_vectors + start.vector;
    // Single elements are too slow for it to matter.
    if (COUNT > 1 && in_plane + tile <= units.tokens.divisor * segments * unit_vectors) {
        const BlockPair pair = pairs[start.pair];
        if (!pair.is_known(to, from)) {
            if (lane == 0 && start.is_first_of_pair()) report_bad(report, first_pair + start.pair);
            return;
        }
        const u64 source = from.at(pair.source, start.plane, 0, 0);
        const u64 target = to.at(pair.destination, start.plane, 0, 0);
        const u32 narrow_block = QUANTIZE ? pair.destination : pair.source;
        const float* const scale = scales.at(narrow_block, start.plane, 0, 0);
#pragma unroll
        for (u32 k = 0; k < KV_CONVERT_UNROLL; ++k) {
            const u32 item = in_plane + lane + k * KV_WARP;
            const u32 unit = units.unit_vectors.quotient(item);
            const u32 vector = item - unit * unit_vectors;
            const u32 token = units.segments.quotient(unit);
            const u32 segment = unit - token * segments;
            const u64 at = source + token * from.token_stride + segment * from.segment_stride;
            held[k].source = reinterpret_cast<const Source*>(at)[vector];
            held[k].target = target + token * to.token_stride + segment * to.segment_stride +
                             vector * (u64)sizeof(Target);
            const u32 head = formats.head_units.quotient(formats.first_unit + segment);
            held[k].scale = scale[token * scales.token_stride + head * scales.head_stride];
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < KV_CONVERT_UNROLL; ++k) {
            held[k].target = 0;
            const u32 item = first + lane + k * KV_WARP;
            if (item >= items) continue;
            const UnitPlace place = place_of<Target>(to, units, count, item);
            const BlockPair pair = pairs[place.pair];
            if (!pair.is_known(to, from)) {
                if (place.is_first_of_pair()) report_bad(report, first_pair + place.pair);
                continue;
            }
            const u64 source = from.at(pair.source, place.plane, place.token, place.segment);
            held[k].source = reinterpret_cast<const Source*>(source)[place.vector];
            held[k].target = to.at(pair.destination, place.plane, place.token, place.segment) +
                             place.vector * (u64)sizeof(Target);
            const u32 head = formats.head_units.quotient(formats.first_unit + place.segment);
            const u32 narrow_block = QUANTIZE ? pair.destination : pair.source;
            held[k].scale = *scales.at(narrow_block, place.plane, place.token, head);
        }
    }
    store_all(formats, held);
}

#define CONVERT(name, COUNT, QUANTIZE)                                                             \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS, KV_CONVERT_BLOCKS)                \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u32 items,              \
         u64 first_pair, const __grid_constant__ Scales scales,                                    \
         const __grid_constant__ Formats formats, u64* report) {                                   \
        convert_tile<COUNT, QUANTIZE>(to, from, units, pairs, items, first_pair, scales, formats,  \
                                      report);                                                     \
    }

CONVERT(quantize_blocks_8, 8, true)
CONVERT(quantize_blocks_1, 1, true)
CONVERT(dequantize_blocks_8, 8, false)
CONVERT(dequantize_blocks_1, 1, false)

// How elements of a pair share scales: groups in the order [plane][token][head], and a group in the
// order of its memory, `tokens` by `segments` by `unit_vectors`.
struct ScaleGroups {
    Divider31 planes;
    Divider31 token_groups;
    Divider31 head_groups;
    u32 tokens; // of a group
    Divider31 segments;
    Divider31 unit_vectors;
    u32 vectors; // of a group
    u32 lanes;   // 1, 2, 4, 8, 16 or 32
};

static_assert(sizeof(ScaleGroups) == 72, "RawScaleGroups of crates/kv-kernels/src/quantize.rs");

// Vectors that a thread reads before it looks at the first.
#define MEASURED_IN_FLIGHT 2

// The larger magnitudes of two pairs, of which the second may be of either sign. A NaN counts as
// nothing, as long as the first is none.
template <u32 WIDE> static __device__ __forceinline__ u32 larger_pair(u32 largest, u32 codes) {
    const u32 magnitudes = codes & 0x7FFF7FFF;
    u32 result;
    if (WIDE == KV_BF16) {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(magnitudes));
    } else {
        asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(magnitudes));
    }
    return result;
}

// The largest magnitude, as its code, that this thread finds in a group, of which it takes every
// `lanes`-th vector.
template <u32 COUNT, u32 WIDE>
static __device__ __forceinline__ u32 largest_code(const BlockSide& from, const ScaleGroups& groups,
                                                   u32 source, const UnitPlace& place, u32 lane) {
    typedef WideVector<COUNT> Wide;
    const u32 pairs = COUNT == 1 ? 1 : COUNT / 2;
    u32 largest = 0;
    for (u32 first = lane; first < groups.vectors; first += MEASURED_IN_FLIGHT * groups.lanes) {
        Wide held[MEASURED_IN_FLIGHT];
#pragma unroll
        for (u32 k = 0; k < MEASURED_IN_FLIGHT; ++k) {
#pragma unroll
            for (u32 i = 0; i < pairs; ++i) held[k].pair[i] = 0;
            u32 token = first + k * groups.lanes;
            if (token >= groups.vectors) continue;
            const u32 vector = take_digit(token, groups.unit_vectors);
            const u32 segment = take_digit(token, groups.segments);
            const u64 unit = from.at(source, place.plane, place.token * groups.tokens + token,
                                     place.segment * groups.segments.divisor + segment);
            held[k] = reinterpret_cast<const Wide*>(unit)[vector];
        }
#pragma unroll
        for (u32 k = 0; k < MEASURED_IN_FLIGHT; ++k) {
#pragma unroll
            for (u32 i = 0; i < pairs; ++i) largest = larger_pair<WIDE>(largest, held[k].pair[i]);
        }
    }
    const u32 low = largest & 0xFFFF;
    const u32 high = largest >> 16;
    return low > high ? low : high;
}

static __device__ __forceinline__ float scale_of(u32 largest, const Formats& formats) {
    // An infinity counts as the largest finite number.
    const u32 infinity = formats.wide == KV_BF16 ? 0x7F80 : 0x7C00;
    const u32 finite = largest < infinity ? largest : infinity - 1;
    const float most = formats.wide == KV_BF16 ? wide_decoded<KV_BF16>(finite).low
                                               : wide_decoded<KV_F16>(finite).low;
    const float scale = __fdiv_rn(most, narrow_max(formats.narrow));
    const float normal = __float_as_uint(scale) < 0x00800000 ? float_of(0x00800000) : scale;
    return largest == 0 ? 1.0f : normal;
}

template <u32 COUNT>
static __device__ __forceinline__ void
measure_group(const BlockSide& to, const BlockSide& from, const ScaleGroups& groups,
              const BlockPair* pairs, u32 items, u64 first_pair, const Scales& scales,
              const Formats& formats, u64* report) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 lane = thread & (groups.lanes - 1);
    UnitPlace place{0, 0, 0, 0, 0};
    place.pair = thread >> (31 - __clz(groups.lanes));
    // Threads without a group stay, because they exchange values below.
    const bool has_group = place.pair < items;
    BlockPair pair{-1, -1};
    if (has_group) {
        place.segment = take_digit(place.pair, groups.head_groups);
        place.token = take_digit(place.pair, groups.token_groups);
        place.plane = take_digit(place.pair, groups.planes);
        pair = pairs[place.pair];
    }
    const bool known = pair.is_known(to, from);
    if (has_group && !known && lane == 0 && place.is_first_of_pair()) {
        report_bad(report, first_pair + place.pair);
    }
    u32 largest = 0;
    if (known) {
        largest = formats.wide == KV_BF16
                      ? largest_code<COUNT, KV_BF16>(from, groups, pair.source, place, lane)
                      : largest_code<COUNT, KV_F16>(from, groups, pair.source, place, lane);
    }
    for (u32 apart = groups.lanes / 2; apart > 0; apart /= 2) {
        const u32 other = __shfl_down_sync(0xFFFFFFFFu, largest, apart);
        largest = other > largest ? other : largest;
    }
    if (!known || lane != 0) return;
    *scales.at(pair.destination, place.plane, place.token, place.segment) =
        scale_of(largest, formats);
}

#define MEASURE(name, COUNT)                                                                       \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ ScaleGroups groups, const BlockPair* pairs, u32 items,            \
         u64 first_pair, const __grid_constant__ Scales scales,                                    \
         const __grid_constant__ Formats formats, u64* report) {                                   \
        measure_group<COUNT>(to, from, groups, pairs, items, first_pair, scales, formats, report); \
    }

MEASURE(measure_scales_8, 8)
MEASURE(measure_scales_1, 1)
