//! The kernels on the simulated device, against oracles that know nothing of them.

mod checksum;
mod errors;
mod fill_and_gather;
pub(crate) mod machine;
mod transfer;
