// Number formats of a KV cache, by integer operations and single precision alone, so that the result
// is the same to the bit on every device.
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

// The code, without its sign, of a finite single-precision magnitude in a format of `MANTISSA` bits
// after the point whose exponents are biased by `BIAS`; too large a number runs on beyond the format.
template <u32 MANTISSA, u32 BIAS>
static __device__ __forceinline__ u32 rounded(u32 magnitude) {
    const u32 exponent = magnitude >> 23;
    if (exponent >= 128 - BIAS) {
        const u32 shift = 23 - MANTISSA;
        const u32 half = ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1);
        return ((magnitude + half) >> shift) - ((127 - BIAS) << MANTISSA);
    }
    // Below the smallest normal number steps stay as they are.
    const u32 shift = 23 - MANTISSA + (128 - BIAS) - exponent;
    if (shift > 24) return 0;
    const u32 whole = (magnitude & 0x7FFFFF) | 0x800000;
    const u32 half = ((1u << (shift - 1)) - 1) + ((whole >> shift) & 1);
    return (whole + half) >> shift;
}

static __device__ __forceinline__ float wide_to_float(u32 code, u32 format) {
    if (format == KV_BF16) {
        const bool is_nan = (code & 0x7FFF) > 0x7F80;
        return float_of(is_nan ? 0x7FC00000 : code << 16);
    }
    const u32 sign = (code & 0x8000) << 16;
    const u32 exponent = (code >> 10) & 31;
    const u32 mantissa = code & 0x3FF;
    if (exponent == 31) return float_of(mantissa ? 0x7FC00000 : sign | 0x7F800000);
    if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // A multiple of 2^-24.
    return float_of(sign | __float_as_uint((float)mantissa * 5.9604644775390625e-8f));
}

static __device__ __forceinline__ u32 wide_from_float(float value, u32 format) {
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    if (format == KV_BF16) return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const u32 code = magnitude == 0x7F800000 ? 0x7C00 : rounded<10, 15>(magnitude);
    return ((bits >> 16) & 0x8000) | (code < 0x7C00 ? code : 0x7C00);
}

static __device__ __forceinline__ float narrow_to_float(u32 code, u32 format) {
    if (format == KV_INT8) return (float)(signed char)code;
    const u32 sign = (code & 0x80) << 24;
    const u32 magnitude = code & 0x7F;
    if (format == KV_E4M3) {
        if (magnitude == 0x7F) return float_of(0x7FC00000);
        if (magnitude >= 8) return float_of(sign | ((magnitude << 20) + (120u << 23)));
        return float_of(sign | __float_as_uint((float)magnitude * 0.001953125f)); // 2^-9
    }
    if (magnitude > 0x7C) return float_of(0x7FC00000);
    if (magnitude == 0x7C) return float_of(sign | 0x7F800000);
    if (magnitude >= 4) return float_of(sign | ((magnitude << 21) + (112u << 23)));
    return float_of(sign | __float_as_uint((float)magnitude * 1.52587890625e-5f)); // 2^-16
}

static __device__ __forceinline__ u32 narrow_from_float(float value, u32 format) {
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7FFFFFFF;
    if (format == KV_INT8) {
        if (magnitude > 0x7F800000) return 0;
        // Beyond 2^31 the conversion saturates.
        i32 whole = __float2int_rn(value);
        whole = whole > 127 ? 127 : whole;
        whole = whole < -128 ? -128 : whole;
        return (u32)whole & 0xFF;
    }
    if (magnitude > 0x7F800000) return 0x7F;
    const u32 sign = (bits >> 24) & 0x80;
    const u32 most = format == KV_E4M3 ? 0x7E : 0x7B;
    if (magnitude == 0x7F800000) return sign | most;
    const u32 code = format == KV_E4M3 ? rounded<3, 7>(magnitude) : rounded<2, 15>(magnitude);
    return sign | (code < most ? code : most);
}

// The largest finite number of a narrow format.
static __device__ __forceinline__ float narrow_max(u32 format) {
    return format == KV_E4M3 ? 448.0f : format == KV_E5M2 ? 57344.0f : 127.0f;
}
