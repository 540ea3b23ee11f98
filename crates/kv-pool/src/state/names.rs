//! Names: who bears one, who follows whom, and how a name is lost.

use crate::blocks::{BlockPhase, Flag};
use crate::guard;
use crate::hold::BlockAt;
use crate::index::TOGETHER;
use crate::naming::Naming;
use crate::state::PoolState;
use crate::{BlockHash, BlockPool, RecordId};

/// How many names of a prefix are looked up before the next one is guessed from their blocks.
const TOGETHER_AT_FIRST: usize = 4;

/// What became of a name that was to be given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Named {
    /// This block bears it, at the block id of the one that was to be named, and is mostly that one.
    New(RecordId),
    /// This block has borne it before, elsewhere.
    Duplicate(RecordId),
}

impl BlockPool {
    /// Takes content out of the index, so that no lookup finds it. Those who have it pinned keep
    /// it. Content that is being offloaded is given up, too: it does not come back when its
    /// [`Offload`](crate::moves::Offload) ends. Whether there was any.
    ///
    /// Content that follows it stays, and is found by prefix again once this content is.
    pub fn remove(&self, hash: BlockHash) -> bool {
        let mut state = self.shared.state.lock();
        let bearer = state.bearer(hash);
        if let Some(id) = bearer {
            state.forget(id);
        }
        bearer.is_some()
    }

    /// Takes content and all that follows it out of the index, wherever it is, also on its way between
    /// tiers; how many blocks lost their names.
    ///
    /// Content follows what it was named after as long as that has kept its name, and again once a
    /// lookup has found the one after the other, or it was named after the other once more. What is not
    /// known to follow stays: content whose predecessor was evicted or removed before.
    ///
    /// For maintenance: holds the lock for a time in proportion to the blocks.
    pub fn remove_with_successors(&self, hash: BlockHash) -> usize {
        let mut state = self.shared.state.lock();
        let first =
            guard!("pool.removal-reaches-what-moves", state.bearer(hash), else state.find(hash));
        let Some(first) = first else { return 0 };
        let mut following = state.following(first);
        // Those that follow come after what they follow as often as not, so all links are found first.
        following.retain(|&id| state.blocks.bears_a_name(id));
        following.iter().for_each(|&id| state.forget(id));
        following.len()
    }
}

impl PoolState {
    /// The block that bears a name, also if its content is on its way: at most one does.
    #[inline]
    pub(crate) fn bearer(&self, hash: BlockHash) -> Option<RecordId> {
        self.index.get(&self.blocks, hash)
    }

    /// The block that lookups of this name find.
    #[inline]
    pub(crate) fn find(&self, hash: BlockHash) -> Option<RecordId> {
        let named = |&id: &RecordId| self.blocks.is(id, Flag::NAMED);
        guard!(
            "pool.moving-content-is-not-found",
            self.bearer(hash).filter(named),
            else self.bearer(hash)
        )
    }

    /// The bearer of the name of what comes before content that is about to be named.
    #[inline]
    pub(crate) fn find_parent(&self, hash: BlockHash) -> Option<RecordId> {
        let last = self.last_named;
        if self.blocks.bears(last, hash) {
            return Some(last);
        }
        guard!("pool.moving-content-has-children", self.bearer(hash), else self.find(hash))
    }

    /// Makes `before` the parent of a block that was named as a successor and has none.
    #[inline]
    fn adopt(&mut self, id: RecordId, before: Option<RecordId>) {
        if let Some(before) = before
            && self.blocks.is(id, Flag::CHAINED)
            && !self.blocks.has_parent(id)
        {
            self.link(id, before);
        }
    }

    /// Finds the longest cached prefix, then pins it. Two passes, for the reads of the first overlap.
    pub(crate) fn pin_prefix(&mut self, hashes: &[BlockHash], pins: &mut Vec<BlockAt>) {
        let alone = self.find_prefix(hashes, pins);
        guard!("pool.lookup-ends-at-quota", pins.truncate(self.usable(pins)));
        if let Some(&missing) = hashes.get(pins.len()) {
            self.note_miss(missing);
        }
        self.note_found(pins);
        self.pin_all(pins);
        if alone {
            self.adopt_all(pins);
        }
    }

    /// Makes each block of a prefix that has lost its parent follow the one before it again.
    pub(crate) fn adopt_all(&mut self, prefix: &[BlockAt]) {
        let mut before = None;
        for at in prefix {
            self.adopt(at.block(), before);
            before = Some(at.block());
        }
    }

