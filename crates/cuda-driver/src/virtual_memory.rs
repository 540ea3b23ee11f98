//! Address ranges without memory, and physical memory without addresses.

use crate::guard;

use crate::alive::{Held, Kind};
use crate::device::{Ended, Object};
use crate::span::Life;
use crate::{
    AccessDesc, AllocationProp, Device, DeviceError, DeviceSpan, DriverError, ErrorCode,
    Granularity, OutOfBounds,
};

/// Reserved device addresses (`cuMemAddressReserve`), without memory until mapped.
///
/// This handle owns the addresses only. It has no table of mappings, and its calls do not wait for
/// the device's work; `cuda-vmm` does both.
#[derive(Debug)]
pub struct AddressRange {
    device: Held,
    /// # Invariants
    /// One whole live reservation of `bytes` bytes; none when `bytes` is 0.
    base: u64,
    bytes: u64,
    life: Life,
}

impl AddressRange {
    /// Reserves `bytes` bytes of addresses.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a size that is 0 or not a multiple of the granularity.
    #[track_caller]
    pub fn reserve(device: &Device, bytes: u64) -> Result<Self, DeviceError> {
        let base = device.run(|driver| {
            driver.mem_address_reserve(bytes, 0, 0).map_err(|error| error.of_bytes(bytes))
        })?;
        let life = Life::begin(device);
        Ok(Self { device: Held::new(device, Kind::AddressRange, bytes), base, bytes, life })
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// `bytes` bytes from `offset` on, mapped or not.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn span(&self, offset: u64, bytes: u64) -> Result<DeviceSpan, OutOfBounds> {
        DeviceSpan::owned(self.base, self.bytes, &self.life).slice(offset, bytes)
    }

    /// Maps all of `memory` at the addresses from `offset` on. Grants no access.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the range is not free, not aligned or not inside the reservation, and for
    /// memory of another driver object.
    #[track_caller]
    pub fn map(&self, offset: u64, memory: &PhysicalMemory) -> Result<(), DeviceError> {
        let address = self.address("cuMemMap", offset, memory.bytes)?;
        let checked =
            self.device.check_driver(&memory.device, "cuMemMap", ErrorCode::INVALID_VALUE);
        guard!("driver.map-own-driver", checked?);
        self.device.run(|driver| {
            // SAFETY: the handle is live (invariant of `handle`), as `memory` is borrowed, and of
            // this driver object.
            unsafe { driver.mem_map(address, memory.bytes, 0, memory.handle) }
                .map_err(|error| error.of_range(address, memory.bytes))
        })
    }

    /// Gives each named device read-write access to a mapped range.
    ///
    /// # Errors
    /// `INVALID_VALUE` on a hole.
    #[track_caller]
    pub fn set_access(
        &self,
        offset: u64,
        bytes: u64,
        access: &[AccessDesc],
    ) -> Result<(), DeviceError> {
        let address = self.address("cuMemSetAccess", offset, bytes)?;
        self.device.run(|driver| {
            let set = driver.mem_set_access(address, bytes, access);
            set.map_err(|error| error.of_range(address, bytes))
        })
    }

    /// Unmaps a range. Also tried on a lost device.
    ///
    /// # Ordering
    /// Waits for no stream: the caller must know that no work on the device uses the range.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the range would split a mapping.
    #[track_caller]
    pub fn unmap(&self, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let address = self.address("cuMemUnmap", offset, bytes)?;
        self.device.clean_up(|driver| {
            driver.mem_unmap(address, bytes).map_err(|error| error.of_range(address, bytes))
        })
    }

    /// Frees the addresses now. No memory may be mapped there.
    ///
    /// # Errors
    /// `INVALID_VALUE` while memory is mapped there. The handle is consumed all the same. If the
    /// call certainly did nothing, it is tried again with the memory of dropped buffers. Otherwise
    /// the addresses stay reserved until the process ends, and [`Device::close`] reports them.
    #[track_caller]
    pub fn free(mut self) -> Result<(), DeviceError> {
        self.give_back()
    }

