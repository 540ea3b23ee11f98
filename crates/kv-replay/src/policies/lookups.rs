//! The block lookups of a trace. Blocks are numbered from 0, so that policies can use tables.

use std::collections::HashMap;

use crate::trace::{Request, Trace};

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
        Self { trace, blocks, distinct: numbers.len(), block_tokens: trace.block_tokens.max(1) }
    }

    /// The requests, in order of arrival.
    pub fn requests(&self) -> impl Iterator<Item = RequestBlocks<'_>> {
        self.trace.requests.iter().scan(0, |next, request| {
            let first_lookup = *next;
            *next += request.hash_ids.len();
            let (blocks, block_tokens) = (&self.blocks[first_lookup..*next], self.block_tokens);
            Some(RequestBlocks { request, blocks, first_lookup, block_tokens })
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
