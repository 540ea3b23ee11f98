// Puts 16-byte words at scattered places of device memory: out[index[i]] = data[i].
//
// Launch: gridDim.x in grid strides, so any grid is correct; blockDim.x at most KV_ROW_THREADS.
//
// Reads  `count` words of data and `count` entries of index; both may lie in mapped host memory, so
//        the two loads of a thread do not wait for each other: one trip over the bus, not two.
// Writes out[index[i]] for i < count, and nothing where index[i] >= out_words.
// The caller has checked: out and data are multiples of 16, no index is there twice, and out
// overlaps neither data nor index.
#include "kv.cuh"

// A load that the compiler leaves in its place: it would move a plain one behind the check of the
// index, and so make it wait for the index's trip over the bus.
static __device__ __forceinline__ Words2 load_early(const Words2* from) {
    Words2 to;
    asm volatile("ld.v2.u64 {%0, %1}, [%2];" : "=l"(to.word[0]), "=l"(to.word[1]) : "l"(from));
    return to;
}

extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)
scatter_words(Words2* out, u64 out_words, const Words2* data, const u32* index, u32 count) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
        const Words2 word = load_early(data + i);
        const u32 target = index[i];
        if (target < out_words) out[target] = word;
    }
}