    #[track_caller]
    fn give_back(&mut self) -> Result<(), DeviceError> {
        // With a length of 0 the destructor frees no addresses.
        let bytes = std::mem::take(&mut self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        guard!("driver.addresses-wait-calls", self.life.end().wait(), else drop(self.life.end()));
        guard!(
            "driver.addresses-again",
            // SAFETY: a live reservation (invariant of `base`), which is used no more.
            unsafe { self.device.destroy(Object::Addresses(self.base, bytes)) },
            else self.device.clean_up(|driver| driver.mem_address_free(self.base, bytes))
        )
    }

    fn address(&self, call: &'static str, offset: u64, bytes: u64) -> Result<u64, DeviceError> {
        OutOfBounds::check(offset, bytes, self.bytes)
            .map_err(|_| DriverError::new(call, ErrorCode::INVALID_VALUE))
            .map_err(|error| error.of_range(self.base.wrapping_add(offset), bytes))
            .map_err(|error| error.on_device(self.device.ordinal()))?;
        Ok(self.base + offset)
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let _ = self.give_back();
    }
}

/// Physical memory of a device (`cuMemCreate`), to be mapped under reserved addresses.
///
/// A drop releases the handle. A release that certainly did nothing is tried again with the memory
/// of dropped buffers, and another refusal is reported by [`Device::close`]. Memory that is still mapped
/// lives on until it is unmapped.
#[derive(Debug)]
pub struct PhysicalMemory {
    device: Held,
    /// # Invariants
    /// A handle with one reference, owned by this struct, and live while `is_live`. Only methods
    /// that consume the struct clear `is_live`, and they return the struct only while it is set.
    handle: u64,
    bytes: u64,
    is_live: bool,
}

impl PhysicalMemory {
    /// The granularity of `device`: sizes and offsets of mappings are multiples of it.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` on a device without virtual-memory management.
    #[track_caller]
    pub fn granularity(device: &Device) -> Result<u64, DeviceError> {
        let prop = AllocationProp::on(device.ordinal());
        device.run(|driver| driver.mem_get_allocation_granularity(prop, Granularity::Recommended))
    }

    /// Creates `bytes` bytes of physical memory on `device`.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`; `INVALID_VALUE` for a size that is not a multiple of the granularity.
    #[track_caller]
    pub fn create(device: &Device, bytes: u64) -> Result<Self, DeviceError> {
        let prop = AllocationProp::on(device.ordinal());
        let handle = device
            .run(|driver| driver.mem_create(bytes, prop).map_err(|error| error.of_bytes(bytes)))?;
        let device = Held::new(device, Kind::PhysicalMemory, bytes);
        Ok(Self { device, handle, bytes, is_live: true })
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that holds the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Releases the handle now, and returns the driver's answer. Also tried on a lost device.
    ///
    /// # Errors
    /// The refusal, with the memory if the call certainly did nothing. Dropping that memory tries
    /// again; [`leak`](PhysicalMemory::leak) does not.
    #[track_caller]
    pub fn release(mut self) -> Result<(), ReleaseError> {
        let (bytes, handle) = (self.bytes, self.handle);
        // SAFETY: the handle is live and this struct's alone (its invariant). Unless the call did
        // nothing for certain, `is_live` says from here on that it is used no more.
        let ended = self.device.end(|driver| unsafe { driver.mem_release(handle) });
        let certain = matches!(ended, Ended::Not(_));
        self.is_live =
            guard!("driver.perhaps-released", certain, else !matches!(ended, Ended::Done));
        match ended {
            Ended::Done => Ok(()),
            Ended::Not(source) | Ended::Perhaps(source) => {
                Err(ReleaseError { memory: self.is_live.then_some(self), bytes, source })
            }
        }
    }

    /// Returns the handle without releasing it: for memory that is gone with its context.
    pub fn leak(mut self) -> u64 {
        self.is_live = false;
        self.handle
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        if self.is_live {
            let _ = guard!(
                "driver.memory-again",
                // SAFETY: the handle is live and this struct's alone (its invariant).
                unsafe { self.device.destroy(Object::PhysicalMemory(self.handle)) },
                else self.device.clean_up(|driver| unsafe { driver.mem_release(self.handle) })
            );
        }
    }
}

/// Physical memory that the driver refused to release.
#[derive(thiserror::Error)]
#[error("{bytes} bytes of physical memory may not have been released")]
pub struct ReleaseError {
    /// The memory, still owned, if the call certainly did nothing: the context could not be bound,
    /// or the driver was out of memory. After another answer, which may be an error of earlier
    /// work, the memory may be gone and its handle another memory's.
    pub memory: Option<PhysicalMemory>,
    /// Its length.
    pub bytes: u64,
    /// The driver's answer.
    pub source: DeviceError,
}

crate::messages::one_line_debug!(ReleaseError);
