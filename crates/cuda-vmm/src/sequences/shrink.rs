//! Memory of a seat that nobody needs: what a live sequence gives up, unmapped when it is at rest,
//! and what is at rest already, unmapped under pressure. A new demand of the sequence wins.

use cuda_driver::{Fence, guard};
use std::sync::atomic::Ordering;

use super::book::{Lengths, Seat, Tenancy};
use super::core::{SpaceCore, Unmapped};
use super::sequence::Sequence;
use crate::gate::UsersUnknown;
use crate::rest::{AtRest, Covered, Quiescence};

impl Sequence {
    /// Gives up the memory beyond `tokens` tokens and the look-ahead. It is unmapped row by row
    /// from the end, each row once the work before the `fences` of the last call that gave it up,
    /// and of earlier calls, has completed, and the leases of the gate taken so far are closed.
    /// Memory that the sequence [extends](Sequence::extend_to) over before that stays mapped. Calls
    /// no driver, except to query the fences of earlier calls if very many have gathered.
    ///
    /// From now on the sequence has at most `tokens` tokens: work on later tokens must follow an
    /// extension that returned `Ok`.
    ///
    /// # Errors
    /// [`UsersUnknown`]; the sequence is unchanged.
    #[track_caller]
    pub fn shrink_to(&mut self, tokens: u64, fences: &[Fence]) -> Result<(), UsersUnknown> {
        let _site = cuda_driver::site::enter();
        let left = tokens.min(self.tokens());
        if left == self.tokens() && !self.asks_beyond(tokens) {
            return Ok(());
        }
        guard!("vmm.give-up-needs-cover", self.check_covers(fences)?);
        let core = &self.core;
        let users = Quiescence::new(core.reservation.gate(), fences, Covered::Yes);
        let used_rows = self.rows_asked();
        let wanted = self.want_less(tokens);
        let core = &self.core;
        let place = &core.lengths[self.seat() as usize];
        let many = {
            let mut book = core.book.lock();
            // In one step: memory that is not wanted has these users, or was never used.
            place.used.store(left, Ordering::Relaxed);
            place.wanted.store(wanted, Ordering::SeqCst);
            let seat = book.seat(self.seat());
            seat.shrunk = true;
            seat.users.add(used_rows, users);
            seat.users.are_many()
        };
        if guard!("vmm.shrink-settles", many, else false) {
            core.settle();
        }
        self.waker().wake();
        Ok(())
    }
}

impl SpaceCore {
    /// Unmaps one row that a live sequence has given up and that is at rest; returns whether there
    /// was one.
    pub(super) fn unmap_given_up(&self) -> bool {
        let place = {
            let mut book = self.book.lock();
            let mut shrunk = book.seats.iter_mut().zip(&self.lengths).enumerate();
            shrunk.find_map(|(place, (seat, shared))| {
                seat.shrunk &= seat.rows > self.wanted_rows(shared);
                (seat.shrunk && self.free_rows(shared, seat) > 0).then_some(place)
            })
        };
        place.is_some_and(|place| self.unmap_last_row(place).is_some())
    }

    pub(super) fn wanted_rows(&self, shared: &Lengths) -> u64 {
        self.shape.rows_for(shared.wanted.load(Ordering::SeqCst))
    }

    /// Number of rows at the end of a seat that no sequence wants and nobody uses.
    pub(super) fn free_rows(&self, shared: &Lengths, seat: &Seat) -> u64 {
        seat.rows.saturating_sub(self.wanted_rows(shared).max(seat.users.end()))
    }

    /// Takes the last row of a seat, with the proof that nobody uses it, unless a sequence wants it.
    /// No new work will use it.
    pub(super) fn lower(&self, shared: &Lengths, seat: &mut Seat) -> Option<(u64, AtRest)> {
        let row = seat.rows.checked_sub(1)?;
        let used_from = guard!("vmm.row-needs-rest", row, else u64::MAX);
        let proof = seat.users.rest_from(used_from)?;
        let left = self.shape.tokens_in(row);
        // SeqCst, against the sequence's store to `wanted` and load of `ready` in `demand`: either
        // the sequence sees that the row is gone, or this thread sees that the sequence wants it.
        shared.ready.store(left, Ordering::SeqCst);
        let wanted = shared.wanted.load(Ordering::SeqCst) > left;
        if guard!("vmm.wanted-row-stays", wanted, else false) {
            shared.ready.store(self.shape.tokens_in(seat.rows), Ordering::Release);
            return None;
        }
        seat.rows = row;
        Some((row, proof))
    }

