//! What can go wrong with pages, addresses and clean-up, one enum for each family of operations.

use cuda_driver::DeviceError;
use cuda_driver::messages::one_line_debug;

use super::{Page, PageId};
use crate::UsersUnknown;
use crate::limit::{OverLimit, Verdict};

/// Why there is no page.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The device cannot map pages of this size.
    #[error("page size {page_bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Size asked for, in bytes.
        page_bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The pool's own limit is reached: an expected outcome.
    #[error("all {capacity} pages of the pool are in use")]
    Exhausted {
        /// The limit.
        capacity: u64,
    },
    /// A limit that several pools share leaves no room: an expected outcome.
    #[error("a shared limit leaves no room for another page")]
    OverLimit(#[from] OverLimit),
    /// The device has less free than is to stay free: an expected outcome.
    #[error("the device cannot spare the memory for a page")]
    NoHeadroom(#[source] Verdict),
    /// The device has no memory left for another page: an expected outcome.
    #[error(
        "cuMemCreate of a page of {page_bytes} bytes, beside {live} pages: CUDA_ERROR_OUT_OF_MEMORY (2)"
    )]
    OutOfMemory {
        /// Bytes of a page.
        page_bytes: u64,
        /// Pages of the pool that exist.
        live: u64,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl PageError {
    /// Whether the same call may succeed later without anything being repaired: when pages were given
    /// back, the limit was raised, or others have freed memory.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::PageBytes { .. } | Self::Device(_))
    }
}

/// A page was given back to a pool that it did not come from.
#[derive(thiserror::Error)]
#[error("{} belongs to another pool", .page.id())]
pub struct ForeignPage {
    /// The page.
    pub page: Page,
}

/// Why addresses were not reserved.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The device cannot map pages of this size.
    #[error("page size {page_bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Size asked for, in bytes.
        page_bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The length is 0 or not made of whole pages.
    #[error("{bytes} bytes are not a positive number of pages of {page_bytes} bytes")]
    Misaligned {
        /// Length asked for, in bytes.
        bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A peer is named twice, or is the owner.
    #[error("device {peer} is named twice in the access list")]
    PeerTwice {
        /// Ordinal of the peer.
        peer: i32,
    },
    /// A peer cannot reach the owner's memory.
    #[error("device {peer} cannot access memory of device {owner}")]
    PeerUnreachable {
        /// Ordinal of the peer.
        peer: i32,
        /// Ordinal of the owner.
        owner: i32,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Nothing was mapped; here are the pages back.
#[derive(thiserror::Error)]
#[error("none of {} pages was mapped", .pages.len() as u64 + .quarantined)]
pub struct MapError {
    /// Why.
    #[source]
    pub reason: MapRefusal,
    /// The pages that were offered, in their order, less those that could not be unmapped again:
    /// the reservation keeps these in quarantine.
    pub pages: Vec<Page>,
    /// How many pages went into quarantine.
    pub quarantined: u64,
}

/// Why pages were not mapped.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MapRefusal {
    /// The range does not lie inside the reservation.
    #[error("{count} pages from page {first} on lie outside a reservation of {capacity} pages")]
    OutOfRange {
        /// First page asked for.
        first: u64,
        /// Number of pages asked for.
        count: u64,
        /// Pages of the reservation.
        capacity: u64,
    },
    /// A page has another size than the reservation's pages.
    #[error("{page} of {bytes} bytes was offered for pages of {page_bytes} bytes")]
    PageBytes {
        /// The page.
        page: PageId,
        /// Its length in bytes.
        bytes: u64,
        /// Bytes of a page of the reservation.
        page_bytes: u64,
    },
    /// A page is memory of another device instance than the reservation's.
    #[error("{page} is memory of another device")]
    ForeignDevice {
        /// The page.
        page: PageId,
    },
    /// Another physical page is mapped there.
    #[error("page {index} already holds {held}")]
    Occupied {
        /// Where.
        index: u64,
        /// The physical page that is mapped there.
        held: PageId,
    },
    /// What was mapped there is retired but may still be in use: try again later.
    #[error("page {index} is retired but not yet at rest")]
    Retiring {
        /// Where.
        index: u64,
    },
    /// An earlier unmapping failed there; see
    /// [`Reservation::retry_quarantined`](crate::pages::Reservation::retry_quarantined).
    #[error("page {index} is in quarantine after a failed unmapping")]
    Quarantined {
        /// Where.
        index: u64,
    },
    /// The driver refused to map a page or to grant access.
    #[error("{step} failed at page {index}")]
    Device {
        /// What was tried.
        step: MapStep,
        /// The page it was tried on, or the first of several.
        index: u64,
        /// What the device answered.
        #[source]
        source: DeviceError,
    },
}

/// The driver calls of a mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MapStep {
    /// `cuMemMap`.
    Map,
    /// `cuMemSetAccess`.
    SetAccess,
}

impl std::fmt::Display for MapStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Map => "mapping",
            Self::SetAccess => "granting access",
        })
    }
}

/// A page that should be mapped is not.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("page {index} is not mapped")]
pub struct NotMapped {
    /// The first such page.
    pub index: u64,
}

/// Why pages were not retired; all of them are as they were.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RetireError {
    /// One of them is not mapped.
    #[error(transparent)]
    NotMapped(#[from] NotMapped),
    /// Nothing says who uses them, and peers can: no single wait would cover all users, so they would never
    /// be at rest.
    #[error(transparent)]
    UsersUnknown(#[from] UsersUnknown),
}

/// One step of a clean-up that the driver refused.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("{step} was refused")]
pub struct CloseError {
    /// The step.
    pub step: CloseStep,
    /// What the device answered.
    #[source]
    pub error: DeviceError,
}

/// The steps of a clean-up, in their order.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum CloseStep {
    /// `cuMemUnmap` of one page.
    Unmap {
        /// Which page of the reservation.
        index: u64,
    },
    /// `cuMemAddressFree` of the reservation.
    FreeAddresses,
    /// `cuMemRelease` of one physical page.
    Release {
        /// Which physical page.
        page: PageId,
    },
}

impl std::fmt::Display for CloseStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unmap { index } => write!(f, "unmapping page {index}"),
            Self::FreeAddresses => f.write_str("freeing the addresses"),
            Self::Release { page } => write!(f, "releasing {page}"),
        }
    }
}

one_line_debug!(
    PageError,
    ForeignPage,
    ReserveError,
    MapError,
    MapRefusal,
    NotMapped,
    RetireError,
    CloseError
);
