//! Attributes of devices, and of the ways between them.

/// Name, UUID, size and bus of a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DeviceInfo {
    /// Marketing name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The UUID that CUDA and NVML agree on.
    pub uuid: [u8; 16],
    /// All memory of the device, in bytes.
    pub total_bytes: u64,
    /// PCI bus id, `domain:bus:device.function`.
    pub pci_bus_id: String,
}

/// A device attribute (`CUdevice_attribute`), by the driver's number.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DeviceAttribute(pub u32);

impl DeviceAttribute {
    /// Most threads of one block.
    pub const MAX_THREADS_PER_BLOCK: Self = Self(1);
    /// Most blocks of a grid in x.
    pub const MAX_GRID_DIM_X: Self = Self(5);
    /// Most blocks of a grid in y.
    pub const MAX_GRID_DIM_Y: Self = Self(6);
    /// Most blocks of a grid in z.
    pub const MAX_GRID_DIM_Z: Self = Self(7);
    /// PCI bus of the device, within its domain.
    pub const PCI_BUS_ID: Self = Self(33);
    /// PCI device (slot) on its bus.
    pub const PCI_DEVICE_ID: Self = Self(34);
    /// Clock of the device's memory, in kHz.
    pub const MEMORY_CLOCK_RATE: Self = Self(36);
    /// Width of the bus to the device's memory, in bits.
    pub const GLOBAL_MEMORY_BUS_WIDTH: Self = Self(37);
    /// PCI domain.
    pub const PCI_DOMAIN_ID: Self = Self(50);
    /// Number of multiprocessors.
    pub const MULTIPROCESSOR_COUNT: Self = Self(16);
    /// Major number of the compute capability.
    pub const COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    /// Minor number of the compute capability.
    pub const COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    /// Whether host and device share one address space.
    pub const UNIFIED_ADDRESSING: Self = Self(41);
    /// Number of copy engines.
    pub const ASYNC_ENGINE_COUNT: Self = Self(40);
    /// Whether memory of the host program can be registered.
    pub const HOST_REGISTER_SUPPORTED: Self = Self(99);
    /// Whether the virtual-memory calls work.
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(102);
    /// The host's memory node next to the device; -1 on a host without nodes.
    pub const HOST_NUMA_ID: Self = Self(134);
}

/// An attribute of the way between two devices (`CUdevice_P2PAttribute`), by the driver's number.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PeerAttribute(pub u32);

impl PeerAttribute {
    /// Rank of the way among all of the machine; 0 is the fastest.
    pub const PERFORMANCE_RANK: Self = Self(1);
    /// Whether the first device can map memory of the second.
    pub const ACCESS_SUPPORTED: Self = Self(2);
    /// Whether the memory's own device performs atomic operations over the way.
    pub const NATIVE_ATOMIC_SUPPORTED: Self = Self(3);
}
