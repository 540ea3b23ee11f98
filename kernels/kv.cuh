// What every kernel of this folder shares: fixed-width integers, tuning constants, and the way in
// which threads are laid over rows.
//
// No system header is included, so the sources need nothing but a compiler: `cargo xtask kernels`
// hands this file to the run-time compiler beside the source that includes it.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static_assert(sizeof(u32) == 4 && sizeof(i32) == 4, "u32 and i32 are four bytes");
static_assert(sizeof(u64) == 8 && sizeof(i64) == 8, "u64 and i64 are eight bytes");
static_assert(sizeof(void*) == 8, "pointers travel as eight-byte arguments");

// Threads of a block, at most, for kernels that move or fill rows.
#define KV_ROW_THREADS 256
// Threads of a block, at most, for the transfer, of which a thread moves one vector.
#define KV_TRANSFER_THREADS 256
// Chunks that one launch of the transfer moves, at most: their descriptions travel as parameters.
#define KV_TRANSFER_CHUNKS 16
// Threads of a block, at most, for the walk, and the vectors that a thread has in flight at once.
#define KV_WALK_THREADS 1024
#define KV_WALK_UNROLL 4
// The same two, threads and vectors, for the copy of blocks by pairs.
#define KV_COPY_THREADS 1024
#define KV_COPY_UNROLL 2
// The same two for its batched walk, which fetches the addresses of so many parts at once. A part has at
// most so many vectors that 32 bits count those of a batch.
#define KV_COPY_BATCH_THREADS 512
#define KV_COPY_BATCH_UNROLL 4
#define KV_COPY_BATCH 256
#define KV_COPY_PART_VECTORS_MAX (1u << 24)
// Vectors that a thread of a sum has in flight at once, and the blocks of KV_ROW_THREADS that a
// multiprocessor holds at least: as many as leave registers for these vectors.
#define KV_SUM_UNROLL 4
#define KV_SUM_BLOCKS 5
// Threads of a block, at most, for the reader, whose blocks each sum one KV block, and the blocks that a
// multiprocessor holds at least: with a fourth, registers are too few; without the bound, loads wait longer.
#define KV_SUM_THREADS 512
#define KV_SUM_READERS 3
// Threads of a warp.
#define KV_WARP 32

// One and two 64-bit words: what a thread moves at once where only 8, or 16, bytes are aligned.
// Constants are enumerators here and elsewhere: variables would be left over in the module.
struct __align__(8) Words1 {
    enum : u32 { COUNT = 1 };
    u64 word[1];
};
struct __align__(16) Words2 {
    enum : u32 { COUNT = 2 };
    u64 word[2];
};

// What a thread moves at once where less is aligned.
struct Bytes1 {
    u8 byte;
};
struct __align__(2) Bytes2 {
    unsigned short half;
};
struct __align__(4) Bytes4 {
    u32 word;
};

// Loads of rows. Transfers load as any kernel does where the second cache holds all of the rows or hardly any of
// them, and stream where it holds a part (kernels/README.md has the measurements): what was streamed
// is the first to leave the second cache, and leaves the first one to the tables.
#define KV_LOADS(name, hint)                                                                       \
    static __device__ __forceinline__ void name(u64 from, Words2& to) {                            \
        asm volatile("ld.global" hint ".v2.u64 {%0, %1}, [%2];"                                    \
                     : "=l"(to.word[0]), "=l"(to.word[1])                                          \
                     : "l"(from));                                                                 \
    }                                                                                              \
    static __device__ __forceinline__ void name(u64 from, Words1& to) {                            \
        asm volatile("ld.global" hint ".u64 %0, [%1];" : "=l"(to.word[0]) : "l"(from));            \
    }                                                                                              \
    static __device__ __forceinline__ void name(u64 from, Bytes4& to) {                            \
        asm volatile("ld.global" hint ".u32 %0, [%1];" : "=r"(to.word) : "l"(from));               \
    }                                                                                              \
    static __device__ __forceinline__ void name(u64 from, Bytes2& to) {                            \
        asm volatile("ld.global" hint ".u16 %0, [%1];" : "=h"(to.half) : "l"(from));               \
    }                                                                                              \
    static __device__ __forceinline__ void name(u64 from, Bytes1& to) {                            \
        u32 byte;                                                                                  \
        asm volatile("ld.global" hint ".u8 %0, [%1];" : "=r"(byte) : "l"(from));                   \
        to.byte = (u8)byte;                                                                        \
    }
