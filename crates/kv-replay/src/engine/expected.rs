//! The checksums that a request's blocks must have, computed without reading them.

use std::sync::Arc;

use kv_kernels::{KvShape, error::ShapeError, verify::Expected};

use super::content::RequestContent;

/// Computes the block sums of one shape, for each device.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    parts: Arc<[Expected]>,
    block_tokens: u64,
}

impl Oracle {
    /// Creates it with one shape for each device's part of the layers.
    pub(super) fn new(
        shapes: impl Iterator<Item = KvShape>,
        block_tokens: u32,
    ) -> Result<Self, ShapeError> {
        let parts: Result<_, _> = shapes.map(|shape| Expected::new(&shape)).collect();
        Ok(Self { parts: parts?, block_tokens: block_tokens.into() })
    }

    pub(super) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The key of a token on device `part`. Every device holds different bytes for it.
    pub(super) fn key_on(part: usize, key: u64) -> u64 {
        key.rotate_left(part as u32)
    }

    fn add(&self, part: usize, sum: u64, token: u64, key: u64) -> u64 {
        let token = (token % self.block_tokens) as usize;
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

    /// The sum of full block `block` on device `part`.
    pub(super) fn full(&self, block: usize, part: usize) -> Option<u64> {
        self.full.get(block * self.oracle.parts() + part).copied()
    }

    /// The full block whose sum on device `part` is `sum`.
    pub(super) fn find(&self, sum: u64, part: usize) -> Option<usize> {
        let sums = self.full.iter().skip(part).step_by(self.oracle.parts());
        sums.into_iter().position(|&found| found == sum)
    }
}
