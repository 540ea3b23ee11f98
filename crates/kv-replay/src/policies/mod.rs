//! Exact simulation of eviction policies on a trace, one request at a time.
