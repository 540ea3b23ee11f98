//! Systems on which no memory is mapped.

use super::{HostPages, PinError};

pub(super) fn map(_: u64, _: bool, _: Option<u32>) -> Result<HostPages, PinError> {
    Err(PinError::Unsupported)
}

pub(super) fn map_unpopulated(_: u64, _: bool, _: Option<u32>) -> Result<HostPages, PinError> {
    Err(PinError::Unsupported)
}

pub(super) fn populate(_: &HostPages, _: u64, _: u64) -> Result<(), PinError> {
    Err(PinError::Unsupported)
}

pub(super) fn host_bytes() -> Option<u64> {
    None
}

pub(super) fn node_of(_: &HostPages) -> Option<u32> {
    None
}

pub(super) fn unmap(_: &mut HostPages) {}

pub(super) fn node_of_pci_device(_: &str) -> Option<i64> {
    None
}
