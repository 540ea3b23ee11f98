//! What a reader of the events knows of the cached content, by name, and nothing else of the pool.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::HashMap;

use kv_pool::{
    BlockHash, BlockPool, Location, Priority,
    events::{EventReader, PoolEvent, Reading},
    policy::RecordId,
};

/// Each name at most once, with the block that bears it.
pub struct Mirror {
    reader: EventReader,
    pub names: HashMap<BlockHash, (RecordId, Location, Priority)>,
}

impl Mirror {
    pub fn new(reader: EventReader) -> Self {
        Self { reader, names: HashMap::new() }
    }

    /// Of a pool without content.
    pub fn of(pool: &BlockPool) -> Self {
        Self::new(pool.events().unwrap())
    }

    /// Begins at a snapshot.
    pub fn from_now(pool: &BlockPool) -> Self {
        let mut mirror = Self::of(pool);
        for view in pool.snapshot().blocks {
            let there = view.hash.map(|name| (name, view.location));
            if let Some((name, at)) = view.expected.or(there) {
                mirror.names.insert(name, (view.block, at, view.priority));
            }
        }
        mirror
    }

    /// Reads on; whether the mirror has the name, and as what.
    #[track_caller]
    pub fn get(&mut self, name: BlockHash) -> Option<(Location, Priority)> {
        self.follow();
        self.names.get(&name).map(|&(_, at, priority)| (at, priority))
    }

    /// Reads on. Every event must follow from those before it.
    pub fn follow(&mut self) {
        let mut readings = Vec::new();
        self.reader.read(usize::MAX, &mut readings);
        for reading in readings {
            let Reading::Event { event, .. } = reading else { panic!("{reading:?}") };
            let before = self.names.len();
            assert!(self.takes(event), "{event:?} does not follow, with {before} names known");
        }
    }

    fn takes(&mut self, event: PoolEvent) -> bool {
        match event {
            PoolEvent::Stored { block, hash, location, priority, .. } => {
                self.names.insert(hash, (block, location, priority)).is_none()
            }
            PoolEvent::Removed { block, hash, location } => {
                let known = self.names.remove(&hash);
                known.is_some_and(|(id, at, _)| (id, at) == (block, location))
            }
            PoolEvent::Moved { block, hash, from, to } => {
                let Some((id, at, _)) = self.names.get_mut(&hash) else { return false };
                (*id, std::mem::replace(at, to)) == (block, from)
            }
            PoolEvent::PriorityChanged { block, hash, from, to } => {
                let Some((id, _, priority)) = self.names.get_mut(&hash) else { return false };
                (*id, std::mem::replace(priority, to)) == (block, from)
            }
            other => panic!("{other:?} is not known here"),
        }
    }
}
