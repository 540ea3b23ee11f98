//! A bounded stock of physical pages: created on demand or ahead of it, reused, always counted.

use std::sync::Arc;

use cuda_driver::{Device, DeviceError, PhysicalMemory};
use parking_lot::Mutex;

use crate::page::PhysicalPage;
use crate::{CloseError, CloseStep, ForeignPage, Page, PageError};

/// How large a pool's pages are and how many there may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PagePoolOptions {
    /// Bytes of a page, a multiple of the device's granularity; `None` is the granularity itself.
    pub page_bytes: Option<u64>,
    /// Most pages that may exist at once, idle ones included.
    pub capacity_pages: u64,
}

/// A look at a pool's accounts, taken at one instant.
///
/// `live == idle + in_use` and `created == live + released` hold in every look.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PagePoolStats {
    /// Most pages that may be live.
    pub capacity: u64,
    /// Pages that exist (or are being created).
    pub live: u64,
    /// Of those, pages that wait in the pool.
    pub idle: u64,
    /// Of those, pages that are with a holder.
    pub in_use: u64,
    /// Pages created since the pool was made.
    pub created: u64,
    /// Pages released to the driver since then.
    pub released: u64,
}

/// The counts of one pool. Pages hold it too, so that a dropped page is accounted for.
#[derive(Debug)]
pub(crate) struct Ledger {
    capacity: u64,
    counts: Mutex<Counts>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    created: u64,
    released: u64,
    idle: u64,
}

impl Ledger {
    /// Counts a page that is about to be created; false when there may be no more.
    fn begin(&self) -> bool {
        let mut counts = self.counts.lock();
        let fits = counts.created - counts.released < self.capacity;
        counts.created += u64::from(fits);
        fits
    }

    /// Takes back what `begin` counted.
    fn cancel(&self) {
        self.counts.lock().created -= 1;
    }

