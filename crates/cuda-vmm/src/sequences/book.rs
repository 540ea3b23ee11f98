//! The seats of a space: their sequences, and how much memory is mapped for each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rest::{AtRest, Quiescence};
use crate::{Fence, gate::Unrest};

/// The part of a seat that the step path and the worker share, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Lengths {
    /// Number of tokens that may be used. Stored with `Release` after access to all planes was
    /// granted, loaded with `Acquire`: a reader may use that many tokens. It is lowered only in two
    /// cases: while the worker has the seat, which no sequence sees then, or by
    /// [`SpaceCore::lower`] to no less than `wanted`.
    ///
    /// [`SpaceCore::lower`]: super::core::SpaceCore::lower
    pub(super) ready: AtomicU64,
    /// Number of tokens that should have memory. Only the sequence writes it, before it reads
    /// `ready`; both accesses are `SeqCst`.
    pub(super) wanted: AtomicU64,
    /// Number of tokens in use. Only the sequence writes it.
    pub(super) used: AtomicU64,
}

/// The user of a seat. The only transitions are resting to live, live to parked, abandoned or (if
/// never exposed) resting, abandoned to parked, parked to resting, and resting to unmapping and
/// back.
#[derive(Debug)]
pub(super) enum Tenancy {
    /// A sequence has the seat.
    Live,
    /// No sequence has the seat, but work of the last one may still use the memory.
    Parked { users: Arc<Quiescence>, order: u64 },
    /// No sequence and no work uses the memory: it can be adopted or unmapped.
    Resting { proof: AtRest, order: u64 },
    /// No sequence has the seat, and the users of the memory are unknown.
    Abandoned,
    /// The worker unmaps memory of the seat.
    Unmapping,
}

/// One seat in the book.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) tenancy: Tenancy,
    /// Number of rows, from the start, that are mapped in all planes. Only the worker's steps
    /// change it.
    pub(super) rows: u64,
    /// Whether a page behind the rows is in quarantine.
    pub(super) stuck: bool,
    /// The possible users of memory that a live sequence has given up, if any. Dropped outside the
    /// book's lock, because it may hold the last handle of an event.
    pub(super) given_up: Option<Arc<Quiescence>>,
    /// Proof that the memory was at rest when the present sequence came. It still holds for memory
    /// that the sequence has not asked for. Absent for a moment while the worker uses it.
    pub(super) rested: Option<AtRest>,
}

/// The numbers of seats and rows by kind of user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Census {
    pub(super) live: u64,
    pub(super) parked: u64,
    pub(super) abandoned: u64,
    pub(super) live_rows: u64,
    /// Rows of parked, resting and abandoned seats, and of those that the worker is unmapping.
    pub(super) parked_rows: u64,
}

/// A seat that was just given to a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) place: u64,
    pub(super) rows: u64,
}

#[derive(Debug)]
pub(super) struct Book {
    pub(super) seats: Vec<Seat>,
    /// Numbers the parkings, which orders them by age and makes each one unique.
    parkings: u64,
}

impl Book {
    pub(super) fn new(sequences: u64) -> Self {
        let seat = |order| Seat {
            tenancy: Tenancy::Resting { proof: AtRest::never_exposed(), order },
            rows: 0,
            stuck: false,
            given_up: None,
            rested: None,
        };
        Self { seats: (0..sequences).map(seat).collect(), parkings: sequences }
    }

    pub(super) fn seat(&mut self, place: u64) -> &mut Seat {
        &mut self.seats[place as usize]
    }

    /// The resting seat that fits `rows` best: the smallest one with enough rows, else the largest.
    /// With `enough`, only a seat with enough rows.
    pub(super) fn claim(&mut self, rows: u64, enough: bool) -> Option<Claim> {
        let fit = |seat: &Seat| match seat.rows >= rows {
            true => (0, seat.rows - rows),
            false => (1, rows - seat.rows),
        };
        let (place, seat) = self
            .seats
            .iter_mut()
            .enumerate()
            .filter(|(_, seat)| matches!(seat.tenancy, Tenancy::Resting { .. }))
            .filter(|(_, seat)| seat.rows >= rows || !(enough || seat.stuck))
            .min_by_key(|(_, seat)| fit(seat))?;
        if let Tenancy::Resting { proof, .. } = std::mem::replace(&mut seat.tenancy, Tenancy::Live)
        {
            seat.rested = Some(proof);
        }
        Some(Claim { place: place as u64, rows: seat.rows })
    }

    pub(super) fn park(&mut self, place: u64, users: Quiescence) {
        let order = self.next_order();
        self.seat(place).tenancy = Tenancy::Parked { users: Arc::new(users), order };
    }

    pub(super) fn rest(&mut self, place: u64, proof: AtRest) {
        let order = self.next_order();
        self.seat(place).tenancy = Tenancy::Resting { proof, order };
    }

    pub(super) fn abandon(&mut self, place: u64) {
        self.seat(place).tenancy = Tenancy::Abandoned;
    }

