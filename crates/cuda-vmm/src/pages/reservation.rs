//! Reserved addresses and the pages mapped to them, changed by one thread at a time.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cuda_driver::{AddressRange, Device, DeviceError, DeviceSpan, Fence, guard};
use parking_lot::{Mutex, RwLock};

use crate::pages::access::AccessList;
use crate::pages::close::ThenPages;
use crate::pages::page::quiet_if_lost;
use crate::pages::pool::PageSize;
use crate::pages::retire::Retiring;
use crate::pages::table::{PageCounts, PageState, Table};
use crate::pages::{Closing, MapError, MapRefusal, NotMapped, Page, RetireError, UnmapReport};
use crate::rest::{AtRest, Covered, Quiescence};
use crate::{
    EpochGate, SpaceError,
    gate::{Unrest, UsersUnknown},
};

/// The options of a reservation.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ReservationOptions {
    /// Length in bytes, a multiple of the page size.
    pub bytes: u64,
    /// Bytes of a page, a multiple of the device's granularity; `None` means the granularity.
    pub page_bytes: Option<u64>,
    /// Ordinals of other devices that may read and write the mapped memory.
    pub peers: Vec<i32>,
}

/// Bytes of a reservation by state.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReservationStats {
    /// Bytes of reserved addresses.
    pub reserved_bytes: u64,
    /// Mapped and ready for use.
    pub mapped_bytes: u64,
    /// Retired and still mapped, waiting for their users.
    pub retiring_bytes: u64,
    /// Mapped because the driver refused to unmap them.
    pub quarantined_bytes: u64,
}

/// A range of device addresses to which physical pages are mapped.
///
/// All methods take `&self`: any number of threads may map, look up and retire at once. Mapping is
/// serialised: a second thread sees the finished work of the first. A page counts as mapped only
/// after access to it has been granted.
///
/// # Ordering
/// `cuMemUnmap` waits for no work. Therefore only [`retire`](Reservation::retire) and
/// [`close`](Reservation::close) unmap. They wait for the given fences and for the leases of
/// [`gate`](Reservation::gate).
///
/// Fences or leases must cover the users of addresses that were handed out. If no lease was ever
/// taken at the gate, and no fence of a device with access is given, the end of the uses is
/// unknown. The memory is then not at rest ([`Unrest::Unknown`]), and only a call that waits
/// succeeds, by waiting for all work of the device. If peers have access, no single wait covers all
/// users: then nothing is [retired](Reservation::retire), and memory closed this way stays mapped.
///
/// The same holds for dropped leases ([`Unrest::Dropped`]), until [fences
/// cover](EpochGate::cover_dropped) the work of their batches.
///
/// # Drop
/// Dropping does not wait, and unmaps only what is provably at rest: retired pages whose users are
/// done; everything, if no address ever left the reservation; and if leases were taken at its gate,
/// everything once all of them are closed and their work has completed (a user of leases takes one
/// for every use). All other memory stays mapped and reserved until the process ends, is logged,
/// and is counted by [`leaked_bytes`](crate::leaked_bytes): a leak is better than a fault. Use
/// [`close`](Reservation::close) to leak nothing.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) device: Device,
    pub(crate) span: DeviceSpan,
    pub(crate) page_bytes: u64,
    page_count: u64,
    pub(crate) access: Arc<AccessList>,
    gate: EpochGate,
    /// `None` once closed. Users of the addresses hold a read lock during a driver call. Only
    /// closing takes the write lock, after all users are gone.
    pub(crate) addresses: RwLock<Option<AddressRange>>,
    /// Serialises mapping. Held across driver calls, whose number is that of the offered pages. No
    /// reader takes it. Taken before `table`.
    pub(crate) editing: Mutex<()>,
    /// The book. Never held across a driver call, so that reading it is always short.
    pub(crate) table: Mutex<Table>,
    /// Whether an address was ever handed out. Before that no work can use the memory.
    exposed: AtomicBool,
}

