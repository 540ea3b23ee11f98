//! The seats of a space: their sequences, and how much memory is mapped for each.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::rest::{Quiescence, Users};

/// The part of a seat that the step path and the worker share, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Lengths {
    /// Number of tokens that may be used. Stored with `Release` after access to all planes was
    /// granted, loaded with `Acquire`: a reader may use that many tokens. It is lowered only by
    /// [`SpaceCore::lower`], to no less than `wanted`.
    ///
    /// [`SpaceCore::lower`]: super::core::SpaceCore::lower
    pub(super) ready: AtomicU64,
    /// Number of tokens that should have memory. Only the sequence writes it, before it reads
    /// `ready`; both accesses are `SeqCst`.
    pub(super) wanted: AtomicU64,
    /// Number of tokens in use. Only the sequence writes it.
    pub(super) used: AtomicU64,
}

/// Who has a seat.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tenancy {
    /// A sequence.
    Live,
    /// Nobody. The seat waits for the users that it has, and then for the next sequence.
    Parked { order: u64 },
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
    /// Whether a live sequence has given up memory that is still mapped.
    pub(super) shrunk: bool,
    /// The possible users of the rows, except the sequence itself and what it will tell of later. A
    /// row that the sequence does not want and that has none of them is at rest.
    pub(super) users: Users,
}

impl Seat {
    pub(super) fn is_live(&self) -> bool {
        matches!(self.tenancy, Tenancy::Live)
    }
}

/// The numbers of seats and rows by kind of user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Census {
    pub(super) live: u64,
    pub(super) parked: u64,
    pub(super) abandoned: u64,
    pub(super) live_rows: u64,
    /// Rows of all other seats.
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
    /// Numbers the parkings, which orders them by age.
    parkings: u64,
}

impl Book {
    pub(super) fn new(sequences: u64) -> Self {
        let seat = |order| Seat {
            tenancy: Tenancy::Parked { order },
            rows: 0,
            stuck: false,
            shrunk: false,
            users: Users::default(),
        };
        Self { seats: (0..sequences).map(seat).collect(), parkings: sequences }
    }

    pub(super) fn seat(&mut self, place: u64) -> &mut Seat {
        &mut self.seats[place as usize]
    }

    /// The seat at rest that fits `rows` best: the smallest one with enough rows, else the largest.
    /// With `enough`, only a seat with enough rows.
    pub(super) fn claim(&mut self, rows: u64, enough: bool) -> Option<Claim> {
        let fit = |seat: &Seat| {
            if seat.rows >= rows { (0, seat.rows - rows) } else { (1, rows - seat.rows) }
        };
        let (place, seat) = self
            .seats
            .iter_mut()
            .enumerate()
            .filter(|(_, seat)| !seat.is_live() && seat.users.are_none())
            .filter(|(_, seat)| seat.rows >= rows || !(enough || seat.stuck))
            .min_by_key(|(_, seat)| fit(seat))?;
        seat.tenancy = Tenancy::Live;
        Some(Claim { place: place as u64, rows: seat.rows })
    }

    /// Live to parked.
    pub(super) fn park(&mut self, place: u64) {
        self.parkings += 1;
        let order = self.parkings;
        let seat = self.seat(place);
        seat.tenancy = Tenancy::Parked { order };
        seat.shrunk = false;
    }

    /// Seats whose users are unknown.
    pub(super) fn abandoned(&self) -> Vec<u64> {
        let unknown = (0..).zip(&self.seats).filter(|(_, seat)| seat.users.are_unknown());
        unknown.map(|(place, _)| place).collect()
    }

    /// The users of all seats that may be done.
    pub(super) fn pending(&self) -> Vec<(u64, Arc<Quiescence>)> {
        let seats = (0..).zip(&self.seats);
        seats
            .flat_map(|(place, seat)| seat.users.pending().map(move |users| (place, users)))
            .collect()
    }

    pub(super) fn census(&self) -> Census {
        let mut census = Census::default();
        for seat in &self.seats {
            match seat.tenancy {
                Tenancy::Live => census.live += 1,
                Tenancy::Parked { .. } if seat.users.are_unknown() => census.abandoned += 1,
                Tenancy::Parked { .. } => census.parked += u64::from(seat.rows > 0),
            }
            match seat.tenancy {
                Tenancy::Live => census.live_rows += seat.rows,
                Tenancy::Parked { .. } => census.parked_rows += seat.rows,
            }
        }
        census
    }
}
