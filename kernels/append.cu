// Scatters the keys and values of new tokens into their slots, of one layer or of several.
//
// For each layer l < layers, tensor k < kv_count, token n < tokens with slot s = slot_mapping[n] >= 0,
// segment i and vector v of a unit:
//   plane(first_plane + l * kv_count + k) + (s / block_tokens) * block_stride
//       + (s % block_tokens) * token_stride + i * segment_stride + base        [v of the pages]
//   = rows[k] + l * layer_stride + n * token_stride + i * segment_stride + base [v of the rows]
//
// Launch: one dimension, blockDim.x at most KV_ROW_THREADS, gridDim.x = ceil(items / blockDim.x) for
// items = planes * tokens * segments * unit_vectors, below 2^31.
//
// Reads  slot_mapping[0 .. tokens], the plane table, and the rows of tokens that have a slot; mapping
//        and rows may lie in mapped host memory.
// Writes those slots. A negative slot is passed over; one that is not ready too, and the token's place,
//        counted from first_token, is reported.
// The caller has checked: addresses, strides and unit lengths are multiples of the vector; no two
// tokens share a slot; rows and pages share no byte.
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

struct AppendSlots {
    const i64* slots;
    Divider64 block_tokens;
    u64 first_token; // of those before this launch
    u32 first_plane;
    u32 kv_count; // 1 or 2
};

static_assert(sizeof(AppendSlots) == 40, "AppendSlots of crates/kv-kernels/src/append.rs");

// `units.tokens` counts the new tokens, `units.planes` layers * kv_count.
template <typename Vector>
static __device__ __forceinline__ void append_vector(const BlockSide& pages,
                                                     const AppendRows& from,
                                                     const BlockUnits& units,
                                                     const AppendSlots& slots, u64* report) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= units.vectors_of_block()) return;
    const UnitPlace place = UnitPlace::of(units, item);
    const i64 slot = slots.slots[place.token];
    if (slot < 0) return;
    const u64 block = slots.block_tokens.quotient((u64)slot);
    if (block >= pages.num_blocks) {
        if ((place.plane | place.segment | place.vector) == 0) {
            report_bad(report, slots.first_token + place.token);
        }
        return;
    }
    const u32 token_in_block = (u32)((u64)slot - block * slots.block_tokens.divisor);
    const u32 kv = slots.kv_count == 2 ? place.plane & 1 : 0;
    const u32 layer = slots.kv_count == 2 ? place.plane >> 1 : place.plane;
    const u64 within = place.vector * (u64)sizeof(Vector);
    const u64 source = from.rows[kv] + layer * from.layer_stride +
                       place.token * from.token_stride + place.segment * from.segment_stride +
                       from.base + within;
    const u64 target =
        pages.at((u32)block, slots.first_plane + place.plane, token_in_block, place.segment) +
        within;
    *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(source);
}

#define APPEND(name, Vector)                                                                       \
    extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)                                   \
    name(const __grid_constant__ BlockSide pages, const __grid_constant__ AppendRows from,         \
         const __grid_constant__ BlockUnits units, const __grid_constant__ AppendSlots slots,      \
         u64* report) {                                                                            \
        append_vector<Vector>(pages, from, units, slots, report);                                  \
    }

APPEND(append_16, Words2)
APPEND(append_8, Words1)
APPEND(append_4, Bytes4)
APPEND(append_2, Bytes2)
APPEND(append_1, Bytes1)
