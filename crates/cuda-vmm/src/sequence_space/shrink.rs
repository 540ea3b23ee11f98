//! What a live sequence gives up: taken when it is at rest, unless the sequence wants it back first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cuda_driver::Event;

use super::book::Tenancy;
use super::core::Core;
use super::sequence::Sequence;
use crate::rest::{AtRest, Quiescence};
use crate::{Progress, Unrest};

impl Sequence {
    /// Gives up the memory beyond `tokens` tokens and the look-ahead. It is unmapped once the work
    /// before `events` has completed and the gate's leases taken so far are closed, row by row from
    /// the end; what is [extended](Sequence::extend_to) over before that stays. Calls no driver.
    ///
    /// From here on the sequence has `tokens` tokens: work on later ones must come after an extension
    /// that was answered `Ok`. More tokens than it has is nothing to give up.
    pub fn shrink_to(&mut self, tokens: u64, events: &[Arc<Event>]) {
        if tokens >= self.tokens() {
            return;
        }
        self.want_less(tokens);
        let core = &self.core;
        let earlier = core.book.lock().seat(self.slot()).given_up.take();
        let users = core.users(events, earlier.as_deref());
        core.book.lock().seat(self.slot()).given_up = Some(Arc::new(users));
        drop(earlier);
        self.waker().wake();
    }
}

impl Core {
    /// Who may use memory as of now: with `events`, those of `earlier`.
    pub(super) fn users(&self, events: &[Arc<Event>], earlier: Option<&Quiescence>) -> Quiescence {
        let gate = self.reservation.gate();
        match earlier {
            None => Quiescence::new(gate, events),
            // The gate's point of now is later than theirs.
            Some(earlier) => Quiescence::new(gate, &[events, earlier.events()].concat()),
        }
    }

    /// Unmaps one row that a live sequence has given up and that is at rest.
    pub(super) fn take_given_up(&self) -> Progress {
        let given_up = self.book.lock().given_up();
        let mut left = Progress::Done;
        for (slot, users) in given_up {
            if !self.has_surplus(slot) {
                drop(self.book.lock().forget_given_up(slot, &users));
                continue;
            }
            match self.given_up_at_rest(&users) {
                Ok(proof) => {
                    if let Some(row) = self.lower(slot, &users) {
                        self.unmap_row(slot, row, &proof);
                        return Progress::More;
                    }
                }
                Err(unrest) => {
                    if let Unrest::Device(error) = unrest {
                        tracing::warn!(%error, "an event cannot be queried: its memory stays");
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

    /// Whether the last row of a slot is more than its sequence wants.
    fn has_surplus(&self, slot: u64) -> bool {
        let rows = self.book.lock().seat(slot).rows;
        let wanted = self.slots[slot as usize].wanted.load(Ordering::SeqCst);
        rows > 0 && self.shape.tokens_in(rows - 1) >= wanted
    }

    /// Takes the last row of a slot away from its sequence, unless that wants it again, has given up
    /// more, or is gone; returns the row, which no new work will use.
    pub(super) fn lower(&self, slot: u64, users: &Arc<Quiescence>) -> Option<u64> {
        let shared = &self.slots[slot as usize];
        let mut book = self.book.lock();
        let seat = book.seat(slot);
        let same = seat.given_up.as_ref().is_some_and(|held| Arc::ptr_eq(held, users));
        if !same || !matches!(seat.tenancy, Tenancy::Live) || seat.rows == 0 {
            return None;
        }
        let row = seat.rows - 1;
        let left = self.shape.tokens_in(row);
        // SeqCst, against the sequence's store to `wanted` and load of `ready` in `demand`: either it
        // sees that the row is gone, or this sees that it wants the row.
        shared.ready.store(left, Ordering::SeqCst);
        if shared.wanted.load(Ordering::SeqCst) > left {
            shared.ready.store(self.shape.tokens_in(seat.rows), Ordering::Release);
            return None;
        }
        seat.rows = row;
        Some(row)
    }

    fn unmap_row(&self, slot: u64, row: u64, proof: &AtRest) {
        let indices: Vec<_> = self.shape.row(slot, row).collect();
        let stuck = !self.unmap(&indices, proof).failed.is_empty();
        self.book.lock().seat(slot).stuck |= stuck;
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::Device;
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::{PagePool, PagePoolOptions, SequenceSpace, SpaceOptions, Worker};

    const PAGE: u64 = 64 << 10;

    /// A sequence of two rows, one token each, of which the second was given up.
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
        sequence.shrink_to(1, &[]);
        assert!(space.core.has_surplus(0));
        let users = space.core.book.lock().given_up().remove(0).1;
        (space, sequence, users)
    }

    #[test]
    fn a_row_that_is_wanted_again_at_the_last_moment_stays() {
        let (space, mut sequence, users) = given_up();
        // The worker has seen the surplus and its rest; now the sequence grows again.
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
        sequence.shrink_to(0, &[]);
        assert_eq!(space.core.lower(0, &users), None);
        let users = space.core.book.lock().given_up().remove(0).1;
        sequence.finish(&[]);
        assert_eq!(space.core.lower(0, &users), None);
    }
}
