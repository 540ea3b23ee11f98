//! A limit in bytes that several pools share and that any thread may change while they work.

pub(crate) mod admission;

use cuda_driver::Device;
use cuda_driver::messages::one_line_debug;
use std::sync::{Arc, Weak};

pub use admission::{AdmissionPolicy, MemoryFigures, MemoryProbe, Verdict};
use parking_lot::Mutex;

/// The maximum of memory in bytes, over all pools with this limit.
///
/// The handle is cheap: clones share the limit. Any thread may change it at any time. Each change
/// has a number, so a refusal can name the limit that caused it. A limit below the bytes in use is
/// allowed: nothing new is created until enough is released, and holders of unused memory are asked
/// to release it.
///
/// # Ordering
/// Memory is charged before it is created and discharged after it was released, so the existing
/// memory never exceeds [`used_bytes`](LimitStats::used_bytes). Each method takes a lock for a few
/// instructions. Only [`reclaim`](MemoryLimit::reclaim) calls the driver.
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    inner: Arc<Inner>,
}

/// The checks of a pool before it creates a page, besides its own capacity.
#[derive(Clone, Debug, Default)]
pub struct MemoryRules {
    /// A limit in bytes, shared with every other owner of a clone.
    pub limit: Option<MemoryLimit>,
    /// The free memory that the device must keep.
    pub admission: Option<AdmissionPolicy>,
}

#[derive(Debug)]
struct Inner {
    book: Mutex<Account>,
    /// Never held while a holder is called.
    holders: Mutex<Vec<Weak<dyn Holder>>>,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    limit_bytes: u64,
    used_bytes: u64,
    revision: u64,
    refusals: u64,
}

impl Account {
    fn refuse(&self, asked_bytes: u64) -> OverLimit {
        let Self { limit_bytes, used_bytes, revision, .. } = *self;
        OverLimit { limit_bytes, used_bytes, asked_bytes, revision }
    }
}

/// The figures of a limit at one moment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LimitStats {
    /// Number of changes of the limit.
    pub revision: u64,
    /// Maximum number of bytes that may exist.
    pub limit_bytes: u64,
    /// Number of bytes that exist, are being created or are being released, and of those that may
    /// exist since their release was refused.
    pub used_bytes: u64,
    /// Number of requests for pages that the limit has refused.
    pub refusals: u64,
}

impl LimitStats {
    /// Number of bytes in use beyond the limit. It is above 0 only after the limit was lowered.
    #[must_use]
    pub fn over_by(&self) -> u64 {
        self.used_bytes.saturating_sub(self.limit_bytes)
    }
}

/// The limit leaves no room. This is expected; retry when the limit was raised or memory was
/// released.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error(
    "{asked_bytes} bytes wanted with {used_bytes} of {limit_bytes} in use (revision {revision} of the limit)"
)]
pub struct OverLimit {
    /// Maximum number of bytes that may exist.
    pub limit_bytes: u64,
    /// Number of existing bytes.
    pub used_bytes: u64,
    /// Requested bytes.
    pub asked_bytes: u64,
    /// Number of changes of the limit so far.
    pub revision: u64,
}

impl OverLimit {
    /// Number of bytes that must be released before the request can be granted.
    pub(crate) fn short_by(&self) -> u64 {
        self.used_bytes.saturating_add(self.asked_bytes).saturating_sub(self.limit_bytes)
    }
}

/// The result of [`MemoryLimit::reclaim`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reclaimed {
    /// Bytes of idle pages that were released, and of memory that could not be released earlier.
    pub idle_bytes: u64,
    /// Bytes of memory that was given up before, and was unmapped and released.
    pub parked_bytes: u64,
    /// Bytes in use beyond the limit afterwards: mapped and needed, or not yet at rest.
    pub over_by: u64,
}

/// A holder of memory under a limit, which can be asked to release unused memory.
///
/// Called without a lock of the limit, from any thread, even from one that is creating memory for
/// another holder of the same limit. Implementors skip what they cannot lock at once.
pub(crate) trait Holder: Send + Sync + std::fmt::Debug {
    /// The device with the memory.
    fn device(&self) -> &Device;

    /// What can be released now. Queries fences, and releases nothing.
    fn unused_bytes(&self) -> u64 {
        0
    }

    /// Tries again what the driver refused to unmap, which is idle then, or to release; returns the
    /// released bytes.
    fn release_refused(&self) -> u64 {
        0
    }