    /// Finds the longest cached prefix; whether one of its blocks may lack a parent.
    ///
    /// The blocks of a prefix were mostly claimed together, and then each is as far from the last as
    /// that from the one before: where it is so, its record tells that it bears the name, and the
    /// index is not asked.
    pub(crate) fn find_prefix(&self, hashes: &[BlockHash], found: &mut Vec<BlockAt>) -> bool {
        let mut alone = false;
        let (mut last, mut step) = (RecordId(u32::MAX), 1);
        let (mut rest, mut together) = (hashes, TOGETHER_AT_FIRST);
        loop {
            let mut guessed = 0;
            for &hash in rest {
                let block = RecordId(last.0.wrapping_add(step));
                let Some((at, lacks)) = self.blocks.bearing(block, hash) else { break };
                found.push(at);
                (last, alone, guessed) = (block, alone | lacks, guessed + 1);
            }
            rest = &rest[guessed..];
            if rest.is_empty() {
                break;
            }
            let mut ids = [RecordId(0); TOGETHER];
            let names = &rest[..rest.len().min(together)];
            let count = self.index.get_many(&self.blocks, names, &mut ids);
            for &block in &ids[..count] {
                let Some((at, lacks)) = self.blocks.found(block) else {
                    // Its content is on its way.
                    return alone || self.blocks.orphans() > 0;
                };
                found.push(at);
                alone |= lacks;
            }
            if count < names.len() {
                break;
            }
            if let [.., before, end] = ids[..count] {
                (last, step) = (end, end.0.wrapping_sub(before.0));
            }
            (rest, together) = (&rest[count..], TOGETHER);
        }
        alone || self.blocks.orphans() > 0
    }

    /// Reads the places of names that are about to be given.
    pub(crate) fn warm(&self, hashes: &[BlockHash]) {
        let seen = hashes.iter().fold(0, |seen, &hash| seen ^ self.index.warm(hash));
        std::hint::black_box(seen);
    }

    /// Names a held block's content, or pins the block that holds the same content already. The pin
    /// that this returns is counted.
    #[inline]
    pub(crate) fn register(
        &mut self,
        own: RecordId,
        hash: BlockHash,
        parent: Option<RecordId>,
        naming: &Naming,
    ) -> Named {
        let bearer = self.index.get_or_mixed(&self.blocks, hash);
        let id = match bearer {
            Err(mixed) if self.name_plainly(own, (hash, mixed), parent, naming) => {
                self.last_named = own;
                return Named::New(own);
            }
            Ok(known) => {
                let as_near = self.blocks.tier(known) <= self.blocks.tier(own);
                let found = as_near
                    && guard!(
                        "pool.moving-content-is-no-duplicate",
                        self.blocks.is(known, Flag::NAMED),
                        else true
                    );
                let found = found || self.blocks.place(known) == BlockPhase::Pinned;
                if found && guard!("pool.duplicate-within-quota", self.may_use(known), else true) {
                    self.counters.duplicates += 1;
                    self.pin(known);
                    self.adopt(known, parent);
                    return Named::Duplicate(known);
                }
                // An unused copy that is farther, or on its way, gives way, and one that its owner may not
                // hold to the one that is held.
                self.come_near(known, own);
                known
            }
            Err(mixed) => {
                #[cfg(all(feature = "sabotage", debug_assertions))]
                self.part_from_other_owner(own);
                self.blocks.set_hash(own, hash);
                self.blocks.set(own, Flag::NAMED);
                self.blocks.set_origin(own, self.blocks.tenant(own), 0);
                self.index.insert_new(mixed, own);
                own
            }
        };
        self.blocks.set_priority(id, naming.retention.priority);
        if naming.retention.duration.is_some() {
            self.set_retention(id, naming.retention);
        }
        self.note_new(id);
        if naming.parent.is_some() || parent.is_some() {
            self.blocks.set(id, Flag::CHAINED);
        }
        if let Some(parent) = parent {
            self.link(id, parent);
        }
        let references = match self.blocks.place(id) {
            BlockPhase::Pinned => self.blocks.references(id).saturating_add(1),
            _ => 1,
        };
        self.blocks.set_references(id, references);
        self.put(id, BlockPhase::Pinned);
        self.note_stored(id);
        self.counters.registered += 1;
        self.last_named = id;
        self.emit_stored(id, naming.parent.unwrap_or(BlockHash::ROOT));
        Named::New(id)
    }

    /// Gives content that is far and unused, or on its way, the block id of the claimed block `own`, where it
    /// has been computed again. It keeps its name and those that follow it, and nothing else.
    #[cold]
    fn come_near(&mut self, id: RecordId, own: RecordId) {
        guard!("pool.removed-before-stored-again", self.emit_removed(id));
        self.counters.dropped += 1;
        self.unlink(id);
        self.blocks.clear(id, Flag::CHAINED);
        #[cfg(all(feature = "sabotage", debug_assertions))]
        self.part_from_other_owner(own);
        self.take_out(id);
        self.note_left(id, self.blocks.tier(id));
        self.blocks.clear(id, Flag::NAMED);
        self.blocks.clear(id, Flag::EXPECTED);
        self.untime(id);
        let before = self.blocks.place(id);
        if before == BlockPhase::Moving {
            self.stand_in(id, own);
        } else {
            self.swap_locations(id, own);
        }
        self.uncount(id);
        self.blocks.set_origin(id, self.blocks.tenant(own), 0);
        self.put(id, BlockPhase::Claimed);
        self.blocks.set(id, Flag::NAMED);
        match before {
            BlockPhase::Moving => {}
            BlockPhase::Queued | BlockPhase::Shadowed => self.enqueue(own),
            // Its block id may be in use still.
            _ => guard!("pool.far-id-waits-for-its-reader", self.rest(own), else self.enqueue(own)),
        }
    }

