//! A bounded pool of physical pages: created on demand or ahead of need, reused, always counted.

use cuda_driver::guard;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError, PhysicalMemory};
use parking_lot::Mutex;

use crate::memory_limit::Holder;
use crate::memory_limit::admission::{AdmissionError, Admitted};
use crate::memory_limit::{AdmissionPolicy, OverLimit};
use crate::pages::page::{Memory, PhysicalPage, Unreleased};
use crate::pages::{CloseError, CloseStep, ForeignPage, Page, PageError};
use crate::{MemoryLimit, MemoryRules};

/// The page size of a pool, and its maximum number of pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PagePoolOptions {
    /// Bytes of a page, a multiple of the device's granularity; `None` means the granularity.
    pub page_bytes: Option<u64>,
    /// Maximum number of pages that may exist at once, idle ones included.
    pub capacity_pages: u64,
}

/// The accounts of a pool at one moment.
///
/// `live == idle + in_use` and `created == live + released` always hold.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PagePoolStats {
    /// Maximum number of live pages.
    pub capacity: u64,
    /// Number of pages that exist or are being created.
    pub live: u64,
    /// Number of live pages that wait in the pool.
    pub idle: u64,
    /// Number of live pages with a holder, and of those whose memory may exist after their last
    /// holder, because it stays mapped or its release was refused.
    pub in_use: u64,
    /// Number of pages created since the pool was made.
    pub created: u64,
    /// Number of pages released to the driver since then.
    pub released: u64,
}

/// The counts of one pool. Pages hold a reference, so that a dropped page is counted too.
#[derive(Debug)]
pub(crate) struct Ledger {
    capacity: u64,
    page_bytes: u64,
    /// The limit is charged for every live page: before the page is counted, and until its release
    /// is counted.
    limit: Option<MemoryLimit>,
    counts: Mutex<Counts>,
    /// Memory of pages that are gone, which the driver has twice refused to release, and which
    /// exists for certain. Counted as live. Not locked during a driver call.
    unreleased: Mutex<Vec<Memory>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    created: u64,
    released: u64,
    idle: u64,
}

impl Ledger {
    /// Counts `count` pages that are about to be created, all or none, for a caller that asked for
    /// `asked` pages.
    fn begin(&self, count: u64, asked: u64) -> Result<(), PageError> {
        let mut counts = self.counts.lock();
        let live = counts.created - counts.released;
        if count > self.capacity.saturating_sub(live) {
            let (in_use, capacity) = (live - counts.idle, self.capacity);
            return Err(PageError::Exhausted { asked, in_use, capacity });
        }
        let Some(bytes) = count.checked_mul(self.page_bytes) else {
            // No device has as much. The driver need not be asked.
            return Err(PageError::OutOfMemory { page_bytes: self.page_bytes, live });
        };
        if let Some(limit) = &self.limit {
            limit.charge(bytes)?;
        }
        counts.created += count;
        Ok(())
    }

    /// Reverts `begin` for `count` pages.
    fn cancel(&self, count: u64) {
        self.counts.lock().created -= count;
        self.discharge(count);
    }

    pub(crate) fn released(&self) {
        self.counts.lock().released += 1;
        self.discharge(1);
    }

    /// Keeps memory that was not released, to be released later.
    pub(crate) fn keep(&self, memory: Memory) {
        self.unreleased.lock().push(memory);
    }

    /// Releases what could not be released earlier; returns the number of pages.
    fn release_again(&self) -> u64 {
        let unreleased = std::mem::take(&mut *self.unreleased.lock());
        let mut count = 0;
        for mut memory in unreleased {
            match memory.release() {
                Err(Unreleased { leaked_bytes: 1.., .. }) if memory.is_live() => self.keep(memory),
                Err(Unreleased { leaked_bytes: 1.., .. }) => {}
                _ => {
                    self.released();
                    count += 1;
                }
            }
        }
        count
    }

    fn discharge(&self, count: u64) {
        if let Some(limit) = &self.limit {
            limit.discharge(count * self.page_bytes);
        }
    }

