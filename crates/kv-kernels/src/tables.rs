//! Tables of block ids on the device.

pub use crate::gather::GatherRows;
