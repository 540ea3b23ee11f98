// Transfers of one chunk in vectors of 16 bytes. See one_chunk.cuh for what they read and write.
#include "one_chunk.cuh"

extern "C" __global__ void __launch_bounds__(KV_ONE_THREADS)
one_chunk_transfer_16(const __grid_constant__ OneChunk one) {
    transfer_one<Words2>(one);
}
