// Puts 16-byte words at scattered places of device memory: out[index[i]] = data[i]. Two kernels: one
// for any number of words, and one for few, whose arguments are the same for every launch. `kv-stage`
// launches them (crates/kv-stage/src/scatter.rs).
//
// Reads  words and indices; both may lie in mapped host memory, so the loads of a thread do not wait
//        for each other: one trip over the bus, not two.
// Writes out[index[i]], and nothing where index[i] >= out_words.
// The caller has checked: out and data are multiples of 16, no index is there twice, and out
// overlaps neither data nor index.
typedef unsigned int u32;
typedef unsigned long long u64;

// The most threads of a block that these kernels are launched with.
#define THREADS_MAX 256

struct __align__(16) Words2 {
    u64 word[2];
};

// A load that the compiler leaves in its place: it would move a plain one behind the check of the
// index, and so make it wait for the index's trip over the bus.
static __device__ __forceinline__ Words2 load_early(const Words2* from) {
    Words2 to;
    asm volatile("ld.v2.u64 {%0, %1}, [%2];" : "=l"(to.word[0]), "=l"(to.word[1]) : "l"(from));
    return to;
}

static __device__ __forceinline__ u32 load_early(const u32* from) {
    u32 to;
    asm volatile("ld.u32 %0, [%1];" : "=r"(to) : "l"(from));
    return to;
}

// Launch: gridDim.x in grid strides, so any grid is correct; blockDim.x at most THREADS_MAX.
//
// Reads  `count` words of data and `count` entries of index.
extern "C" __global__ void __launch_bounds__(THREADS_MAX)
scatter_words(Words2* out, u64 out_words, const Words2* data, const u32* index, u32 count) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
        const Words2 word = load_early(data + i);
        const u32 target = index[i];
        if (target < out_words) out[target] = word;
    }
}

// The same for the words of a packet: room for `words_max` words, as many indices after them, and
// behind those how many of both there are.
//
// Launch: one block of up to THREADS_MAX threads, each of which takes one word; the caller has as many
//         threads as there are words. With fewer the rest is not written.
//
// Reads  of each thread below `words_max` its word and its index, whether or not the packet has so
//        many, and the count: three loads, none of which waits for another.
extern "C" __global__ void __launch_bounds__(THREADS_MAX)
scatter_packet(Words2* out, u64 out_words, const Words2* packet, u32 words_max) {
    const u32 i = threadIdx.x;
    if (i >= words_max) return;
    const u32* index = (const u32*)(packet + words_max);
    const u32 count = load_early(index + words_max);
    const u32 target = load_early(index + i);
    const Words2 word = load_early(packet + i);
    if (i < count && target < out_words) out[target] = word;
}
