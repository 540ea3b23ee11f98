//! Memory that reads arrive in: it does not move, and is looked at only when nothing arrives there.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::NixlError;

/// Reads begin at multiples of it.
const ALIGN: usize = 4096;

/// So many bytes, which an agent may have registered.
#[derive(Debug)]
pub(crate) struct Landing {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is memory, which is reached only by `slice`, whose caller promises that nothing writes it.
unsafe impl Send for Landing {}
// SAFETY: as above.
unsafe impl Sync for Landing {}

impl Landing {
    /// So many bytes, at least one.
    pub(crate) fn new(bytes: usize) -> Result<Self, NixlError> {
        let none = || NixlError::Memory { bytes: bytes as u64 };
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| none())?;
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        Ok(Self { start, layout })
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// The first bytes, all of them at most.
    ///
    /// # Safety
    /// Nothing writes them as long as the slice lives.
    pub(crate) unsafe fn slice(&self, bytes: usize) -> &[u8] {
        let bytes = bytes.min(self.bytes());
        // SAFETY: they are allocated, initialised by `alloc_zeroed`, and by the caller's promise not written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), bytes) }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and not used any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
