//! The draft model of a run: what it computes of each request, and how far that is right.

use kv_plane::Room;

use super::RunError;
use super::cache::Compute;
use super::scheduler::Scheduler;

impl<C: Compute> Scheduler<'_, C> {
    /// Has the draft model compute what it lags behind of a request whose tokens are reserved, or nothing in this
    /// iteration.
    pub(super) fn reserve_drafts(&mut self, number: usize) {
        if self.draft_layers == 0 || !self.chance.drafts(number, self.iteration) {
            return;
        }
        let Some(request) = self.live.get_mut(&number) else { return };
        let Some(sequence) = request.sequence.as_mut() else { return };
        let longest = sequence.upper() + u64::from(sequence.next());
        let tokens = longest.saturating_sub(sequence.draft_end()).min(self.drafts_left);
        // Without room, the request goes on without drafts.
        if let Ok(Room::Given(())) = self.cache.reserve_draft(sequence, tokens as u32) {
            self.drafts_left -= tokens;
        }
    }

    /// Says how far the draft model has come, of tokens that are certain by now.
    pub(super) fn commit_drafts(&mut self) -> Result<(), RunError> {
        for (&number, request) in &mut self.live {
            let (Some(sequence), Some((step, end))) = (&mut request.sequence, request.drafted)
            else {
                continue;
            };
            let end = end.min(sequence.resolved()).min(sequence.known());
            if end <= sequence.draft_end() || sequence.is_suspended() {
                continue;
            }
            let committed = self.cache.commit_draft(sequence, step, end);
            committed.map_err(|source| RunError::CommitDraft { request: number, source })?;
        }
        Ok(())
    }
}
