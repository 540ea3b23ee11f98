//! Pieces of a read that have come, and who takes them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kv_remote::message::Span;

use crate::landing::{Came, Landing};
use crate::reader::Failure;

/// A piece that has come. Nothing is read into its landing before that is among the free ones again.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) landing: Arc<Landing>,
    /// Places in the list of spans.
    spans: Range<usize>,
}

impl Arrived {
    /// # Safety
    /// The piece is over, and its landing is neither free nor lent to another one.
    pub(crate) unsafe fn new(landing: Arc<Landing>, spans: Range<usize>) -> Self {
        Self { landing, spans }
    }

    /// Says each span of the piece. Its landing is free then.
    pub(crate) fn say(self, spans: &[Span], each: &mut dyn FnMut(usize, Came<'_>)) -> Arc<Landing> {
        let Self { landing, spans: of } = self;
        let mut at = 0;
        for (place, span) in of.clone().zip(spans.get(of).unwrap_or_default()) {
            let end = at + span.bytes as usize;
            // SAFETY: by the promise of `new`, and since the landing becomes free behind this.
            if let Some(came) = unsafe { landing.came(at..end) } {
                each(place, came);
            }
            at = end;
        }
        landing
    }
}

/// Takes pieces that have come, and gives back their landings.
pub(crate) trait Taker {
    /// Takes a piece; false if none is wanted any more.
    fn take(&mut self, piece: Arrived, free: &mut Vec<Arc<Landing>>) -> Result<bool, Failure>;

    /// Landings that are not with the taker, at most.
    fn room(&self) -> usize;

    /// Puts landings that have been looked at with the free ones.
    fn give_back(&mut self, free: &mut Vec<Arc<Landing>>);

    /// Waits until a landing was looked at; false if no piece is wanted any more.
    fn wait(&mut self, deadline: Instant, free: &mut Vec<Arc<Landing>>) -> Result<bool, Failure>;
}

/// Says the spans of each piece at once.
pub(crate) struct Here<'a> {
    pub(crate) spans: &'a [Span],
    pub(crate) each: &'a mut dyn FnMut(usize, Came<'_>),
}

impl Taker for Here<'_> {
    fn take(&mut self, piece: Arrived, free: &mut Vec<Arc<Landing>>) -> Result<bool, Failure> {
        let landing = piece.say(self.spans, self.each);
        landing.is_used();
        free.push(landing);
        Ok(true)
    }

    fn room(&self) -> usize {
        usize::MAX
    }

    fn give_back(&mut self, _: &mut Vec<Arc<Landing>>) {}

    fn wait(&mut self, _: Instant, _: &mut Vec<Arc<Landing>>) -> Result<bool, Failure> {
        // Nothing is with it.
        Err(Failure::Unused)
    }
}
