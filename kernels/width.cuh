// The bytes that a thread moves at once, for sources that are built once for each: KV_WIDTH, and the
// vector and the entries' names that follow from it.
#pragma once
#include "kv.cuh"

#define KV_JOINED(name, width) name##_##width
#define KV_WITH(name, width) KV_JOINED(name, width)
#define KV_NAMED(name) KV_WITH(name, KV_WIDTH)

template <u32 WIDTH> struct VectorOf;
template <> struct VectorOf<16> { typedef Words2 Type; };
template <> struct VectorOf<8> { typedef Words1 Type; };
template <> struct VectorOf<4> { typedef Bytes4 Type; };
template <> struct VectorOf<2> { typedef Bytes2 Type; };
template <> struct VectorOf<1> { typedef Bytes1 Type; };

typedef VectorOf<KV_WIDTH>::Type WidthVector;
