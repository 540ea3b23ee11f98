//! The life of a sequence: what the manager decides, with memory mapped where it needs some.

use std::collections::VecDeque;

use kv_manager::{
    Admission, Adoption, Answer, BudgetError, ChangeError, CommitError, Committed, DraftError,
    Export, ExportRefused, PinnedPrefix, Request, Reserved, Room, Sequence, SequenceError,
    SuspendError, Tokens,
};
use kv_pool::{BlockHash, retention::Retention};
use kv_tier::GroupFormat;
use tracing::level_filters::LevelFilter;

use crate::{DemandError, KvCache, ReserveError, ResumeError, Workers};

/// Whether calls of one sequence are traced. A step makes hundreds, so a span that nobody asks for is not even made.
#[inline]
fn is_traced() -> bool {
    LevelFilter::current() >= LevelFilter::TRACE
}

impl<W: Workers> KvCache<W> {
    /// Takes in the token ids that came out of a step; see [`Manager::commit`](kv_manager::Manager::commit).
    ///
    /// # Errors
    /// [`CommitError`]; the sequence is as it was.
    pub fn commit<'a>(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        tokens: impl Into<Tokens<'a>>,
    ) -> Result<Committed, CommitError> {
        let _span = is_traced().then(|| tracing::trace_span!("commit", step).entered());
        if sequence.loads().is_some() {
            // The step is over for the loads, if not for the devices.
            self.workers.settle(&mut self.manager);
        }
        self.manager.commit(sequence, step, tokens)
    }

    /// Gives a sequence room for the next `tokens` tokens, which the next [`stage`](KvCache::stage)
    /// computes; see [`Manager::reserve`](kv_manager::Manager::reserve). Blocks without content are taken
    /// first, then memory is mapped, and then cached blocks are evicted.
    ///
    /// # Errors
    /// [`ReserveError`]; the sequence is as it was.
    #[track_caller]
    pub fn reserve(
        &mut self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Room<Reserved>, ReserveError> {
        let _span = is_traced().then(|| tracing::trace_span!("reserve", tokens).entered());
        Ok(self.growing(|manager| manager.reserve(sequence, tokens))??)
    }

    /// Takes in an id of each sequence of a batch, and gives it room for a token more, for as many of the first sequences as
    /// need nothing else; how many. See [`Manager::decode`](kv_manager::Manager::decode).
    pub fn decode(&mut self, batch: &mut [&mut Sequence], step: u64, ids: &[u32]) -> usize {
        let _span = is_traced().then(|| tracing::trace_span!("decode", step).entered());
        if self.workers.can_grow() {
            self.take_mapped();
        }
        self.manager.decode(batch, step, ids)
    }

    /// Has the next step compute `tokens` tokens of a sequence by the draft model, from the end of its KV on; see
    /// [`Manager::reserve_draft`](kv_manager::Manager::reserve_draft). They lie in the parts'
    /// [`draft_batch`](crate::Part::draft_batch) then.
    ///
    /// # Errors
    /// [`ReserveError`]; the sequence is as it was, and can go on without drafts.
    #[track_caller]
    pub fn reserve_draft(
        &mut self,
        sequence: &mut Sequence,
        tokens: u32,
    ) -> Result<Room<()>, ReserveError> {
        Ok(self.growing(|manager| manager.reserve_draft(sequence, tokens))??)
    }

    /// Takes in how far the KV of the draft model reaches; see
    /// [`Manager::commit_draft`](kv_manager::Manager::commit_draft).
    ///
    /// # Errors
    /// [`DraftError`]; the sequence is as it was.
    pub fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        step: u64,
        end: u64,
    ) -> Result<Committed, DraftError> {
        self.manager.commit_draft(sequence, step, end)
    }

    /// Admits as many requests of a queue, in order, as rows, memory and a step's budget of tokens allow, and takes them
    /// out of it, with those that can never be admitted; see [`Manager::admit`](kv_manager::Manager::admit).
    ///
    /// Empty blocks are claimed first. If there are too few, more memory is mapped; with
    /// [`Growth::Ahead`](crate::Growth::Ahead) that has been done already in the steady state. If
    /// no memory is left, cached blocks are evicted, to host memory where there is room.
    ///
    /// # Errors
    /// [`DemandError`] if memory could not be mapped though some is left; all requests are in the queue then.
    #[track_caller]
    pub fn admit<R: AsMut<Request>>(
        &mut self,
        queue: &mut VecDeque<R>,
        budget: u64,
    ) -> Result<Admission<R>, DemandError> {
        let _span = tracing::debug_span!("admit", requests = queue.len(), budget).entered();
        self.growing(|manager| manager.admit(queue, budget))
    }

    /// Cuts a sequence to its first `tokens` tokens, and returns where its KV ends; see
    /// [`Manager::truncate`](kv_manager::Manager::truncate).
    ///
    /// # Errors
    /// [`ChangeError`]; the sequence is as it was.
    pub fn truncate(&mut self, sequence: &mut Sequence, tokens: u64) -> Result<u64, ChangeError> {
        self.manager.truncate(sequence, tokens)
    }

    /// Adds tokens that did not come out of a step; see [`Manager::extend`](kv_manager::Manager::extend).
    ///
    /// # Errors
    /// [`ChangeError`]; the sequence is as it was.
    pub fn extend<'a>(
        &mut self,
        sequence: &mut Sequence,
        tokens: impl Into<Tokens<'a>>,
    ) -> Result<(), ChangeError> {
        self.manager.extend(sequence, tokens)
    }

    /// A twin of a sequence that shares every block of it. A block that both hold is copied, on the device,
    /// before one of them writes it; see [`Manager::fork`](kv_manager::Manager::fork).
    ///
    /// For several answers to a prompt, fork once all tokens of the prompt but the last are computed or staged. Then no id is
    /// to come, and each twin computes the last token for itself.
    ///
    /// # Errors
    /// [`ChangeError`]; nothing has changed.
    pub fn fork(&mut self, sequence: &mut Sequence) -> Result<Sequence, ChangeError> {
        let _span = tracing::debug_span!("fork", tokens = sequence.known()).entered();
        self.manager.fork(sequence)
    }

    /// Takes a sequence off the device; see [`Manager::suspend`](kv_manager::Manager::suspend). The next
    /// [`stage`](KvCache::stage) enqueues the copies to host memory, behind the work that writes the
    /// blocks.
    ///
    /// # Errors
    /// [`SuspendError`]; the sequence is as it was.
    pub fn suspend(&mut self, sequence: &mut Sequence) -> Result<(), SuspendError> {
        let _span = tracing::debug_span!("suspend", tokens = sequence.known()).entered();
        self.manager.suspend(sequence)
    }

    /// Brings a suspended sequence back, and returns where its KV ends; see
    /// [`Manager::resume`](kv_manager::Manager::resume).
    ///
    /// # Errors
    /// [`ResumeError`]; the sequence is suspended as it was, but for what failed steps have spoilt.
    #[track_caller]
    pub fn resume(&mut self, sequence: &mut Sequence) -> Result<Room<u64>, ResumeError> {
        let _span = tracing::debug_span!("resume", tokens = sequence.known()).entered();
        Ok(self.growing(|manager| manager.resume(sequence))??)
    }

    /// Describes a sequence for another cache, and holds its blocks; see
    /// [`Manager::export`](kv_manager::Manager::export).
    ///
    /// # Errors
    /// [`ExportRefused`], with the sequence.
    pub fn export(&mut self, sequence: Sequence) -> Result<Export, Box<ExportRefused>> {
        self.manager.export(sequence)
    }

    /// Admits a request whose first `tokens` tokens have KV in another process; see
    /// [`Manager::adopt`](kv_manager::Manager::adopt).
    ///
    /// # Errors
    /// [`DemandError`] if memory could not be mapped though some is left; nothing was admitted then.
    #[track_caller]
    pub fn adopt(
        &mut self,
        request: &mut Request,
        tokens: u64,
        there: &[GroupFormat],
    ) -> Result<(Answer, Option<Adoption>), DemandError> {
        self.growing(|manager| manager.adopt(request, tokens, there))
    }

    /// Takes in the end of a transfer; see [`Manager::adopted`](kv_manager::Manager::adopted).
    ///
    /// # Errors
    /// [`SequenceError`]; the transfer has ended all the same.
    pub fn adopted(
        &mut self,
        sequence: &mut Sequence,
        adoption: Adoption,
        right: usize,
    ) -> Result<u64, SequenceError> {
        self.manager.adopted(sequence, adoption, right)
    }

    /// Brings content back from host memory before a request asks for it; see
    /// [`Manager::prefetch`](kv_manager::Manager::prefetch). No step waits for it that does not use it.
    ///
    /// # Errors
    /// [`DemandError`] if memory could not be mapped though some is left.
    #[track_caller]
    pub fn prefetch(&mut self, names: &[BlockHash]) -> Result<usize, DemandError> {
        self.growing(|manager| manager.prefetch(names))
    }

    /// Keeps a cached prefix on the device as long as the answer lives; see
    /// [`Manager::pin`](kv_manager::Manager::pin).
    ///
    /// # Errors
    /// [`BudgetError::Pins`]; nothing was pinned.
    pub fn pin(&mut self, names: &[BlockHash]) -> Result<PinnedPrefix, BudgetError> {
        self.manager.pin(names)
    }

    /// Says what a sequence's named blocks are worth from their release on.
    pub fn retain(&mut self, sequence: &Sequence, retention: impl Into<Retention>) {
        self.manager.retain(sequence, retention);
    }

    /// Forgets the content with these names, in every tier; how many blocks there were.
    pub fn forget(&mut self, names: &[BlockHash]) -> usize {
        self.manager.forget(names)
    }

    /// Forgets all cached content, because the model's weights were changed; see
    /// [`Manager::reset`](kv_manager::Manager::reset).
    pub fn reset(&mut self) {
        self.manager.reset();
    }
}
