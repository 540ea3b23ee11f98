//! Who has which seat, and how much is mapped under it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rest::{AtRest, Quiescence};
use crate::{Fence, Unrest};

/// What the step path and the worker share of one seat; each on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Lengths {
    /// Tokens that may be used. Stored with `Release` once access to all planes was granted, loaded
    /// with `Acquire`: who reads a number may use that many tokens. Lowered only while the seat is
    /// with the worker, which no sequence sees, or to no less than `wanted`, by [`SpaceCore::lower`].
    ///
    /// [`SpaceCore::lower`]: super::core::SpaceCore::lower
    pub(super) ready: AtomicU64,
    /// Tokens that memory should be there for. Written by the sequence alone, before it reads
    /// `ready`, both `SeqCst`.
    pub(super) wanted: AtomicU64,
    /// Tokens in use. Written by the sequence alone.
    pub(super) used: AtomicU64,
}

/// Who has a seat. Between the states lie only these steps: resting to live, live to parked, abandoned
/// or (never exposed) resting, abandoned to parked, parked to resting, and resting to unmapping and
/// back.
#[derive(Debug)]
pub(super) enum Tenancy {
    /// A sequence.
    Live,
    /// Nobody, but the work of the last sequence may still use the memory.
    Parked { users: Arc<Quiescence>, order: u64 },
    /// Nobody, and nothing uses the memory: to be adopted or unmapped.
    Resting { proof: AtRest, order: u64 },
    /// Nobody, and what uses the memory is unknown.
    Abandoned,
    /// The worker takes memory away.
    Unmapping,
}

/// One seat in the book.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) tenancy: Tenancy,
    /// Rows from the start that are mapped over all planes. Changed by the worker's steps alone.
    pub(super) rows: u64,
    /// Whether a page behind the rows is in quarantine.
    pub(super) stuck: bool,
    /// Who may still use what a live sequence has given up, while there is any. Taken out and
    /// dropped outside the book's lock: with it goes the last handle of an event, perhaps.
    pub(super) given_up: Option<Arc<Quiescence>>,
    /// Proof that the memory was at rest when the present sequence came: what that has not asked for
    /// still is. Gone for a moment while the worker makes use of it.
    pub(super) rested: Option<AtRest>,
}

/// Seats by tenancy, their rows with them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Census {
    pub(super) live: u64,
    pub(super) parked: u64,
    pub(super) abandoned: u64,
    pub(super) live_rows: u64,
    /// Of parked, resting and abandoned seats, and of those that the worker is at.
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
    /// Numbers the parkings, so that the oldest is known and none is taken for another.
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

    /// The resting seat that fits `rows` best: of those with enough the one with the fewest, else the
    /// one with the most. With `enough`, only one that has enough.
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

    /// Abandoned to parked, unless somebody else did it meanwhile.
    pub(super) fn park_abandoned(&mut self, place: u64, users: Quiescence) {
        if matches!(self.seat(place).tenancy, Tenancy::Abandoned) {
            self.park(place, users);
        }
    }

    /// Live seats of which something was given up, and who may use it.
    pub(super) fn given_up(&self) -> Vec<(u64, Arc<Quiescence>)> {
        let given_up = |(place, seat): (u64, &Seat)| {
            let live = matches!(seat.tenancy, Tenancy::Live);
            Some((place, Arc::clone(seat.given_up.as_ref().filter(|_| live)?)))
        };
        (0..).zip(&self.seats).filter_map(given_up).collect()
    }

    /// Forgets what was given up, unless more has been meanwhile. Returned to be dropped elsewhere.
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

    /// The parked seats, by their parkings.
    pub(super) fn parked(&self) -> Vec<Waiting> {
        let waiting = |(place, seat): (usize, &Seat)| match &seat.tenancy {
            Tenancy::Parked { users, order } => {
                Some(Waiting { place: place as u64, order: *order, users: Arc::clone(users) })
            }
            _ => None,
        };
        self.seats.iter().enumerate().filter_map(waiting).collect()
    }

    /// Parked to resting, unless the seat has gone another way meanwhile.
    pub(super) fn settle(&mut self, waiting: &Waiting, proof: AtRest) {
        let seat = self.seat(waiting.place);
        if matches!(seat.tenancy, Tenancy::Parked { order, .. } if order == waiting.order) {
            seat.tenancy = Tenancy::Resting { proof, order: waiting.order };
        }
    }

    /// Takes the last row of the seat that has rested longest away, to be unmapped by the caller, who
    /// then calls [`hand_back`](Book::hand_back).
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
        // Relaxed would do: no sequence has the seat, and the next gets it under the book's lock.
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

/// A row to be unmapped, with the proof that its seat is at rest.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) place: u64,
    pub(super) row: u64,
    pub(super) proof: AtRest,
    order: u64,
}
