//! Workloads in the trace format, generated from a seed.
