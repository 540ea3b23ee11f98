//! Compares the checksums that were read with the expected ones.

use std::collections::BTreeMap;

use kv_kernels::verify::BAD_BLOCK;

use super::groups::Reads;
use super::live::Live;
use crate::config::Verify;
use crate::report::{CorruptBlock, RunReport};
use crate::rng::SplitMix64;

/// With sampling, one in this many blocks is compared.
const SAMPLE_ONE_IN: u64 = 16;

/// A step whose checksums have not arrived yet.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) step: u64,
    pub(super) rows: Vec<SequenceSums>,
}

/// The state of one sequence when it was read.
#[derive(Debug)]
pub(super) struct SequenceSums {
    /// The row of the checksums that holds its own.
    pub(super) row: usize,
    pub(super) request: usize,
    /// Number of its tokens before the step.
    pub(super) start: u64,
    pub(super) tokens: u64,
    /// The sums, for each device, of its last block if that was partly full.
    pub(super) partial: Vec<u64>,
    /// The sums, for each part with a state, of the state that the step begins with.
    pub(super) states: Vec<u64>,
    /// Tokens that a draft model has right KV for, and the sums of the last block of these.
    pub(super) drafted: (u64, Vec<u64>),
}

/// The checksums that were read of one part, row by row.
#[derive(Debug)]
pub(super) struct PartSums<'a> {
    pub(super) sums: &'a [u64],
    pub(super) width: usize,
}

#[derive(Debug)]
pub(super) struct Verifier {
    verify: Verify,
    block_tokens: u64,
    seed: u64,
}

impl Verifier {
    pub(super) fn new(verify: Verify, block_tokens: u32, seed: u64) -> Self {
        Self { verify, block_tokens: block_tokens.into(), seed }
    }

    pub(super) fn reads(&self) -> bool {
        self.verify != Verify::None
    }

    pub(super) fn compare(
        &self,
        reading: &Reading,
        (part, reads): (usize, Reads),
        checksums: &PartSums<'_>,
        live: &BTreeMap<usize, Live>,
        report: &mut RunReport,
    ) {
        let mut chance = SplitMix64::new(self.seed ^ reading.step);
        for row in &reading.rows {
            let found = checksums.sums.chunks_exact(checksums.width.max(1)).nth(row.row);
            let (Some(request), Some(found)) = (live.get(&row.request), found) else { continue };
            let (tokens, partial) = match reads {
                Reads::Drafted => (row.drafted.0, &row.drafted.1),
                _ => (row.tokens, &row.partial),
            };
            let full = (tokens / self.block_tokens) as usize;
            let blocks = match reads {
                // A step that begins with the first token reads no state.
                Reads::State => usize::from(row.start > 0),
                _ => tokens.div_ceil(self.block_tokens) as usize,
            };
            let first = reads.first_block(row.start, self.block_tokens);
            for (block, &sum) in found.iter().enumerate().take(blocks).skip(first) {
                if self.verify == Verify::Sample && chance.below(SAMPLE_ONE_IN) != 0 {
                    continue;
                }
                let expected = match block < full {
                    _ if reads == Reads::State => row.states.get(part).copied(),
                    true => request.expected.full(block, part),
                    false => partial.get(part).copied(),
                };
                report.verified_blocks += 1;
                if expected == Some(sum) {
                    continue;
                }
                let corrupt = CorruptBlock {
                    request: row.request as u64,
                    iteration: reading.step,
                    block: block as u64,
                    physical_block: request.physical(block),
                    device: part as u32,
                    message: self.message(sum, expected, part, live),
                };
                report.add_corruption(corrupt);
            }
        }
    }

    fn message(
        &self,
        sum: u64,
        expected: Option<u64>,
        part: usize,
        live: &BTreeMap<usize, Live>,
    ) -> String {
        if sum == BAD_BLOCK {
            return "the block table on the device names no block that is ready".to_owned();
        }
        let owner = live.iter().find_map(|(&number, request)| {
            request.expected.find(sum, part).map(|block| (number, block))
        });
        match (owner, expected) {
            (Some((request, block)), _) => {
                format!("it holds the content of request {request}, block {block}")
            }
            (None, Some(expected)) => format!(
                "it sums to {sum:#018x} instead of {expected:#018x}, and to no block of a live \
                 request"
            ),
            (None, None) => format!("it sums to {sum:#018x}, and nothing was written there"),
        }
    }
}
