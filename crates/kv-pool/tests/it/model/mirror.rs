//! What a reader of the events knows of the cached content, by name, and nothing else of the pool.

use std::collections::HashMap;

use kv_pool::{
    BlockHash, Location, Priority,
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
