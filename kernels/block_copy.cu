// Copies blocks, or the same part of every row of them, between two memories, by pairs of ids.
//
// For each pair (source, destination), plane p, token t, segment s and vector v of a unit:
//   to.at(destination, p, t, s)[v] = from.at(source, p, t, s)[v]
// with `at` of blocks.cuh. Which strides either side has is its layout: two different ones make it a
// change of layout, and bases within the row make it a change of heads. Where `ids` of a side is 0, and not
// all ones, its block of a pair is the number of the pair in this launch, whatever the pair says.
//
// copy_blocks_N deals vectors out one tile after the other. copy_blocks_batched_N gives each block of threads a
// range of parts (a block of a pair in one plane), fetches the addresses of KV_COPY_BATCH parts at once and then
// moves them: pairs and plane tables in host memory cost one trip over the bus a batch, and few blocks of
// threads keep enough under way for a link between GPUs. Both give the same bytes.
//
// Launch of copy_blocks_N: one dimension, blockDim.x at most KV_COPY_THREADS. Blocks take tiles of
// blockDim.x * KV_COPY_UNROLL vectors in grid strides, so any gridDim.x is correct with which
// items + gridDim.x * blockDim.x * KV_COPY_UNROLL stays below 2^32.
// Launch of copy_blocks_batched_N: one dimension, any gridDim.x, blockDim.x at most KV_COPY_BATCH_THREADS; a part
// has at most KV_COPY_PART_VECTORS_MAX vectors.
//
// Reads  pairs[0 .. count], the plane tables, and the units of the source blocks. All of these may lie
//        in mapped host memory or on a peer.
// Writes the same units of the destination blocks. A pair of which either block is not in 0 .. num_blocks
//        of its side is passed over, and its place, counted from first_pair, is reported.
// The caller has checked: addresses, strides and unit lengths are multiples of the vector; every
// block below num_blocks lies in its memory; no block is a destination twice, or a source and a
// destination in the same memory.
#include "blocks.cuh"
#include "report.cuh"

// Whether blocks of a side are named by ids: all ones where they are, 0 where the place of a pair counts.
struct NamedByIds {
    u32 source;
    u32 destination;

    // Without a branch, because nearly all launches have ids on both sides.
    __device__ __forceinline__ BlockPair named(const BlockPair& pair, u32 place) const {
        return BlockPair{(i32)(((u32)pair.source & source) | (place & ~source)),
                         (i32)(((u32)pair.destination & destination) | (place & ~destination))};
    }
};

static_assert(sizeof(NamedByIds) == 8, "crates/kv-kernels/src/block_copy.rs");

template <typename Vector>
static __device__ __forceinline__ void copy_tile(const BlockSide& to, const BlockSide& from,
                                                 const BlockUnits& units, const BlockPair* pairs,
                                                 u32 items, const NamedByIds& ids, u32 first,
                                                 u64 first_pair, u64* report) {
    u64 target[KV_COPY_UNROLL];
    Vector held[KV_COPY_UNROLL];
#pragma unroll
    for (u32 k = 0; k < KV_COPY_UNROLL; ++k) {
        target[k] = 0;
        const u32 item = first + k * blockDim.x;
        if (item >= items) continue;
        const UnitPlace place = UnitPlace::of(units, item);
        const BlockPair pair = ids.named(pairs[place.pair], place.pair);
        if (!pair.is_known(to, from)) {
            if (place.is_first_of_pair()) report_bad(report, first_pair + place.pair);
            continue;
        }
        const u64 within = place.vector * (u64)sizeof(Vector);
        target[k] = to.at(pair.destination, place.plane, place.token, place.segment) + within;
        held[k] = *reinterpret_cast<const Vector*>(
            from.at(pair.source, place.plane, place.token, place.segment) + within);
    }
#pragma unroll
    for (u32 k = 0; k < KV_COPY_UNROLL; ++k) {
        if (target[k] != 0) *reinterpret_cast<Vector*>(target[k]) = held[k];
    }
}

template <typename Vector>
static __device__ __forceinline__ void copy_all(const BlockSide& to, const BlockSide& from,
                                                const BlockUnits& units, const BlockPair* pairs,
                                                u32 items, const NamedByIds& ids, u64 first_pair,
                                                u64* report) {
    const u32 tile = blockDim.x * KV_COPY_UNROLL;
    for (u32 first = blockIdx.x * tile + threadIdx.x; first < items; first += gridDim.x * tile) {
        copy_tile<Vector>(to, from, units, pairs, items, ids, first, first_pair, report);
    }
}

