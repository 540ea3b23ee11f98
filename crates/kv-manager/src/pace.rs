//! The pace of a sequence that decodes: what the calls of a step may take for granted of it.
//!
//! A step of a decoding sequence mostly does what the step before it did: it writes into a block that is there, names
//! none and leaves none behind. [`stage`](crate::Manager::stage) finds out how long that will be so, and says it as a
//! [`Pace`], of which `commit`, `reserve` and the next `stage` need a few comparisons each; a `commit` that names a block
//! and a `reserve` that takes one say it anew. Whatever else looks at the
//! sequence ends its pace, and what concerns all sequences, such as a failed step, ends those of all.

use std::sync::atomic::{AtomicU64, Ordering};

use kv_pool::{Row, guard};

use crate::names::Namer;
use crate::{Manager, Sequence};

/// What a manager's sequences have of it while nothing happens that concerns all of them. No two managers have the same,
/// and none has one twice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Pulse(u64);

impl Pulse {
    /// No manager's.
    const NONE: Self = Self(0);

    /// One that there was not before.
    pub(crate) fn draw() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // A number alone: nothing else is read or written by its order.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What holds of a sequence as long as its manager has this pulse.
///
/// The sequence runs, all its ids are known as ids, and nothing is to come for it but the ids of its steps.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Pace {
    pulse: Pulse,
    /// As long as fewer tokens have KV for certain, no block gets a name or leaves a window.
    quiet: u64,
    /// Tokens that it has blocks for, which are its own to write from the certain end of its KV on.
    room: u64,
    /// The most tokens that a step can write at once.
    at_once: u32,
    row: Row,
}

impl Pace {
    /// Nothing is granted.
    pub(crate) const NONE: Self =
        Self { pulse: Pulse::NONE, quiet: 0, room: 0, at_once: 0, row: Row::new(0) };

    /// The row, if nothing happens to blocks while `resolved` tokens have KV for certain.
    #[inline]
    pub(crate) fn quiet_row(&self, resolved: u64) -> Option<Row> {
        (resolved < self.quiet).then_some(self.row)
    }

    /// Tokens that it has blocks for, if a step can write so many of them at once.
    #[inline]
    pub(crate) fn room_for(&self, tokens: u32) -> Option<u64> {
        (tokens <= self.at_once).then_some(self.room)
    }

    /// Whether it was found out, be that so still or not. Then no load is to come for the sequence.
    #[inline]
    pub(crate) fn is_granted(&self) -> bool {
        self.pulse != Pulse::NONE
    }

    /// The sequence may be another one afterwards.
    #[inline]
    pub(crate) fn end(&mut self) {
        guard!("manager.other-calls-end-a-pace", self.pulse = Pulse::NONE);
    }
}

impl Manager {
    /// How a sequence goes on, if that is known.
    #[inline]
    pub(crate) fn pace<'a>(&self, sequence: &'a Sequence) -> Option<&'a Pace> {
        let pace = Some(&sequence.pace).filter(|pace| pace.pulse == self.steps.pulse());
        debug_assert!(pace.is_none_or(|pace| self.holds(pace, sequence)), "{sequence:?}: {pace:?}");
        pace
    }

    /// Whether what a pace says is so.
    fn holds(&self, pace: &Pace, sequence: &Sequence) -> bool {
        let bounds = sequence.held.find_bounds(&self.groups);
        self.check_whole(sequence).is_ok()
            && self.is_plain(sequence)
            && sequence.failures_seen == self.steps.failures().count()
            && sequence.row() == Some(pace.row)
            && pace.quiet <= bounds.names_at.min(bounds.retires_at)
            && pace.room <= bounds.writes_to
            && pace.at_once <= bounds.at_once
            && bounds.writes_from <= sequence.ends.resolved()
    }

    /// Finds out how a sequence goes on that was looked at and staged just now, or has its pace still and other blocks.
    pub(crate) fn set_pace(&self, sequence: &mut Sequence) {
        let Some(row) = sequence.row().filter(|_| self.is_plain(sequence)) else { return };
        let bounds = *sequence.held.bounds(&self.groups);
        if bounds.writes_from > sequence.ends.resolved() {
            return;
        }
        let quiet = bounds.names_at.min(bounds.retires_at);
        let (room, at_once) = (bounds.writes_to, bounds.at_once);
        sequence.pace = Pace { pulse: self.steps.pulse(), quiet, room, at_once, row };
    }

    /// Whether nothing is to come for a sequence but the ids of its steps.
    fn is_plain(&self, sequence: &Sequence) -> bool {
        !sequence.suspended
            && sequence.arrives.is_none()
            && sequence.load.is_none()
            && sequence.frontier.is_none()
            && sequence.depends.is_empty()
            && !self.groups.has_draft()
            && takes_any_id(sequence, &self.namer)
    }
}

/// Whether ids of any value can follow in a sequence.
fn takes_any_id(sequence: &Sequence, namer: &Namer) -> bool {
    sequence.known.ids().is_some() && namer.takes_any_id()
}
