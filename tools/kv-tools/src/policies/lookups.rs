//! The block lookups of a trace. Blocks are numbered from 0, so that policies can use tables.

use std::collections::HashMap;
use std::time::Duration;

use kv_pool::policy::ReuseHint;

use kv_replay::trace::{Request, Trace};

/// The longest time that a client knows its tool to take. A session that comes back later waits for a person, of whom
/// nothing is known.
pub const TOOL_CALL_MAX: Duration = Duration::from_secs(30);

/// A block, numbered in the order of first lookups.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct TraceBlock(pub(super) usize);

impl TraceBlock {
    /// Its number, below [`Lookups::distinct`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

/// The block lookups of a trace, in order.
#[derive(Clone, Debug)]
pub struct Lookups<'a> {
    trace: &'a Trace,
    /// # Invariants
    ///
    /// As many entries as all requests together have hash ids.
    blocks: Vec<TraceBlock>,
    distinct: usize,
    block_tokens: u64,
    /// The hint about each request's blocks; empty without hints.
    hints: Vec<Option<ReuseHint>>,
}

/// One request and its blocks.
#[derive(Clone, Copy, Debug)]
pub struct RequestBlocks<'a> {
    /// The request.
    pub request: &'a Request,
    /// Its blocks, from the first of the prompt to the last.
    pub blocks: &'a [TraceBlock],
    /// Index of its first lookup among those of the trace.
    pub first_lookup: usize,
    /// Number of prompt tokens of a block.
    pub block_tokens: u64,
    /// What an engine says of its blocks when it is done.
    pub hint: Option<ReuseHint>,
}

impl<'a> Lookups<'a> {
    /// The lookups of `trace`.
    #[must_use]
    pub fn new(trace: &'a Trace) -> Self {
        let mut numbers = HashMap::new();
        let ids = trace.requests.iter().flat_map(|request| &request.hash_ids);
        let blocks = ids
            .map(|&id| {
                let next = numbers.len();
                TraceBlock(*numbers.entry(id).or_insert(next))
            })
            .collect();
        Self {
            trace,
            blocks,
            distinct: numbers.len(),
            block_tokens: trace.block_tokens.max(1),
            hints: Vec::new(),
        }
    }

    /// The same with what its [clients](kv_replay::hints) say: that a session is over, or comes back from a tool within
    /// [`TOOL_CALL_MAX`].
    #[must_use]
    pub fn hinted(self) -> Self {
        let said = kv_replay::hints::of_requests(&self.trace.requests, self.block_tokens);
        let is_known =
            |hint: &ReuseHint| !matches!(hint, ReuseHint::BackIn(time) if *time > TOOL_CALL_MAX);
        Self { hints: said.into_iter().map(|hint| hint.filter(is_known)).collect(), ..self }
    }

    /// The requests, in order of arrival.
    pub fn requests(&self) -> impl Iterator<Item = RequestBlocks<'_>> {
        let hints = self.hints.iter().copied().chain(std::iter::repeat(None));
        self.trace.requests.iter().zip(hints).scan(0, |next, (request, hint)| {
            let first_lookup = *next;
            *next += request.hash_ids.len();
            let (blocks, block_tokens) = (&self.blocks[first_lookup..*next], self.block_tokens);
            Some(RequestBlocks { request, blocks, first_lookup, block_tokens, hint })
        })
    }

    /// The block of each lookup.
    #[must_use]
    pub fn blocks(&self) -> &[TraceBlock] {
        &self.blocks
    }

    /// Number of distinct blocks.
    #[must_use]
    pub fn distinct(&self) -> usize {
        self.distinct
    }
}
