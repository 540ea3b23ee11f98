//! Pages whose memory another process uses too, through a file descriptor.
//!
//! The exporter takes a page with
//! [`PagePool::take_exportable`](crate::pages::PagePool::take_exportable),
//! [exports](SharedPage::export) it, and passes the descriptor to the other process, as its
//! standard input or over a Unix socket. The other process [imports](import_page) it and maps the
//! page like any other.
//!
//! # Order
//! Neither events nor leases reach another process. A writer waits for its own work on the device,
//! and then tells the reader by a message. A reader enqueues its work after the message. Releasing
//! needs no message: the memory lives until the last process has unmapped and released it and has
//! closed the descriptor.
//!
//! # Accounts
//! The exporter's pool counts the page until the exporter releases it. After that, no pool counts
//! the memory that the importer still holds, although it occupies the device. An imported page
//! belongs to no pool and counts against no limit.
//!
//! # Isolation
//! The other process can read and write the whole page. The exporter chooses what lies on the page.
//! Requests that must not see each other must not share an exported page. When the exporter returns
//! the page, its pool releases the page and never hands it out again.
//!
//! # The death of a process
//! Memory that a dead process exported stays with the importers. The driver releases the memory of
//! a dead importer. Pending work of a dead process is lost. The survivor learns of the death from
//! the operating system, and must treat data that was promised but not announced as incomplete.

use cuda_driver::messages::one_line_debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuda_driver::shareable::{ShareableHandle, ShareableKind, ShareableRef};
use cuda_driver::{Device, DeviceError, ErrorCode, PhysicalMemory};

use crate::pages::page::Origin;
use crate::pages::pool::PageSize;
use crate::pages::{PageId, SharedPage};

/// A page's memory as a file descriptor, for another process.
///
/// The descriptor keeps the memory alive until it is closed in every process that has it. It is
/// closed on `exec`, unless it becomes an input or output of the new program.
#[derive(Debug)]
pub struct ExportedPage {
    fd: OwnedFd,
    page: PageId,
    bytes: u64,
    device_uuid: [u8; 16],
}

impl ExportedPage {
    /// The bare descriptor.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// The page's identity.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.page
    }

    /// Length in bytes. The importer needs it, because the driver does not report it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device with the memory. In another process its ordinal may differ; its UUID is the same.
    #[must_use]
    pub fn device_uuid(&self) -> [u8; 16] {
        self.device_uuid
    }
}

impl AsFd for ExportedPage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The reason why a page was not exported.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The page was not created for export, see
    /// [`PagePool::take_exportable`](crate::pages::PagePool::take_exportable).
    #[error("{page} was not created for export")]
    NotExportable {
        /// The page.
        page: PageId,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The reason why memory of another process was not imported.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The device cannot map pages of this size.
    #[error("page size {bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Given size, in bytes.
        bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The memory belongs to another device, or to one that this process does not see.
    #[error("the memory does not belong to device {device}")]
    OtherDevice {
        /// Ordinal of the given device.
        device: i32,
    },
    /// The device refused the call, for instance because the descriptor is not exported memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl SharedPage {
    /// Exports the page's memory as a file descriptor. This may be done any number of times. From
    /// now on no other user gets the memory.
    ///
    /// # Ordering
    /// None: see [the module](crate::pages::share#order).
    ///
    /// # Errors
    /// [`ExportError`].
    #[track_caller]
    pub fn export(&self) -> Result<ExportedPage, ExportError> {
        let _site = cuda_driver::site::enter();
        let page = self.id();
        let memory = self.memory().filter(|_| self.origin() == Origin::Exportable);
        let memory = memory.ok_or(ExportError::NotExportable { page })?;
        // Before the call: if the call fails half-way, the page is released instead of reused.
        self.mark_exported();
        let device = memory.device();
        match memory.export(ShareableKind::PosixFd)? {
            ShareableHandle::PosixFd(fd) => {
                Ok(ExportedPage { fd, page, bytes: self.bytes(), device_uuid: device.info().uuid })
            }
            _ => Err(ExportError::NotExportable { page }),
        }
    }
}

/// Imports a page of `bytes` bytes on `device`, whose memory another process exported as `fd`.
///
/// The descriptor may be closed afterwards. Each import is a separate page with its own identity,
/// even if the memory is the same. The driver does not report the length of the memory. With a
/// wrong `bytes`, mapping the page fails.
///
/// # Ordering
/// None: see [the module](crate::pages::share#order).
///
/// # Errors
/// [`ImportError`].
#[track_caller]
pub fn import_page(device: &Device, fd: impl AsFd, bytes: u64) -> Result<SharedPage, ImportError> {
    let _site = cuda_driver::site::enter();
    let size = PageSize::ask(device, Some(bytes))?;
    if !size.is_mappable() {
        return Err(ImportError::PageBytes { bytes, granularity: size.granularity });
    }
    let source = ShareableRef::PosixFd(fd.as_fd());
    let memory = PhysicalMemory::import(device, source, bytes).map_err(|error| {
        if error.driver_error().code == ErrorCode::INVALID_DEVICE {
            ImportError::OtherDevice { device: device.ordinal() }
        } else {
            ImportError::Device(error)
        }
    })?;
    Ok(SharedPage::imported(memory))
}

one_line_debug!(ExportError, ImportError);
