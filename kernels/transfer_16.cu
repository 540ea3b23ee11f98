// Transfers in vectors of 16 bytes: rows of nearly every model. See transfer.cuh for what they read and
// write.
#include "transfer.cuh"

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
multi_layer_transfer_16(const __grid_constant__ TransferPages pages,
                        const __grid_constant__ TransferChunks chunks) {
    transfer<Words2>(pages, chunks);
}
