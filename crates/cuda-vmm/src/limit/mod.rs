//! A limit in bytes that several pools share and that others may move while they work.

pub(crate) mod admission;
#[cfg(feature = "nvml")]
mod nvml;

use cuda_driver::messages::one_line_debug;
use std::sync::{Arc, Weak};

pub use admission::{AdmissionPolicy, DriverProbe, Headroom, MemoryFigures, MemoryProbe, Verdict};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use nvml::NvmlProbe;
use parking_lot::Mutex;

/// Memory that may exist at once, in bytes, over all pools that were given this limit.
///
/// A cheap handle: clones are the same limit. Any thread may move it at any time; each move has a
/// number, so that who was refused knows under which limit. Lowering it below what is in use is no
/// error: nothing new is created until enough has gone, and whoever holds memory that nobody needs is
/// asked to release it.
///
/// # Ordering
/// Memory is charged before it is created and discharged after it was released, so what exists never
/// exceeds [`used_bytes`](LimitStats::used_bytes). Each method takes a lock for a few instructions; only
/// [`reclaim`](MemoryLimit::reclaim) calls the driver.
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    inner: Arc<Inner>,
}

/// What a pool asks before it creates a page, beside its own capacity.
#[derive(Clone, Debug, Default)]
pub struct MemoryRules {
    /// A limit in bytes, shared with whatever else was given a clone of it.
    pub limit: Option<MemoryLimit>,
    /// What the device has to have free.
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

/// A look at a limit, taken at one instant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LimitStats {
    /// How often the limit was moved.
    pub revision: u64,
    /// Most bytes that may exist.
    pub limit_bytes: u64,
    /// Bytes that exist, are being created or are being released.
    pub used_bytes: u64,
    /// How often something was refused.
    pub refusals: u64,
}

impl LimitStats {
    /// Bytes in use beyond the limit: more than 0 only after it was lowered.
    #[must_use]
    pub fn over_by(&self) -> u64 {
        self.used_bytes.saturating_sub(self.limit_bytes)
    }
}

/// The limit leaves no room: an expected outcome, worth a retry when it was raised or memory has gone.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error(
    "{asked_bytes} bytes asked with {used_bytes} of {limit_bytes} in use (revision {revision} of the limit)"
)]
pub struct OverLimit {
    /// Most bytes that may exist.
    pub limit_bytes: u64,
    /// Bytes that existed.
    pub used_bytes: u64,
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// How often the limit had been moved.
    pub revision: u64,
}

/// What [`MemoryLimit::reclaim`] did.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reclaimed {
    /// Bytes of idle pages that were released.
    pub idle_bytes: u64,
    /// Bytes of parked pages that were unmapped and released.
    pub parked_bytes: u64,
    /// Bytes in use beyond the limit after that: mapped and needed, or not yet at rest.
    pub over_by: u64,
}

/// Who holds memory under a limit, and may be asked to give up what nobody needs.
///
/// Called with no lock of the limit held, from any thread, also from one that is creating memory for
/// another holder of the same limit: implementors skip what they cannot lock at once.
pub(crate) trait Holder: Send + Sync + std::fmt::Debug {
    /// Releases idle pages until `bytes` are released, or none is left; returns the bytes.
    fn release_idle(&self, bytes: u64) -> u64;

    /// Unmaps and releases parked pages that are at rest until `bytes` are released, or none is left;
    /// returns the bytes. Does not wait.
    fn release_parked(&self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// The limit was moved. Calls no driver.
    fn limit_moved(&self) {}
}

impl MemoryLimit {
    /// At most `bytes` bytes, revision 0.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let book = Account { limit_bytes: bytes, used_bytes: 0, revision: 0, refusals: 0 };
        Self { inner: Arc::new(Inner { book: Mutex::new(book), holders: Mutex::new(Vec::new()) }) }
    }

