//! A right policy, for those that do something wrong or note what they are told.

use kv_pool::Priority;
use kv_pool::policy::{BlockFacts, EvictionPolicy, PolicyTime, RecordId};

/// The order of a pool without a policy: the lowest priority first, in it what was let go of first, and nothing before
/// what follows it. As slowly and plainly as possible.
#[derive(Debug, Default)]
pub struct Order {
    evictable: Vec<Evictable>,
}

#[derive(Debug)]
struct Evictable {
    block: RecordId,
    priority: Priority,
    has_children: bool,
    /// It came up while others followed it, and goes before the others of its priority when they are gone.
    aside: bool,
}

impl EvictionPolicy for Order {
    fn name(&self) -> &'static str {
        "order"
    }

    fn evictable(&mut self, block: RecordId, facts: &BlockFacts) {
        self.held(block);
        let BlockFacts { priority, has_children, .. } = *facts;
        self.evictable.push(Evictable { block, priority, has_children, aside: false });
    }

    fn children(&mut self, block: RecordId, has_children: bool) {
        let Some(at) = self.evictable.iter().position(|of| of.block == block) else { return };
        self.evictable[at].has_children = has_children;
        if self.evictable[at].aside && !has_children {
            let next = Evictable { aside: false, ..self.evictable.remove(at) };
            self.evictable.insert(0, next);
        }
    }

    fn held(&mut self, block: RecordId) {
        self.evictable.retain(|of| of.block != block);
    }

    fn removed(&mut self, block: RecordId) {
        self.held(block);
    }

    fn victim(&mut self, _: PolicyTime) -> Option<RecordId> {
        let leaves = self.evictable.iter().filter(|of| !of.has_children);
        let lowest = leaves.map(|of| of.priority).min()?;
        let next = |of: &Evictable| of.priority == lowest && !of.has_children;
        let at = self.evictable.iter().position(next)?;
        for (before, of) in self.evictable.iter_mut().enumerate() {
            let came_up = of.priority < lowest || of.priority == lowest && before < at;
            of.aside |= of.has_children && came_up;
        }
        Some(self.evictable.remove(at).block)
    }

    fn len(&self) -> usize {
        self.evictable.len()
    }
}

/// Hands what it does not do itself to a policy that is right, which is its field of this name.
#[macro_export]
macro_rules! as_ordered {
    ($order:ident) => {
        fn children(&mut self, block: RecordId, has_children: bool) {
            self.$order.children(block, has_children);
        }

        fn held(&mut self, block: RecordId) {
            self.$order.held(block);
        }

        fn removed(&mut self, block: RecordId) {
            self.$order.removed(block);
        }

        fn len(&self) -> usize {
            self.$order.len()
        }
    };
}