static_assert((u64)KV_COPY_BATCH * KV_COPY_PART_VECTORS_MAX <= 1ull << 32, "32 bits count a batch");

template <typename Vector>
static __device__ __forceinline__ void copy_batched(const BlockSide& to, const BlockSide& from,
                                                    const BlockUnits& units, const BlockPair* pairs,
                                                    u32 items, const NamedByIds& ids,
                                                    u64 first_pair, u64* report) {
    __shared__ u64 sources[KV_COPY_BATCH];
    __shared__ u64 targets[KV_COPY_BATCH];
    const u32 unit_vectors = units.unit_vectors.divisor;
    const u32 segments = units.segments.divisor;
    const u32 rows = units.tokens.divisor * segments;
    const u32 part_vectors = unit_vectors * rows;
    const u32 count = items / (part_vectors * units.planes.divisor);
    const u64 parts = (u64)count * units.planes.divisor;
    const u64 end = parts * (blockIdx.x + 1) / gridDim.x;
    for (u64 batch = parts * blockIdx.x / gridDim.x; batch < end; batch += KV_COPY_BATCH) {
        const u32 fetched = end - batch < KV_COPY_BATCH ? (u32)(end - batch) : KV_COPY_BATCH;
        for (u32 i = threadIdx.x; i < fetched; i += blockDim.x) {
            const u32 part = (u32)batch + i;
            const u32 plane = part / count;
            const u32 place = part - plane * count;
            const BlockPair pair = ids.named(pairs[place], place);
            const bool known = pair.is_known(to, from);
            if (!known && plane == 0) report_bad(report, first_pair + place);
            sources[i] = known ? from.at(pair.source, plane, 0, 0) : 0;
            targets[i] = known ? to.at(pair.destination, plane, 0, 0) : 0;
        }
        __syncthreads();
        const u64 vectors = (u64)fetched * part_vectors;
        const u64 stride = blockDim.x;
        for (u64 vector = threadIdx.x; vector < vectors; vector += KV_COPY_BATCH_UNROLL * stride) {
            Vector held[KV_COPY_BATCH_UNROLL];
            u64 target[KV_COPY_BATCH_UNROLL];
#pragma unroll
            for (u32 k = 0; k < KV_COPY_BATCH_UNROLL; ++k) {
                const u64 at = vector + k * stride;
                target[k] = 0;
                if (at >= vectors) continue;
                const u32 part = (u32)at / part_vectors;
                if (targets[part] == 0) continue;
                const u32 within = (u32)at - part * part_vectors;
                const u32 row = rows == 1 ? 0 : within / unit_vectors;
                const u32 token = segments == 1 ? row : row / segments;
                const u32 segment = row - token * segments;
                const u64 offset = (u64)(within - row * unit_vectors) * sizeof(Vector);
                held[k] = *reinterpret_cast<const Vector*>(
                    sources[part] + token * from.token_stride + segment * from.segment_stride + offset);
                target[k] =
                    targets[part] + token * to.token_stride + segment * to.segment_stride + offset;
            }
#pragma unroll
            for (u32 k = 0; k < KV_COPY_BATCH_UNROLL; ++k) {
                if (target[k] != 0) *reinterpret_cast<Vector*>(target[k]) = held[k];
            }
        }
        __syncthreads();
    }
}

#define COPY_BLOCKS(name, walk, threads, Vector)                                                   \
    extern "C" __global__ void __launch_bounds__(threads)                                          \
    name(const __grid_constant__ BlockSide to, const __grid_constant__ BlockSide from,             \
         const __grid_constant__ BlockUnits units, const BlockPair* pairs, u32 items,              \
         const __grid_constant__ NamedByIds ids, u64 first_pair, u64* report) {                    \
        walk<Vector>(to, from, units, pairs, items, ids, first_pair, report);                      \
    }
#define COPY_BLOCKS_OF(bytes, Vector)                                                              \
    COPY_BLOCKS(copy_blocks_##bytes, copy_all, KV_COPY_THREADS, Vector)                            \
    COPY_BLOCKS(copy_blocks_batched_##bytes, copy_batched, KV_COPY_BATCH_THREADS, Vector)

COPY_BLOCKS_OF(16, Words2)
COPY_BLOCKS_OF(8, Words1)
COPY_BLOCKS_OF(4, Bytes4)
COPY_BLOCKS_OF(2, Bytes2)
COPY_BLOCKS_OF(1, Bytes1)
