//! Memory that a live sequence does not need: memory that it gives up, unmapped when it is at rest,
//! and memory that it adopted beyond its needs, unmapped under pressure. In both cases a new demand
//! of the sequence wins.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::book::{Lengths, Seat, Tenancy};
use super::core::{SpaceCore, Unmapped};
use super::sequence::Sequence;
use crate::rest::{AtRest, Covered, Quiescence};
use crate::worker::Progress;
use crate::{
    Fence,
    gate::{Unrest, UsersUnknown},
};

impl Sequence {
    /// Gives up the memory beyond `tokens` tokens and the look-ahead. It is unmapped row by row
    /// from the end, once the work before `fences` has completed and the leases of the gate taken
    /// so far are closed. Memory that the sequence [extends](Sequence::extend_to) over before that
    /// stays mapped. Calls no driver.
    ///
    /// From now on the sequence has `tokens` tokens: work on later tokens must follow an extension
    /// that returned `Ok`. If the sequence has fewer tokens, nothing is given up.
    ///
    /// # Errors
    /// [`UsersUnknown`]; the sequence is unchanged.
    #[track_caller]
    pub fn shrink_to(&mut self, tokens: u64, fences: &[Fence]) -> Result<(), UsersUnknown> {
        let _site = cuda_driver::site::enter();
        if tokens >= self.tokens() {
            return Ok(());
        }
        if self.covers(fences) == Covered::No {
            return Err(UsersUnknown { fences: fences.len() as u64 });
        }
        let wanted = self.want_less(tokens);
        let core = &self.core;
        let place = &core.lengths[self.seat() as usize];
        let earlier = core.book.lock().seat(self.seat()).given_up.clone();
        let users = Arc::new(core.users(fences, earlier.as_deref()));
        let replaced = {
            let mut book = core.book.lock();
            // In one step: memory that is not wanted is given up with these users, or was never
            // used.
            place.used.store(tokens, Ordering::Relaxed);
            place.wanted.store(wanted, Ordering::SeqCst);
            book.seat(self.seat()).given_up.replace(users)
        };
        drop((earlier, replaced));
        self.waker().wake();
        Ok(())
    }
}

impl SpaceCore {
    /// The possible users at this moment, if `fences` or the gate's leases cover them, together
    /// with those of `earlier`.
    pub(super) fn users(&self, fences: &[Fence], earlier: Option<&Quiescence>) -> Quiescence {
        let gate = self.reservation.gate();
        match earlier {
            None => Quiescence::new(gate, fences, Covered::Yes),
            // The gate's present point is later than theirs.
            Some(earlier) => {
                Quiescence::new(gate, &[fences, earlier.fences()].concat(), Covered::Yes)
            }
        }
    }

    /// Unmaps one row that a live sequence has given up and that is at rest.
    pub(super) fn take_given_up(&self) -> Progress {
        let given_up = self.book.lock().given_up();
        let mut left = Progress::Done;
        for (place, users) in given_up {
            if !self.has_surplus(place) {
                drop(self.book.lock().forget_given_up(place, &users));
                continue;
            }
            match self.given_up_at_rest(&users) {
                Ok(proof) => {
                    if let Some(row) = self.lower(place, &users) {
                        self.unmap_row(place, row, &proof);
                        return Progress::More;
                    }
                }
                Err(unrest) => {
                    if let Unrest::Device(error) = unrest {
                        tracing::warn!(%error, "a fence cannot be queried: its memory stays");
                    }
                    left = Progress::Waiting;
                }
            }
        }
        left
    }

    fn given_up_at_rest(&self, users: &Quiescence) -> Result<AtRest, Unrest> {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.sabotage.rests_at_once() {
            return Ok(AtRest::sabotage());
        }
        users.check()
    }

    /// Whether the last row of a seat is more than its sequence wants.
    fn has_surplus(&self, place: u64) -> bool {
        let rows = self.book.lock().seat(place).rows;
        let wanted = self.lengths[place as usize].wanted.load(Ordering::SeqCst);
        rows > 0 && self.shape.tokens_in(rows - 1) >= wanted
    }

    /// Takes the last row of a seat away from its sequence, unless the sequence wants it again, has
    /// given up more, or is gone. Returns the row; no new work will use it.
    pub(super) fn lower(&self, place: u64, users: &Arc<Quiescence>) -> Option<u64> {
        let mut book = self.book.lock();
        let seat = book.seat(place);
        let same = seat.given_up.as_ref().is_some_and(|held| Arc::ptr_eq(held, users));
        if same { self.lower_seat(&self.lengths[place as usize], seat) } else { None }
    }

