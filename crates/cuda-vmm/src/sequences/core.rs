//! The work of a space: checks what is at rest, maps ahead of need, and unmaps under pressure.

use cuda_driver::guard;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuda_driver::Device;
use parking_lot::Mutex;

use super::book::{Book, Lengths, Seat};
use super::shape::Shape;
use super::stats::Counters;
use crate::background::{Fault, Progress, WorkSource};
use crate::pages::{
    CloseError, CloseStep, MapError, MapRefusal, Page, PageError, PagePool, PhysicalPage,
    Reservation, UnmapReport,
};
use crate::rest::{AtRest, Done, Look, Quiescence};

/// A space, as shared by its sequences and its worker.
#[derive(Debug)]
pub(super) struct SpaceCore {
    pub(super) shape: Shape,
    pub(super) parked_pages_max: u64,
    pub(super) prepared_pages: u64,
    pub(super) reservation: Reservation,
    pub(super) pages: PagePool,
    pub(super) lengths: Box<[Lengths]>,
    /// Held to read the seats or change a few words, never across a driver call.
    pub(super) book: Mutex<Book>,
    pub(super) counters: Counters,
    /// Whether the addresses of the whole space were handed out.
    pub(super) exposed: AtomicBool,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) sabotage: super::sabotage::Sabotage,
}

impl WorkSource for SpaceCore {
    fn device(&self) -> Option<&Device> {
        Some(self.reservation.device())
    }

    fn step(&self) -> Result<Progress, Fault> {
        let waiting = self.settle();
        self.retry_quarantined();
        if self.relieve()
            || self.grow_most_urgent()?
            || self.unmap_given_up()
            || self.unmap_surplus()
            || self.prepare()?
        {
            return Ok(Progress::More);
        }
        Ok(if waiting { Progress::Waiting } else { Progress::Done })
    }
}

/// Methods that change mappings are called only from steps and from `Waker::run`, and therefore by
/// one thread at a time.
impl SpaceCore {
    /// Forgets the users of all seats that are done; returns whether others are left.
    pub(super) fn settle(&self) -> bool {
        let pending = self.book.lock().pending();
        let (mut waiting, mut look) = (false, Look::default());
        for (place, users) in pending {
            match self.check_done(users, &mut look) {
                Some(done) => self.book.lock().seat(place).users.forget(&done),
                None => waiting = true,
            }
        }
        waiting
    }

    fn check_done(&self, users: Arc<Quiescence>, look: &mut Look) -> Option<Done> {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.sabotage.rests_at_once() {
            return Some(Done::sabotage(users));
        }
        Done::check(users, look)
    }

    /// Tries again to unmap pages in quarantine.
    pub(super) fn retry_quarantined(&self) {
        if self.reservation.stats().quarantined_bytes == 0 {
            return;
        }
        let report = self.reservation.retry_quarantined();
        {
            let mut book = self.book.lock();
            book.seats.iter_mut().for_each(|seat| seat.stuck = false);
            for failure in &report.failed {
                if let CloseStep::Unmap { index } = failure.step {
                    book.seat(self.shape.seat_of(index)).stuck = true;
                }
            }
        }
        self.take_back(report);
    }

    /// Maps rows where they are needed most; returns whether any were mapped.
    fn grow_most_urgent(&self) -> Result<bool, Fault> {
        let mut refused = Ok(false);
        let wanting = self.in_want();
        // The pages of a step are divided among all wanting seats, so that none of them waits long.
        let rows_max = self.shape.step_rows() / (wanting.len() as u64).max(1);
        for place in wanting {
            match self.grow(place, rows_max) {
                Ok(grown) if grown => return Ok(true),
                Ok(_) => {}
                // This fault concerns only this seat.
                Err(fault @ Fault::Quarantined { .. }) => refused = refused.and(Err(fault)),
                Err(fault) => return Err(fault),
            }
        }
        refused
    }

    /// Live seats that want more memory: those without remaining memory first, then by remaining
    /// memory.
    fn in_want(&self) -> Vec<u64> {
        let mut wanting: Vec<_> = self
            .book
            .lock()
            .seats
            .iter()
            .enumerate()
            .filter(|(place, seat)| self.wants(&self.lengths[*place], seat))
            .map(|(place, seat)| {
                let used = self.lengths[place].used.load(Ordering::Relaxed);
                (self.shape.tokens_in(seat.rows).saturating_sub(used), place as u64)
            })
            .collect();
        wanting.sort_unstable();
        wanting.into_iter().map(|(_, place)| place).collect()
    }