    /// No limit yet: something to lower later.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(u64::MAX)
    }

    /// Moves the limit and returns the revision that this made. What lies over the new limit is not
    /// waited for: pools that work in the background release what nobody needs by themselves, and
    /// [`reclaim`](MemoryLimit::reclaim) does it for all.
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

    /// How often the limit was moved.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.stats().revision
    }

    /// Most bytes that may exist.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.stats().limit_bytes
    }

    /// Bytes in use beyond the limit.
    #[must_use]
    pub fn over_by(&self) -> u64 {
        self.stats().over_by()
    }

    /// The accounts.
    #[must_use]
    pub fn stats(&self) -> LimitStats {
        let Account { limit_bytes, used_bytes, revision, refusals } = *self.inner.book.lock();
        LimitStats { revision, limit_bytes, used_bytes, refusals }
    }

    /// Has every holder release what nobody needs, as far as the limit asks: idle pages first, then
    /// parked ones that are at rest. What is mapped and in use stays.
    ///
    /// # Ordering
    /// Makes driver calls on the calling thread. Does not wait for the device.
    #[track_caller]
    pub fn reclaim(&self) -> Reclaimed {
        let _site = cuda_driver::site::enter();
        let holders = self.holders();
        let mut done = Reclaimed::default();
        for holder in &holders {
            done.idle_bytes += holder.release_idle(self.over_by());
        }
        for holder in &holders {
            done.parked_bytes += holder.release_parked(self.over_by());
        }
        done.over_by = self.over_by();
        done
    }

    /// Has other holders release up to `bytes` that nobody needs, so that something new can be
    /// created; returns whether any were.
    pub(crate) fn make_room(&self, bytes: u64) -> bool {
        let mut released = 0;
        let holders = self.holders();
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

    /// Counts memory that is about to be created.
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), OverLimit> {
        let mut book = self.inner.book.lock();
        match book.used_bytes.checked_add(bytes).filter(|&used| used <= book.limit_bytes) {
            Some(used_bytes) => {
                book.used_bytes = used_bytes;
                Ok(())
            }
            None => {
                book.refusals += 1;
                let Account { limit_bytes, used_bytes, revision, .. } = *book;
                Err(OverLimit { limit_bytes, used_bytes, asked_bytes: bytes, revision })
            }
        }
    }

    /// Whether the limit is kept at present; a refusal names `asked_bytes`.
    pub(crate) fn check_not_over(&self, asked_bytes: u64) -> Result<(), OverLimit> {
        let mut book = self.inner.book.lock();
        if book.used_bytes <= book.limit_bytes {
            return Ok(());
        }
        book.refusals += 1;
        let Account { limit_bytes, used_bytes, revision, .. } = *book;
        Err(OverLimit { limit_bytes, used_bytes, asked_bytes, revision })
    }

    /// Takes back what `charge` counted: the memory is gone, or was never made.
    pub(crate) fn discharge(&self, bytes: u64) {
        let mut book = self.inner.book.lock();
        debug_assert!(book.used_bytes >= bytes, "{bytes} bytes discharged twice: {book:?}");
        book.used_bytes = book.used_bytes.saturating_sub(bytes);
    }

    /// Adds somebody to be asked for memory as long as they live.
    pub(crate) fn enroll(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.inner.holders.lock();
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(holder);
    }

    fn holders(&self) -> Vec<Arc<dyn Holder>> {
        self.inner.holders.lock().iter().filter_map(Weak::upgrade).collect()
    }
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
            "1 bytes asked with 60 of 50 in use (revision 1 of the limit)"
        );
        limit.discharge(11);
        assert_eq!((limit.over_by(), limit.charge(1)), (0, Ok(())));
        let expected = LimitStats { revision: 1, limit_bytes: 50, used_bytes: 50, refusals: 1 };
        assert_eq!(limit.stats(), expected);
        assert_eq!((limit.set(u64::MAX), limit.charge(u64::MAX).is_err()), (2, true));
    }
}
