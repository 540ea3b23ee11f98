// Moves rows of KV between contiguous chunks and paged memory: what the transfer kernels share.
//
//   chunk   row of (kv, layer, token) at
//             address + kv * kv_stride + layer * layer_stride + token * token_stride,
//           row_bytes = row_vectors * sizeof(Vector) bytes in one piece
//   paged   plane c = kv * plane_layers + layer begins at plane_ptrs[c]. A row there is made of at
//           most two parts, each of segments of equal length. Byte x of segment i of a part, of token
//           t of block b, lies at
//             plane_ptrs[c] + b * block_stride + part.offset + t * part.token_stride
//                           + i * part.segment_stride + x
//           and the row in the chunk is the segments of the first part in order, then the second's.
//   mapping by slots: token n has slot s = mapping[n] (i64): b = s / block_tokens,
//           t = s % block_tokens; by blocks: b = mapping[n / block_tokens] (i32),
//           t = n % block_tokens
//
// A chunk has moved = tokens - skip tokens to move in each plane; its moved rows are numbered
// (kv * layers + layer) * moved + (token - skip), and a launch takes `rows` of them from `first_row`
// on. One item is one vector of one row. Items are dealt out in order, tile by tile: a tile is
// blockDim.x * KV_TRANSFER_UNROLL items, so that a warp's accesses to the chunk are one piece, every
// thread has several loads in flight, and short rows leave no thread idle.
//
// Launch: one dimension, blockDim.x a multiple of 32 and at most KV_TRANSFER_THREADS, the same that
// the tiles of the chunks were counted with. Any gridDim.x is correct.
//
// Reads  plane_ptrs, the mapping of tokens skip .. tokens, and the rows to move.
// Writes the rows moved to, of tokens that have a block in 0 .. num_blocks. A skipped token is neither
//        read nor written on either side. A row whose block is not negative and yet out of range is
//        told to `report`, with its token's place in the mapping.
// The caller has checked: every address, stride, offset and segment length is a multiple of the
// vector; every range lies in its allocation; no two tokens that are stored share a slot; chunks and
// planes do not overlap; moved < 2^31 and row_vectors < 2^31.
#pragma once
#include "report.cuh"

// Chunk to paged memory. Any other value of `direction` is paged memory to chunk.
#define KV_TO_PAGED 0
// The mapping names slots. Any other value of `mapping_kind` is block ids.
#define KV_BY_SLOT 0

// A part of every row in the pages. Lengths are in vectors, strides and offset in bytes.
struct TransferPart {
    u64 offset;
    u64 token_stride;
    u64 segment_stride;
    Divider32 segment_vectors;
};

struct TransferPages {
    const u64* plane_ptrs;
    u64* report; // or null
    u64 num_blocks;
    u64 block_stride;
    Divider64 block_tokens;
    TransferPart parts[2];
    Divider64 row_vectors_wide;
    Divider32 row_vectors;
    Divider32 layers; // of the chunk
    u32 first_part_vectors;
    u32 plane_layers; // of the paged memory
    u32 first_layer;  // of the chunk, in the paged memory
    u32 direction;
    u32 mapping_kind;
    u32 chunks;
    u32 vector_bytes; // for the CPU reference, which serves every vector
    u32 reserved;
};

struct TransferChunk {
    u64 address;
    const void* mapping;
    u64 first_row;
    u64 items;      // rows * row_vectors
    u64 first_tile; // tiles of the chunks before
    u64 kv_stride;
    u64 layer_stride;
    u64 token_stride;
    Divider64 moved_wide;
    Divider32 moved;
    u32 skip;
    u32 reserved;
};

static_assert(sizeof(TransferPages) == 176, "TransferPages of crates/kv-kernels/src/launch.rs");
static_assert(sizeof(TransferChunk) == 96, "TransferChunk of crates/kv-kernels/src/launch.rs");

struct TransferChunks {
    TransferChunk chunk[KV_TRANSFER_CHUNKS];
};

// Where a vector of a row lies in the row's block, from the block's start in its plane.
template <typename Vector, bool PLAIN>
static __device__ __forceinline__ u64 offset_in_block(const TransferPages& pages, u64 token,
                                                      u32 vector) {
    if (PLAIN) return token * pages.parts[0].token_stride + vector * (u64)sizeof(Vector);
    const bool second = vector >= pages.first_part_vectors;
    const TransferPart& a = pages.parts[0];
    const TransferPart& b = pages.parts[1];
    if (second) vector -= pages.first_part_vectors;
    const Divider32 segment_vectors{
        second ? b.segment_vectors.divisor : a.segment_vectors.divisor,
        second ? b.segment_vectors.magic : a.segment_vectors.magic};
    const u32 segment = segment_vectors.quotient(vector);
    vector -= segment * segment_vectors.divisor;
    return (second ? b.offset : a.offset) + token * (second ? b.token_stride : a.token_stride) +
           segment * (second ? b.segment_stride : a.segment_stride) +
           vector * (u64)sizeof(Vector);
}

