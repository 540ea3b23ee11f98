//! Physical memory, which several machines of this process can hold, as several processes can on a
//! GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::pages::Pages;

/// Bytes taken from one device's memory. Dropping the value returns them.
///
/// Exported memory may be dropped last by another machine. The bytes are returned to the machine
/// that created the memory.
#[derive(Debug)]
pub(super) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    /// Adds `bytes` to `used`, unless the sum exceeds `capacity`.
    pub(super) fn take(used: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<Self> {
        // Relaxed: only the machine that owns the counter adds to it, under its lock. Others only
        // subtract.
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

/// First key of physical memory, beyond all addresses.
const KEYS_START: u64 = 1 << 61;

/// Keys of new memory start at a multiple of this, so that a page of keys belongs to a single
/// memory.
const KEYS_ALIGNMENT: u64 = 1 << 30;

/// The key of the first byte of new physical memory. All bytes of the process have distinct keys.
pub(super) fn new_key(bytes: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(KEYS_START);
    // Relaxed: the keys must be distinct, and order nothing.
    NEXT.fetch_add(bytes.next_multiple_of(KEYS_ALIGNMENT), Ordering::Relaxed)
}

/// The bytes of one `cuMemCreate`.
#[derive(Debug)]
pub(super) enum Backing {
    /// Held by one machine.
    Own { pages: Pages, charge: Charge, key: u64 },
    /// Exported once, so that other machines can hold it too.
    Shared(Arc<SharedMemory>),
}

/// Memory that several machines can hold. The lock is held for one copy of bytes at a time, inside
/// a machine's lock. No other lock is taken while it is held.
#[derive(Debug)]
pub(super) struct SharedMemory {
    bytes: u64,
    key: u64,
    pages: Mutex<Pages>,
    _charge: Charge,
}

impl Backing {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Own { pages, .. } => pages.bytes(),
            Self::Shared(shared) => shared.bytes,
        }
    }

    /// The key of the first byte, the same in every machine.
    pub(super) fn key(&self) -> u64 {
        match self {
            Self::Own { key, .. } => *key,
            Self::Shared(shared) => shared.key,
        }
    }

    /// The bytes, if they can be borrowed: no other machine can reach them.
    #[inline]
    pub(super) fn own(&self) -> Option<&Pages> {
        match self {
            Self::Own { pages, .. } => Some(pages),
            Self::Shared(_) => None,
        }
    }

    pub(super) fn look<T>(&self, look: impl FnOnce(&Pages) -> T) -> T {
        match self {
            Self::Own { pages, .. } => look(pages),
            Self::Shared(shared) => look(&shared.pages.lock()),
        }
    }

    pub(super) fn edit<T>(&mut self, edit: impl FnOnce(&mut Pages) -> T) -> T {
        match self {
            Self::Own { pages, .. } => edit(pages),
            Self::Shared(shared) => edit(&mut shared.pages.lock()),
        }
    }

    /// The same memory, in the form that other machines can hold.
    pub(super) fn into_shared(self) -> Arc<SharedMemory> {
        match self {
            Self::Own { pages, charge, key } => Arc::new(SharedMemory {
                bytes: pages.bytes(),
                key,
                pages: Mutex::new(pages),
                _charge: charge,
            }),
            Self::Shared(shared) => shared,
        }
    }
}