    /// Whether idle pages may be used, once what was not released earlier is. Over the limit they must be released instead, and so must
    /// all other idle pages under the limit. Called without a lock of any pool.
    fn keep_to_limit(&self) -> Result<(), OverLimit> {
        self.release_again();
        let Some(limit) = &self.limit else { return Ok(()) };
        if guard!("vmm.over-limit-reclaims", limit.over_by() > 0, else false) {
            limit.reclaim();
        }
        limit.check_not_over(self.page_bytes)
    }

    fn look(&self) -> PagePoolStats {
        let Counts { created, released, idle } = *self.counts.lock();
        let live = created - released;
        PagePoolStats {
            capacity: self.capacity,
            live,
            idle,
            in_use: live - idle,
            created,
            released,
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // What is refused again stays charged. The device tries it again.
        self.release_again();
    }
}

/// Physical pages of one size on one device. The handle is cheap: clones share the pool.
#[derive(Clone, Debug)]
pub struct PagePool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    page_bytes: u64,
    admission: Option<AdmissionPolicy>,
    ledger: Arc<Ledger>,
    /// # Invariants
    /// While the lock is free, the length is the ledger's `idle`. Last in, first out, so that
    /// recently used pages are reused. Taken before the ledger's lock.
    idle: Mutex<Vec<PhysicalPage>>,
}

impl PagePool {
    /// An empty pool. Nothing is created yet.
    ///
    /// # Errors
    /// [`PageError::PageBytes`] for a size that the device cannot map, [`PageError::Device`].
    #[track_caller]
    pub fn new(device: &Device, options: PagePoolOptions) -> Result<Self, PageError> {
        Self::with_rules(device, options, MemoryRules::default())
    }

    /// Like [`new`](PagePool::new), under a limit that several pools share, and with a check of the
    /// device's free memory.
    ///
    /// # Errors
    /// As [`new`](PagePool::new).
    #[track_caller]
    pub fn with_rules(
        device: &Device,
        options: PagePoolOptions,
        rules: MemoryRules,
    ) -> Result<Self, PageError> {
        let _site = cuda_driver::site::enter();
        let size = PageSize::ask(device, options.page_bytes)?;
        let PageSize { page_bytes, granularity } = size;
        if !size.is_mappable() {
            return Err(PageError::PageBytes { page_bytes, granularity });
        }
        let MemoryRules { limit, admission } = rules;
        let ledger = Ledger {
            capacity: options.capacity_pages,
            page_bytes,
            limit,
            counts: Mutex::new(Counts::default()),
            unreleased: Mutex::new(Vec::new()),
        };
        let inner = Arc::new(Inner {
            device: device.clone(),
            page_bytes,
            admission,
            ledger: Arc::new(ledger),
            idle: Mutex::new(Vec::new()),
        });
        if let Some(limit) = &inner.ledger.limit {
            let holder = Arc::downgrade(&inner);
            limit.enroll(holder);
        }
        Ok(Self { inner })
    }

