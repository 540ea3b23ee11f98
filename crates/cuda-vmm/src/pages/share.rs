//! Pages whose memory another process uses too, by way of a file descriptor.
//!
//! The exporter takes a page with [`PagePool::take_exportable`](crate::pages::PagePool::take_exportable),
//! [exports](SharedPage::export) it, and hands the descriptor to the other process: as its standard
//! input, or over a Unix socket. The other [imports](import_page) it, and maps the page like any other.
//!
//! # Order
//! Neither events nor leases reach another process. Whoever writes waits for its own work on the
//! device, then tells the other by a message; whoever reads enqueues its work after the message.
//! Releasing is different: no message is needed, because the memory lives until the last process has
//! unmapped and released it, and has closed the descriptor.
//!
//! # Accounts
//! The pool of the exporter counts the page until the exporter lets go of it. What the importer still
//! holds then is counted by nobody, although it takes memory of the device. An imported page belongs to
//! no pool and counts against no limit.
//!
//! # Isolation
//! The other process reads and writes all of the page: what lies on it is the exporter's choice, and
//! requests that must not see each other must not lie on one exported page. When the exporter gives the
//! page back, its pool releases it and never hands it out again.
//!
//! # The death of a process
//! Memory that a dead process exported stays with the importers. What a dead importer had is given
//! back by the driver. Work of the dead that had not run is lost: the survivor learns that its partner
//! died from the operating system, and must take as torn whatever was promised and not announced.

use cuda_driver::messages::one_line_debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuda_driver::shareable::{ShareableHandle, ShareableKind, ShareableRef};
use cuda_driver::{Device, DeviceError, ErrorCode, PhysicalMemory};

use crate::pages::page::Origin;
use crate::pages::pool::PageSize;
use crate::pages::{PageId, SharedPage};

/// A page's memory as a file descriptor, for another process.
///
/// The descriptor keeps the memory alive until it is closed, in every process that has it. It is
/// closed on `exec`, unless it is made an input or output of the new program.
#[derive(Debug)]
pub struct ExportedPage {
    fd: OwnedFd,
    page: PageId,
    bytes: u64,
    device_uuid: [u8; 16],
}

impl ExportedPage {
    /// The descriptor alone.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Which page it is.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.page
    }

    /// Length in bytes. The importer must be told: the driver does not.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that holds the memory. Its ordinal may be another one in another process, its UUID is
    /// the same.
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

/// Why a page was not exported.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// It was not created for export, see [`PagePool::take_exportable`](crate::pages::PagePool::take_exportable).
    #[error("{page} was not created for export")]
    NotExportable {
        /// The page.
        page: PageId,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why memory of another process was not imported.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The device cannot map pages of this size.
    #[error("page size {bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Size given, in bytes.
        bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The memory is of another device, or of one that this process does not see.
    #[error("the memory is not of device {device}")]
    OtherDevice {
        /// Ordinal of the device given.
        device: i32,
    },
    /// The device refused: what the descriptor stands for is no memory, for one.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl SharedPage {
    /// The page's memory as a file descriptor, which may be done any number of times. From now on the
    /// memory is given to nobody else.
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
        // Before the call: where it fails half-way, the page is released rather than reused.
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

/// A page of `bytes` bytes of `device` whose memory another process exported as `fd`.
///
/// The descriptor may be closed afterwards. Each import is a page of its own, with an identity of its
/// own, also where the memory is the same. The driver does not tell how long the memory is: with a
/// wrong `bytes`, the page is refused when it is mapped.
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
