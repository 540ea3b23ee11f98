//! A decode step of many sequences in one call.

use crate::{Manager, Sequence};

impl Manager {
    /// [Commits](Self::commit) one id to each sequence of a batch, which came out of `step`, and
    /// [reserves](Self::reserve) one token behind it: what most steps do for most sequences that decode. `ids` has the id of
    /// each sequence, in the same order; a sequence without one is left as it was.
    ///
    /// The call ends before the first sequence that needs more: a commit that is not [`Taken`](crate::Committed::Taken) or
    /// an error, or a block where none is empty. Returns how many sequences come before that one: they are as `commit` and
    /// `reserve` would leave them. That one and those behind it are as they were. `commit` and `reserve` give the answers
    /// for that one, and this call can go on behind it.
    pub fn decode(&mut self, batch: &mut [&mut Sequence], step: u64, ids: &[u32]) -> usize {
        let mut pairs = batch.iter_mut().zip(ids);
        let more = pairs.position(|(sequence, id)| !self.decode_one(sequence, step, *id));
        more.unwrap_or(batch.len().min(ids.len()))
    }

    /// Takes an id of a sequence, and gives it room for a token more. Whether that is all there is to it; else nothing has
    /// changed.
    #[inline]
    fn decode_one(&mut self, sequence: &mut Sequence, step: u64, id: u32) -> bool {
        let room = self.pace(sequence).and_then(|pace| pace.room_for(1));
        let upper = sequence.ends.upper_behind_one(step);
        let (Some(room), Some(upper)) = (room, upper) else { return false };
        let end = upper.saturating_add(1);
        // An empty block is the same one before and after a block is named.
        if end > room && !self.take_next(false, sequence, end) {
            return false;
        }
        let is_taken = sequence.ends.commit_first(step, sequence.known.tokens());
        debug_assert!(is_taken, "{sequence:?}: step {step}");
        self.add_id(sequence, step, id);
        sequence.ends.next = 1;
        true
    }
}
