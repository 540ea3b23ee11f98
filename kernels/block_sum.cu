// Sums whole blocks of bytes, in an order that does not depend on their layout, so that a block that
// is stored elsewhere can be verified.
//
// The bytes of a block, planes slowest and then tokens and the bytes of a row, padded with zeros to
// whole words, are words w of 64 bits. The sum of block ids[n] is added to sums[n]:
//   the wrapping sum over all words of  mixed(word[w], key_of(w))
// which mix.cuh has.
//
// A kernel reads pieces of 16, 8, 4, 2 or 1 bytes, which are numbered in the same order. A thread takes a
// piece at a time, or all the pieces of a word where they are smaller: these may lie in rows, in parts of rows
// and in planes of their own.
//
// Launch: gridDim.x over slices of a block, gridDim.y over ids, both in grid strides, so any grid is
// correct with which pieces + gridDim.x * blockDim.x * KV_SUM_UNROLL stays below 2^32; blockDim.x a
// multiple of 32 and at most KV_ROW_THREADS.
//
// Reads  ids[0 .. count], the plane table and the rows of the blocks named; all may lie in mapped host
//        memory.
// Writes sums[0 .. count], to which it adds: BAD_BLOCK where an id is not in 0 .. num_blocks; its place is
//        then reported too.
// The caller has checked: addresses, strides, segments and rows are multiples of the piece; a block has fewer
// than 2^31 pieces, and segments and rows are not empty.
#include "blocks.cuh"
#include "mix.cuh"
#include "reduce.cuh"
#include "report.cuh"

// What lies alike in all rows: segments, counted in pieces, in equal steps.
struct RowPart {
    u64 offset; // from a block's start in its plane
    u64 token_stride;
    u64 segment_stride;
    u32 first; // pieces of a row before the part; more than a row has where there is no such part
    Divider31 segment;
};

// Where the rows of blocks lie.
struct BlockRows {
    const u64* plane_ptrs; // in the order layer * kv_count + kv
    u64 block_stride;
    u64 num_blocks;
    RowPart keys[2];   // of rows of all planes, or of every second one
    RowPart values[2]; // of the others
    Divider31 row;
    Divider31 tokens;
    u32 kinds;  // 2 where values lie differently from keys, or 1
    u32 pieces; // of a block
};

static_assert(sizeof(BlockRows) == 216, "RawBlockRows of crates/kv-kernels/src/block_sum.rs");

// A piece, and how many lie together from there on.
struct PiecePlace {
    u64 address;
    u32 together;
};

template <typename Piece>
static __device__ __forceinline__ PiecePlace place_in_part(const RowPart& part, u64 plane, u32 token,
                                                           u32 in_row) {
    u32 segment = in_row - part.first;
    const u32 inside = segment;
    segment = part.segment.quotient(segment);
    const u32 in_segment = inside - segment * part.segment.divisor;
    const u64 address = plane + part.offset + token * part.token_stride +
                        segment * part.segment_stride + in_segment * (u64)sizeof(Piece);
    return PiecePlace{address, part.segment.divisor - in_segment};
}

template <typename Piece>
static __device__ __forceinline__ PiecePlace place_of(const BlockRows& rows, u32 block, u32 piece) {
    u32 plane = rows.row.quotient(piece);
    const u32 in_row = piece - plane * rows.row.divisor;
    const u32 token = take_digit(plane, rows.tokens);
    const u64 start = rows.plane_ptrs[plane] + block * rows.block_stride;
    if (rows.kinds == 2 && plane % 2 == 1) {
        return in_row < rows.values[1].first
                   ? place_in_part<Piece>(rows.values[0], start, token, in_row)
                   : place_in_part<Piece>(rows.values[1], start, token, in_row);
    }
    return in_row < rows.keys[1].first ? place_in_part<Piece>(rows.keys[0], start, token, in_row)
                                       : place_in_part<Piece>(rows.keys[1], start, token, in_row);
}

// What a vector adds whose first word has this key.
static __device__ __forceinline__ u64 share(Words2 vector, u64 key) {
    return mixed(vector.word[0], key) + mixed(vector.word[1], key + GOLDEN);
}
static __device__ __forceinline__ u64 share(Words1 vector, u64 key) { return mixed(vector.word[0], key); }

static __device__ __forceinline__ u64 bits_of(Bytes4 piece) { return piece.word; }
static __device__ __forceinline__ u64 bits_of(Bytes2 piece) { return piece.half; }
static __device__ __forceinline__ u64 bits_of(Bytes1 piece) { return piece.byte; }

