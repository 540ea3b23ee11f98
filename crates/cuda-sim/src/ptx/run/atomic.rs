//! Atomic operations on memory.

use super::super::op::{Access, AccessOrder, AtomicRule};
use super::super::types::mask;
use super::observation::Ran;
use super::spaces::{Accessor, Spaces};

impl Spaces<'_> {
    /// Changes one element and returns its old value.
    pub(super) fn atomic(
        &mut self,
        access: &Access,
        address: u64,
        rule: AtomicRule,
        (b, c): (u64, u64),
        by: Accessor,
    ) -> Ran<u64> {
        let size = usize::from(access.bytes);
        let mut data = [0; 16];
        // For the conflict check this is a single access.
        let order = match access.order {
            AccessOrder::Atomic(scope) => AccessOrder::AtomicLoad(scope),
            other => other,
        };
        let load = Access { order, ..*access };
        self.load(&load, address, size as u32, by, &mut data)?;
        let mut word = [0; 8];
        word[..size].copy_from_slice(&data[..size]);
        let old = u64::from_le_bytes(word);
        let new = match rule {
            AtomicRule::Binary(f) => f(old, b),
            AtomicRule::CompareAndSwap if old == b & mask(size as u32 * 8) => c,
            AtomicRule::CompareAndSwap => old,
        };
        self.store(access, address, &new.to_le_bytes()[..size], by)?;
        Ok(old)
    }
}