    /// The device that holds the pages.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.inner.page_bytes
    }

    /// The limit that counts the pages.
    pub(crate) fn limit(&self) -> Option<&MemoryLimit> {
        self.inner.ledger.limit.as_ref()
    }

    /// Takes an idle page, or creates one. A new page costs about 12 µs, and its contents are
    /// undefined.
    ///
    /// Over its limit a pool hands out no page, not even an idle one. At or over the limit, all
    /// pools under it must release unused memory before this call is refused.
    ///
    /// # Errors
    /// [`PageError::Exhausted`] at the pool's capacity, [`PageError::OverLimit`] at a shared limit,
    /// [`PageError::NoHeadroom`] and [`PageError::OutOfMemory`] at the device's.
    #[track_caller]
    pub fn take(&self) -> Result<PhysicalPage, PageError> {
        let _site = cuda_driver::site::enter();
        self.noted(self.take_all(1).map(one))
    }

    /// Takes `count` pages, or none: on failure idle pages are idle again and new pages are
    /// released.
    ///
    /// # Errors
    /// As [`take`](PagePool::take).
    #[track_caller]
    pub fn take_many(&self, count: u64) -> Result<Vec<PhysicalPage>, PageError> {
        let _site = cuda_driver::site::enter();
        self.noted(self.take_all(count))
    }

    /// Keeps a page for reuse. A shared page with other holders stays with them; the last one
    /// returned becomes idle.
    ///
    /// # Errors
    /// [`ForeignPage`], with the page, if another pool created it.
    #[track_caller]
    pub fn give_back(&self, page: impl Into<Page>) -> Result<(), ForeignPage> {
        let _site = cuda_driver::site::enter();
        let page = page.into();
        if !guard!("vmm.foreign-page-refused", page.is_counted_by(&self.inner.ledger), else true) {
            return Err(ForeignPage { page });
        }
        if let Some(page) = page.into_owned() {
            self.put(page);
        }
        Ok(())
    }

    /// Keeps pages that came from this pool for reuse.
    pub(crate) fn take_back(&self, pages: Vec<Page>) {
        for page in pages {
            let returned = self.give_back(page);
            debug_assert!(returned.is_ok(), "a page did not come from the pool");
        }
    }

    /// Creates pages until `count` are idle; returns the number of idle pages.
    ///
    /// The pages are not needed yet, so nothing is released to make room for them: neither idle
    /// pages of this pool nor memory of another.
    ///
    /// # Errors
    /// Like [`take`](PagePool::take); pages created before the failure stay idle.
    #[track_caller]
    pub fn prepare(&self, count: u64) -> Result<u64, PageError> {
        let _site = cuda_driver::site::enter();
        let ledger = &self.inner.ledger;
        let missing = count.saturating_sub(self.stats().idle);
        let mut admitted = self.admit(missing)?;
        for _ in 0..missing {
            let begun = ledger.begin(1, count);
            self.noted(guard!("vmm.prepare-takes-nothing", begun, else self.with_room(begun, 1)))?;
            match self.create(&mut admitted) {
                Ok(page) => self.put(page),
                Err(error) => return Err(self.not_created(1, error)),
            }
        }
        Ok(self.stats().idle)
    }

    /// Releases idle pages until at most `keep` are left, and what the driver refused to release
    /// earlier; returns the number of released pages and every refusal of the driver.
    #[track_caller]
    pub fn trim(&self, keep: u64) -> (u64, Vec<CloseError>) {
        let _site = cuda_driver::site::enter();
        let excess = self.inner.take_idle(|idle| idle.saturating_sub(keep));
        let mut errors = Vec::new();
        let again = self.inner.ledger.release_again();
        let (released, _) = release_all(excess, &mut errors);
        (again + released, errors)
    }

    /// All idle pages, for a caller that releases them.
    pub(crate) fn take_idle(&self) -> Vec<Page> {
        self.inner.take_idle(|idle| idle)
    }

    /// Releases idle pages of at least `bytes` bytes, or all; returns the released bytes.
    pub(crate) fn release_idle(&self, bytes: u64) -> u64 {
        Holder::release_idle(&*self.inner, bytes)
    }

    /// Number of bytes in use beyond the limit.
    pub(crate) fn over_limit_by(&self) -> u64 {
        self.limit().map_or(0, MemoryLimit::over_by)
    }

    /// The accounts.
    #[must_use]
    pub fn stats(&self) -> PagePoolStats {
        self.inner.ledger.look()
    }

    /// Counts a refusal by the limit, once for each request.
    pub(crate) fn noted<T>(&self, answer: Result<T, PageError>) -> Result<T, PageError> {
        if let (Err(PageError::OverLimit(_)), Some(limit)) = (&answer, self.limit()) {
            limit.note_refusal();
        }
        answer
    }

    /// Like [`take_many`](PagePool::take_many), for a caller that may ask again: counts no refusal.
    pub(crate) fn take_all(&self, count: u64) -> Result<Vec<PhysicalPage>, PageError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        self.inner.ledger.keep_to_limit()?;
        let (mut taken, begun) = {
            let mut idle = self.inner.idle.lock();
            let reused = count.min(idle.len() as u64);
            // Counted while the list is locked. Otherwise a page returned in between would make the
            // pool look exhausted.
            let begun = self.inner.ledger.begin(count - reused, count);
            let pops = if matches!(begun, Err(PageError::Exhausted { .. })) { 0 } else { reused };
            (self.inner.pop(&mut idle, pops), begun)
        };
        let missing = count - taken.len() as u64;
        // On failure, pages created by this call are dropped and therefore released: a call that
        // failed for lack of memory must not keep some.
        let begun = self.with_room(begun, missing);
        match begun.and_then(|()| self.create_many(missing)) {
            Ok(created) => {
                taken.extend(created);
                Ok(taken)
            }
            Err(error) => {
                let give_back = || taken.into_iter().for_each(|page| self.put(page));
                guard!("vmm.failed-take-gives-back", give_back());
                Err(error)
            }
        }
    }

    /// A second attempt to count pages, after pools under the same limit have released what it
    /// lacks. Called without a lock of any pool.
    fn with_room(&self, begun: Result<(), PageError>, count: u64) -> Result<(), PageError> {
        let Err(PageError::OverLimit(refused)) = begun else { return begun };
        let Some(limit) = self.limit() else { return begun };
        let Inner { device, page_bytes, admission, ledger, .. } = &*self.inner;
        if let Some(policy) = admission {
            // Nothing is released for what the device would refuse.
            let verdict = policy.judge(device, count.saturating_mul(*page_bytes))?;
            if verdict.short_by() > limit.unused_bytes_on(device) {
                return Err(PageError::NoHeadroom(verdict));
            }
        }
        if limit.make_room(refused.short_by(), None) { ledger.begin(count, count) } else { begun }
    }

    /// Lets pools under the same limit release unused memory of this device; returns whether any
    /// was.
    fn make_device_room(&self, bytes: u64) -> bool {
        self.limit().is_some_and(|limit| limit.make_room(bytes, Some(&self.inner.device)))
    }

    /// Creates the `count` pages that were counted, or none.
    fn create_many(&self, count: u64) -> Result<Vec<PhysicalPage>, PageError> {
        let mut admitted = self.admit(count);
        if let Err(PageError::NoHeadroom(verdict)) = &admitted
            && self.make_device_room(verdict.short_by())
        {
            admitted = self.admit(count);
        }
        let mut admitted = admitted.inspect_err(|_| self.inner.ledger.cancel(count))?;
        let mut created = Vec::new();
        let mut create_all = || {
            for made in 0..count {
                // Nothing is released for the next page if there is too little for all of them.
                let missing_bytes = (count - made) * self.inner.page_bytes;
                created.push(match self.create(&mut admitted) {
                    Err(error)
                        if error.is_out_of_memory() && self.make_device_room(missing_bytes) =>
                    {
                        self.create(&mut admitted)?
                    }
                    made => made?,
                });
            }
            Ok(())
        };
        // The context is bound once for all of them.
        let bound = count > 1;
        let made =
            if bound { self.inner.device.while_current(&mut create_all) } else { Ok(create_all()) };
        match made.unwrap_or_else(Err) {
            Ok(()) => Ok(created),
            Err(error) => Err(self.not_created(count - created.len() as u64, error)),
        }
    }

    /// Asks whether the device can spare `count` pages. Each page is promised until it exists.
    fn admit(&self, count: u64) -> Result<Option<Admitted>, PageError> {
        let Some(policy) = self.inner.admission.as_ref().filter(|_| count > 0) else {
            return Ok(None);
        };
        let wanted_bytes = count.saturating_mul(self.inner.page_bytes);
        match policy.admit(&self.inner.device, wanted_bytes) {
            Ok(admitted) => Ok(Some(admitted)),
            Err(AdmissionError::NoHeadroom(verdict)) => Err(PageError::NoHeadroom(verdict)),
            Err(AdmissionError::Device(error)) => Err(error.into()),
        }
    }

    /// Creates one page that was counted.
    fn create(&self, admitted: &mut Option<Admitted>) -> Result<PhysicalPage, DeviceError> {
        let Inner { device, page_bytes, ledger, .. } = &*self.inner;
        let create = || PhysicalPage::create(device, *page_bytes, ledger);
        match admitted {
            Some(admitted) => admitted.create(*page_bytes, create),
            None => create(),
        }
    }

    /// Counts `count` pages as not created; returns why.
    fn not_created(&self, count: u64, error: DeviceError) -> PageError {
        let Inner { page_bytes, ledger, .. } = &*self.inner;
        guard!("vmm.uncreated-not-counted", ledger.cancel(count));
        if error.is_out_of_memory() {
            PageError::OutOfMemory { page_bytes: *page_bytes, live: ledger.look().live }
        } else {
            PageError::Device(error)
        }
    }

    fn put(&self, page: PhysicalPage) {
        let mut idle = self.inner.idle.lock();
        idle.push(page);
        self.inner.ledger.counts.lock().idle += 1;
    }
}

