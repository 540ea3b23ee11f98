//! Which copies the engine's work waits for: those that touch blocks of its batch.

use cuda_driver::guard;
use kv_manager::{Checked, GroupId, Start};

use crate::GroupOptions;

/// Device blocks of copies that the compute streams do not wait for yet, by direction.
///
/// A copy out reads a block that a sequence of the batch may have got meanwhile; a copy back writes one that
/// it may read. What is copied for nobody in the batch, as by a suspension, holds nobody up.
#[derive(Debug)]
pub(crate) struct Awaited {
    /// For each device block, a bit for each direction.
    marks: Vec<u8>,
    /// The blocks of each direction that have its bit.
    marked: [Vec<usize>; 2],
}

impl Awaited {
    pub(crate) fn new(device_blocks: usize) -> Self {
        Self { marks: vec![0; device_blocks], marked: Default::default() }
    }

    pub(crate) fn note(&mut self, lane: usize, block: usize) {
        let (Some(mark), Some(marked)) = (self.marks.get_mut(block), self.marked.get_mut(lane))
        else {
            return;
        };
        let bit = 1 << lane;
        if *mark & bit == 0 {
            *mark |= bit;
            marked.push(block);
        }
    }

    /// Whether the batch of a plan has blocks of each direction.
    pub(crate) fn of_batch(
        &self,
        plan: Checked<'_>,
        (group, options): (GroupId, &GroupOptions),
    ) -> [bool; 2] {
        // Of states, any entry may have been claimed for the step.
        let block_tokens = if options.is_state() { 1 } else { options.shape.block_tokens() };
        let waiting = (0..2).filter(|&lane| !self.marked[lane].is_empty());
        let all = waiting.fold(0, |all, lane| all | 1 << lane);
        let mut found = 0;
        let batch = &plan.draft_batch[..];
        let drafts = guard!("cache.draft-copies-are-awaited", batch, else &batch[..0]);
        for row in plan.batch.iter().chain(drafts) {
            let (Start::At(upper) | Start::Open { upper, .. }) = row.start;
            let blocks = upper.saturating_add(row.tokens.into()).div_ceil(block_tokens.into());
            let ids = plan.row(group, row.row);
            // New blocks are the last ones of their rows.
            let ids = &ids[..blocks.min(ids.len() as u64) as usize];
            for id in ids.iter().rev().filter_map(|entry| entry.block()) {
                if found == all {
                    break;
                }
                found |= self.marks.get(id.index()).copied().unwrap_or(0);
            }
        }
        [found & 1 != 0, found & 2 != 0]
    }

    /// Forgets a direction, for whose copies the compute streams wait now.
    pub(crate) fn clear(&mut self, lane: usize) {
        for block in self.marked[lane].drain(..) {
            self.marks[block] &= !(1 << lane);
        }
    }
}
