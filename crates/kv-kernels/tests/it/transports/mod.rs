//! Transports between pages and pinned host memory, on the simulated device: each gives the bytes
//! that the transfer kernel gives over device memory, whatever order streams advance in, and leaves
//! nothing behind when it fails.

mod blocks;
mod edges;
mod failures;
mod machine;
mod order;
mod profiles;
mod sweep;