    /// Unmaps the last row of a seat if nobody wants or uses it.
    fn unmap_last_row(&self, place: usize) -> Option<Unmapped> {
        let (row, proof) = self.lower(&self.lengths[place], &mut self.book.lock().seats[place])?;
        let indices: Vec<_> = self.shape.row(place as u64, row).collect();
        let unmapped = self.unmap(&indices, &proof);
        self.book.lock().seats[place].stuck |= !unmapped.failed.is_empty();
        Some(unmapped)
    }

    /// Unmaps an unneeded row: the last row of the seat that was parked first and has one at rest,
    /// else the last row of the live seat with the most.
    pub(super) fn unmap_unneeded_row(&self) -> Option<Unmapped> {
        let place = {
            let book = self.book.lock();
            let free = book.seats.iter().enumerate().filter_map(|(place, seat)| {
                let rows = self.free_rows(&self.lengths[place], seat);
                let order = match seat.tenancy {
                    Tenancy::Parked { order } => (false, order),
                    Tenancy::Live => (true, u64::MAX - rows),
                };
                (rows > 0).then_some((order, place))
            });
            free.min()?.1
        };
        self.unmap_last_row(place)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_driver::{Device, Stream};
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::Worker;
    use crate::pages::{PagePool, PagePoolOptions};
    use crate::sequences::{SequenceSpace, SpaceOptions};

    const PAGE: u64 = 64 << 10;

    /// A sequence of two rows with one token each. The second row was given up.
    fn given_up() -> (SequenceSpace, Sequence) {
        let config = SimConfig { granularity: PAGE, ..SimConfig::default() };
        let sim = Arc::new(SimDriver::new(config).unwrap());
        let device = Device::open(sim, 0).unwrap();
        let options = PagePoolOptions { page_bytes: None, capacity_pages: 8 };
        let pages = PagePool::new(&device, options).unwrap();
        let options = SpaceOptions {
            sequences: 1,
            planes: 1,
            token_bytes: PAGE,
            tokens_max: 2,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&pages, &Worker::manual(), options).unwrap();
        let mut sequence = space.admit(2).unwrap();
        sequence.extend_blocking(2).unwrap();
        sequence.shrink_to(1, &[]).unwrap();
        space.core.settle();
        (space, sequence)
    }

    fn lower(space: &SequenceSpace) -> Option<u64> {
        let mut book = space.core.book.lock();
        space.core.lower(&space.core.lengths[0], &mut book.seats[0]).map(|(row, _)| row)
    }

    #[test]
    fn a_row_that_is_wanted_again_at_the_last_moment_stays() {
        let (space, mut sequence) = given_up();
        // The worker has seen the surplus and its rest. Now the sequence grows again.
        sequence.extend_to(2).unwrap();
        assert_eq!(lower(&space), None);
        assert_eq!(sequence.ready_tokens(), 2);
        sequence.extend_to(2).unwrap();
        sequence.finish(&[]);
    }

    #[test]
    fn a_row_that_was_taken_is_seen_to_be_gone() {
        let (space, mut sequence) = given_up();
        assert_eq!(lower(&space), Some(1));
        assert!(sequence.extend_to(2).is_err());
        assert_eq!(sequence.ready_tokens(), 1);
        sequence.finish(&[]);
    }

    #[test]
    fn users_that_leases_cover_do_not_gather_while_a_lease_is_open_or_dropped() {
        let (space, mut sequence) = given_up();
        let lease = space.gate().lease();
        for step in 0..1_000 {
            sequence.extend_to(2).unwrap();
            sequence.shrink_to(1, &[]).unwrap();
            assert_eq!(space.core.book.lock().pending().len(), 1, "step {step}");
        }
        drop(lease);
        sequence.extend_to(2).unwrap();
        sequence.shrink_to(0, &[]).unwrap();
        // The dropped lease is waited for, as the first of them was told.
        assert_eq!((space.core.settle(), lower(&space)), (true, None));
        sequence.finish(&[]);
        assert!(space.admit(1).is_err());
    }

    #[test]
    fn a_row_is_not_taken_before_all_who_were_named_for_it_are_seen_to_be_done() {
        let (space, mut sequence) = given_up();
        let stream = Stream::new(space.device()).unwrap();
        let fence = || Fence::record(&stream).unwrap();
        sequence.extend_to(2).unwrap();
        sequence.shrink_to(0, &[fence()]).unwrap();
        assert_eq!(lower(&space), None);
        stream.synchronize().unwrap();
        assert_eq!((space.core.settle(), lower(&space)), (false, Some(1)));
        sequence.extend_to(1).unwrap();
        sequence.finish(&[fence()]);
        assert_eq!(lower(&space), None);
        stream.synchronize().unwrap();
        assert_eq!((space.core.settle(), lower(&space)), (false, Some(0)));
    }
}
