// Transfers in vectors of 8 bytes: rows and addresses of whole words. See transfer.cuh for what they read and
// write.
#include "transfer.cuh"

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
multi_layer_transfer_8(const __grid_constant__ TransferPages pages,
                       const __grid_constant__ TransferChunks chunks) {
    transfer<Words1>(pages, chunks);
}
