//! Physical pages: memory with an identity, with one holder or several.

use cuda_driver::guard;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cuda_driver::{Device, DeviceError, PhysicalMemory};

use crate::pages::pool::Ledger;

/// Identifies a physical page for the lifetime of the process. Never reused.
///
/// The driver may reuse its handles after a release, so they cannot serve as identity.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PageId(u64);

impl PageId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: the counter only has to be unique.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page#{}", self.0)
    }
}

/// Physical memory whose release returns the driver's answer, so that a clean-up can report every
/// refusal.
#[derive(Debug)]
pub(crate) struct Memory {
    device: Device,
    /// `None` once released, or perhaps released.
    physical: Option<PhysicalMemory>,
    bytes: u64,
}

impl Memory {
    fn new(physical: PhysicalMemory) -> Self {
        let (device, bytes) = (physical.device().clone(), physical.bytes());
        Self { device, physical: Some(physical), bytes }
    }

    /// Moves the memory out. What is left has none.
    fn take(&mut self) -> Self {
        Self { device: self.device.clone(), physical: self.physical.take(), bytes: self.bytes }
    }

    /// Whether the memory exists for certain.
    pub(crate) fn is_live(&self) -> bool {
        self.physical.is_some()
    }

    /// Releases the memory. A call that certainly had no effect is repeated once. If the second had
    /// none either, the memory is live.
    pub(crate) fn release(&mut self) -> Result<(), Unreleased> {
        let Some(physical) = self.physical.take() else { return Ok(()) };
        let Err(refused) = physical.release() else { return Ok(()) };
        let Err(error) = quiet_if_lost(&self.device, Err(refused.source)) else {
            let _ = refused.memory.map(PhysicalMemory::leak);
            return Ok(());
        };
        match refused.memory.map(PhysicalMemory::release) {
            Some(Ok(())) => return Err(Unreleased { error, leaked_bytes: 0 }),
            Some(Err(again)) => self.physical = again.memory,
            None => {}
        }
        Err(Unreleased { error, leaked_bytes: self.bytes })
    }
}

/// A lost device returns its error for every call of a clean-up. Its memory is gone with its
/// context, so the step counts as done. The cause is in the device's [`poison`](Device::poison).
pub(crate) fn quiet_if_lost(
    device: &Device,
    answer: Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    match answer {
        Err(error) if device.poison().is_some() && error.driver_error().code.is_sticky() => Ok(()),
        answer => answer,
    }
}

/// The contents of a page, owned or shared.
#[derive(Debug)]
struct Body {
    id: PageId,
    memory: Memory,
    /// The ledger of the pool that created the page.
    ledger: Arc<Ledger>,
    /// Whether the memory may exist for longer than the page. Then it stays counted.
    outlives: AtomicBool,
}

impl Body {
    fn new(memory: PhysicalMemory, ledger: Arc<Ledger>) -> Self {
        let (memory, outlives) = (Memory::new(memory), AtomicBool::new(false));
        Self { id: PageId::next(), memory, ledger, outlives }
    }

    fn release(&mut self) -> Result<(), Unreleased> {
        let released = self.memory.release();
        if matches!(released, Err(Unreleased { leaked_bytes: 1.., .. })) {
            let outlives = self.outlives.get_mut();
            let stays_mapped = *outlives;
            guard!("vmm.unreleased-stays-charged", *outlives = true);
            // Memory that stays mapped is counted for good.
            if !stays_mapped && self.memory.is_live() {
                guard!("vmm.unreleased-tried-again", self.ledger.keep(self.memory.take()));
            }
        }
        released
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Err(Unreleased { error, leaked_bytes }) = self.release() {
            tracing::warn!(%error, leaked_bytes, page = %self.id, "the release of a page was refused");
        }
        // After the release: until then the memory exists, and the pool must not create more.
        if !*self.outlives.get_mut() {
            self.ledger.released();
        }
    }
}

/// A physical page with exactly one holder, from a [`PagePool`](crate::pages::PagePool).
///
/// Dropping it releases the memory. [`PagePool::give_back`](crate::pages::PagePool::give_back)
/// keeps it for reuse. It is not `Clone`. A page that is mapped at several addresses must first be
/// [shared](PhysicalPage::share), so that two holders never both assume ownership.
#[derive(Debug)]
pub struct PhysicalPage {
    body: Body,
}

impl PhysicalPage {
    /// Creates a page that `ledger` has already counted as live.
    pub(crate) fn create(
        device: &Device,
        bytes: u64,
        ledger: &Arc<Ledger>,
    ) -> Result<Self, DeviceError> {
        let memory = PhysicalMemory::create(device, bytes)?;
        Ok(Self { body: Body::new(memory, Arc::clone(ledger)) })
    }

    /// Identity of the page.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.body.id
    }

    /// Converts the page to a shared one.
    #[must_use]
    pub fn share(self) -> SharedPage {
        SharedPage { body: Arc::new(self.body) }
    }
}

/// A physical page with any number of holders. Clones are the same page.
///
/// Clones may be mapped at several addresses. Mapping one again at an address where it is already
/// mapped succeeds and does nothing. As a [`Page`], it has an identity, and its last holder gets it back
/// ([`Page::into_owned`]).
#[derive(Clone, Debug)]
pub struct SharedPage {
    body: Arc<Body>,
}

/// A release that was refused.
#[derive(Clone, Copy)]
pub(crate) struct Unreleased {
    /// The first error.
    pub(crate) error: DeviceError,
    /// Bytes that may still exist; 0 if a second call released them.
    pub(crate) leaked_bytes: u64,
}

/// A page, as a reservation takes and returns it.
#[derive(Debug)]
pub enum Page {
    /// With one holder.
    Owned(PhysicalPage),
    /// With several holders.
    Shared(SharedPage),
}

impl Page {
    /// Identity of the page.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.body().id
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.body().memory.bytes
    }

    /// The page itself, unless other holders still share it.
    #[must_use]
    pub fn into_owned(self) -> Option<PhysicalPage> {
        match self {
            Self::Owned(page) => Some(page),
            Self::Shared(page) => Arc::into_inner(page.body).map(|body| PhysicalPage { body }),
        }
    }

    /// The device with the memory.
    pub(crate) fn device(&self) -> &Device {
        &self.body().memory.device
    }

    /// The memory, for mapping.
    pub(crate) fn memory(&self) -> Option<&PhysicalMemory> {
        self.body().memory.physical.as_ref()
    }

    pub(crate) fn is_counted_by(&self, ledger: &Arc<Ledger>) -> bool {
        Arc::ptr_eq(&self.body().ledger, ledger)
    }

    /// Releases the memory now, unless other holders still share it. Returns whether this was the
    /// last holder. A call that certainly had no effect is repeated once.
    pub(crate) fn release(self) -> Result<bool, Unreleased> {
        let Some(mut page) = self.into_owned() else { return Ok(false) };
        page.body.release().map(|()| true)
    }

    /// Notes that the memory stays mapped when its handle is released.
    pub(crate) fn stays_mapped(&self) {
        // Relaxed: read by the last holder, which got the page from this one.
        self.body().outlives.store(true, Ordering::Relaxed);
    }

    fn body(&self) -> &Body {
        match self {
            Self::Owned(page) => &page.body,
            Self::Shared(page) => &page.body,
        }
    }
}

impl From<PhysicalPage> for Page {
    fn from(page: PhysicalPage) -> Self {
        Self::Owned(page)
    }
}

impl From<SharedPage> for Page {
    fn from(page: SharedPage) -> Self {
        Self::Shared(page)
    }
}
