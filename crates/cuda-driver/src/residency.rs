//! Spans over memory that somebody else allocated, made after the driver was asked what lies there.

use crate::{
    AllocationProp, Device, DeviceError, DeviceSpan, Granularity, MemoryKind, OutOfBounds,
};

/// Why an address does not name memory of a device.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The range overflows the address space.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// Nothing that the driver knows lies there.
    #[error("nothing is allocated or mapped at {address:#x}")]
    Unknown {
        /// First address of the range at which nothing lies.
        address: u64,
    },
    /// Memory of another kind lies there.
    #[error("{kind:?} memory lies at {address:#x}, not that of a device")]
    Kind {
        /// First address of the range at which it lies.
        address: u64,
        /// What lies there.
        kind: MemoryKind,
    },
    /// Memory of another device lies there.
    #[error("memory of device {found} lies at {address:#x}, not of device {device}")]
    OtherDevice {
        /// First address of the range at which it lies.
        address: u64,
        /// The device that was named.
        device: i32,
        /// The device whose memory it is.
        found: i32,
    },
    /// The driver did not answer.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

crate::messages::one_line_debug!(ResidencyError);

impl DeviceSpan {
    /// A span over memory of `device` that the host program allocated, once the driver has said that it
    /// is: each allocation is asked for, and each page of it that may be mapped or not.
    ///
    /// The memory of a peer is looked up on the peer, and named in launches of any device that has
    /// access. Takes a call of the driver for every 2 MiB; a span that is used again need not be looked
    /// up again.
    ///
    /// # Ordering
    /// Says what lay there when it was called. Memory that is freed afterwards is an error of the
    /// device when it is accessed.
    ///
    /// # Errors
    /// [`ResidencyError`], with the first address that is not such memory.
    #[track_caller]
    pub fn of_device(device: &Device, address: u64, bytes: u64) -> Result<Self, ResidencyError> {
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
            // Of a reservation the driver tells where it ends, and not what of it is mapped.
            let next_page = (at / page + 1).saturating_mul(page);
            let next = found.start.saturating_add(found.bytes).min(next_page);
            // A piece that does not reach beyond the address would be none.
            if next <= at {
                return Err(ResidencyError::Unknown { address: at });
            }
            at = next;
        }
        Ok(Self::new_unchecked(address, bytes))
    }
}
