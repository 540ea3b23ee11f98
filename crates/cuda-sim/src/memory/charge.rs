//! What a device has in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes taken from one device's memory. Dropping the value returns them.
#[derive(Debug)]
pub(super) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    /// Adds `bytes` to `used`, unless the sum exceeds `capacity`.
    pub(super) fn take(used: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<Self> {
        // Relaxed: all is done under the machine's lock.
        let taken = used.load(Ordering::Relaxed).checked_add(bytes)?;
        (taken <= capacity).then(|| {
            used.fetch_add(bytes, Ordering::Relaxed);
            Self { used: Arc::clone(used), bytes }
        })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
