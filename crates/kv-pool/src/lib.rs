//! A block pool for LLM KV caches: prefix index, eviction, pins and tiers, with atomic claims and no unsafe code.