impl Reservation {
    /// Reserves addresses. Nothing is mapped yet.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn new(device: &Device, options: ReservationOptions) -> Result<Self, SpaceError> {
        Self::with_gate(device, options, EpochGate::new())
    }

    /// Like [`new`](Reservation::new), with a gate that several reservations share. One lease then
    /// covers a batch's use of all of them.
    ///
    /// # Errors
    /// [`SpaceError`].
    #[track_caller]
    pub fn with_gate(
        device: &Device,
        options: ReservationOptions,
        gate: EpochGate,
    ) -> Result<Self, SpaceError> {
        let _site = cuda_driver::site::enter();
        let size = PageSize::ask(device, options.page_bytes)?;
        let PageSize { page_bytes, granularity } = size;
        if !size.is_mappable() {
            return Err(SpaceError::PageBytes { page_bytes, granularity });
        }
        if options.bytes == 0 || !options.bytes.is_multiple_of(page_bytes) {
            return Err(SpaceError::Misaligned { bytes: options.bytes, page_bytes });
        }
        let access = Arc::new(AccessList::new(device, &options.peers)?);
        let addresses = AddressRange::reserve(device, options.bytes)?;
        let span = addresses
            .span(0, options.bytes)
            .unwrap_or_else(|error| unreachable!("a range contains itself: {error}"));
        gate.guard(&access);
        Ok(Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                span,
                page_bytes,
                page_count: options.bytes / page_bytes,
                access,
                gate,
                addresses: RwLock::new(Some(addresses)),
                editing: Mutex::new(()),
                table: Mutex::new(Table::default()),
                exposed: AtomicBool::new(false),
            }),
        })
    }

    /// The device that the addresses belong to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The gate whose leases batches take before they use addresses of this reservation.
    #[must_use]
    pub fn gate(&self) -> &EpochGate {
        &self.inner.gate
    }

    /// All addresses, mapped or not.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.inner.expose();
        self.inner.span
    }

    /// The addresses of mapped pages.
    ///
    /// # Errors
    /// [`NotMapped`] with the first page that is not mapped, retiring ones included.
    pub fn mapped_span(&self, pages: Range<u64>) -> Result<DeviceSpan, NotMapped> {
        // An empty range may have its end before its start.
        let end = guard!("vmm.backward-range-empty", pages.end.max(pages.start), else pages.end);
        let pages = pages.start..end;
        {
            let table = self.inner.table.lock();
            table.check_mapped(pages.clone())?;
            // Under the same lock, so that a thread that retires the pages knows that they were
            // handed out.
            self.inner.expose();
        }
        let offset = pages.start.min(self.inner.page_count) * self.inner.page_bytes;
        let bytes = (pages.end - pages.start) * self.inner.page_bytes;
        self.inner.span.slice(offset, bytes).map_err(|_| NotMapped { index: pages.start })
    }

    /// The state of a page.
    #[must_use]
    pub fn page_state(&self, index: u64) -> PageState {
        self.inner.table.lock().state(index)
    }

    /// Maps `pages` at the pages from `first` on, all or none; returns how many were not mapped
    /// there already.
    ///
    /// On failure the mapped pages are unmapped in reverse, and no thread ever sees a part of them.
    /// A page that cannot be unmapped again goes into quarantine.
    ///
    /// # Ordering
    /// The memory may be used as soon as this returns. Its contents are undefined.
    ///
    /// # Errors
    /// [`MapError`] with the pages.
    #[track_caller]
    pub fn map_range<P: Into<Page>>(
        &self,
        first: u64,
        pages: impl IntoIterator<Item = P>,
    ) -> Result<u64, MapError> {
        let _site = cuda_driver::site::enter();
        self.inner.map(first, pages.into_iter().map(Into::into).collect())
    }

    /// Takes mapped pages out of use. From now on they count as neither mapped nor free, until the
    /// work before `fences` has completed and the leases of the gate taken so far are closed.
    ///
    /// # Errors
    /// [`RetireError`]; nothing was retired then.
    #[track_caller]
    pub fn retire(&self, pages: Range<u64>, fences: &[Fence]) -> Result<Retiring, RetireError> {
        let _site = cuda_driver::site::enter();
        let users = || self.inner.users(fences);
        let ticket = self.inner.table.lock().retire(pages.clone(), users)?;
        Ok(Retiring::new(Arc::clone(&self.inner), ticket, pages))
    }

    /// Whether pages could be mapped on the whole range.
    pub(crate) fn check_free(&self, pages: Range<u64>) -> Result<(), MapRefusal> {
        self.inner.table.lock().check_free(pages)
    }

    /// Unmaps every retired page that is at rest, including those of dropped [`Retiring`]s. Does
    /// not wait.
    #[track_caller]
    pub fn poll_retired(&self) -> UnmapReport {
        let _site = cuda_driver::site::enter();
        self.inner.poll_retired()
    }

    /// Tries again to unmap the pages in quarantine.
    #[track_caller]
    pub fn retry_quarantined(&self) -> UnmapReport {
        let _site = cuda_driver::site::enter();
        self.inner.retry_quarantined()
    }

    /// Bytes by state, at one moment.
    #[must_use]
    pub fn stats(&self) -> ReservationStats {
        let PageCounts { mapped, retiring, quarantined } = self.inner.table.lock().counts();
        let page_bytes = self.inner.page_bytes;
        ReservationStats {
            reserved_bytes: self.inner.span.bytes(),
            mapped_bytes: mapped * page_bytes,
            retiring_bytes: retiring * page_bytes,
            quarantined_bytes: quarantined * page_bytes,
        }
    }

    /// Retires everything that is mapped, as the first step of clean-up.
    ///
    /// The second step is [`Closing::try_complete`] or [`Closing::wait`], once the work before
    /// `fences` has completed and the leases of the gate are closed.
    #[track_caller]
    pub fn close(self, fences: &[Fence]) -> Closing {
        let _site = cuda_driver::site::enter();
        let covered = self.inner.covers(fences);
        self.close_after(fences, covered, ThenPages::Reported)
    }

    /// Like `close`, for a caller that knows whether `fences` cover all users.
    pub(crate) fn close_after(
        self,
        fences: &[Fence],
        covered: Covered,
        then: ThenPages,
    ) -> Closing {
        let users = || Quiescence::new(&self.inner.gate, fences, covered);
        self.inner.table.lock().retire_all(users);
        Closing::new(self, then)
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage_unmap_retired(&self) -> UnmapReport {
        self.inner.unmap_retired(|_| Some(AtRest::sabotage()))
    }
}

