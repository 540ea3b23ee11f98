//! What happened to cached content, in order: a bounded log that any number of readers follow.

pub use crate::snapshot::{BlockUse, BlockView, EventReader, PoolSnapshot};

use std::collections::TryReserveError;

use crate::{BlockHash, Location, Priority, RecordId};

/// Something that happened to cached content, as a router or another host wants to know it.
///
/// A name has one bearer at a time: its events are `Stored`, any number of `Moved` and
/// `PriorityChanged`, and `Removed`, over and over. So a reader may keep what it knows by name. Content
/// that is being offloaded keeps its name for readers, though lookups find it only when the
/// [`Offload`](crate::moves::Offload) has been committed: then comes `Moved`, or `Removed` as soon as it is
/// given up, removed, or computed again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum PoolEvent {
    /// Content got a name: lookups find it from now on.
    Stored {
        /// The block.
        block: RecordId,
        /// Its name.
        hash: BlockHash,
        /// The name that it was named after, also if no block bears that; [`BlockHash::ROOT`] if it was named after
        /// none.
        parent: BlockHash,
        /// Where it lies.
        location: Location,
        /// Its priority.
        priority: Priority,
    },
    /// Content lost its name: no lookup finds it any more.
    Removed {
        /// The block.
        block: RecordId,
        /// The name that it had.
        hash: BlockHash,
        /// Where it lay; of content on its way, where it came from.
        location: Location,
    },
    /// Content lies elsewhere from now on, under the same name.
    Moved {
        /// The block.
        block: RecordId,
        /// Its name.
        hash: BlockHash,
        /// Where it lay.
        from: Location,
        /// Where it lies.
        to: Location,
    },
    /// Content is worth more or less than before.
    PriorityChanged {
        /// The block.
        block: RecordId,
        /// Its name.
        hash: BlockHash,
        /// Its priority before.
        from: Priority,
        /// Its priority from now on.
        to: Priority,
    },
}

/// What a reader of the log is given next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reading {
    /// An event.
    Event {
        /// Its number. Events are numbered from 0, without gaps, in the order in which they
        /// happened.
        sequence: u64,
        /// What happened.
        event: PoolEvent,
    },
    /// The reader came too late: events were overwritten before it read them. What it knows of the
    /// pool may be wrong, and it goes on after them.
    Lost {
        /// The number of the first that is lost.
        first: u64,
        /// How many are lost.
        count: u64,
    },
}

/// The latest events. A new one takes the place of the oldest; it neither waits nor allocates once
/// the log is full for the first time.
#[derive(Debug)]
pub(crate) struct EventLog {
    ring: Vec<PoolEvent>,
    /// # Invariants
    /// 0, or a power of two; `ring` never holds more.
    capacity: usize,
    /// The number of the next event, and so how many there were.
    next: u64,
}

impl EventLog {
    /// A log of the latest `capacity` events, rounded up to a power of two. With 0 events are
    /// counted only, and every reader is told how many it lost.
    pub(crate) fn new(capacity: usize) -> Result<Self, TryReserveError> {
        let capacity = match capacity {
            0 => 0,
            // Too large for a power of two is too large for memory: reserved as asked, and refused.
            events => events.checked_next_power_of_two().unwrap_or(events),
        };
        let mut ring = Vec::new();
        ring.try_reserve_exact(capacity)?;
        Ok(Self { ring, capacity, next: 0 })
    }

    /// Appends an event, in constant time.
    pub(crate) fn push(&mut self, event: PoolEvent) {
        let place = self.place(self.next);
        self.next += 1;
        if self.ring.len() < self.capacity {
            self.ring.push(event);
        } else if let Some(oldest) = self.ring.get_mut(place) {
            *oldest = event;
        }
    }

    /// How many events there were.
    pub(crate) fn len(&self) -> u64 {
        self.next
    }

    /// What a reader is given who has read all events below number `next`, and then goes on after it; `None` when
    /// there is no more. Readers know nothing of each other, and the log nothing of them.
    pub(crate) fn read(&self, next: &mut u64) -> Option<Reading> {
        let oldest = self.next - self.ring.len() as u64;
        let sequence = *next;
        if sequence >= self.next {
            return None;
        }
        if sequence < oldest {
            *next = oldest;
            return Some(Reading::Lost { first: sequence, count: oldest - sequence });
        }
        *next += 1;
        let event = *self.ring.get(self.place(sequence))?;
        Some(Reading::Event { sequence, event })
    }

    fn place(&self, sequence: u64) -> usize {
        // The rest fits, as it is less than `capacity`.
        (sequence & (self.capacity as u64).wrapping_sub(1)) as usize
    }
}
