//! Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies every byte.