    fn wants(&self, place: &Lengths, seat: &Seat) -> bool {
        // `Acquire` is not needed: the number orders nothing else.
        seat.is_live() && place.wanted.load(Ordering::Relaxed) > self.shape.tokens_in(seat.rows)
    }

    /// Maps the next rows of a seat in all its planes: as many as the seat wants, at most
    /// `rows_max` but at least one; all or nothing. Returns false if the seat wants none any more.
    pub(super) fn grow(&self, place: u64, rows_max: u64) -> Result<bool, Fault> {
        let rows = {
            let mut book = self.book.lock();
            let seat = book.seat(place);
            let shared = &self.lengths[place as usize];
            if !self.wants(shared, seat) {
                return Ok(false);
            }
            let wanted = self.shape.rows_for(shared.wanted.load(Ordering::Relaxed));
            seat.rows..wanted.min(seat.rows.saturating_add(rows_max)).max(seat.rows + 1)
        };
        let first = rows.start..rows.start + 1;
        let grown = self.map_rows(place, rows.clone());
        match grown {
            // Memory may be short for several rows but suffice for one.
            Err(fault) if rows != first && !fault.is_fatal() => self.map_rows(place, first)?,
            grown => grown?,
        }
        Ok(true)
    }

    /// Maps `rows`, the next ones of a seat: all or nothing.
    fn map_rows(&self, place: u64, rows: Range<u64>) -> Result<(), Fault> {
        self.check_rows(place, rows.clone())?;
        let pages = self.take_pages(rows.end - rows.start)?;
        let indices = self.shape.rows(place, rows.clone());
        let places = indices.zip(pages).map(|(index, page)| (index, Page::from(page))).collect();
        match self.reservation.inner.map_at(places) {
            Ok(_) => {
                let mut book = self.book.lock();
                book.seat(place).rows = rows.end;
                // Partner: the loads of `ready` by the seat's sequence. Access to all of it was
                // granted.
                let ready = self.shape.tokens_in(rows.end);
                self.lengths[place as usize].ready.store(ready, Ordering::Release);
                Ok(())
            }
            Err(MapError { reason, pages, quarantined }) => {
                self.pages.take_back(pages);
                if guard!("vmm.stuck-seat-not-given", quarantined > 0, else false) {
                    self.book.lock().seat(place).stuck = true;
                }
                Err(self.fault(reason))
            }
        }
    }

    /// Fails if a page blocks these rows. Checked before any page is created.
    fn check_rows(&self, place: u64, rows: Range<u64>) -> Result<(), Fault> {
        let bytes = self.reservation.stats();
        // If no page is retiring or quarantined, no page lies behind the rows of its seat. Checking
        // each page of a row takes time proportional to the number of planes, which may exceed the
        // number of pages.
        if bytes.retiring_bytes == 0 && bytes.quarantined_bytes == 0 {
            return Ok(());
        }
        let check = |index| self.reservation.check_free(index..index + 1);
        self.shape.rows(place, rows).try_for_each(check).map_err(|reason| self.fault(reason))
    }

    /// Pages for that many rows: idle ones, new ones, or, for one row, those of resting seats.
    fn take_pages(&self, rows: u64) -> Result<Vec<PhysicalPage>, Fault> {
        loop {
            let error = match self.pages.take_all(rows * self.shape.ranges) {
                Ok(pages) => return Ok(pages),
                Err(error) => error,
            };
            let fault = self.page_fault(error);
            let short = matches!(fault, Fault::OutOfMemory { .. } | Fault::Limit { .. });
            // Over its limit the pool hands out no page, not even an idle one.
            if rows == 1 && short {
                self.settle();
                if self.relieve() || self.unmap_unneeded_row().is_some() {
                    continue;
                }
            }
            // Whoever asks for several rows asks for one next.
            let refused = if rows == 1 { self.pages.noted(Err(error)) } else { Err(error) };
            return refused.map_err(|_| fault);
        }
    }

