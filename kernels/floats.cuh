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

// The sign is put back by the caller; magnitudes are the bits of non-negative numbers.

// The code of a magnitude that is not below the smallest normal number of a format with `MANTISSA` bits
// after the point whose exponents are biased by `BIAS`; too large a number runs on beyond the format.
template <u32 MANTISSA, u32 BIAS>
static __device__ __forceinline__ u32 rounded_normal(u32 magnitude) {
    const u32 shift = 23 - MANTISSA;
    const u32 half = ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1);
    return ((magnitude + half) >> shift) - ((127 - BIAS) << MANTISSA);
}

// The code of any magnitude that is a number. Below the smallest normal number steps are equal: beside
// a number whose own steps are as long, adding rounds to them, and leaves the code in the lowest bits.
template <u32 MANTISSA, u32 BIAS>
static __device__ __forceinline__ u32 rounded(u32 magnitude) {
    const u32 beside = (127 + 23 + 1 - BIAS - MANTISSA) << 23;
    const u32 small = __float_as_uint(__fadd_rn(float_of(magnitude), float_of(beside))) - beside;
    return magnitude < ((128 - BIAS) << 23) ? small : rounded_normal<MANTISSA, BIAS>(magnitude);
}

// The magnitude of a code without its sign: its exponent is put in place and biased anew by a
// multiplication, which is exact, for the smallest codes too.
template <u32 MANTISSA, u32 BIAS>
static __device__ __forceinline__ u32 widened(u32 code) {
    const float rebias = float_of((127 + 127 - BIAS) << 23);
    return __float_as_uint(__fmul_rn(float_of(code << (23 - MANTISSA)), rebias));
}

template <u32 FORMAT> static __device__ __forceinline__ float wide_to_float(u32 code) {
    if (FORMAT == KV_BF16) return float_of(code << 16);
    const u32 magnitude = code & 0x7FFF;
    const u32 special = magnitude > 0x7C00 ? 0x7FC00000 : 0x7F800000;
    const u32 bits = magnitude >= 0x7C00 ? special : widened<10, 15>(magnitude);
    return float_of(((code & 0x8000) << 16) | bits);
}

template <u32 FORMAT> static __device__ __forceinline__ u32 wide_from_float(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7FFFFFFF;
    const bool is_nan = magnitude > 0x7F800000;
    if (FORMAT == KV_BF16) return is_nan ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const u32 code = rounded<10, 15>(magnitude);
    return is_nan ? 0x7FFF : ((bits >> 16) & 0x8000) | (code < 0x7C00 ? code : 0x7C00);
}

template <u32 FORMAT> static __device__ __forceinline__ float narrow_to_float(u32 code) {
    if (FORMAT == KV_INT8) return (float)(signed char)code;
    const u32 magnitude = code & 0x7F;
    u32 bits;
    if (FORMAT == KV_E4M3) {
        bits = magnitude == 0x7F ? 0x7FC00000 : widened<3, 7>(magnitude);
    } else {
        const u32 special = magnitude > 0x7C ? 0x7FC00000 : 0x7F800000;
        bits = magnitude >= 0x7C ? special : widened<2, 15>(magnitude);
    }
    return float_of(((code & 0x80) << 24) | bits);
}

template <u32 FORMAT> static __device__ __forceinline__ u32 narrow_from_float(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7FFFFFFF;
    const bool is_nan = magnitude > 0x7F800000;
    if (FORMAT == KV_INT8) {
        // Beyond 2^31 the conversion saturates.
        i32 whole = __float2int_rn(value);
        whole = whole > 127 ? 127 : whole;
        whole = whole < -128 ? -128 : whole;
        return is_nan ? 0 : (u32)whole & 0xFF;
    }
    const u32 most = FORMAT == KV_E4M3 ? 0x7E : 0x7B;
    // An infinity runs on beyond the format as large numbers do.
    const u32 code = FORMAT == KV_E4M3 ? rounded<3, 7>(magnitude) : rounded<2, 15>(magnitude);
    return is_nan ? 0x7F : ((bits >> 24) & 0x80) | (code < most ? code : most);
}

// The largest finite number of a narrow format.
static __device__ __forceinline__ float narrow_max(u32 format) {
    return format == KV_E4M3 ? 448.0f : format == KV_E5M2 ? 57344.0f : 127.0f;
}