// This thread's share of a tile, KV_SUM_UNROLL vectors for each thread of a warp. Most tiles lie together, and
// have one address.
template <typename Vector>
static __device__ __forceinline__ u64 sum_of_tile(const BlockRows& rows, u32 block, u32 first) {
    const u32 own = first + threadIdx.x % KV_WARP;
    const u64 key = key_of((u64)own * Vector::COUNT);
    const u64 key_step = KV_WARP * Vector::COUNT * GOLDEN;
    Vector held[KV_SUM_UNROLL];
    const PiecePlace start = place_of<Vector>(rows, block, first);
    u64 sum = 0;
    if (start.together >= KV_WARP * KV_SUM_UNROLL) {
        const u64 at = start.address + (own - first) * (u64)sizeof(Vector);
#pragma unroll
        for (u32 k = 0; k < KV_SUM_UNROLL; ++k) {
            load_streaming(at + k * (KV_WARP * sizeof(Vector)), held[k]);
        }
#pragma unroll
        for (u32 k = 0; k < KV_SUM_UNROLL; ++k) sum += share(held[k], key + k * key_step);
        return sum;
    }
#pragma unroll
    for (u32 k = 0; k < KV_SUM_UNROLL; ++k) {
        const u32 piece = own + k * KV_WARP;
        if (piece < rows.pieces) load_streaming(place_of<Vector>(rows, block, piece).address, held[k]);
    }
#pragma unroll
    for (u32 k = 0; k < KV_SUM_UNROLL; ++k) {
        if (own + k * KV_WARP < rows.pieces) sum += share(held[k], key + k * key_step);
    }
    return sum;
}

// This thread's share of a block, in pieces of whole words.
template <typename Vector, bool WHOLE>
struct Sums {
    static __device__ __forceinline__ u64 of_thread(const BlockRows& rows, u32 block) {
        const u32 warp = blockIdx.x * blockDim.x + threadIdx.x - threadIdx.x % KV_WARP;
        const u32 step = gridDim.x * blockDim.x * KV_SUM_UNROLL;
        u64 sum = 0;
        for (u32 tile = warp * KV_SUM_UNROLL; tile < rows.pieces; tile += step) {
            sum += sum_of_tile<Vector>(rows, block, tile);
        }
        return sum;
    }
};

// The same in smaller pieces.
template <typename Piece>
struct Sums<Piece, false> {
    static __device__ __forceinline__ u64 of_thread(const BlockRows& rows, u32 block) {
        const u32 of_word = 8 / sizeof(Piece);
        const u32 words = (rows.pieces + of_word - 1) / of_word;
        u64 sum = 0;
        for (u32 w = blockIdx.x * blockDim.x + threadIdx.x; w < words; w += gridDim.x * blockDim.x) {
            u64 word = 0;
#pragma unroll
            for (u32 k = 0; k < of_word; ++k) {
                const u32 number = w * of_word + k;
                if (number >= rows.pieces) break;
                Piece piece;
                load_streaming(place_of<Piece>(rows, block, number).address, piece);
                word |= bits_of(piece) << (8 * sizeof(Piece) * k);
            }
            sum += mixed(word, key_of(w));
        }
        return sum;
    }
};

template <typename Piece>
static __device__ __forceinline__ void sum_all(const BlockRows& rows, const i32* ids, u64 count,
                                               u64* sums, u64* report) {
    __shared__ u64 of_warp[KV_ROW_THREADS / KV_WARP];
    for (u64 place = blockIdx.y; place < count; place += gridDim.y) {
        const i32 block = ids[place];
        if (block < 0 || (u64)block >= rows.num_blocks) {
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                atomicAdd(sums + place, (u64)BAD_BLOCK);
                report_bad(report, place);
            }
            continue;
        }
        const u64 share = Sums<Piece, sizeof(Piece) >= 8>::of_thread(rows, (u32)block);
        const u64 sum = sum_over_block(share, of_warp);
        if (threadIdx.x == 0) atomicAdd(sums + place, sum);
    }
}

#define SUM_BLOCKS(name, Piece)                                                                    \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS, KV_SUM_BLOCKS)                    \
    name(const __grid_constant__ BlockRows rows, const i32* ids, u64 count, u64* sums,             \
         u64* report) {                                                                            \
        sum_all<Piece>(rows, ids, count, sums, report);                                            \
    }

SUM_BLOCKS(sum_blocks_16, Words2)
SUM_BLOCKS(sum_blocks_8, Words1)
SUM_BLOCKS(sum_blocks_4, Bytes4)
SUM_BLOCKS(sum_blocks_2, Bytes2)
SUM_BLOCKS(sum_blocks_1, Bytes1)
