//! One shared instance per physical GPU: the device registry of a KV cache.