// Where an item comes from and goes to; both 0 for one that does not move.
struct TransferEnds {
    u64 from;
    u64 to;
};

// Moves a thread's items: all of its loads are in flight before its first store.
template <typename Vector, u32 COUNT>
static __device__ __forceinline__ void move_items(const TransferEnds (&ends)[COUNT]) {
    Vector vectors[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ends[k].to) vectors[k] = *reinterpret_cast<const Vector*>(ends[k].from);
    }
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ends[k].to) *reinterpret_cast<Vector*>(ends[k].to) = vectors[k];
    }
}

// One tile of one chunk, beginning at item `first`.
template <typename Vector, bool PLAIN>
static __device__ __forceinline__ void transfer_tile(const TransferPages& pages,
                                                     const TransferChunk& chunk, u64 first) {
    // Where the tile begins takes 64 bits; its items count on from there with 32.
    const u64 first_row = pages.row_vectors_wide.quotient(first);
    const u32 first_vector = (u32)(first - first_row * pages.row_vectors_wide.divisor);
    const u64 row = chunk.first_row + first_row;
    const u32 first_plane = (u32)chunk.moved_wide.quotient(row);
    const u32 first_token = (u32)(row - first_plane * chunk.moved_wide.divisor);

    TransferEnds ends[KV_TRANSFER_UNROLL];
#pragma unroll
    for (u32 k = 0; k < KV_TRANSFER_UNROLL; ++k) {
        ends[k] = TransferEnds{0, 0};
        const u32 local = k * blockDim.x + threadIdx.x;
        if (first + local >= chunk.items) continue;
        const u32 rows_on = pages.row_vectors.quotient(first_vector + local);
        const u32 vector = first_vector + local - rows_on * pages.row_vectors.divisor;
        const u32 planes_on = chunk.moved.quotient(first_token + rows_on);
        const u32 token =
            chunk.skip + first_token + rows_on - planes_on * chunk.moved.divisor;
        const u32 plane = first_plane + planes_on;
        const u32 kv = pages.layers.quotient(plane);
        const u32 layer = plane - kv * pages.layers.divisor;

        u64 block;
        u64 token_in_block;
        bool named;
        u64 place = token;
        if (pages.mapping_kind == KV_BY_SLOT) {
            const i64 slot = static_cast<const i64*>(chunk.mapping)[token];
            block = pages.block_tokens.quotient((u64)slot);
            token_in_block = (u64)slot - block * pages.block_tokens.divisor;
            named = slot >= 0;
        } else {
            place = pages.block_tokens.quotient(token);
            const i32 id = static_cast<const i32*>(chunk.mapping)[place];
            block = (u64)(i64)id;
            token_in_block = token - place * pages.block_tokens.divisor;
            named = id >= 0;
        }
        if (!named || block >= pages.num_blocks) {
            if (named && vector == 0) report_bad(pages.report, place);
            continue;
        }
        const u64 in_pages =
            pages.plane_ptrs[(u64)kv * pages.plane_layers + pages.first_layer + layer] +
            block * pages.block_stride + offset_in_block<Vector, PLAIN>(pages, token_in_block, vector);
        const u64 in_chunk = chunk.address + kv * chunk.kv_stride + layer * chunk.layer_stride +
                             token * chunk.token_stride + vector * (u64)sizeof(Vector);
        const bool to_paged = pages.direction == KV_TO_PAGED;
        ends[k] = TransferEnds{to_paged ? in_chunk : in_pages, to_paged ? in_pages : in_chunk};
    }

    move_items<Vector, KV_TRANSFER_UNROLL>(ends);
}

// Every tile of every chunk, in grid strides.
template <typename Vector, bool PLAIN>
static __device__ __forceinline__ void transfer_tiles(const TransferPages& pages,
                                                      const TransferChunks& chunks) {
    const u64 tile_items = (u64)blockDim.x * KV_TRANSFER_UNROLL;
    u32 at = 0;
    for (u64 tile = blockIdx.x;; tile += gridDim.x) {
        // Tiles of a block only grow, so the chunk is the same or a later one.
        u64 first = (tile - chunks.chunk[at].first_tile) * tile_items;
        while (first >= chunks.chunk[at].items) {
            at += 1;
            if (at >= pages.chunks) return;
            first = (tile - chunks.chunk[at].first_tile) * tile_items;
        }
        transfer_tile<Vector, PLAIN>(pages, chunks.chunk[at], first);
    }
}

// A row is plain where it is one piece in the pages too.
template <typename Vector>
static __device__ __forceinline__ void transfer(const TransferPages& pages,
                                                const TransferChunks& chunks) {
    if (pages.parts[0].offset == 0 &&
        pages.parts[0].segment_vectors.divisor == pages.row_vectors.divisor) {
        transfer_tiles<Vector, true>(pages, chunks);
    } else {
        transfer_tiles<Vector, false>(pages, chunks);
    }
}