    pub(crate) fn released(&self) {
        self.counts.lock().released += 1;
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

/// Physical pages of one size on one device. A cheap handle: clones are the same pool.
#[derive(Clone, Debug)]
pub struct PagePool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    page_bytes: u64,
    ledger: Arc<Ledger>,
    /// # Invariants
    /// Its length is the ledger's `idle`, whenever the lock is free; last in, first out, so that a
    /// page used a moment ago is used again. Taken before the ledger's lock.
    idle: Mutex<Vec<PhysicalPage>>,
}

impl PagePool {
    /// An empty pool; nothing is created yet.
    ///
    /// # Errors
    /// [`PageError::PageBytes`] for a size that the device cannot map, [`PageError::Device`].
    pub fn new(device: &Device, options: PagePoolOptions) -> Result<Self, PageError> {
        let size = PageSize::ask(device, options.page_bytes)?;
        let PageSize { page_bytes, granularity } = size;
        if !size.is_mappable() {
            return Err(PageError::PageBytes { page_bytes, granularity });
        }
        let ledger =
            Ledger { capacity: options.capacity_pages, counts: Mutex::new(Counts::default()) };
        Ok(Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                page_bytes,
                ledger: Arc::new(ledger),
                idle: Mutex::new(Vec::new()),
            }),
        })
    }

    /// The device that holds the pages.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Bytes of each page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.inner.page_bytes
    }

    /// An idle page, or else a new one. A new page costs about 12 µs and its contents are undefined.
    ///
    /// # Errors
    /// [`PageError::Exhausted`] at the pool's capacity, [`PageError::OutOfMemory`] at the device's.
    pub fn take(&self) -> Result<PhysicalPage, PageError> {
        {
            let mut idle = self.inner.idle.lock();
            if let Some(page) = self.pop(&mut idle) {
                return Ok(page);
            }
            // Counted while the list is still locked: a page given back in between would otherwise
            // make a pool look exhausted that is not.
            self.begin()?;
        }
        self.create()
    }

    /// `count` pages, or none: on failure idle pages are idle again and new ones are released.
    ///
    /// # Errors
    /// As [`take`](PagePool::take).
    pub fn take_many(&self, count: u64) -> Result<Vec<PhysicalPage>, PageError> {
        let mut taken = Vec::new();
        {
            let mut idle = self.inner.idle.lock();
            while (taken.len() as u64) < count
                && let Some(page) = self.pop(&mut idle)
            {
                taken.push(page);
            }
        }
        let reused = taken.len();
        while (taken.len() as u64) < count {
            match self.begin().and_then(|()| self.create()) {
                Ok(page) => taken.push(page),
                Err(error) => {
                    // What this call created is dropped, hence released: a call that failed for
                    // want of memory must not sit on some.
                    taken.truncate(reused);
                    taken.into_iter().for_each(|page| self.put(page));
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    /// Keeps a page for reuse. A shared page that others still hold stays theirs: the last to be
    /// given back becomes idle.
    ///
    /// # Errors
    /// [`ForeignPage`], with the page, when it came from another pool.
    pub fn give_back(&self, page: impl Into<Page>) -> Result<(), ForeignPage> {
        let page = page.into();
        if !page.is_counted_by(&self.inner.ledger) {
            return Err(ForeignPage { page });
        }
        if let Some(page) = page.into_owned() {
            self.put(page);
        }
        Ok(())
    }

    /// Creates pages ahead of need until `count` are idle; returns how many are.
    ///
    /// # Errors
    /// As [`take`](PagePool::take); pages created before the failure stay idle.
    pub fn prepare(&self, count: u64) -> Result<u64, PageError> {
        loop {
            let idle = self.stats().idle;
            if idle >= count {
                return Ok(idle);
            }
            self.begin()?;
            self.put(self.create()?);
        }
    }

    /// Releases idle pages until at most `keep` are left; returns how many were released and every
    /// refusal of the driver.
    pub fn trim(&self, keep: u64) -> (u64, Vec<CloseError>) {
        let excess = {
            let mut idle = self.inner.idle.lock();
            let keep = usize::try_from(keep).unwrap_or(usize::MAX).min(idle.len());
            let excess = idle.split_off(keep);
            self.inner.ledger.counts.lock().idle -= excess.len() as u64;
            excess
        };
        let mut errors = Vec::new();
        let count = excess.len() as u64;
        for page in excess {
            release(page.into(), &mut errors);
        }
        (count, errors)
    }

    /// The accounts.
    #[must_use]
    pub fn stats(&self) -> PagePoolStats {
        self.inner.ledger.look()
    }

    fn begin(&self) -> Result<(), PageError> {
        if self.inner.ledger.begin() {
            Ok(())
        } else {
            Err(PageError::Exhausted { capacity: self.inner.ledger.capacity })
        }
    }

    /// Creates the page that `begin` counted.
    fn create(&self) -> Result<PhysicalPage, PageError> {
        let Inner { device, page_bytes, ledger, .. } = &*self.inner;
        PhysicalPage::create(device, *page_bytes, ledger).map_err(|error| {
            ledger.cancel();
            if error.is_out_of_memory() {
                PageError::OutOfMemory { page_bytes: *page_bytes, live: ledger.look().live }
            } else {
                PageError::Device(error)
            }
        })
    }

    fn pop(&self, idle: &mut Vec<PhysicalPage>) -> Option<PhysicalPage> {
        let page = idle.pop()?;
        self.inner.ledger.counts.lock().idle -= 1;
        Some(page)
    }

    fn put(&self, page: PhysicalPage) {
        let mut idle = self.inner.idle.lock();
        idle.push(page);
        self.inner.ledger.counts.lock().idle += 1;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Pages of this list are released as they drop; those with a holder live on with it.
        let idle = std::mem::take(self.idle.get_mut());
        self.ledger.counts.lock().idle = 0;
        drop(idle);
    }
}

/// Releases one page and notes a refusal; returns whether this was its last holder.
pub(crate) fn release(page: Page, errors: &mut Vec<CloseError>) -> bool {
    let id = page.id();
    page.release().unwrap_or_else(|error| {
        errors.push(CloseError { step: CloseStep::Release { page: id }, error });
        true
    })
}

/// A size of pages that was asked for, beside what the device can do.
#[derive(Clone, Copy)]
pub(crate) struct PageSize {
    pub(crate) page_bytes: u64,
    pub(crate) granularity: u64,
}

impl PageSize {
    /// The granularity stands in for a size that was not given.
    pub(crate) fn ask(device: &Device, asked: Option<u64>) -> Result<Self, DeviceError> {
        let granularity = PhysicalMemory::granularity(device)?;
        Ok(Self { page_bytes: asked.unwrap_or(granularity), granularity })
    }

    pub(crate) fn is_mappable(self) -> bool {
        let Self { page_bytes, granularity } = self;
        page_bytes > 0 && granularity > 0 && page_bytes.is_multiple_of(granularity)
    }
}
