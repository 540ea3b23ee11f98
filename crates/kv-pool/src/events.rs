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

/// How far one reader has read. Readers know nothing of each other, and the log nothing of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct EventCursor {
    next: u64,
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

    /// A reader of every event from the first on, which may be lost already.
    #[cfg(test)]
    pub(crate) fn cursor_at_start(&self) -> EventCursor {
        EventCursor { next: 0 }
    }

    /// A reader of what happens from now on.
    pub(crate) fn cursor_now(&self) -> EventCursor {
        EventCursor { next: self.next }
    }

    /// The next thing for a reader, which then goes on after it; `None` when it has read all.
    pub(crate) fn read(&self, cursor: &mut EventCursor) -> Option<Reading> {
        let oldest = self.next - self.ring.len() as u64;
        let sequence = cursor.next;
        if sequence >= self.next {
            return None;
        }
        if sequence < oldest {
            cursor.next = oldest;
            return Some(Reading::Lost { first: sequence, count: oldest - sequence });
        }
        cursor.next += 1;
        let event = *self.ring.get(self.place(sequence))?;
        Some(Reading::Event { sequence, event })
    }

    fn place(&self, sequence: u64) -> usize {
        // The rest fits, as it is less than `capacity`.
        (sequence & (self.capacity as u64).wrapping_sub(1)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockId, Tier};

    fn event(number: u64) -> PoolEvent {
        let location = Location { tier: Tier::Primary, id: BlockId(number as u32) };
        PoolEvent::Removed {
            block: RecordId(0),
            hash: BlockHash::from_u128(number.into()),
            location,
        }
    }

    fn log(capacity: usize, events: u64) -> EventLog {
        let mut log = EventLog::new(capacity).unwrap();
        (0..events).for_each(|number| log.push(event(number)));
        log
    }

    fn read_all(log: &EventLog, cursor: &mut EventCursor) -> Vec<Reading> {
        std::iter::from_fn(|| log.read(cursor)).collect()
    }

    fn events(numbers: std::ops::Range<u64>) -> Vec<Reading> {
        numbers.map(|sequence| Reading::Event { sequence, event: event(sequence) }).collect()
    }

    #[test]
    fn readers_see_every_event_in_order_and_independently() {
        let mut log = log(8, 0);
        let (mut first, mut second) = (log.cursor_at_start(), log.cursor_now());
        (0..3).for_each(|number| log.push(event(number)));
        assert_eq!(read_all(&log, &mut first), events(0..3));
        assert_eq!(log.read(&mut first), None);
        let mut late = log.cursor_now();
        (3..8).for_each(|number| log.push(event(number)));
        assert_eq!(read_all(&log, &mut first), events(3..8));
        assert_eq!(read_all(&log, &mut second), events(0..8));
        assert_eq!(read_all(&log, &mut late), events(3..8));
        assert_eq!(log.len(), 8);
    }

    #[test]
    fn a_reader_that_lags_is_told_how_much_it_lost_and_goes_on() {
        let mut log = log(4, 2);
        let mut cursor = log.cursor_at_start();
        assert_eq!(log.read(&mut cursor), events(0..1).first().copied());
        (2..9).for_each(|number| log.push(event(number)));
        let mut expected = vec![Reading::Lost { first: 1, count: 4 }];
        expected.extend(events(5..9));
        assert_eq!(read_all(&log, &mut cursor), expected);
    }

    #[test]
    fn a_reader_that_is_exactly_one_log_behind_has_lost_nothing() {
        let log = log(4, 4);
        assert_eq!(read_all(&log, &mut log.cursor_at_start()), events(0..4));
        let log = self::log(4, 5);
        let readings = read_all(&log, &mut log.cursor_at_start());
        assert_eq!(readings[0], Reading::Lost { first: 0, count: 1 });
        assert_eq!(readings[1..], events(1..5));
    }

    #[test]
    fn a_log_without_room_says_that_everything_is_lost() {
        let log = log(0, 3);
        let readings = read_all(&log, &mut log.cursor_at_start());
        assert_eq!(readings, [Reading::Lost { first: 0, count: 3 }]);
        assert_eq!(read_all(&log, &mut log.cursor_now()), []);
    }

    #[test]
    fn nothing_is_lost_in_silence_however_readers_and_writers_alternate() {
        for capacity in [1, 2, 3, 5, 64] {
            let mut log = log(capacity, 0);
            let mut cursors = [log.cursor_at_start(); 3];
            let mut seen = [0_u64; 3];
            let mut random = 7_u64;
            for number in 0..5_000 {
                log.push(event(number));
                for (at, (cursor, seen)) in cursors.iter_mut().zip(&mut seen).enumerate() {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    for _ in 0..random % (2 + at as u64) {
                        match log.read(cursor) {
                            Some(Reading::Event { sequence, event: found }) => {
                                assert_eq!((sequence, found), (*seen, event(*seen)));
                                *seen += 1;
                            }
                            Some(Reading::Lost { first, count }) => {
                                assert_eq!(first, *seen);
                                assert!(count > 0);
                                *seen += count;
                            }
                            None => assert_eq!(*seen, log.len()),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_event_is_small_and_the_log_does_not_grow() {
        assert!(size_of::<PoolEvent>() <= 64);
        let log = log(3, 100);
        assert_eq!((log.ring.len(), log.ring.capacity()), (4, 4));
        assert!(EventLog::new(usize::MAX).is_err());
    }
}
