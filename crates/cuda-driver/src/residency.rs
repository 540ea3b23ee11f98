//! Spans over memory of the host program, checked with the driver.

use crate::{
    AllocationProp, Device, DeviceError, DeviceSpan, DriverError, Granularity, MemoryKind,
    OutOfBounds,
};

/// Why memory was not taken from the host program, or not lent to its cudarc: it is not memory of the device, or not
/// made of the elements asked for.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The range overflows the address space.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// The driver knows no memory there.
    #[error("nothing is allocated or mapped at {address:#x}")]
    Unknown {
        /// First address of the range without memory.
        address: u64,
    },
    /// The memory is of another kind.
    #[error("{kind:?} memory lies at {address:#x}, not that of a device")]
    Kind {
        /// First address of the range with that memory.
        address: u64,
        /// Its kind.
        kind: MemoryKind,
    },
    /// The memory is of another device.
    #[error("memory of device {found} lies at {address:#x}, not of device {device}")]
    OtherDevice {
        /// First address of the range at which it lies.
        address: u64,
        /// The given device.
        device: i32,
        /// The device of the memory.
        found: i32,
    },
    /// The memory to lend is not aligned for the elements.
    #[error("address {address:#x} is not aligned to the {align} bytes of an element")]
    Misaligned {
        /// First address.
        address: u64,
        /// Alignment of an element, in bytes.
        align: u64,
    },
    /// The memory to lend is not made of whole elements, or the elements have no bytes.
    #[error("{bytes} bytes are no whole number of elements of {element_bytes} bytes")]
    Length {
        /// Length of the memory, in bytes.
        bytes: u64,
        /// Length of an element, in bytes.
        element_bytes: u64,
    },
    /// cudarc could not make the events of a slice.
    #[error("cudarc refused the memory")]
    Cudarc(#[source] DriverError),
    /// The driver did not answer.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

crate::messages::one_line_debug!(ResidencyError);

impl DeviceSpan {
    /// A span over memory of `device` that the host program allocated. The driver is asked about
    /// each allocation of the range, and about each page that may be mapped or not.
    ///
    /// Memory of a peer is looked up on the peer; launches of any device with access may name it.
    /// This takes a driver call for every 2 MiB, so keep the span for later uses.
    ///
    /// # Errors
    /// [`ResidencyError`], with the first address that is not such memory.
    ///
    /// # Safety
    /// - what lies there stays until all work has run that is given the span or a part of it: the driver says
    ///   what lay there when it was asked.
    #[track_caller]
    pub unsafe fn of_device(
        device: &Device,
        address: u64,
        bytes: u64,
    ) -> Result<Self, ResidencyError> {
        OutOfBounds::check(address, bytes, u64::MAX)?;
        let end = address + bytes;
        let prop = AllocationProp::on(device.ordinal());
        // A device without virtual memory has no mappings.
        let page = device
            .run(|driver| driver.mem_get_allocation_granularity(prop, Granularity::Minimum))
            .map_or(u64::MAX, |bytes| bytes.max(1));
        let mut at = address;
        while at < end {
            let found = device.run(|driver| driver.pointer_get_attributes(at))?;
            match found.kind {
                Some(MemoryKind::Device) if found.device == device.ordinal() => {}
                Some(MemoryKind::Device) => {
                    let (device, found) = (device.ordinal(), found.device);
                    return Err(ResidencyError::OtherDevice { address: at, device, found });
                }
                Some(kind) => return Err(ResidencyError::Kind { address: at, kind }),
                None => return Err(ResidencyError::Unknown { address: at }),
            }
            // For a reservation the driver returns its range, not the mapped part of it.
            let next_page = (at / page + 1).saturating_mul(page);
            let next = found.start.saturating_add(found.bytes).min(next_page);
            // A piece that ends at the address would be empty.
            if next <= at {
                return Err(ResidencyError::Unknown { address: at });
            }
            at = next;
        }
        // SAFETY: the driver has said that it is device memory; the caller promises that it stays so.
        Ok(unsafe { Self::from_raw(address, bytes) }?)
    }
}
