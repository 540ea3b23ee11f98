// Turns rows of block ids into the offset tables of attention kernels, for every pool at once.
//
// For each pool p, row s < rows and column b < columns(s):
//   v              = source[p * pool_stride + row(s) * row_stride + b]
//   out[p][s][0][b] = v == -1 ? -1 : scales[p] * v
//   out[p][s][1][b] = v == -1 ? -1 : scales[p] * v + offsets[p]
// with 32-bit products that wrap, row(s) = row_index ? row_index[s] : s, and
// columns(s) = live ? min(live[s], width) : width. `out` is [pools, out_rows, 2, width].
//
// Launch: gridDim.x over columns, gridDim.y over rows, gridDim.z over pools, all in grid strides, so
// any grid is correct; blockDim.x at most KV_ROW_THREADS. Choose
//   gridDim.x = ceil(width / (4 * blockDim.x)), gridDim.y = min(rows, 65535),
//   gridDim.z = min(pools, 65535)
//
// Reads  row_index[0 .. rows], live[0 .. rows], scales and offsets[0 .. pools], and the live columns
//        of the rows named; all of these may lie in mapped host memory.
// Writes the live columns of rows 0 .. rows of out and no other. A row that does not end within its
//        pool of the source is not read: its columns become -1, and its place s is reported.
// The caller has checked: out_rows >= rows, every array holds what is read, and out overlaps nothing.
#include "report.cuh"

// Columns that a thread reads before it writes the first.
#define COLUMNS_IN_FLIGHT 4

extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)
gather_block_offsets(i32* out, u64 out_rows, const i32* source, u64 pool_stride, u64 row_stride,
                     const u32* row_index, const u32* live, const i32* scales, const i32* offsets,
                     u32 pools, u32 rows, u32 width, u64* report) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 pool = blockIdx.z; pool < pools; pool += gridDim.z) {
        const u32 scale = (u32)scales[pool];
        const u32 offset = (u32)offsets[pool];
        for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
            const u64 from = (row_index ? row_index[row] : row) * row_stride;
            const u64 wanted = live ? live[row] : width;
            const u64 columns = wanted < width ? wanted : width;
            const bool known = from + columns <= pool_stride;
            if (!known && first == 0 && pool == 0) report_bad(report, row);

            const i32* ids = source + pool * pool_stride + from;
            i32* keys = out + (pool * out_rows + row) * 2 * width;
            i32* values = keys + width;
            for (u64 at = first; at < columns; at += COLUMNS_IN_FLIGHT * threads) {
                i32 id[COLUMNS_IN_FLIGHT];
#pragma unroll
                for (u32 i = 0; i < COLUMNS_IN_FLIGHT; ++i) {
                    const u64 column = at + i * threads;
                    id[i] = known && column < columns ? ids[column] : -1;
                }
#pragma unroll
                for (u32 i = 0; i < COLUMNS_IN_FLIGHT; ++i) {
                    const u64 column = at + i * threads;
                    if (column >= columns) break;
                    const u32 key = scale * (u32)id[i];
                    keys[column] = id[i] == -1 ? -1 : (i32)key;
                    values[column] = id[i] == -1 ? -1 : (i32)(key + offset);
                }
            }
        }
    }
}
