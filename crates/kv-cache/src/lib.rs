//! A KV cache an LLM engine can talk to: admit, extend, stage, offload, onboard and release, over mapped and pooled GPU memory.
