//! Export and import of physical memory, in the two forms that the driver has on Linux.

#[cfg(unix)]
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::api::Api;
use super::descriptors::handle_type;
use crate::shareable::FabricHandle;
use crate::{DriverError, DriverResult, ErrorCode, ShareableHandle, ShareableKind, ShareableRef};

/// The memory of `handle`, as `kind`.
///
/// # Safety
/// - `handle` is a live handle of physical memory.
pub(super) unsafe fn export(
    api: &Api,
    handle: u64,
    kind: ShareableKind,
) -> DriverResult<ShareableHandle> {
    match kind {
        #[cfg(unix)]
        // SAFETY: the caller passes a live handle.
        ShareableKind::PosixFd => unsafe { export_fd(api, handle) },
        #[cfg(not(unix))]
        ShareableKind::PosixFd => {
            Err(DriverError::new("cuMemExportToShareableHandle", ErrorCode::NOT_SUPPORTED))
        }
        ShareableKind::Fabric => {
            let mut fabric = FabricHandle([0; 64]);
            let place = ptr::from_mut(&mut fabric.0).cast();
            // SAFETY: the caller passes a live handle; for this kind the call writes 64 bytes, which
            // `fabric` has; the flags must be 0.
            unsafe { api.cuMemExportToShareableHandle(place, handle, handle_type(kind), 0) }?;
            Ok(ShareableHandle::Fabric(fabric))
        }
    }
}

/// # Safety
/// - `handle` is a live handle of physical memory.
#[cfg(unix)]
unsafe fn export_fd(api: &Api, handle: u64) -> DriverResult<ShareableHandle> {
    let failed = || DriverError::new("cuMemExportToShareableHandle", ErrorCode::OPERATING_SYSTEM);
    let kind = handle_type(ShareableKind::PosixFd);
    let mut fd: RawFd = -1;
    let place = ptr::from_mut(&mut fd).cast();
    // SAFETY: the caller passes a live handle; for this kind the call writes an `int`, which `fd` is;
    // the flags must be 0.
    unsafe { api.cuMemExportToShareableHandle(place, handle, kind, 0) }?;
    if fd < 0 {
        return Err(failed());
    }
    // SAFETY: the descriptor was opened by the call for its caller, and no other code has it.
    let exported = unsafe { OwnedFd::from_raw_fd(fd) };
    // A duplicate is closed on `exec`, even if the driver's descriptor is not. So a child process
    // gets the memory only on purpose.
    let exported = exported.try_clone().map_err(|_| failed())?;
    Ok(ShareableHandle::PosixFd(exported))
}

/// A new handle of the memory that `source` names.
pub(super) fn import(api: &Api, source: ShareableRef<'_>) -> DriverResult<u64> {
    #[cfg(unix)]
    let duplicate;
    #[cfg(unix)]
    let source = match source {
        // In place of a pointer, descriptor 0 is a null pointer, which driver 580 refuses.
        ShareableRef::PosixFd(fd) if fd.as_raw_fd() == 0 => {
            let failed =
                |_| DriverError::new("cuMemImportFromShareableHandle", ErrorCode::OPERATING_SYSTEM);
            duplicate = fd.try_clone_to_owned().map_err(failed)?;
            ShareableRef::PosixFd(duplicate.as_fd())
        }
        source => source,
    };
    let (kind, shareable) = match source {
        #[cfg(unix)]
        ShareableRef::PosixFd(fd) => (ShareableKind::PosixFd, fd_argument(fd)),
        ShareableRef::Fabric(fabric) => {
            (ShareableKind::Fabric, ptr::from_ref(&fabric.0).cast_mut().cast())
        }
    };
    let mut handle = 0;
    // SAFETY: `handle` is live and of the type that the call writes. A descriptor is open as long as
    // it is borrowed, and looked up by the operating system; a fabric handle is 64 live bytes, which
    // are only read.
    unsafe { api.cuMemImportFromShareableHandle(&mut handle, shareable, handle_type(kind)) }?;
    Ok(handle)
}

/// The call takes a descriptor in place of a pointer, which it does not follow.
#[cfg(unix)]
fn fd_argument(fd: BorrowedFd<'_>) -> *mut std::ffi::c_void {
    ptr::without_provenance_mut(fd.as_raw_fd() as usize)
}
