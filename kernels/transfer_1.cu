// Transfers in vectors of 1 byte: what is not aligned at all. See transfer.cuh for what they read and
// write.
#include "transfer.cuh"

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
multi_layer_transfer_1(const __grid_constant__ TransferPages pages,
                       const __grid_constant__ TransferChunks chunks) {
    transfer<Bytes1>(pages, chunks);
}
