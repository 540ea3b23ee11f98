// Number formats of a KV cache, in pairs: what the conversions of the hardware take and give. Devices of
// compute capability 9.0 have one for every format. For those before, 8-bit floats are converted by
// integer operations and exact arithmetic. The result is the same to the bit on all of them.
//
//   wide    bf16, or f16
//   narrow  e4m3 (one NaN, no infinity), e5m2, or int8
//
// From single precision, numbers are rounded to the nearest, ties to even. Narrow formats saturate:
// what is too large, an infinity too, becomes the largest finite number of its sign. A NaN becomes
// 0x7F in either 8-bit float, and 0 as int8. f16 and bf16 overflow to infinity, as arithmetic does, and
// their NaN is 0x7FFF. No NaN keeps its sign or payload.
#pragma once
#include "kv.cuh"

enum : u32 { KV_BF16 = 0, KV_F16 = 1 };
enum : u32 { KV_E4M3 = 0, KV_E5M2 = 1, KV_INT8 = 2 };

static __device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

// Two numbers, of which `low` comes first in memory.
struct Pair {
    float low;
    float high;
};

static __device__ __forceinline__ Pair pair_of_halves(u32 codes) {
    Pair pair;
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "mov.b32 {low, high}, %2;\n\t"
        "cvt.f32.f16 %0, low;\n\t"
        "cvt.f32.f16 %1, high;\n\t"
        "}"
        : "=f"(pair.low), "=f"(pair.high)
        : "r"(codes));
    return pair;
}

// Two 16-bit codes, of which the lower comes first.
template <u32 FORMAT> static __device__ __forceinline__ Pair wide_decoded(u32 codes) {
    if (FORMAT == KV_BF16) return Pair{float_of(codes << 16), float_of(codes & 0xFFFF0000)};
    return pair_of_halves(codes);
}

template <u32 FORMAT> static __device__ __forceinline__ u32 wide_encoded(Pair pair) {
    u32 codes;
    if (FORMAT == KV_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(pair.high), "f"(pair.low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(pair.high), "f"(pair.low));
    }
    return codes;
}

// A single 8-bit float of `MANTISSA` bits after the point whose exponents are biased by `BIAS`.
template <u32 MANTISSA, u32 BIAS> static __device__ __forceinline__ u32 narrow_float(float value) {
    const u32 bits = __float_as_uint(value);
    // A NaN becomes the largest too, and is seen to below.
    const float magnitude = fminf(fabsf(value), MANTISSA == 3 ? 448.0f : 57344.0f);
    // Beside a power of two whose steps are those of the format at this number, adding rounds to them.
    const u32 power = __float_as_uint(magnitude) & 0x7F800000;
    const u32 least = (128 - BIAS) << 23;
    const float beside = float_of((power > least ? power : least) + ((23 - MANTISSA) << 23));
    const float rounded = __fadd_rn(__fadd_rn(magnitude, beside), -beside);
    // Where the smallest normal numbers of both formats meet, so do the codes: exactly, as no bit is lost.
    const float rebiased = __fmul_rn(rounded, float_of(BIAS << 23));
    const u32 code = (__float_as_uint(rebiased) >> (23 - MANTISSA)) | ((bits >> 24) & 0x80);
    return value == value ? code : 0x7F;
}

// Two 8-bit codes in 16 bits, of which the lower comes first.
template <u32 FORMAT> static __device__ __forceinline__ u32 narrow_encoded(Pair pair) {
    if (FORMAT == KV_INT8) {
        // Beyond 2^31 the first step saturates, and it makes 0 of a NaN.
        const i32 low = __float2int_rn(pair.low);
        const i32 high = __float2int_rn(pair.high);
        u32 codes;
        asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(codes) : "r"(high), "r"(low), "r"(0));
        return codes;
    }
#if __CUDA_ARCH__ >= 900
    unsigned short codes;
    if (FORMAT == KV_E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(codes)
            : "f"(pair.high), "f"(pair.low));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;"
            : "=h"(codes)
            : "f"(pair.high), "f"(pair.low));
    }
    return codes;
#else
    if (FORMAT == KV_E4M3) return narrow_float<3, 7>(pair.low) | narrow_float<3, 7>(pair.high) << 8;
    return narrow_float<2, 15>(pair.low) | narrow_float<2, 15>(pair.high) << 8;
#endif
}

template <u32 FORMAT> static __device__ __forceinline__ Pair narrow_decoded(u32 codes) {
    if (FORMAT == KV_INT8) {
        return Pair{(float)(signed char)codes, (float)(signed char)(codes >> 8)};
    }
    u32 halves;
#if __CUDA_ARCH__ >= 900
    if (FORMAT == KV_E4M3) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));
    } else {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));
    }
#else
    // Each code as the upper byte of a half: as it stands that is the half of e5m2.
    halves = __byte_perm(codes, 0, 0x1404);
    if (FORMAT == KV_E4M3) {
        // One exponent bit fewer, and a bias that is 8 less: the product is exact. A NaN is made one.
        const u32 magnitudes = halves & 0x7F007F00;
        const u32 nans = ((magnitudes + 0x01000100) & 0x80008000) >> 15;
        const u32 shifted = (halves & 0x80008000) | (magnitudes >> 1);
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(shifted), "r"(0x5C005C00));
        halves |= nans * 0x7FFF;
    }
#endif
    return pair_of_halves(halves);
}

// The largest finite number of a narrow format.
static __device__ __forceinline__ float narrow_max(u32 format) {
    return format == KV_E4M3 ? 448.0f : format == KV_E5M2 ? 57344.0f : 127.0f;
}
