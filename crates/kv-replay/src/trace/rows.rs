//! The requests of a file while it is read: each is checked, and all together are bounded.

use std::collections::HashSet;
use std::sync::Arc;

use cuda_driver::guard;

use super::{IDS_MAX, LineProblem, ReadOptions, Request, Trace, TraceError};

/// A request as a file has it.
#[derive(Debug)]
pub struct Row {
    pub timestamp_ms: u64,
    pub input_length: u64,
    pub output_length: u64,
    /// `None` for a prompt that the file gives no ids: it shares nothing with any other.
    pub hash_ids: Option<Vec<u64>>,
    pub tenant: Option<Arc<str>>,
}

#[derive(Debug)]
pub struct Rows<'a> {
    name: &'a str,
    pub block_tokens: u64,
    skip_unusable: bool,
    /// Those without ids have none yet.
    requests: Vec<Request>,
    skipped: u64,
    /// Ids of all requests, with those that are to be made.
    ids: u64,
    /// Whether arrivals may go back, because the file is ordered by something else.
    is_unordered: bool,
}

impl<'a> Rows<'a> {
    /// No rows yet. A hash id stands for as many tokens as the options say, else for `block_tokens`.
    pub fn new(name: &'a str, block_tokens: u64, options: &ReadOptions) -> Self {
        Self {
            name,
            block_tokens: options.block_tokens.unwrap_or(block_tokens),
            skip_unusable: options.skip_unusable,
            requests: Vec::new(),
            skipped: 0,
            ids: 0,
            is_unordered: false,
        }
    }

    /// Lets arrivals go back from here on: [`finish`](Self::finish) orders them.
    pub fn order_by_arrival(&mut self) {
        self.is_unordered = true;
    }

    /// Arrival of the row before.
    pub fn last_ms(&self) -> u64 {
        self.requests.last().map_or(0, |request| request.timestamp_ms)
    }

    /// Takes a row, or the reason why it is none. The reason ends the reading, unless such rows are left out.
    pub fn push(&mut self, line: u64, row: Result<Row, LineProblem>) -> Result<(), TraceError> {
        match row.and_then(|row| self.checked(row)) {
            Ok(request) => {
                self.ids += request.input_length.div_ceil(self.block_tokens.max(1));
                if guard!("replay.ids-bounded", self.ids > IDS_MAX, else self.ids > 8 * IDS_MAX) {
                    return Err(self.at(line, LineProblem::TooManyIds { limit: IDS_MAX }));
                }
                self.requests.push(request);
            }
            Err(_) if self.skip_unusable => self.skipped += 1,
            Err(problem) => return Err(self.at(line, problem)),
        }
        Ok(())
    }

    pub fn at(&self, line: u64, problem: LineProblem) -> TraceError {
        TraceError::Line { name: self.name.to_owned(), line, problem }
    }

    fn checked(&self, row: Row) -> Result<Request, LineProblem> {
        let Row { timestamp_ms, input_length, output_length, hash_ids, tenant } = row;
        let is_named = hash_ids.is_some();
        let hash_ids = hash_ids.unwrap_or_default();
        let request = Request { timestamp_ms, input_length, output_length, hash_ids, tenant };
        request.check_numbers()?;
        if is_named {
            request.check(self.block_tokens)?;
        }
        let previous_ms = self.last_ms();
        if timestamp_ms < previous_ms && !self.is_unordered {
            return Err(LineProblem::Backwards { timestamp_ms, previous_ms });
        }
        Ok(request)
    }

    /// The trace. Prompts without ids get some that no other request has.
    pub fn finish(self) -> Trace {
        let Self { block_tokens, mut requests, skipped, is_unordered, .. } = self;
        if is_unordered {
            // Stable: requests of one moment stay in the order of the file.
            requests.sort_by_key(|request| request.timestamp_ms);
        }
        let named: HashSet<u64> =
            requests.iter().flat_map(|request| &request.hash_ids).copied().collect();
        let mut fresh = (0..).filter(|id| !named.contains(id));
        for request in requests.iter_mut().filter(|request| request.hash_ids.is_empty()) {
            let count = request.input_length.div_ceil(block_tokens.max(1));
            request.hash_ids = fresh.by_ref().take(count as usize).collect();
        }
        Trace { block_tokens, requests, skipped }
    }
}