impl Inner {
    /// Removes idle pages; `excess` computes the number from the number of idle pages.
    fn take_idle(&self, excess: impl FnOnce(u64) -> u64) -> Vec<Page> {
        let mut idle = self.idle.lock();
        let count = idle.len() as u64;
        self.pop(&mut idle, excess(count).min(count))
    }

    fn pop<P: From<PhysicalPage>>(&self, idle: &mut Vec<PhysicalPage>, count: u64) -> Vec<P> {
        self.ledger.counts.lock().idle -= count;
        idle.drain(idle.len() - count as usize..).map(P::from).collect()
    }
}

impl Holder for Inner {
    fn device(&self) -> &Device {
        &self.device
    }

    fn unused_bytes(&self) -> u64 {
        self.ledger.look().idle * self.page_bytes
    }

    fn release_refused(&self) -> u64 {
        self.ledger.release_again() * self.page_bytes
    }

    fn release_idle(&self, bytes: u64) -> u64 {
        let excess = self.take_idle(|_| bytes.div_ceil(self.page_bytes));
        let mut errors = Vec::new();
        // The driver releases them here, with no lock held.
        let (released, _) = release_all(excess, &mut errors);
        for error in errors {
            tracing::warn!(%error, source = %error.error, "an idle page was not released");
        }
        released * self.page_bytes
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The pages of this list are released on drop. Pages with a holder live on.
        let idle = std::mem::take(self.idle.get_mut());
        self.ledger.counts.lock().idle = 0;
        drop(idle);
    }
}

