//! How the driver is asked for memory: pinned on the host, or to be mapped on a device.

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
    /// Cached, portable and visible to kernels: right for staging and for host-side KV blocks.
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
    /// Portable and visible to kernels: what [`HostAllocFlags::CACHED`] is for allocated memory.
    pub const SHARED: Self = Self { portable: true, device_map: true };
}

/// Which granularity to ask for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Granularity {
    /// The least size and alignment that works.
    Minimum,
    /// What the driver advises for speed.
    Recommended,
}

/// Read-write access of one device to a mapped range (`CUmemAccessDesc`).
///
/// There is no way to build one that is not initialised, and no access but read-write: a
/// half-built descriptor is what makes `cuMemSetAccess` fail on a mapping that succeeded.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct AccessDesc {
    /// Ordinal of the device that is given access.
    pub device: i32,
}

/// Where memory lies, as the driver tells it of an address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of a device: allocated, or mapped into a reservation.
    Device,
    /// Pinned host memory.
    Host,
}

/// What the driver tells of an address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PointerAttributes {
    /// Where the memory lies; `None` where the driver knows nothing of the address.
    pub kind: Option<MemoryKind>,
    /// The device that holds the memory, or in whose context it was pinned.
    pub device: i32,
    /// First address of the allocation, or of the reservation that the memory is mapped into.
    pub start: u64,
    /// Its length, in bytes.
    pub bytes: u64,
}
