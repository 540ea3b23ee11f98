//! Physical memory, and how several machines of this process hold it: as several processes do on a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::pages::Pages;

/// Bytes taken of one device's memory; dropping it gives them back.
///
/// What was exported may be dropped last by another machine than the one that created it, and is
/// given back to the one that did.
#[derive(Debug)]
pub(super) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    /// Adds `bytes` to `used`, unless that makes more than `capacity`.
    pub(super) fn take(used: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<Self> {
        // Relaxed: only the machine that owns the counter adds to it, under its lock; others lower it.
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

/// First key of physical memory: beyond all addresses.
const KEYS_START: u64 = 1 << 61;

/// Keys of new memory begin at a multiple of this, so that pages of keys belong to one memory.
const KEYS_ALIGNMENT: u64 = 1 << 30;

/// A number for the first byte of new physical memory, such that no two bytes of the process ever have
/// the same.
pub(super) fn new_key(bytes: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(KEYS_START);
    // Relaxed: the numbers must differ, and order nothing.
    NEXT.fetch_add(bytes.next_multiple_of(KEYS_ALIGNMENT), Ordering::Relaxed)
}

/// The bytes of one `cuMemCreate`, wherever they are held.
#[derive(Debug)]
pub(super) enum Backing {
    /// Of one machine alone.
    Own { pages: Pages, charge: Charge, key: u64 },
    /// Exported once, so that others may hold it too.
    Shared(Arc<SharedMemory>),
}

/// Memory that several machines may hold. The lock is taken for one copy of bytes at a time, inside
/// the lock of a machine, and no other is taken under it.
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

    /// What the first byte is known by, in every machine.
    pub(super) fn key(&self) -> u64 {
        match self {
            Self::Own { key, .. } => *key,
            Self::Shared(shared) => shared.key,
        }
    }

    /// The bytes, where they can be lent: no other machine can reach them.
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

    /// The same memory, such that others may hold it.
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
