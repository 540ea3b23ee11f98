//! A small seeded random number generator, so that a workload follows from its seed on every platform.
