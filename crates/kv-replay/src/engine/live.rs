//! A request in the engine.

use std::collections::VecDeque;

use kv_plane::manager::Reuse;
use kv_plane::{GroupId, Request, Sequence};

use super::content::RequestContent;
use super::expected::ExpectedSums;
use crate::report::RunReport;

/// A request, or a branch of one, until its last result was compared.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) content: RequestContent,
    pub(super) expected: ExpectedSums,
    /// What is to be admitted; `None` while it has a sequence, and when it is over.
    pub(super) request: Option<Request>,
    /// Its blocks; `None` before it is admitted, while it is preempted, and when it is cancelled.
    pub(super) sequence: Option<Sequence>,
    pub(super) staged: Option<Staged>,
    /// Where its KV really ends, which the cache learns with the ids of its steps.
    pub(super) truth: u64,
    /// Steps whose ids were not committed, each with the number of ids.
    pub(super) outcomes: VecDeque<(u64, u64)>,
    /// The last step that a draft model has computed tokens in, and where its right KV ends then.
    pub(super) drafted: Option<(u64, u64)>,
    /// Number of tokens that the sequence will have at its end.
    pub(super) total: u64,
    /// Branches to be made when its prompt is computed.
    pub(super) twins: u32,
    /// The iteration in which it is resumed, while it is suspended.
    pub(super) wakes: u64,
    pub(super) dies: Option<u64>,
    /// Whether it is a request of the trace whose cached tokens were not counted yet.
    pub(super) uncounted: bool,
    /// The step after which it is over.
    pub(super) over_in: Option<u64>,
    /// Number of times that it was computed anew because it was stuck.
    pub(super) stuck: u32,
    pub(super) cancelled: bool,
    pub(super) forked: bool,
}

/// Tokens of a request in an iteration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staged {
    /// Cached tokens in front of them that the store skips.
    pub(super) skip: u64,
    pub(super) start: u64,
    /// Those from here on are drafts that are rejected.
    pub(super) right: u64,
    pub(super) end: u64,
}

impl Live {
    pub(super) fn new(
        mut content: RequestContent,
        expected: ExpectedSums,
        answer_tokens: u64,
        reuse: Reuse,
    ) -> Self {
        let prompt = content.prompt_tokens();
        let mut request = Request::named(prompt, content.names(prompt).to_vec());
        request.reuse = reuse;
        let total = prompt + answer_tokens;
        let begun = Self::with(content, expected, total);
        Self { request: Some(request), uncounted: true, ..begun }
    }

    fn with(content: RequestContent, expected: ExpectedSums, total: u64) -> Self {
        Self {
            content,
            expected,
            request: None,
            sequence: None,
            staged: None,
            truth: 0,
            outcomes: VecDeque::new(),
            drafted: None,
            total,
            twins: 0,
            wakes: 0,
            dies: None,
            uncounted: false,
            over_in: None,
            stuck: 0,
            cancelled: false,
            forked: false,
        }
    }

    /// A branch of this request from token `from` on, with a sequence of its own.
    pub(super) fn branch(&self, from: u64, number: u64, sequence: Sequence) -> Self {
        let content = self.content.branch(from, number);
        let branch = Self::with(content, self.expected.clone(), self.total);
        Self { sequence: Some(sequence), truth: self.truth, forked: true, ..branch }
    }

    /// Takes its blocks away, to be admitted again with what it knows by then.
    pub(super) fn preempt(&mut self) {
        let Some(mut sequence) = self.sequence.take() else { return };
        let known = sequence.known();
        let mut request = Request::named(known, self.content.names(known).to_vec());
        // It has not ended.
        request.reuse = sequence.reuse();
        sequence.set_reuse(Reuse::default());
        self.request = Some(request);
        self.outcomes.clear();
        (self.staged, self.drafted) = (None, None);
    }

    /// Counts its lookups, at its first admission; these and the hits.
    pub(super) fn count_lookups(
        &self,
        sequence: &Sequence,
        block_tokens: u64,
        report: &mut RunReport,
    ) -> (u64, u64) {
        // The last token of a prompt is always computed, so its block is not looked up.
        let lookups = (self.content.prompt_tokens() - 1) / block_tokens;
        let hits = sequence.cached_tokens() / block_tokens;
        report.block_lookups += lookups;
        report.block_hits += hits;
        report.hit_rate = report.block_hits as f64 / report.block_lookups.max(1) as f64;
        report.prefix_tokens_reused += sequence.cached_tokens();
        (lookups, hits)
    }

    /// Id of the device block that it has there now; `u64::MAX` if it has none any more.
    pub(super) fn physical(&self, block: usize) -> u64 {
        let block = self.sequence.as_ref().and_then(|sequence| sequence.block(GroupId(0), block));
        block.map_or(u64::MAX, |id| id.index() as u64)
    }
}
