// Moves rows of KV between contiguous chunks and paged memory: what transfers and walks share.
//
//   chunk   row of (kv, layer, token), row_bytes bytes in one piece. Moved row r of plane
//           c = kv * layers + layer, of tokens - skip moved rows in each, lies
//             r + c * moved + (c + 1) * skip  rows after the chunk's row 0
//   paged   plane c begins at plane_ptrs[c + kv * layers_left_out]. A row there is made of at most two
//           parts, each of segments of equal length. Byte x of segment i of a part, of token t of
//           block b, lies at
//             plane + b * block_stride + part.offset + t * part.token_stride
//                   + i * part.segment_stride + x
//           and the row in the chunk is the segments of the first part in order, then the second's.
//   mapping by slots: token n has slot s = mapping[n] (i64): b = s / block_tokens,
//           t = s % block_tokens; by blocks: b = mapping[n / block_tokens] (i32),
//           t = n % block_tokens
//
// Items are vectors of moved rows, from `first_row` on, in that order: a warp's accesses to the chunk are
// one piece, and short rows leave no thread idle. `address` is that of the chunk's row
// `first_row + skip`, so that item i of plane c lies at
//   address + i * sizeof(Vector) + c * skip_bytes
//
// Index arithmetic is 32-bit but for the addresses. What is longer, the host cuts into launches. Only what
// it cannot cut, because the device alone knows the mapping, has 64 bits: strides and slots, in the walk's
// `WideRows`, which may also have an offset, or two parts.
//
// Launch: one dimension of threads, a multiple of 32;
//   transfer_N   at most KV_TRANSFER_THREADS, gridDim.x >= ceil(items / blockDim.x): each block moves
//                one tile of the chunk
//   transfers_N  the same for every chunk, gridDim.y = chunks
//   walk_N       at most KV_WALK_THREADS, any gridDim.x; a mapping by blocks, or with layers_left_out, is
//                for `WideRows`
//
// Reads  plane_ptrs, the mapping of tokens skip .. tokens, and the rows to move.
// Writes the rows moved to, of tokens whose place is in 0 .. places: the slots, or blocks, that are ready.
//        A skipped token is neither read nor written on either side. A row whose place is not negative
//        and yet not ready is told to `report`, with its token's entry in the mapping.
// The caller has checked: every address, stride, offset and segment length is a multiple of the vector;
// every range lies in its allocation; no two tokens that are stored share a slot; chunks and planes do
// not overlap. Rows with their skip, items, and slots unless the rows are wide, are fewer than 2^31, and
// so are gridDim.x * blockDim.x * KV_WALK_UNROLL; strides are below 2^32 unless the rows are wide.
#pragma once
#include "report.cuh"

// Chunk to paged memory. Any other value of `direction` is paged memory to chunk.
#define KV_TO_PAGED 0
// The mapping names slots. Any other value of `mapping_kind` is block ids.
#define KV_BY_SLOT 0

struct TransferPages {
    const u64* plane_ptrs; // from the chunks' first layer on
    u64* report;           // or null
    Divider31 row_vectors;
    Divider31 segment_vectors;
    Divider31 block_tokens;
    Divider31 layers; // of the chunks
    u32 places;       // slots, or blocks, that are ready
    u32 block_stride;
    u32 token_stride;
    u32 segment_stride;
    u32 layers_left_out; // of the paged memory, between a kv's last layer of the chunks and the next's first
    u32 direction;
    u32 mapping_kind;
    u32 chunks;
    u32 vector_bytes; // for the CPU reference, which serves every vector
    u32 streams;      // whether loads are streamed
};

struct TransferChunk {
    u64 address;
    const void* mapping;
    Divider31 moved;
    u32 skip;
    u32 skip_bytes; // skip * row bytes
    u32 first_row;
    u32 items;
    u32 reserved;
};

static_assert(sizeof(TransferPages) == 104, "TransferPages of crates/kv-kernels/src/walk.rs");
static_assert(sizeof(TransferChunk) == 48, "TransferChunk of crates/kv-kernels/src/walk.rs");

