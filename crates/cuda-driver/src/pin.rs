//! Pinned memory by two ways: allocated by the driver, or mapped beforehand and registered with it.

use std::fmt;

use crate::device::Retired;
use crate::{
    Device, DeviceError, ErrorCode, HostAllocFlags, HostPages, HostPagesError, HostPagesOptions,
    HostRegion, HostRegisterFlags, MemoryNode, PagesGot, PinnedBuffer,
};

/// Where pinned memory comes from.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum HostMemory {
    /// The driver allocates it (`cuMemHostAlloc`) and chooses its pages.
    Driver(HostAllocFlags),
    /// It is mapped in pages of our choice and registered (`cuMemHostRegister`), portable and visible
    /// to kernels. Where that is not supported, it comes from the driver, cached.
    Pages(HostPagesOptions),
}

/// Why memory was not pinned. Nothing is left behind.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The system maps no such memory.
    #[error(transparent)]
    Pages(#[from] HostPagesError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl PinError {
    /// Whether host or device ran out of memory: an expected outcome, unlike the loss of a device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Pages(HostPagesError::Refused { .. }) => true,
            Self::Pages(_) => false,
            Self::Device(error) => error.is_out_of_memory(),
        }
    }
}

/// A region that was not registered, and why.
#[derive(thiserror::Error)]
#[error("host memory was not registered")]
pub struct RegisterError {
    /// The region, as it was handed over. None where the driver registered it, refused it an address, and
    /// refused to take the registration back as well: the device then keeps it as memory of a dropped
    /// buffer, because memory that is registered may not be unmapped.
    pub region: Option<Box<dyn HostRegion>>,
    /// Why.
    #[source]
    pub source: DeviceError,
}

crate::messages::one_line_debug!(PinError, RegisterError);

/// Whose memory a pinned buffer is.
pub(crate) enum Origin {
    /// The driver's.
    Driver,
    /// Of a region, registered at its first address.
    Region(Box<dyn HostRegion>, Option<PagesGot>),
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver => f.write_str("driver"),
            Self::Region(region, _) => region.fmt(f),
        }
    }
}

impl PinnedBuffer {
    /// Pins `bytes` bytes of `memory`. Slow; never on a step's path.
    ///
    /// # Ordering
    /// May wait for the device, when what was dropped is freed first.
    ///
    /// # Errors
    /// [`PinError`].
    #[track_caller]
    pub fn pin(device: &Device, bytes: u64, memory: HostMemory) -> Result<Self, PinError> {
        let options = match memory {
            HostMemory::Driver(flags) => return Ok(Self::alloc(device, bytes, flags)?),
            HostMemory::Pages(options) => options,
        };
        device.free_retired()?;
        let node = match options.node {
            MemoryNode::Any => None,
            MemoryNode::BesideDevice => device.host_node(),
            MemoryNode::Number(node) => Some(node),
        };
        let pages = match HostPages::map(bytes, options.huge, node) {
            Ok(pages) => pages,
            Err(HostPagesError::Unsupported) => return Self::from_driver(device, bytes),
            Err(error) => return Err(error.into()),
        };
        let got = pages.got();
        match Self::register(device, Box::new(pages), HostRegisterFlags::SHARED) {
            Ok(mut buffer) => {
                buffer.shorten(bytes, got);
                Ok(buffer)
            }
            Err(RegisterError { region, source }) => {
                drop(region);
                match source.driver_error().code {
                    ErrorCode::NOT_SUPPORTED | ErrorCode::NOT_PERMITTED => {
                        tracing::debug!(%source, "the driver registers no memory, and allocates it");
                        Self::from_driver(device, bytes)
                    }
                    _ => Err(source.into()),
                }
            }
        }
    }

    #[track_caller]
    fn from_driver(device: &Device, bytes: u64) -> Result<Self, PinError> {
        Ok(Self::alloc(device, bytes, HostAllocFlags::CACHED)?)
    }

    /// Pins memory that the host program has, such as a segment that processes share.
    ///
    /// `region` is dropped when the buffer is gone and the device has done with it, see
    /// [`Device::free_retired`].
    ///
    /// # Errors
    /// [`RegisterError`], which hands the region back: `HOST_MEMORY_ALREADY_REGISTERED` when some of it
    /// is pinned, `NOT_SUPPORTED`, `OUT_OF_MEMORY`.
    #[track_caller]
    pub fn register(
        device: &Device,
        region: Box<dyn HostRegion>,
        flags: HostRegisterFlags,
    ) -> Result<Self, RegisterError> {
        let (host, bytes) = (region.address(), region.bytes());
        let mut stays = false;
        let registered = device.run(|driver| {
            // SAFETY: the region is initialised memory that stays mapped until it is dropped (contract
            // of `HostRegion`), which is after it was unregistered.
            unsafe { driver.mem_host_register(host, bytes, flags) }
                .map_err(|error| error.of_range(host, bytes))?;
            driver.mem_host_get_device_pointer(host).inspect_err(|_| {
                // SAFETY: registered just now; the device knows nothing of it.
                let undone = unsafe { driver.mem_host_unregister(host) };
                stays = undone.is_err();
            })
        });
        match registered {
            Ok(address) => Ok(Self::of_region(device, region, address)),
            Err(source) if stays => {
                device.retire(Retired::Registered(region));
                Err(RegisterError { region: None, source })
            }
            Err(source) => Err(RegisterError { region: Some(region), source }),
        }
    }

    /// What the memory got of the pages asked for; none of memory that the driver allocated or the
    /// caller registered.
    #[must_use]
    pub fn pages(&self) -> Option<PagesGot> {
        match &self.origin {
            Origin::Region(_, got) => *got,
            Origin::Driver => None,
        }
    }

    /// Bytes that are pinned for this buffer: its own, and the rest of its last page.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        match &self.origin {
            Origin::Region(region, _) => region.bytes(),
            Origin::Driver => self.bytes(),
        }
    }
}