KV_LOADS(load_cached, "")
KV_LOADS(load_streaming, ".L1::no_allocate")
#undef KV_LOADS

// Stores of rows, which are the first to leave the second cache.
static __device__ __forceinline__ void store_streaming(u64 to, Words2 from) {
    asm volatile("st.global.cs.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(from.word[0]), "l"(from.word[1])
                 : "memory");
}
static __device__ __forceinline__ void store_streaming(u64 to, Words1 from) {
    asm volatile("st.global.cs.u64 [%0], %1;" ::"l"(to), "l"(from.word[0]) : "memory");
}
static __device__ __forceinline__ void store_streaming(u64 to, Bytes4 from) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(from.word) : "memory");
}
static __device__ __forceinline__ void store_streaming(u64 to, Bytes2 from) {
    asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to), "h"(from.half) : "memory");
}
static __device__ __forceinline__ void store_streaming(u64 to, Bytes1 from) {
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(to), "r"((u32)from.byte) : "memory");
}

// Division by a number that the host knows, for numbers below 2^31: one high product instead of some
// hundred instructions. With 2^shift the least power of two that is not below the divisor, `magic` is
// floor(2^32 * (2^shift - divisor) / divisor) + 1 (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication", 1994). The sum does not wrap, because the product is not above the
// number.
struct Divider31 {
    u32 divisor;
    u32 magic;
    u32 shift;

    __device__ __forceinline__ u32 quotient(u32 n) const {
        return (__umulhi(n, magic) + n) >> shift;
    }
};
// The same for every 64-bit number, with one correction: `magic` is floor((2^64 - 1) / divisor). The
// estimate is the quotient or one less: with 2^64 - 1 = magic * divisor + r it falls short of
// n / divisor by n * (1 + r) / (divisor * 2^64), which is less than 1.
struct Divider64 {
    u64 divisor;
    u64 magic;

    __device__ __forceinline__ u64 quotient(u64 n) const {
        const u64 estimate = __umul64hi(n, magic);
        return estimate + (n - estimate * divisor >= divisor ? 1 : 0);
    }
};

// Whether 16 bytes at a time are aligned, given everything that must be a multiple of 16 or-ed
// together.
static __device__ __forceinline__ bool aligned_16(u64 bits) { return (bits & 15) == 0; }

// Threads laid over rows: a group of neighbouring threads takes a row, and the threads of the
// group take neighbouring vectors of it. A group is a warp, or the smallest power of two that
// covers a row of fewer than 32 vectors, so that short rows leave few threads idle.
struct RowGroup {
    u32 shift; // log2 of the threads of a group
    u32 lane;  // this thread within its group

    static __device__ __forceinline__ RowGroup over(u64 row_bytes) {
        // Where an address forbids 16 bytes at a time, the group takes the row in two strides.
        const u64 vector_bytes = aligned_16(row_bytes) ? 16 : 8;
        u32 shift = 5;
        while (shift > 0 && (vector_bytes << (shift - 1)) >= row_bytes) shift -= 1;
        return RowGroup{shift, threadIdx.x & ((1u << shift) - 1)};
    }

    // The threads of a group: the stride from one vector of a thread to its next.
    __device__ __forceinline__ u32 width() const { return 1u << shift; }

    // The first row of this thread's group, of all rows that the whole grid walks.
    __device__ __forceinline__ u64 first_in_grid() const {
        return ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> shift;
    }
    // How many rows the whole grid takes at once.
    __device__ __forceinline__ u64 rows_of_grid() const {
        return ((u64)gridDim.x * blockDim.x) >> shift;
    }

    // The same two for rows that one block walks alone.
    __device__ __forceinline__ u64 first_in_block() const { return threadIdx.x >> shift; }
    __device__ __forceinline__ u64 rows_of_block() const { return blockDim.x >> shift; }
};

// Where the row of a token lies in a paged plane.
struct PagedLayout {
    u64 block_tokens;
    u64 block_stride_bytes;
    u64 token_stride_bytes;

    __device__ __forceinline__ u64 offset(u64 block, u64 token_in_block) const {
        return block * block_stride_bytes + token_in_block * token_stride_bytes;
    }
};
