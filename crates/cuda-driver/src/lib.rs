//! The CUDA driver calls a KV cache makes, behind one object-safe trait, with RAII handles that bind their own context.
