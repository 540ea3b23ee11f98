// Scatters the keys and values of new tokens into their slots, of one layer or of several.
//
// For each layer l < layers, tensor k < kv_count, token n < tokens with slot s = slot_mapping[n] >= 0,
// segment i and vector v of a unit:
//   plane(first_plane + l * kv_count + k) + (s / block_tokens) * block_stride
//       + (s % block_tokens) * token_stride + i * segment_stride + base        [v of the pages]
//   = rows[k] + l * layer_stride + n * token_stride + i * segment_stride + base [v of the rows]
//
// Launch: one dimension, blockDim.x at most KV_ROW_THREADS; vectors in grid strides, so any gridDim.x
// is correct, of up to 2^31 threads.
//
// Reads  slot_mapping[0 .. tokens], the plane table, and the rows of tokens that have a slot; mapping
//        and rows may lie in mapped host memory.
// Writes those slots. A negative slot is passed over; one at or beyond num_slots too, and the token's
//        place is reported.
// The caller has checked: addresses, strides and unit lengths are multiples of the vector; no two
// tokens share a slot; rows and pages share no byte; unit_vectors, segments, tokens and planes are
// below 2^31.
#include "blocks.cuh"
#include "report.cuh"

struct AppendRows {
    u64 rows[2];
    u64 layer_stride;
    u64 token_stride;
    u64 segment_stride;
    u64 base;
};

static_assert(sizeof(AppendRows) == 48, "RawAppendRows of crates/kv-kernels/src/append.rs");

struct Words4 {
    u32 word;
};
struct Bytes {
    u8 byte;
};

// `units.tokens` counts the new tokens, `units.planes` layers * kv_count.
template <typename Vector>
static __device__ __forceinline__ void append_all(const BlockSide& pages, const AppendRows& from,
                                                  const BlockUnits& units,
                                                  const i64* slot_mapping, u64 block_tokens,
                                                  u32 first_plane, u32 kv_count, u64* report) {
    const u64 items = units.planes * units.tokens * units.segments * units.unit_vectors;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    UnitPlace place = UnitPlace::of(units, item);
    for (; item < items; item += threads, place = place.plus(units, (u32)threads)) {
        const i64 slot = slot_mapping[place.token];
        if (slot < 0) continue;
        const u64 block = (u64)slot / block_tokens;
        if (block >= pages.num_blocks) {
            if ((place.plane | place.segment | place.vector) == 0) report_bad(report, place.token);
            continue;
        }
        const u32 layer = place.plane / kv_count;
        const u64 source = from.rows[place.plane - layer * kv_count] + layer * from.layer_stride +
                           place.token * from.token_stride + place.segment * from.segment_stride +
                           from.base + place.vector * (u64)sizeof(Vector);
        const u64 target = pages.at(block, first_plane + place.plane,
                                    (u64)slot - block * block_tokens, place.segment) +
                           place.vector * (u64)sizeof(Vector);
        *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(source);
    }
}

#define APPEND(name, Vector)                                                                       \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide pages, const __grid_constant__ AppendRows from,         \
         const __grid_constant__ BlockUnits units, const i64* slot_mapping, u64 block_tokens,      \
         u32 first_plane, u32 kv_count, u64* report) {                                             \
        append_all<Vector>(pages, from, units, slot_mapping, block_tokens, first_plane, kv_count,  \
                           report);                                                                \
    }

APPEND(append_16, Words2)
APPEND(append_4, Words4)
APPEND(append_1, Bytes)
