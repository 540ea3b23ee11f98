//! Least recently used, as a prefix cache sees it.

use super::pooled::{Slots, facts};
use super::{Policy, RequestBlocks};

/// LRU as a prefix cache sees it.
///
/// A cached block is useful only if every block before it is cached too, so the hits of a request
/// are its leading run of cached blocks. The other blocks are then inserted. At the end the
/// request's blocks are released from last to first, so its head is the most recently used: tails
/// are evicted before heads.
pub(super) struct PrefixLru(pub(super) Slots);

impl Policy for PrefixLru {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        let slots = &mut self.0;
        let run = request.blocks.iter().take_while(|&&block| slots.slot_of(block).is_some());
        let hits = run.count();
        for (depth, &block) in request.blocks.iter().enumerate().skip(hits) {
            if slots.slot_of(block).is_none()
                && let Some(slot) = slots.insert(block, facts(request, depth, None))
            {
                slots.release(slot);
            }
        }
        // A request larger than the cache has lost some of its own blocks by now.
        for (depth, &block) in request.blocks.iter().enumerate().rev() {
            if let Some(slot) = slots.slot_of(block) {
                slots.find(slot, facts(request, depth, None).used);
                slots.release(slot);
            }
        }
        hits as u64
    }
}
