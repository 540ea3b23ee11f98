// Gathers rows of a table of block ids into a dense one: out[r][c] = table[row_index[r]][c].
//
// Launch: gridDim.x over columns and gridDim.y over rows, both in grid strides, so any grid is
// correct; blockDim.x at most KV_ROW_THREADS. Choose
//   gridDim.x = ceil(width / blockDim.x), gridDim.y = min(rows, 65535)
//
// Reads  row_index[0 .. rows] and `width` entries of each row named there; the table may lie in
//        mapped host memory.
// Writes `width` entries of each of `rows` rows of out: -1 where row_index[r] >= table_rows, and
//        then nothing of the table is read. Strides are in entries.
// The caller has checked: both strides are at least `width`, and out and table do not overlap.
#include "kv.cuh"

extern "C" __global__ void __launch_bounds__(KV_ROW_THREADS)
gather_rows(i32* out, u64 out_stride, const i32* table, u64 table_stride, const u32* row_index,
            u32 rows, u32 width, u32 table_rows) {
    const u64 columns_of_grid = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const u32 source = row_index[row];
        const bool known = source < table_rows;
        for (u64 column = first; column < width; column += columns_of_grid) {
            out[row * out_stride + column] =
                known ? table[source * table_stride + column] : -1;
        }
    }
}
