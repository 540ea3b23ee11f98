// What a word of KV adds to a sum, by its place.
#pragma once
#include "kv.cuh"

enum : u64 { GOLDEN = 0x9E3779B97F4A7C15ull, MIX = 0xD6E8FEB86659FD93ull };
enum : u64 { BAD_BLOCK = 0xBADB10C0BADB10C0ull };

// The key of the word with this index.
static __device__ __forceinline__ u64 key_of(u64 index) { return (index + 1) * GOLDEN; }

// A word mixed with the key of its place. The mixing can be undone, so that two words of one place never add
// the same; and it is not linear, so that what is lost in one place does not make up for what is lost in
// another, or for words that stand in each other's places. A word of zeros adds what its place tells.
// Shifts by 32 bits take one instruction, the products six in all.
static __device__ __forceinline__ u64 mixed(u64 word, u64 key) {
    u64 x = word ^ key;
    x = (x ^ (x >> 32)) * MIX;
    x = (x ^ (x >> 32)) * MIX;
    return x ^ (x >> 32);
}
