//! Errors of pages, addresses and clean-up, one enum for each family of operations.

use cuda_driver::DeviceError;
use cuda_driver::messages::one_line_debug;

use super::{Page, PageId};
use crate::gate::UsersUnknown;
use crate::memory_limit::{OverLimit, Verdict};

/// The reason why a pool did not provide a page.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The device cannot map pages of this size.
    #[error("page size {page_bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Requested size, in bytes.
        page_bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The pool's capacity is reached. This is an expected outcome.
    #[error("cannot take {asked} pages: {in_use} of {capacity} are in use")]
    Exhausted {
        /// Requested number of pages.
        asked: u64,
        /// Number of pages with a holder.
        in_use: u64,
        /// The capacity.
        capacity: u64,
    },
    /// A shared limit leaves no room. This is an expected outcome.
    #[error("no page: a shared limit leaves no room for another")]
    OverLimit(#[from] OverLimit),
    /// The device has too little free memory beyond what must stay free. This is an expected
    /// outcome.
    #[error("no page: the device cannot spare the memory")]
    NoHeadroom(#[source] Verdict),
    /// The device has no memory left for another page. This is an expected outcome.
    #[error(
        "cuMemCreate of a page of {page_bytes} bytes, beside {live} pages: CUDA_ERROR_OUT_OF_MEMORY (2)"
    )]
    OutOfMemory {
        /// Bytes of a page.
        page_bytes: u64,
        /// Number of pages of the pool that exist.
        live: u64,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A page was returned to a pool that did not create it.
#[derive(thiserror::Error)]
#[error("{} was not taken back: it belongs to another pool", .page.id())]
pub struct ForeignPage {
    /// The page.
    pub page: Page,
}

/// Nothing was mapped. The pages are returned.
#[derive(thiserror::Error)]
#[error("none of {} pages was mapped", .pages.len() as u64 + .quarantined)]
pub struct MapError {
    /// The cause.
    #[source]
    pub reason: MapRefusal,
    /// The offered pages, in their order, except those that could not be unmapped again: the
    /// reservation keeps these in quarantine.
    pub pages: Vec<Page>,
    /// Number of pages in quarantine.
    pub quarantined: u64,
}

/// The reason why pages were not mapped.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MapRefusal {
    /// The range does not lie inside the reservation.
    #[error("{count} pages from page {first} on lie outside a reservation of {capacity} pages")]
    OutOfRange {
        /// First requested page.
        first: u64,
        /// Number of requested pages.
        count: u64,
        /// Number of pages of the reservation.
        capacity: u64,
    },
    /// The page size differs from the reservation's.
    #[error("{page} of {bytes} bytes does not fit a reservation with pages of {page_bytes} bytes")]
    PageBytes {
        /// The page.
        page: PageId,
        /// Its length in bytes.
        bytes: u64,
        /// Bytes of a page of the reservation.
        page_bytes: u64,
    },
    /// A page belongs to another device instance than the reservation.
    #[error("{page} belongs to another device")]
    ForeignDevice {
        /// The page.
        page: PageId,
    },
    /// Another physical page is mapped there.
    #[error("page {index} already holds {held}")]
    Occupied {
        /// The page index.
        index: u64,
        /// The physical page that is mapped there.
        held: PageId,
    },
    /// The page mapped there is retired and may still be in use: try again later.
    #[error("page {index} is retired but not yet at rest")]
    Retiring {
        /// The page index.
        index: u64,
    },
    /// An earlier unmapping failed there; see
    /// [`Reservation::retry_quarantined`](crate::pages::Reservation::retry_quarantined).
    #[error("page {index} is in quarantine after a failed unmapping")]
    Quarantined {
        /// The page index.
        index: u64,
    },
    /// The driver refused to map a page or to grant access.
    #[error("the driver did not map page {index} with access")]
    Device {
        /// The page of the failed call, or the first of several.
        index: u64,
        /// The device's error.
        #[source]
        source: DeviceError,
    },
}

/// A page is not mapped but should be.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("page {index} is not mapped")]
pub struct NotMapped {
    /// The first such page.
    pub index: u64,
}

/// The reason why pages were not retired. None of them was changed.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RetireError {
    /// One of the pages is not mapped.
    #[error(transparent)]
    NotMapped(#[from] NotMapped),
    /// A fence is of a device that cannot access the memory. Or nothing covers the users, and peers
    /// have access: no single wait would cover all users, so the pages would never be at rest.
    #[error(transparent)]
    UsersUnknown(#[from] UsersUnknown),
}

/// A step of a clean-up that the driver refused.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("{step} was refused")]
pub struct CloseError {
    /// The step.
    pub step: CloseStep,
    /// The device's error.
    #[source]
    pub error: DeviceError,
}

impl CloseError {
    pub(crate) fn unmapping(index: u64, error: DeviceError) -> Self {
        Self { step: CloseStep::Unmap { index }, error }
    }
}

/// The steps of a clean-up, in their order.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum CloseStep {
    /// `cuMemUnmap` of one page.
    Unmap {
        /// Index of the page in the reservation.
        index: u64,
    },
    /// `cuMemAddressFree` of the reservation.
    FreeAddresses,
    /// `cuMemRelease` of one physical page.
    Release {
        /// The physical page.
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

one_line_debug!(PageError, ForeignPage, MapError, MapRefusal, NotMapped, RetireError, CloseError);
