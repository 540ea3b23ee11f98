//! Export and import of physical memory between machines, which simulate processes.

use cuda_driver::shareable::{ShareableHandle, ShareableKind, ShareableRef};
use cuda_driver::{AllocationProp, ErrorCode};

use crate::state::{Answer, Machine};

/// The driver's answer for fabric handles without a channel of the fabric's service.
pub(crate) const NO_FABRIC: ErrorCode = ErrorCode::NOT_PERMITTED;

impl Machine {
    pub(crate) fn mem_export(
        &mut self,
        handle: u64,
        kind: ShareableKind,
    ) -> Answer<ShareableHandle> {
        match kind {
            #[cfg(unix)]
            ShareableKind::PosixFd => self.memory.export(handle).map(ShareableHandle::PosixFd),
            // The memory was not created for this kind of handle.
            _ => Err(ErrorCode::INVALID_VALUE),
        }
    }

    pub(crate) fn mem_import(&mut self, source: ShareableRef<'_>) -> Answer<u64> {
        match source {
            #[cfg(unix)]
            ShareableRef::PosixFd(fd) => {
                let handle = self.new_handle();
                self.memory.import(handle, fd)?;
                Ok(handle)
            }
            _ => Err(NO_FABRIC),
        }
    }

    pub(crate) fn mem_properties(&self, handle: u64) -> Answer<AllocationProp> {
        let properties = self.memory.virtual_memory.properties(handle);
        let (device, posix_fd) = properties.ok_or(ErrorCode::INVALID_VALUE)?;
        Ok(AllocationProp { device: device as i32, posix_fd, fabric: false })
    }
}
