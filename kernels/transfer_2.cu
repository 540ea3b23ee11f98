// Transfers in vectors of 2 bytes: what is aligned to 2 bytes. See transfer.cuh for what they read and
// write.
#include "transfer.cuh"

extern "C" __global__ void __launch_bounds__(KV_TRANSFER_THREADS)
multi_layer_transfer_2(const __grid_constant__ TransferPages pages,
                       const __grid_constant__ TransferChunks chunks) {
    transfer<Bytes2>(pages, chunks);
}
