// Transfers in vectors of 4 bytes: pages of indexers, and what is aligned to 4 bytes. See transfer.cuh for what they read and
// write.
#include "transfer.cuh"

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
multi_layer_transfer_4(const __grid_constant__ TransferPages pages,
                       const __grid_constant__ TransferChunks chunks) {
    transfer<Bytes4>(pages, chunks);
}