impl Inner {
    pub(crate) fn expose(&self) {
        // Release: partner of `covers`. The check avoids a write for each span that a step path
        // asks for.
        if !self.exposed.load(Ordering::Relaxed) {
            self.exposed.store(true, Ordering::Release);
        }
    }

    /// Whether `fences` or the gate's leases cover all possible users.
    pub(crate) fn covers(&self, fences: &[Fence]) -> Covered {
        let reached = || self.access.reaches_any(fences);
        let spoken_for = !self.exposed.load(Ordering::Acquire)
            || self.gate.was_leased()
            || guard!("vmm.fence-must-reach", reached(), else !fences.is_empty());
        if spoken_for { Covered::Yes } else { Covered::No }
    }

    /// Like [`covers`](Inner::covers), but fails if nothing covers the users, or if a fence is of a
    /// device that cannot be one.
    pub(crate) fn check_covers(&self, fences: &[Fence]) -> Result<(), UsersUnknown> {
        self.check_fences(fences, self.covers(fences))
    }

    /// Does the same where the caller knows whether the users are covered.
    pub(crate) fn check_fences(
        &self,
        fences: &[Fence],
        covered: Covered,
    ) -> Result<(), UsersUnknown> {
        let strange = |fence: &&Fence| !self.access.reaches(fence.device());
        let foreign = fences.iter().filter(strange).count() as u64;
        match covered {
            Covered::Yes if guard!("vmm.strange-fence-refused", foreign == 0, else true) => Ok(()),
            _ => Err(UsersUnknown { fences: fences.len() as u64, foreign }),
        }
    }

