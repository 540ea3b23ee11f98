// The plain kernel of the comparison: a block of threads for each token, words of 16 bytes, one at a time
// in each thread. Pages are `[plane][block][token][row]`, rows whole; the chunk is `[plane][token][row]`.
//
// Launch: one dimension, gridDim.x = tokens, any number of threads in a block.
struct __align__(16) Words {
    unsigned long long word[2];
};

extern "C" __global__ void plain_transfer(unsigned long long chunk, const unsigned long long* planes,
                                          const long long* slots, unsigned long long tokens,
                                          unsigned long long nplanes, unsigned long long row_bytes,
                                          unsigned long long to_pages) {
    const unsigned long long token = blockIdx.x;
    const unsigned long long vectors = row_bytes / 16;
    const long long slot = slots[token];
    for (unsigned long long i = threadIdx.x; i < nplanes * vectors; i += blockDim.x) {
        const unsigned long long plane = i / vectors;
        const unsigned long long v = i % vectors;
        Words* page = (Words*)(planes[plane] + slot * row_bytes) + v;
        Words* row = (Words*)(chunk + (plane * tokens + token) * row_bytes) + v;
        if (to_pages) {
            *page = *row;
        } else {
            *row = *page;
        }
    }
}
