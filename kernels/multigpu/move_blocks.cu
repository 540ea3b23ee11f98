// Copies scattered blocks in one launch: between memories of two GPUs of which this one can reach
// the other, or between this GPU's memory and a dense buffer, pinned host memory as well.
//
// An item is the part of one block in one plane: `rows` rows of `row_bytes` bytes. Item `i` of the whole
// move is pair `i % pairs` in plane `i / pairs`; this launch takes `items` of them from `first` on. On
// each side it lies at
//   planes[plane] + id * block_stride + row * row_stride      where dense is 0, and else at
//   dense + (i - first) * rows * row_bytes + row * row_bytes
//
// Launch: any grid is correct; blockDim.x at most MOVE_THREADS. No dynamic shared memory.
//
// Reads  the items' source rows; planes and pairs, which may lie in mapped host memory: they are
//        fetched for many items at once, so that a trip over the bus is not paid for each.
// Writes the items' destination rows, and nothing else.
// The caller has checked: ids lie in their planes; no destination overlaps another or a source;
// an item has at most MOVE_ELEMENTS_MAX words; for move_words, every address, stride and row_bytes
// is a multiple of 16.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MOVE_THREADS 512
// Items whose addresses are fetched at once.
#define MOVE_BATCH 256
// Words that a thread has under way at once: reads over a link take microseconds.
#define MOVE_UNROLL 4
// So that the words of a batch are counted in 32 bits.
#define MOVE_ELEMENTS_MAX (1u << 24)

static_assert((u64)MOVE_BATCH * MOVE_ELEMENTS_MAX <= 1ull << 32, "words of a batch fit 32 bits");

struct __align__(16) Word {
    u64 half[2];
};

struct Side {
    const u64* planes; // not read where dense is not 0
    u64 dense;
    u64 block_stride;
    u64 row_stride;
};

struct Job {
    Side from;
    Side to;
    const u64* pairs; // low half: the source's block, high half: the destination's
    u64 first;
    u64 items;
    u64 row_bytes;
    u32 rows;
    u32 pair_count;
};

static __device__ __forceinline__ u64 address(const Side& side, u64 plane, u32 id, u64 nth, u64 bytes) {
    if (side.dense != 0) return side.dense + nth * bytes;
    return side.planes[plane] + (u64)id * side.block_stride;
}

template <typename W> static __device__ __forceinline__ void move_items(const Job& job) {
    __shared__ u64 from[MOVE_BATCH];
    __shared__ u64 to[MOVE_BATCH];
    const u32 per_row = (u32)(job.row_bytes / sizeof(W));
    const u32 per_item = per_row * job.rows;
    const u64 item_bytes = job.row_bytes * job.rows;
    const u64 from_row = job.from.dense != 0 ? job.row_bytes : job.from.row_stride;
    const u64 to_row = job.to.dense != 0 ? job.row_bytes : job.to.row_stride;
    const u64 begin = job.items * blockIdx.x / gridDim.x;
    const u64 end = job.items * (blockIdx.x + 1) / gridDim.x;
    for (u64 batch = begin; batch < end; batch += MOVE_BATCH) {
        const u32 count = end - batch < MOVE_BATCH ? (u32)(end - batch) : MOVE_BATCH;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            const u64 item = job.first + batch + i;
            const u64 plane = item / job.pair_count;
            const u64 pair = job.pairs[item % job.pair_count];
            from[i] = address(job.from, plane, (u32)pair, batch + i, item_bytes);
            to[i] = address(job.to, plane, (u32)(pair >> 32), batch + i, item_bytes);
        }
        __syncthreads();
        const u64 words = (u64)count * per_item;
        const u64 stride = blockDim.x;
        for (u64 word = threadIdx.x; word < words; word += MOVE_UNROLL * stride) {
            W held[MOVE_UNROLL];
            u64 target[MOVE_UNROLL];
#pragma unroll
            for (u32 k = 0; k < MOVE_UNROLL; ++k) {
                const u64 at = word + k * stride;
                if (at < words) {
                    const u32 item = (u32)at / per_item;
                    const u32 within = (u32)at - item * per_item;
                    const u32 row = job.rows == 1 ? 0 : within / per_row;
                    const u64 offset = (u64)(within - row * per_row) * sizeof(W);
                    held[k] = *(const W*)(from[item] + row * from_row + offset);
                    target[k] = to[item] + row * to_row + offset;
                }
            }
#pragma unroll
            for (u32 k = 0; k < MOVE_UNROLL; ++k) {
                if (word + k * stride < words) *(W*)target[k] = held[k];
            }
        }
        __syncthreads();
    }
}

// 16 bytes at a time.
extern "C" __global__ void __launch_bounds__(MOVE_THREADS) move_words(Job job) {
    move_items<Word>(job);
}

// One byte at a time, where nothing more is aligned: correct, and slow.
extern "C" __global__ void __launch_bounds__(MOVE_THREADS) move_bytes(Job job) {
    move_items<u8>(job);
}