    /// Does the same for a seat whose book is locked.
    fn lower_seat(&self, shared: &Lengths, seat: &mut Seat) -> Option<u64> {
        if !matches!(seat.tenancy, Tenancy::Live) || seat.rows == 0 {
            return None;
        }
        let row = seat.rows - 1;
        let left = self.shape.tokens_in(row);
        // SeqCst, against the sequence's store to `wanted` and load of `ready` in `demand`: either
        // the sequence sees that the row is gone, or this thread sees that the sequence wants it.
        shared.ready.store(left, Ordering::SeqCst);
        if shared.wanted.load(Ordering::SeqCst) > left {
            shared.ready.store(self.shape.tokens_in(seat.rows), Ordering::Release);
            return None;
        }
        seat.rows = row;
        Some(row)
    }

    fn unmap_row(&self, place: u64, row: u64, proof: &AtRest) -> Unmapped {
        let indices: Vec<_> = self.shape.row(place, row).collect();
        let unmapped = self.unmap(&indices, proof);
        self.book.lock().seat(place).stuck |= !unmapped.failed.is_empty();
        unmapped
    }

    /// Unmaps an unneeded row: the last row of the seat that has rested longest, else the last row
    /// of the live seat with the most unneeded rows.
    pub(super) fn unmap_unneeded_row(&self) -> Option<Unmapped> {
        self.unmap_oldest_row().or_else(|| self.unmap_spare_row())
    }

    /// Unmaps a row that a live sequence found mapped and never asked for. It was at rest when the
    /// sequence came, and still is.
    fn unmap_spare_row(&self) -> Option<Unmapped> {
        let (place, row, proof) = self.lower_spare()?;
        let unmapped = self.unmap_row(place, row, &proof);
        let mut book = self.book.lock();
        let seat = book.seat(place);
        // Another sequence may have the seat by now, with its own proof.
        if matches!(seat.tenancy, Tenancy::Live) {
            seat.rested.get_or_insert(proof);
        }
        Some(unmapped)
    }

    fn lower_spare(&self) -> Option<(u64, u64, AtRest)> {
        let mut book = self.book.lock();
        let rows =
            |(place, seat): (usize, &Seat)| (self.spare_rows(&self.lengths[place], seat), place);
        let (spare, place) = book.seats.iter().enumerate().map(rows).max()?;
        let seat = &mut book.seats[place];
        if spare == 0 {
            return None;
        }
        let proof = seat.rested.take()?;
        match self.lower_seat(&self.lengths[place], seat) {
            Some(row) => Some((place as u64, row, proof)),
            None => {
                seat.rested = Some(proof);
                None
            }
        }
    }

    /// Number of rows of a live seat that were at rest when its sequence came, and that it has not
    /// asked for.
    pub(super) fn spare_rows(&self, shared: &Lengths, seat: &Seat) -> u64 {
        // Memory that was given up has users of its own.
        let is_spare = matches!(seat.tenancy, Tenancy::Live)
            && seat.given_up.is_none()
            && seat.rested.is_some();
        let wanted = shared.wanted.load(Ordering::SeqCst);
        if is_spare { seat.rows.saturating_sub(self.shape.rows_for(wanted)) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::Device;
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::Worker;
    use crate::pages::{PagePool, PagePoolOptions};
    use crate::sequences::{SequenceSpace, SpaceOptions};

    const PAGE: u64 = 64 << 10;

    /// A sequence of two rows with one token each. The second row was given up.
    fn given_up() -> (SequenceSpace, Sequence, Arc<Quiescence>) {
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
        assert!(space.core.has_surplus(0));
        let users = space.core.book.lock().given_up().remove(0).1;
        (space, sequence, users)
    }

    #[test]
    fn a_row_that_is_wanted_again_at_the_last_moment_stays() {
        let (space, mut sequence, users) = given_up();
        // The worker has seen the surplus and its rest. Now the sequence grows again.
        sequence.extend_to(2).unwrap();
        assert_eq!(space.core.lower(0, &users), None);
        assert_eq!(sequence.ready_tokens(), 2);
        sequence.extend_to(2).unwrap();
        sequence.finish(&[]);
    }

    #[test]
    fn a_row_that_was_taken_is_seen_to_be_gone() {
        let (space, mut sequence, users) = given_up();
        assert_eq!(space.core.lower(0, &users), Some(1));
        assert!(sequence.extend_to(2).is_err());
        assert_eq!(sequence.ready_tokens(), 1);
        sequence.finish(&[]);
    }

    #[test]
    fn a_row_given_up_anew_or_by_one_who_left_is_not_taken_on_the_old_proof() {
        let (space, mut sequence, users) = given_up();
        sequence.extend_to(2).unwrap();
        sequence.shrink_to(0, &[]).unwrap();
        assert_eq!(space.core.lower(0, &users), None);
        let users = space.core.book.lock().given_up().remove(0).1;
        sequence.finish(&[]);
        assert_eq!(space.core.lower(0, &users), None);
    }
}
