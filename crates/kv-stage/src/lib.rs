//! Event-retired pinned staging buffers and block-table staging for CUDA streams.
