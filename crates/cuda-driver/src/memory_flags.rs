//! Flags and descriptors of memory: pinned on the host, or mapped on a device.

/// Flags of pinned host memory (`CU_MEMHOSTALLOC_*`).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct HostAllocFlags {
    /// Pinned for every context, not only the current one.
    pub portable: bool,
    /// Also mapped for kernels of devices without unified addressing.
    pub device_map: bool,
    /// Not cached by the host: fast for the device to read, very slow for the CPU to read.
    pub write_combined: bool,
}

impl HostAllocFlags {
    /// Cached, portable and visible to kernels, for staging and for KV blocks in host memory.
    pub const CACHED: Self = Self { portable: true, device_map: true, write_combined: false };
}

/// Flags of registered host memory (`CU_MEMHOSTREGISTER_*`).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct HostRegisterFlags {
    /// Pinned for every context, not only the current one.
    pub portable: bool,
    /// Also mapped for kernels of devices without unified addressing.
    pub device_map: bool,
}

impl HostRegisterFlags {
    /// Portable and visible to kernels, like [`HostAllocFlags::CACHED`] for allocated memory.
    pub const SHARED: Self = Self { portable: true, device_map: true };
}

/// Which granularity to ask for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Granularity {
    /// The smallest size and alignment that works.
    Minimum,
    /// The driver's recommendation for speed.
    Recommended,
}

/// Read-write access of one device to a mapped range (`CUmemAccessDesc`).
///
/// A descriptor is always fully initialised, and read-write is its only kind of access. With a
/// descriptor that is initialised in part, `cuMemSetAccess` fails on a mapping that succeeded.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct AccessDesc {
    /// Ordinal of the device that is given access.
    pub device: i32,
}

/// Kind of the memory at an address, as the driver reports it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of a device: allocated, or mapped into a reservation.
    Device,
    /// Pinned host memory.
    Host,
}

/// The driver's attributes of an address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PointerAttributes {
    /// Kind of the memory; `None` for an address that the driver does not know.
    pub kind: Option<MemoryKind>,
    /// The device that holds the memory, or in whose context it was pinned.
    pub device: i32,
    /// First address of the allocation, or of the reservation with the mapping.
    pub start: u64,
    /// Its length, in bytes.
    pub bytes: u64,
}