    /// Releases idle pages until `bytes` are released or none is left; returns the released bytes.
    fn release_idle(&self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// Unmaps and releases memory that was given up and is at rest, until `bytes` are released or none is
    /// left; returns the released bytes. Does not wait.
    fn release_parked(&self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// Tells the holder that the limit was changed. Makes no driver call.
    fn limit_moved(&self) {}
}

impl MemoryLimit {
    /// A limit of `bytes` bytes, revision 0; `u64::MAX` for none yet, to be lowered later.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let book = Account { limit_bytes: bytes, used_bytes: 0, revision: 0, refusals: 0 };
        Self { inner: Arc::new(Inner { book: Mutex::new(book), holders: Mutex::new(Vec::new()) }) }
    }

    /// Changes the limit and returns the new revision. Does not wait for memory above the new
    /// limit: pools that work in the background release unused memory themselves, and
    /// [`reclaim`](MemoryLimit::reclaim) releases it for all pools.
    pub fn set(&self, bytes: u64) -> u64 {
        let revision = {
            let mut book = self.inner.book.lock();
            book.limit_bytes = bytes;
            book.revision += 1;
            book.revision
        };
        for holder in self.holders() {
            holder.limit_moved();
        }
        revision
    }

    /// Number of bytes in use beyond the limit.
    pub(crate) fn over_by(&self) -> u64 {
        self.stats().over_by()
    }

    /// The statistics.
    #[must_use]
    pub fn stats(&self) -> LimitStats {
        let Account { limit_bytes, used_bytes, revision, refusals } = *self.inner.book.lock();
        LimitStats { revision, limit_bytes, used_bytes, refusals }
    }

    /// Makes every holder release unused memory, as far as the limit asks: idle pages first, then
    /// memory that was given up and is at rest. Mapped memory in use stays.
    ///
    /// # Ordering
    /// Makes driver calls on the calling thread. Does not wait for the device.
    #[track_caller]
    pub fn reclaim(&self) -> Reclaimed {
        let _site = cuda_driver::site::enter();
        let holders = self.holders();
        let idle_bytes = holders.iter().map(|holder| holder.release_refused()).sum();
        let mut done = Reclaimed { idle_bytes, ..Reclaimed::default() };
        for holder in &holders {
            done.idle_bytes += holder.release_idle(self.over_by());
        }
        for holder in &holders {
            done.parked_bytes += holder.release_parked(self.over_by());
        }
        done.over_by = self.over_by();
        done
    }

    /// Makes other holders release up to `bytes` of unused memory, of one device if one is named, so
    /// that something new can be created; returns whether any was released. Where there is too
    /// little for the request, nothing is.
    pub(crate) fn make_room(&self, bytes: u64, device: Option<&Device>) -> bool {
        let holders = self.holders_on(device);
        // Nobody wants what could not be released earlier, so trying that again harms nobody.
        let mut released: u64 = holders.iter().map(|holder| holder.release_refused()).sum();
        if unused_bytes(&holders) < bytes.saturating_sub(released) {
            return released > 0;
        }
        let idle = |holder: &dyn Holder, bytes| holder.release_idle(bytes);
        let parked = |holder: &dyn Holder, bytes| holder.release_parked(bytes);
        for release in [idle, parked] {
            for holder in &holders {
                if released < bytes {
                    released += release(&**holder, bytes - released);
                }
            }
        }
        released > 0
    }

    /// What other holders can release now of the memory of a device.
    pub(crate) fn unused_bytes_on(&self, device: &Device) -> u64 {
        unused_bytes(&self.holders_on(Some(device)))
    }

    /// Counts memory that is about to be created.
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), OverLimit> {
        let mut book = self.inner.book.lock();
        match book.used_bytes.checked_add(bytes).filter(|&used| used <= book.limit_bytes) {
            Some(used_bytes) => {
                book.used_bytes = used_bytes;
                Ok(())
            }
            None => Err(book.refuse(bytes)),
        }
    }

    /// Whether the limit is respected at present. A refusal names `asked_bytes`.
    pub(crate) fn check_not_over(&self, asked_bytes: u64) -> Result<(), OverLimit> {
        let book = self.inner.book.lock();
        if book.used_bytes <= book.limit_bytes { Ok(()) } else { Err(book.refuse(asked_bytes)) }
    }

    /// Counts a request that was refused for good.
    pub(crate) fn note_refusal(&self) {
        self.inner.book.lock().refusals += 1;
    }

    /// Reverts `charge`: the memory was released, or was never created.
    pub(crate) fn discharge(&self, bytes: u64) {
        let mut book = self.inner.book.lock();
        debug_assert!(book.used_bytes >= bytes, "{bytes} bytes discharged twice: {book:?}");
        book.used_bytes = book.used_bytes.saturating_sub(bytes);
    }

    /// Registers a holder, to be asked for memory as long as it lives.
    pub(crate) fn enroll(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.inner.holders.lock();
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(holder);
    }

    fn holders(&self) -> Vec<Arc<dyn Holder>> {
        self.inner.holders.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The holders of memory of one device, if one is named.
    fn holders_on(&self, device: Option<&Device>) -> Vec<Arc<dyn Holder>> {
        let mut holders = self.holders();
        holders.retain(|holder| device.is_none_or(|device| shares_memory(holder.device(), device)));
        holders
    }
}

fn unused_bytes(holders: &[Arc<dyn Holder>]) -> u64 {
    holders.iter().map(|holder| holder.unused_bytes()).fold(0, u64::saturating_add)
}

/// Whether two handles are of one GPU, in whatever context.
fn shares_memory(one: &Device, other: &Device) -> bool {
    one.ordinal() == other.ordinal()
        && std::ptr::addr_eq(Arc::as_ptr(one.driver()), Arc::as_ptr(other.driver()))
}

one_line_debug!(OverLimit);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_all_that_it_depends_on() {
        let limit = MemoryLimit::new(100);
        assert_eq!(limit.charge(60), Ok(()));
        assert_eq!((limit.set(50), limit.over_by()), (1, 10));
        let refused = OverLimit { limit_bytes: 50, used_bytes: 60, asked_bytes: 1, revision: 1 };
        assert_eq!(limit.charge(1), Err(refused));
        assert_eq!(
            refused.to_string(),
            "1 bytes wanted with 60 of 50 in use (revision 1 of the limit)"
        );
        limit.discharge(11);
        assert_eq!((limit.over_by(), limit.charge(1)), (0, Ok(())));
        let expected = LimitStats { revision: 1, limit_bytes: 50, used_bytes: 50, refusals: 0 };
        assert_eq!(limit.stats(), expected);
        limit.note_refusal();
        assert_eq!(limit.stats().refusals, 1);
        assert_eq!((limit.set(u64::MAX), limit.charge(u64::MAX).is_err()), (2, true));
    }
}