    /// Pins a claimed block without giving it a name.
    #[inline]
    pub(crate) fn take_unnamed(&mut self, id: RecordId) {
        self.blocks.set_references(id, 1);
        self.put(id, BlockPhase::Pinned);
    }

    /// Makes `parent` the block that `id` follows.
    #[inline]
    fn link(&mut self, id: RecordId, parent: RecordId) {
        if parent == id || !self.blocks.may_have_children(parent) {
            return;
        }
        self.blocks.set_parent(id, Some(parent));
        let children = self.blocks.children(parent) + 1;
        self.blocks.set_children(parent, children);
        self.note_child(parent, self.blocks.tier(id), true);
        let depth = self.blocks.depth(parent).saturating_add(1);
        let tenant = self.blocks.tenant(id);
        self.blocks.set_origin(id, tenant, depth);
    }

    #[inline]
    fn unlink(&mut self, id: RecordId) {
        let parent = self.blocks.parent(id);
        self.blocks.set_parent(id, None);
        let Some(parent) = parent else { return };
        let children = self.blocks.children(parent) - 1;
        self.blocks.set_children(parent, children);
        self.note_child(parent, self.blocks.tier(id), false);
        if children == 0 {
            self.follow_no_more(parent);
            if self.blocks.place(parent) == BlockPhase::Shadowed {
                self.unshadow(parent);
            }
        }
    }

    /// Takes a block out of its chain, on both sides.
    #[inline]
    pub(crate) fn cut(&mut self, id: RecordId) {
        self.unlink(id);
        self.blocks.clear(id, Flag::CHAINED);
        self.note_removed(id);
        if self.blocks.children(id) > 0 {
            self.blocks.disown(id);
        }
    }

    /// The block, and all that follow it.
    fn following(&self, first: RecordId) -> Vec<RecordId> {
        let blocks = &self.blocks;
        // Whether a block follows the first one, as far as that is known.
        let mut known: Vec<Option<bool>> = vec![None; blocks.len()];
        known[first.index()] = Some(true);
        let mut path = Vec::new();
        for id in blocks.ids() {
            let mut at = id;
            let follows = loop {
                if let Some(follows) = known[at.index()] {
                    break follows;
                }
                // Known from here on, so that a walk ends even in a ring.
                known[at.index()] = Some(false);
                path.push(at);
                match blocks.parent(at) {
                    Some(parent) => at = parent,
                    None => break false,
                }
            };
            for at in path.drain(..) {
                known[at.index()] = Some(follows);
            }
        }
        blocks.ids().filter(|id| known[id.index()] == Some(true)).collect()
    }

    /// Takes the name from a block's content, also on its way: no lookup finds it any more.
    #[inline]
    pub(crate) fn forget(&mut self, id: RecordId) {
        let queued = matches!(self.blocks.place(id), BlockPhase::Queued | BlockPhase::Shadowed);
        if queued {
            // The queue that it is in is named by the name.
            self.take_out(id);
        }
        self.unname(id);
        self.counters.dropped += 1;
        if queued {
            self.enqueue(id);
        }
    }

    /// Makes a block that one owner has pinned that owner's claim, without its name. Whether it was.
    pub(crate) fn unname_pinned(&mut self, id: RecordId) -> bool {
        let sole = self.blocks.place(id) == BlockPhase::Pinned && self.blocks.references(id) == 1;
        if !sole || self.blocks.is(id, Flag::COPYING) {
            return false;
        }
        if self.blocks.bears_a_name(id) {
            self.forget(id);
        }
        self.blocks.set_references(id, 0);
        self.put(id, BlockPhase::Claimed);
        true
    }

    /// Takes a name from a block that is in no queue.
    #[inline]
    pub(crate) fn unname(&mut self, id: RecordId) {
        self.emit_removed(id);
        self.index.remove(&self.blocks, id);
        self.blocks.clear(id, Flag::NAMED);
        self.blocks.clear(id, Flag::EXPECTED);
        self.untime(id);
        self.cut(id);
        self.account(id);
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
impl PoolState {
    /// Keeps the lists whole when a block with two owners is named by the second: its bytes are what
    /// a test wants to see damaged.
    #[inline]
    fn part_from_other_owner(&mut self, id: RecordId) {
        self.take_out(id);
        if self.blocks.is(id, Flag::NAMED) {
            self.unname(id);
        }
    }
}
