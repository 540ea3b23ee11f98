//! A simulated CUDA device: address, stream, event, context and fault semantics of the driver, with every access checked.
