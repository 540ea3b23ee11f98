// Attention of the tokens of a step over the paged cache: grouped query heads, causal, for chunks of prompts and for
// decode alike. `src/attention/mod.rs` launches it.
//
// For query token t and head h, with p = positions[first_token + t] and the key head g = h / (heads / kv_heads):
//   out[t][h] = sum over j <= p of softmax_j(scale * q[t][h] . K[j][g]) * V[j][g]
// where token j of the sequence lies in block block_table[s][j / block_tokens], at j % block_tokens.
//
// Every float of a row (t, h) follows from that row's query, keys and values alone, by the same operations in the same
// order, whatever else is in the batch, wherever the blocks lie, and however the prompt was cut: keys are taken in tiles of
// ATTENTION_TILE from token 0 on. `src/attention/arithmetic.rs` has the same operations for the host. Sums, products and
// quotients are written as intrinsics, which are rounded each for itself and are never contracted.
//
// Launch: grid (tokens, heads), blockDim.x = head_size, a multiple of 32 up to ATTENTION_THREADS_MAX.
//
// Reads  the queries; of each token's sequence the row of the block table, and keys and values up to the token; positions
//        and query starts.
// Writes out. A block id out of range makes the row's output NaN.
// The caller has checked: addresses and strides are multiples of 16 bytes; `first_token + tokens` is no more than the
// batch has tokens.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define ATTENTION_TILE 64
#define ATTENTION_THREADS_MAX 256
#define LANES 8

struct Pages {
    u64 keys;   // block 0 of the layer's keys
    u64 values; // and of its values
    u64 block_stride;
    u64 token_stride;
    u32 block_tokens;
    u32 num_blocks;
};

struct Batch {
    const i32* block_table; // [sequences, table_width]
    const i32* query_starts; // [sequences + 1]
    const i64* positions; // [tokens]
    u32 table_width;
    u32 sequences;
    u32 first_token;
    u32 unused;
};

struct Heads {
    u32 heads;
    u32 kv_heads;
    u32 head_size;
    float scale;
};

static_assert(sizeof(Pages) == 40 && sizeof(Batch) == 40 && sizeof(Heads) == 16,
              "arguments of src/attention/mod.rs");

// e^x for x <= 0, by a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]. Below -87 it is 0.
static __device__ __forceinline__ float exp_of(float x) {
    if (x < -87.0f) return 0.0f;
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), magic);
    const float n = __fsub_rn(shifted, magic);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.38888889e-3f;
    p = __fadd_rn(__fmul_rn(p, r), 8.33333333e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.16666667e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.66666667e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    const i32 exponent = __float_as_int(shifted) - __float_as_int(magic) + 127;
    return __fmul_rn(p, __int_as_float(exponent << 23));
}

// The product of a query and a key: LANES sums, which are then added in pairs.
static __device__ __forceinline__ float dot(const float* query, u64 key, u32 head_size) {
    float sum[LANES];
    for (u32 lane = 0; lane < LANES; lane += 1) sum[lane] = 0.0f;
    for (u32 i = 0; i < head_size; i += LANES) {
        const float4 low = *reinterpret_cast<const float4*>(key + i * 4);
        const float4 high = *reinterpret_cast<const float4*>(key + i * 4 + 16);
        sum[0] = __fadd_rn(sum[0], __fmul_rn(query[i + 0], low.x));
        sum[1] = __fadd_rn(sum[1], __fmul_rn(query[i + 1], low.y));
        sum[2] = __fadd_rn(sum[2], __fmul_rn(query[i + 2], low.z));
        sum[3] = __fadd_rn(sum[3], __fmul_rn(query[i + 3], low.w));
        sum[4] = __fadd_rn(sum[4], __fmul_rn(query[i + 4], high.x));
        sum[5] = __fadd_rn(sum[5], __fmul_rn(query[i + 5], high.y));
        sum[6] = __fadd_rn(sum[6], __fmul_rn(query[i + 6], high.z));
        sum[7] = __fadd_rn(sum[7], __fmul_rn(query[i + 7], high.w));
    }
    const float a = __fadd_rn(__fadd_rn(sum[0], sum[4]), __fadd_rn(sum[2], sum[6]));
    const float b = __fadd_rn(__fadd_rn(sum[1], sum[5]), __fadd_rn(sum[3], sum[7]));
    return __fadd_rn(a, b);
}

// The sequence that a token of the batch belongs to: the last one that begins at the token or before it.
static __device__ __forceinline__ u32 sequence_of(const Batch& batch, u32 token) {
    u32 low = 0;
    u32 high = batch.sequences;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (batch.query_starts[middle] <= (i32)token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS_MAX)
chat_attention(const __grid_constant__ Pages pages, const __grid_constant__ Batch batch,
               const __grid_constant__ Heads heads, const float* queries, float* out) {
    __shared__ float query[ATTENTION_THREADS_MAX];
    __shared__ float score[ATTENTION_TILE];
    __shared__ float weight[ATTENTION_TILE];
    __shared__ u64 place[ATTENTION_TILE]; // of a token's row in its plane
    __shared__ u32 bad;
    const u32 d = threadIdx.x;
    const u32 token = batch.first_token + blockIdx.x;
    const u64 row = ((u64)blockIdx.x * heads.heads + blockIdx.y) * heads.head_size;
    const u64 head_bytes = (u64)(blockIdx.y / (heads.heads / heads.kv_heads)) * heads.head_size * 4;
    const i32* table = batch.block_table + (u64)sequence_of(batch, token) * batch.table_width;
    const u32 context = (u32)batch.positions[token] + 1;
    query[d] = queries[row + d];
    if (d == 0) bad = 0;
    float most = -3.0e38f;
    float total = 0.0f;
    float sum = 0.0f;
    for (u32 first = 0; first < context; first += ATTENTION_TILE) {
        const u32 count = context - first < ATTENTION_TILE ? context - first : ATTENTION_TILE;
        __syncthreads();
        for (u32 k = d; k < count; k += blockDim.x) {
            const u32 at = first + k;
            const u32 column = at / pages.block_tokens;
            const i32 block = column < batch.table_width ? table[column] : -1;
            if (block < 0 || (u32)block >= pages.num_blocks) {
                bad = 1;
                place[k] = head_bytes;
                score[k] = 0.0f;
                continue;
            }
            place[k] = (u64)block * pages.block_stride +
                       (u64)(at - column * pages.block_tokens) * pages.token_stride + head_bytes;
            score[k] = __fmul_rn(dot(query, pages.keys + place[k], heads.head_size), heads.scale);
        }
        __syncthreads();
        if (bad != 0) break;
        float now = most;
        for (u32 k = 0; k < count; k += 1) now = score[k] > now ? score[k] : now;
        for (u32 k = d; k < count; k += blockDim.x) weight[k] = exp_of(__fsub_rn(score[k], now));
        __syncthreads();
        const float kept = exp_of(__fsub_rn(most, now));
        total = __fmul_rn(total, kept);
        sum = __fmul_rn(sum, kept);
        for (u32 k = 0; k < count; k += 1) {
            const float value = *reinterpret_cast<const float*>(pages.values + place[k] + (u64)d * 4);
            total = __fadd_rn(total, weight[k]);
            sum = __fadd_rn(sum, __fmul_rn(weight[k], value));
        }
        most = now;
    }
    out[row + d] = bad != 0 ? __int_as_float(0x7fffffff) : __fdiv_rn(sum, total);
}