struct TransferChunks {
    TransferChunk chunk[KV_TRANSFER_CHUNKS];
};

// A part of every row, with 64 bits.
struct WidePart {
    u64 offset; // of its first segment, from the start of a block
    u64 token_stride;
    u64 segment_stride;
    Divider31 segment_vectors;
    u32 reserved;
};

// Rows that the walk takes with 64 bits, and in two parts. `first_vectors`, those of the first part, is 0 for
// rows that are not wide.
struct WideRows {
    u64 block_stride;
    u64 places;
    Divider64 block_tokens;
    WidePart parts[2];
    u32 first_vectors;
    u32 reserved;
};

static_assert(sizeof(WideRows) == 120, "WideRows of crates/kv-kernels/src/walk.rs");

// Where an item lies, before its place in the mapping is known.
struct TransferItem {
    u32 vector; // of its row
    u32 plane;
    u32 token;

    __device__ __forceinline__ TransferItem(const TransferPages& pages, const TransferChunk& chunk,
                                          u32 item) {
        const u32 moved_row = pages.row_vectors.quotient(item);
        const u32 row = chunk.first_row + moved_row;
        vector = item - moved_row * pages.row_vectors.divisor;
        plane = chunk.moved.quotient(row);
        token = chunk.skip + row - plane * chunk.moved.divisor;
    }
};

// Tells of those of a thread's items that begin a row whose place is not ready. This is rare, so it
// finds them once more instead of keeping what it needs.
template <bool BY_SLOT_ONLY>
static __device__ __forceinline__ void report_items(const TransferPages& pages,
                                                    const TransferChunk& chunk, i64 places, u32 first,
                                                    u32 count) {
#pragma unroll 1
    for (u32 k = 0; k < count; ++k) {
        const TransferItem item(pages, chunk, first + k * blockDim.x);
        if (item.vector != 0) continue;
        u32 entry = item.token;
        i64 place;
        if (BY_SLOT_ONLY || pages.mapping_kind == KV_BY_SLOT) {
            place = static_cast<const i64*>(chunk.mapping)[entry];
        } else {
            entry = pages.block_tokens.quotient(entry);
            place = static_cast<const i32*>(chunk.mapping)[entry];
        }
        if (place >= places) report_bad(pages.report, entry);
    }
}

// Moves COUNT items, a block's width apart, from `first` on. Each step is taken for all of them, so
// that what they wait for overlaps: the tables, then the loads, then the stores. Where it is known that
// the mapping is by slots, no layer is left out.
template <typename Vector, bool PLAIN, bool TO_PAGED, bool BY_SLOT_ONLY, bool STREAMS, u32 COUNT>
static __device__ __forceinline__ void move_items(const TransferPages& pages,
                                                   const TransferChunk& chunk, u32 first) {
    const bool by_slot = BY_SLOT_ONLY || pages.mapping_kind == KV_BY_SLOT;
    u64 in_chunk[COUNT];
    u64 in_pages[COUNT];
    i64 places[COUNT];
    u32 vectors_in[COUNT];
    u32 tokens_in[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        const u32 n = first + k * blockDim.x;
        const TransferItem item(pages, chunk, n);
        vectors_in[k] = item.vector;
        tokens_in[k] = 0;
        if (by_slot) {
            places[k] = static_cast<const i64*>(chunk.mapping)[item.token];
        } else {
            const u32 entry = pages.block_tokens.quotient(item.token);
            tokens_in[k] = item.token - entry * pages.block_tokens.divisor;
            places[k] = static_cast<const i32*>(chunk.mapping)[entry];
        }
        u32 plane = item.plane;
        if (!BY_SLOT_ONLY && pages.layers_left_out) {
            plane += pages.layers.quotient(plane) * pages.layers_left_out;
        }
        in_pages[k] = pages.plane_ptrs[plane];
        if (PLAIN) in_pages[k] += (u64)item.vector * sizeof(Vector);
        in_chunk[k] =
            chunk.address + (u64)n * sizeof(Vector) + (u64)item.plane * chunk.skip_bytes;
    }
    bool ready[COUNT];
    bool all = true;
    Vector vectors[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        ready[k] = (u64)places[k] < pages.places;
        all = all && ready[k];
        u32 block = (u32)places[k];
        if (by_slot) {
            block = pages.block_tokens.quotient((u32)places[k]);
            tokens_in[k] = (u32)places[k] - block * pages.block_tokens.divisor;
        }
        in_pages[k] += (u64)block * pages.block_stride + (u64)tokens_in[k] * pages.token_stride;
        if (!PLAIN) {
            const u32 segment = pages.segment_vectors.quotient(vectors_in[k]);
            const u32 vector = vectors_in[k] - segment * pages.segment_vectors.divisor;
            in_pages[k] += (u64)segment * pages.segment_stride + (u64)vector * sizeof(Vector);
        }
        const u64 from = TO_PAGED ? in_chunk[k] : in_pages[k];
        if (!ready[k]) continue;
        if (STREAMS) {
            load_streaming(from, vectors[k]);
        } else {
            load_cached(from, vectors[k]);
        }
    }
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ready[k]) store_streaming(TO_PAGED ? in_pages[k] : in_chunk[k], vectors[k]);
    }
    if (!all && pages.report) report_items<BY_SLOT_ONLY>(pages, chunk, pages.places, first, COUNT);
}

