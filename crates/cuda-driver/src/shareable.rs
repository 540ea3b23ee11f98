//! Physical memory in a form that another process can take.

#[cfg(unix)]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use crate::virtual_memory::FabricSupport;

/// The form in which physical memory is exported (`CUmemAllocationHandleType`).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ShareableKind {
    /// A POSIX file descriptor, for processes of the same host.
    PosixFd,
    /// A fabric handle, for processes of any host that the GPUs' fabric connects.
    Fabric,
}

/// Physical memory in a form that another process can take.
#[derive(Debug)]
#[non_exhaustive]
pub enum ShareableHandle {
    /// A file descriptor, which keeps the memory alive until it is closed.
    #[cfg(unix)]
    PosixFd(OwnedFd),
    /// A fabric handle: bytes without an owner.
    Fabric(FabricHandle),
}

/// The source of an import.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ShareableRef<'a> {
    /// A file descriptor. It stays open, and may be closed after the import.
    #[cfg(unix)]
    PosixFd(BorrowedFd<'a>),
    /// A fabric handle.
    Fabric(&'a FabricHandle),
}

/// The bytes of a fabric handle (`CUmemFabricHandle`).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct FabricHandle(pub [u8; 64]);

impl ShareableHandle {
    /// The form that it has.
    #[must_use]
    pub fn kind(&self) -> ShareableKind {
        match self {
            #[cfg(unix)]
            Self::PosixFd(_) => ShareableKind::PosixFd,
            Self::Fabric(_) => ShareableKind::Fabric,
        }
    }

    /// A reference to it, to import from.
    #[must_use]
    pub fn borrow(&self) -> ShareableRef<'_> {
        match self {
            #[cfg(unix)]
            Self::PosixFd(fd) => ShareableRef::PosixFd(fd.as_fd()),
            Self::Fabric(handle) => ShareableRef::Fabric(handle),
        }
    }
}
