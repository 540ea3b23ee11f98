//! The checksums that a request's blocks must have, computed without reading them.

use std::sync::Arc;

use kv_kernels::{KvShape, layout::LayoutError, verify::Expected};

use super::content::RequestContent;
use super::groups::Reads;

/// Computes the block sums of one shape, for each device.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    parts: Arc<[Expected]>,
    reads: Arc<[Reads]>,
    block_tokens: u64,
}

impl Oracle {
    /// Creates it with the shape of each part of the layers, and what its readers read.
    pub(super) fn new(
        parts: Vec<(KvShape, Reads)>,
        block_tokens: u32,
    ) -> Result<Self, LayoutError> {
        let reads = parts.iter().map(|&(_, reads)| reads).collect();
        let parts: Result<_, _> = parts.iter().map(|(shape, _)| Expected::new(shape)).collect();
        Ok(Self { parts: parts?, reads, block_tokens: block_tokens.into() })
    }

    pub(super) fn reads(&self, part: usize) -> Reads {
        self.reads[part]
    }

    /// The sum of a part's state behind `tokens` tokens; 0 for other parts.
    fn state(&self, part: usize, content: &RequestContent, tokens: u64) -> u64 {
        match self.reads[part] {
            Reads::State if tokens > 0 => self.add(part, 0, 0, content.state_key(tokens)),
            _ => 0,
        }
    }

    pub(super) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The key of a token on device `part`. Every device holds different bytes for it.
    pub(super) fn key_on(part: usize, key: u64) -> u64 {
        key.rotate_left(part as u32)
    }

    fn add(&self, part: usize, sum: u64, token: u64, key: u64) -> u64 {
        let token = match self.reads[part] {
            Reads::State => 0,
            _ => (token % self.block_tokens) as usize,
        };
        // The token lies within a block, so the sum exists.
        self.parts[part].add(sum, token, Self::key_on(part, key)).unwrap_or(0)
    }
}

/// The checksums of a request's blocks, as far as its tokens were written at least once.
///
/// They do not depend on the block ids, so they survive a preemption.
#[derive(Clone, Debug)]
pub(super) struct ExpectedSums {
    oracle: Oracle,
    /// Sums of the full blocks, `[block][part]`.
    full: Vec<u64>,
    /// Sums of the partly full block, for each part; 0 if there is none.
    last: Vec<u64>,
    tokens: u64,
}

impl ExpectedSums {
    pub(super) fn new(oracle: &Oracle) -> Self {
        let last = vec![0; oracle.parts()];
        Self { oracle: oracle.clone(), full: Vec::new(), last, tokens: 0 }
    }

    /// Extends the sums to the first `tokens` tokens.
    pub(super) fn cover(&mut self, content: &RequestContent, tokens: u64) {
        for token in self.tokens..tokens {
            let key = content.key(token);
            for (part, last) in self.last.iter_mut().enumerate() {
                *last = self.oracle.add(part, *last, token, key);
            }
            if (token + 1) % self.oracle.block_tokens == 0 {
                self.full.extend_from_slice(&self.last);
                self.last.fill(0);
            }
        }
        self.tokens = self.tokens.max(tokens);
    }

    /// The sums, for each part, of the partly full block when the request has `tokens` tokens. The
    /// sums cover these tokens already.
    pub(super) fn partial(&self, content: &RequestContent, tokens: u64) -> Vec<u64> {
        if tokens == self.tokens {
            return self.last.clone();
        }
        let first = tokens - tokens % self.oracle.block_tokens;
        let sum = |part| {
            (first..tokens)
                .fold(0, |sum, token| self.oracle.add(part, sum, token, content.key(token)))
        };
        (0..self.oracle.parts()).map(sum).collect()
    }

    /// The sums, for each part with a state, of the state behind `tokens` tokens.
    pub(super) fn states(&self, content: &RequestContent, tokens: u64) -> Vec<u64> {
        (0..self.oracle.parts()).map(|part| self.oracle.state(part, content, tokens)).collect()
    }

    pub(super) fn full(&self, block: usize, part: usize) -> Option<u64> {
        self.full.get(block * self.oracle.parts() + part).copied()
    }

    pub(super) fn find(&self, sum: u64, part: usize) -> Option<usize> {
        let sums = self.full.iter().skip(part).step_by(self.oracle.parts());
        sums.into_iter().position(|&found| found == sum)
    }
}