    pub(super) fn abandoned(&self) -> Vec<u64> {
        let abandoned = |seat: &Seat| matches!(seat.tenancy, Tenancy::Abandoned);
        (0..).zip(&self.seats).filter(|(_, seat)| abandoned(seat)).map(|(place, _)| place).collect()
    }

    /// Abandoned to parked, unless another thread did so meanwhile.
    pub(super) fn park_abandoned(&mut self, place: u64, users: Quiescence) {
        if matches!(self.seat(place).tenancy, Tenancy::Abandoned) {
            self.park(place, users);
        }
    }

    /// Live seats of which memory was given up, with its possible users.
    pub(super) fn given_up(&self) -> Vec<(u64, Arc<Quiescence>)> {
        let given_up = |(place, seat): (u64, &Seat)| {
            let live = matches!(seat.tenancy, Tenancy::Live);
            Some((place, Arc::clone(seat.given_up.as_ref().filter(|_| live)?)))
        };
        (0..).zip(&self.seats).filter_map(given_up).collect()
    }

    /// Clears the memory given up, unless more was given up meanwhile. Returned so that the caller
    /// drops it outside the lock.
    pub(super) fn forget_given_up(
        &mut self,
        place: u64,
        users: &Arc<Quiescence>,
    ) -> Option<Arc<Quiescence>> {
        self.seat(place).given_up.take_if(|held| Arc::ptr_eq(held, users))
    }

    fn next_order(&mut self) -> u64 {
        self.parkings += 1;
        self.parkings
    }

    /// The parked seats, identified by their parkings.
    pub(super) fn parked(&self) -> Vec<Waiting> {
        let waiting = |(place, seat): (usize, &Seat)| match &seat.tenancy {
            Tenancy::Parked { users, order } => {
                Some(Waiting { place: place as u64, order: *order, users: Arc::clone(users) })
            }
            _ => None,
        };
        self.seats.iter().enumerate().filter_map(waiting).collect()
    }

    /// Parked to resting, unless the seat has changed meanwhile.
    pub(super) fn settle(&mut self, waiting: &Waiting, proof: AtRest) {
        let seat = self.seat(waiting.place);
        if matches!(seat.tenancy, Tenancy::Parked { order, .. } if order == waiting.order) {
            seat.tenancy = Tenancy::Resting { proof, order: waiting.order };
        }
    }

    /// Takes away the last row of the seat that has rested longest. The caller unmaps it, and then
    /// calls [`hand_back`](Book::hand_back).
    pub(super) fn take_row(
        &mut self,
        lengths: &[Lengths],
        ready: impl Fn(u64) -> u64,
    ) -> Option<Taken> {
        let resting = |seat: &Seat| match seat.tenancy {
            Tenancy::Resting { order, .. } if seat.rows > 0 => Some(order),
            _ => None,
        };
        let (place, _) = self
            .seats
            .iter()
            .enumerate()
            .filter_map(|(place, seat)| Some((place, resting(seat)?)))
            .min_by_key(|&(_, order)| order)?;
        let seat = &mut self.seats[place];
        let Tenancy::Resting { proof, order } =
            std::mem::replace(&mut seat.tenancy, Tenancy::Unmapping)
        else {
            unreachable!("seat {place} was seen to rest")
        };
        seat.rows -= 1;
        // `Relaxed` would suffice: no sequence has the seat, and the next one gets it under the
        // book's lock.
        lengths[place].ready.store(ready(seat.rows), Ordering::Release);
        Some(Taken { place: place as u64, row: seat.rows, proof, order })
    }

    pub(super) fn hand_back(&mut self, taken: Taken, stuck: bool) {
        let Taken { place, proof, order, .. } = taken;
        let seat = self.seat(place);
        seat.stuck |= stuck;
        seat.tenancy = Tenancy::Resting { proof, order };
    }

    pub(super) fn census(&self) -> Census {
        let mut census = Census::default();
        for seat in &self.seats {
            match seat.tenancy {
                Tenancy::Live => census.live += 1,
                Tenancy::Abandoned => census.abandoned += 1,
                _ if seat.rows > 0 => census.parked += 1,
                _ => {}
            }
            match seat.tenancy {
                Tenancy::Live => census.live_rows += seat.rows,
                _ => census.parked_rows += seat.rows,
            }
        }
        census
    }
}

/// A parked seat whose users may be done.
#[derive(Debug)]
pub(super) struct Waiting {
    place: u64,
    order: u64,
    users: Arc<Quiescence>,
}

impl Waiting {
    pub(super) fn check(&self) -> Result<AtRest, Unrest> {
        self.users.check()
    }

    pub(super) fn fences(&self) -> &[Fence] {
        self.users.fences()
    }
}

/// A row to unmap, with the proof that its seat is at rest.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) place: u64,
    pub(super) row: u64,
    pub(super) proof: AtRest,
    order: u64,
}