// The same for wide rows, either way.
template <typename Vector, u32 COUNT>
static __device__ __forceinline__ void move_wide(const TransferPages& pages, const WideRows& rows,
                                                 const TransferChunk& chunk, bool by_slot,
                                                 u32 first) {
    const bool to_paged = pages.direction == KV_TO_PAGED;
    u64 in_chunk[COUNT];
    u64 in_pages[COUNT];
    bool ready[COUNT];
    bool all = true;
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        const u32 n = first + k * blockDim.x;
        const TransferItem item(pages, chunk, n);
        u64 block;
        u64 token;
        if (by_slot) {
            const u64 slot = static_cast<const u64*>(chunk.mapping)[item.token];
            ready[k] = slot < rows.places;
            block = rows.block_tokens.quotient(slot);
            token = slot - block * rows.block_tokens.divisor;
        } else {
            const u32 entry = pages.block_tokens.quotient(item.token);
            block = (u64)(i64)static_cast<const i32*>(chunk.mapping)[entry];
            ready[k] = block < rows.places;
            token = item.token - entry * pages.block_tokens.divisor;
        }
        all = all && ready[k];
        const u32 left_out = pages.layers.quotient(item.plane) * pages.layers_left_out;
        const bool second = item.vector >= rows.first_vectors;
        const WidePart& a = rows.parts[0];
        const WidePart& b = rows.parts[1];
        const u32 in_part = second ? item.vector - rows.first_vectors : item.vector;
        const Divider31 segment_vectors{
            second ? b.segment_vectors.divisor : a.segment_vectors.divisor,
            second ? b.segment_vectors.magic : a.segment_vectors.magic,
            second ? b.segment_vectors.shift : a.segment_vectors.shift};
        const u32 segment = segment_vectors.quotient(in_part);
        const u32 vector = in_part - segment * segment_vectors.divisor;
        in_pages[k] = pages.plane_ptrs[item.plane + left_out] + block * rows.block_stride +
                      (second ? b.offset : a.offset) +
                      token * (second ? b.token_stride : a.token_stride) +
                      segment * (second ? b.segment_stride : a.segment_stride) +
                      (u64)vector * sizeof(Vector);
        in_chunk[k] =
            chunk.address + (u64)n * sizeof(Vector) + (u64)item.plane * chunk.skip_bytes;
    }
    Vector vectors[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ready[k]) load_streaming(to_paged ? in_chunk[k] : in_pages[k], vectors[k]);
    }
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
        if (ready[k]) store_streaming(to_paged ? in_pages[k] : in_chunk[k], vectors[k]);
    }
    if (!all && pages.report) report_items<false>(pages, chunk, rows.places, first, COUNT);
}

static __device__ __forceinline__ bool is_plain(const TransferPages& pages) {
    return pages.segment_vectors.divisor == pages.row_vectors.divisor;
}
