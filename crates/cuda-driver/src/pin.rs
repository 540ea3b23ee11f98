//! Pinned memory of two kinds: allocated by the driver, or mapped beforehand and registered with
//! it.

use std::fmt;

use crate::guard;

use crate::device::Retired;
use crate::{
    Device, DeviceError, ErrorCode, GrantedPages, HostAllocFlags, HostPages, HostPagesOptions,
    HostRegion, HostRegisterFlags, PageKind, PinnedBuffer,
};

/// Sources of pinned memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum HostMemory {
    /// The driver allocates it (`cuMemHostAlloc`) and chooses its pages.
    Driver(HostAllocFlags),
    /// This crate maps the chosen kind of pages and registers them (`cuMemHostRegister`), portable
    /// and visible to kernels. If that is not supported, the driver allocates the memory, cached.
    Pages(HostPagesOptions),
}

/// Why host memory was not mapped, or not pinned. No memory stays mapped or pinned.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The system refused to map the memory.
    #[error("the system mapped no {bytes} bytes of host memory: error {errno}")]
    Refused {
        /// Bytes asked for.
        bytes: u64,
        /// Number of the system's error.
        errno: i32,
    },
    /// Memory is mapped on Linux only.
    #[error("host memory is mapped on Linux only")]
    Unsupported,
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl PinError {
    /// Whether host or device ran out of memory: an expected outcome, unlike the loss of a device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Refused { .. } => true,
            Self::Unsupported => false,
            Self::Device(error) => error.is_out_of_memory(),
        }
    }
}

/// A region that was not registered, and why.
#[derive(thiserror::Error)]
#[error("host memory was not pinned where it is")]
pub struct RegisterError {
    /// The region that was passed in. `None` if the driver registered it, refused its device
    /// address, and refused to unregister it. The device then keeps the region as memory of a
    /// dropped buffer, because registered memory must stay mapped.
    pub region: Option<Box<dyn HostRegion>>,
    /// The reason.
    #[source]
    pub source: DeviceError,
}

crate::messages::one_line_debug!(PinError, RegisterError);

/// The owner of a pinned buffer's memory.
pub(crate) enum Origin {
    /// The driver.
    Driver,
    /// A region, registered at its first address.
    Region(Box<dyn HostRegion>, Option<GrantedPages>),
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
    /// Pins `bytes` bytes of `memory`. Too slow for a step's path.
    ///
    /// # Ordering
    /// May wait for the device, if dropped memory is freed first.
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
        match HostPages::map(bytes, options.huge, options.node_for(device)) {
            Ok(pages) => Self::pin_pages(device, pages),
            Err(PinError::Unsupported) => Self::from_driver(device, bytes),
            Err(error) => Err(error),
        }
    }

    /// Pins pages that are mapped already, portable and visible to kernels. The buffer has as many
    /// bytes as the mapping was asked for. If the driver registers no memory, it allocates memory
    /// instead, cached, and the pages are returned to the system.
    ///
    /// Pages that are not [populated](HostPages::populate) are provided by the driver, on one
    /// thread. Unlike [`pin`](PinnedBuffer::pin), this does not free dropped memory first.
    ///
    /// # Errors
    /// [`PinError`].
    #[track_caller]
    pub fn pin_pages(device: &Device, mut pages: HostPages) -> Result<Self, PinError> {
        if pages.granted().pages == PageKind::Huge {
            // Such pages can be refused by a call only. A first access would end the process.
            pages.populate(0, pages.bytes())?;
        }
        pages.note_node();
        let (granted, bytes) = (pages.granted(), pages.asked());
        match Self::register(device, Box::new(pages), HostRegisterFlags::SHARED) {
            Ok(mut buffer) => {
                buffer.shorten(bytes, granted);
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

    /// Pins memory of the host program, such as a segment that processes share.
    ///
    /// `region` is dropped after the buffer was dropped and the device is done with it; see
    /// [`Device::free_retired`].
    ///
    /// # Errors
    /// [`RegisterError`], which returns the region: `HOST_MEMORY_ALREADY_REGISTERED` if a part of
    /// it is pinned, `NOT_SUPPORTED`, `OUT_OF_MEMORY`.
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
            let reached = driver.mem_host_get_device_pointer(host);
            reached.map_err(|error| error.of_range(host, bytes)).inspect_err(|_| {
                // SAFETY: registered just now; the device knows nothing of it.
                let undo = || unsafe { driver.mem_host_unregister(host) };
                let undone = guard!("driver.refused-unregistered", undo(), else Ok(()));
                stays = guard!("driver.registered-not-returned", undone.is_err(), else false);
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

    /// Page options actually granted; `None` for memory that the driver allocated or the caller
    /// registered.
    #[must_use]
    pub fn pages(&self) -> Option<GrantedPages> {
        match &self.origin {
            Origin::Region(_, granted) => *granted,
            Origin::Driver => None,
        }
    }

    /// Bytes pinned for this buffer: its length, rounded up to a whole page.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        match &self.origin {
            Origin::Region(region, _) => region.bytes(),
            Origin::Driver => self.bytes(),
        }
    }
}