    /// Unmaps an unused row if there are more than allowed; returns whether one was unmapped.
    fn unmap_surplus(&self) -> bool {
        let rows = {
            let book = self.book.lock();
            book.census().parked_rows + self.all_spare_rows(&book)
        };
        rows.saturating_mul(self.shape.ranges) > self.parked_pages_max
            && self.unmap_unneeded_row().is_some()
    }

    /// Number of rows of live seats that their sequences do not want and nobody uses.
    pub(super) fn all_spare_rows(&self, book: &Book) -> u64 {
        let live = book.seats.iter().zip(&self.lengths).filter(|(seat, _)| seat.is_live());
        live.map(|(seat, shared)| self.free_rows(shared, seat)).sum()
    }

    pub(super) fn unmap(&self, indices: &[u64], proof: &AtRest) -> Unmapped {
        self.take_back(self.reservation.inner.unmap_at_rest(indices, proof))
    }

    /// Refills the pool's idle pages; returns whether a page was created. Too little memory is not
    /// a fault here: no sequence has asked for it yet.
    fn prepare(&self) -> Result<bool, Fault> {
        let stats = self.pages.stats();
        if stats.idle >= self.prepared_pages || stats.live >= stats.capacity {
            return Ok(false);
        }
        match self.pages.prepare(stats.idle + 1) {
            Ok(_) => Ok(true),
            Err(error) => match self.page_fault(error) {
                Fault::OutOfMemory { .. } | Fault::Limit { .. } => Ok(false),
                fault => Err(fault),
            },
        }
    }

    fn take_back(&self, report: UnmapReport) -> Unmapped {
        let pages = report.pages.len() as u64;
        self.pages.take_back(report.pages);
        for failure in &report.failed {
            tracing::warn!(%failure, source = %failure.error, "a page of a space is in quarantine");
        }
        Unmapped { pages, failed: report.failed }
    }

    fn page_fault(&self, error: PageError) -> Fault {
        let bytes = self.shape.row_bytes(1);
        match error {
            PageError::OutOfMemory { .. } => Fault::OutOfMemory { bytes },
            PageError::Device(error) => Fault::of_device(self.device(), error, bytes),
            _ => Fault::Limit { bytes },
        }
    }

    fn fault(&self, reason: MapRefusal) -> Fault {
        match reason {
            MapRefusal::Quarantined { index } | MapRefusal::Retiring { index } => {
                Fault::Quarantined { index }
            }
            MapRefusal::Device { source, .. } => {
                Fault::of_device(self.device(), source, self.shape.row_bytes(1))
            }
            reason => unreachable!("a space maps its own pages in order: {reason}"),
        }
    }

    pub(super) fn device(&self) -> &Device {
        self.reservation.device()
    }

    /// Time for the stall statistics: virtual time on a simulated machine.
    pub(super) fn clock(&self) -> Clock {
        match self.device().virtual_now() {
            Some(now) => Clock::Virtual(now),
            None => Clock::Real(std::time::Instant::now()),
        }
    }

    pub(super) fn elapsed(&self, since: Clock) -> Duration {
        match since {
            Clock::Virtual(then) => {
                self.device().virtual_now().unwrap_or(then).saturating_sub(then)
            }
            Clock::Real(then) => then.elapsed(),
        }
    }
}

/// The start of a stall.
#[derive(Clone, Copy, Debug)]
pub(super) enum Clock {
    Virtual(Duration),
    Real(std::time::Instant),
}

/// The result of an unmapping.
#[derive(Debug, Default)]
pub(super) struct Unmapped {
    pub(super) pages: u64,
    pub(super) failed: Vec<CloseError>,
}

impl Drop for SpaceCore {
    /// Unmaps, without waiting, what is at rest. Memory that may still be in use follows the rule
    /// for dropping a [`Reservation`], which is dropped next.
    fn drop(&mut self) {
        let seats = std::mem::take(&mut self.book.get_mut().seats);
        for (place, seat) in (0..).zip(seats) {
            let rows = (0..seat.rows).rev();
            let indices: Vec<_> = rows.flat_map(|row| self.shape.row(place, row).rev()).collect();
            // No sequence is live: each keeps the space.
            match (seat.users.rest_from(0), seat.users.joined()) {
                _ if indices.is_empty() => {}
                (Some(proof), _) => drop(self.unmap(&indices, &proof)),
                (None, Some(users)) => self.reservation.inner.retire_at(&indices, Arc::new(users)),
                (None, None) => {}
            }
        }
    }
}
