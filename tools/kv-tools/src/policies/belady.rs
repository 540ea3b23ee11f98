//! Belady's optimum: an upper bound for policies that do not know the future.

use std::collections::BinaryHeap;

use super::{Capacity, Lookups, Policy, RequestBlocks, TraceBlock};

/// Position that means "no further lookup".
const NEVER: usize = usize::MAX;

/// Evicts the block whose next lookup is furthest away (Belady, 1966). Every looked-up block is
/// cached.
///
/// Blocks that are never looked up again may be evicted in any order without changing a single hit.
pub(super) struct Belady {
    capacity: usize,
    /// For each lookup, the position of the next lookup of the same block, or [`NEVER`].
    next_lookup: Vec<usize>,
    /// For each block, the position of its next lookup while it is cached.
    cached: Vec<Option<usize>>,
    cached_len: usize,
    /// Cached blocks, furthest next lookup first. An entry becomes stale when its block is looked
    /// up. Its position is then in the past, so all current entries leave the heap before it, and a
    /// stale entry is never used.
    furthest: BinaryHeap<(usize, TraceBlock)>,
}

impl Belady {
    pub(super) fn new(lookups: &Lookups<'_>, capacity: Capacity) -> Self {
        let blocks = lookups.blocks();
        let mut next_lookup = vec![NEVER; blocks.len()];
        let mut upcoming = vec![NEVER; lookups.distinct()];
        for (position, block) in blocks.iter().enumerate().rev() {
            next_lookup[position] = std::mem::replace(&mut upcoming[block.index()], position);
        }
        Self {
            capacity: capacity.blocks(),
            next_lookup,
            cached: vec![None; lookups.distinct()],
            cached_len: 0,
            furthest: BinaryHeap::new(),
        }
    }

    fn access(&mut self, position: usize, block: TraceBlock) -> bool {
        let hit = self.cached[block.index()].is_some();
        if !hit {
            if self.cached_len >= self.capacity {
                self.evict();
            }
            self.cached_len += 1;
        }
        let next = self.next_lookup[position];
        self.cached[block.index()] = Some(next);
        self.furthest.push((next, block));
        hit
    }

    fn evict(&mut self) {
        while let Some((next, block)) = self.furthest.pop() {
            if self.cached[block.index()] == Some(next) {
                self.cached[block.index()] = None;
                self.cached_len -= 1;
                return;
            }
        }
    }
}

impl Policy for Belady {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        let positions = request.first_lookup..;
        positions
            .zip(request.blocks)
            .map(|(position, &block)| u64::from(self.access(position, block)))
            .sum()
    }
}