    /// The users of memory that no new user can find. Unknown users can be waited for only if no
    /// peer has access.
    fn users(&self, fences: &[Fence]) -> Result<Quiescence, UsersUnknown> {
        let covered = self.covers(fences);
        let peers = guard!("vmm.peers-need-cover", self.has_peers(), else false);
        self.check_fences(fences, if peers { covered } else { Covered::Yes })?;
        Ok(Quiescence::new(&self.gate, fences, covered))
    }

    /// Whether devices other than the owner can access the memory.
    fn has_peers(&self) -> bool {
        self.access.as_slice().len() > 1
    }

    /// Waits for all work of the owner, if no other device can access the memory.
    pub(crate) fn wait_for_all(&self) -> Result<(), Unrest> {
        if self.has_peers() {
            return Err(Unrest::Unknown);
        }
        match self.device.synchronize() {
            // On a lost device no work runs.
            Err(error) if self.device.poison().is_none() => Err(error.into()),
            _ => Ok(()),
        }
    }

    pub(crate) fn check_range(&self, first: u64, count: u64) -> Result<(), MapRefusal> {
        match first.checked_add(count) {
            Some(end) if end <= self.page_count => Ok(()),
            _ => Err(MapRefusal::OutOfRange { first, count, capacity: self.page_count }),
        }
    }

    pub(crate) fn offset(&self, index: u64) -> u64 {
        // Cannot overflow: pages in the book lie inside the reservation.
        index * self.page_bytes
    }

    pub(crate) fn unmap_page(
        &self,
        addresses: &AddressRange,
        index: u64,
    ) -> Result<(), DeviceError> {
        let unmapped = addresses.unmap(self.offset(index), self.page_bytes);
        quiet_if_lost(&self.device, unmapped)
    }

    /// Unmaps what is provably at rest, without waiting, and leaks everything else; see the section
    /// on dropping of [`Reservation`].
    fn abandon(&mut self) {
        if self.addresses.get_mut().is_none() {
            return;
        }
        let never_exposed = !*self.exposed.get_mut();
        if never_exposed || guard!("vmm.drop-leaks-unknown", self.gate.was_leased(), else true) {
            let gate = &self.gate;
            let users = || Quiescence::new(gate, &[], Covered::Yes);
            self.table.get_mut().retire_all(users);
        }
        let unmapped = self.unmap_retired(|retirement| match never_exposed {
            true => Some(AtRest::never_exposed()),
            false => {
                let checked = || retirement.users.check().ok();
                guard!("vmm.drop-unmaps-at-rest", checked(), else Some(AtRest::never_exposed()))
            }
        });
        let retried = self.retry_quarantined();
        // Their memory is released before the addresses are freed or leaked.
        drop((unmapped, retried));
        let addresses = self.addresses.get_mut().take();
        let table = self.table.get_mut();
        if table.is_empty() {
            // Dropping the addresses frees them.
            return;
        }
        let left = table.take_rest();
        let bytes = left.len() as u64 * self.page_bytes;
        LEAKED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        tracing::warn!(bytes, "a reservation was dropped while in use: its memory is leaked");
        // The leaked clones of the device keep its context alive, and so the mappings.
        std::mem::forget((left, addresses));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.abandon();
    }
}

static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of device memory that this process leaked because their owner was dropped while they may
/// have been in use; see the section on dropping of [`Reservation`].
#[must_use]
pub fn leaked_bytes() -> u64 {
    LEAKED_BYTES.load(Ordering::Relaxed)
}