fn one(pages: Vec<PhysicalPage>) -> PhysicalPage {
    let [page] = <[_; 1]>::try_from(pages)
        .unwrap_or_else(|pages| unreachable!("{} pages instead of one", pages.len()));
    page
}

/// Releases pages and records every refusal. Returns the number of pages whose memory was released
/// (not those with other holders), and the bytes that may be left.
pub(crate) fn release_all(
    pages: impl IntoIterator<Item = Page>,
    errors: &mut Vec<CloseError>,
) -> (u64, u64) {
    let (mut count, mut left_bytes) = (0, 0);
    for page in pages {
        let id = page.id();
        match page.release() {
            Ok(released) => count += u64::from(released),
            Err(Unreleased { error, leaked_bytes }) => {
                errors.push(CloseError { step: CloseStep::Release { page: id }, error });
                count += u64::from(leaked_bytes == 0);
                left_bytes += leaked_bytes;
            }
        }
    }
    (count, left_bytes)
}

/// A requested page size, and the device's granularity.
#[derive(Clone, Copy)]
pub(crate) struct PageSize {
    pub(crate) page_bytes: u64,
    pub(crate) granularity: u64,
}

impl PageSize {
    /// The granularity replaces a missing size.
    pub(crate) fn ask(device: &Device, asked: Option<u64>) -> Result<Self, DeviceError> {
        let granularity = PhysicalMemory::granularity(device)?;
        Ok(Self { page_bytes: asked.unwrap_or(granularity), granularity })
    }

    pub(crate) fn is_mappable(self) -> bool {
        let Self { page_bytes, granularity } = self;
        page_bytes > 0 && granularity > 0 && page_bytes.is_multiple_of(granularity)
    }
}
