//! Lists of launches over odd sizes for each operation: on the simulated device the committed PTX gives,
//! thread by thread, the bytes that the CPU references give, and these are what oracles that know nothing
//! of either foretell. `tests/gpu.rs` runs the same lists on a card.

pub(crate) mod adopt;
pub(crate) mod append;
pub(crate) mod block_copy;
pub(crate) mod block_sum;
pub(crate) mod chunk_cases;
pub(crate) mod chunk_errors;
pub(crate) mod chunks;
pub(crate) mod far;
pub(crate) mod host_link;
pub(crate) mod huge;
pub(crate) mod lays;
pub(crate) mod on;
mod readers;
pub(crate) mod skip;
pub(crate) mod ways;
