//! What only some pools have: a clock and expiries, a log of events, tenants, policies of their own.
//!
//! A pool without them pays one predictable branch for each.

use std::collections::{BTreeSet, HashMap, TryReserveError};
use std::time::Duration;

use crate::blocks::{BlockPhase, Flag};
use crate::clock::{Clock, nanos};
use crate::events::EventLog;
use crate::guard;
use crate::hold::BlockAt;
use crate::policy::{BlockFacts, EvictionPolicy, PolicyTime, ReuseHint};
use crate::state::PoolState;
use crate::state::caught::{Guarded, caught};
use crate::state::tenancy::Tenancy;
use crate::store::{Candidate, StorePolicy};
use crate::{BlockHash, Location, PoolEvent, Priority, RecordId, Retention, Tier};

/// What a policy wants to know of a block and the record has no room for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Note {
    found: u32,
    used: PolicyTime,
    /// Blocks that follow it, by the tier that they lie in.
    children: [u32; Tier::COUNT],
}

#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) clock: Box<dyn Clock>,
    /// Of blocks that are `TIMED`, how long they keep their priority after their release, and until when, if that has
    /// begun.
    durations: HashMap<RecordId, (Duration, Option<Duration>)>,
    /// The latter, by time. Of equal times the lower block comes first, so that the order of eviction is the same in
    /// every run.
    expiries: BTreeSet<(Duration, RecordId)>,
    pub(crate) events: Option<EventLog>,
    pub(crate) tenancy: Option<Tenancy>,
    pub(crate) policies: [Option<Guarded<dyn EvictionPolicy>>; Tier::COUNT],
    /// Decides what is stored in the secondary tier.
    store: Option<Guarded<dyn StorePolicy>>,
    /// Empty without a policy.
    notes: Vec<Note>,
    /// The latest of the clock's answers.
    now: Duration,
    /// The same in milliseconds.
    now_ms: u64,
}

impl Watch {
    pub(crate) fn new(
        clock: Box<dyn Clock>,
        events: Option<usize>,
        policies: [Option<Box<dyn EvictionPolicy>>; Tier::COUNT],
        store: Option<Box<dyn StorePolicy>>,
        blocks: usize,
    ) -> Result<Self, TryReserveError> {
        let mut notes = Vec::new();
        if store.is_some() || policies.iter().any(Option::is_some) {
            notes.try_reserve_exact(blocks)?;
            notes.resize(blocks, Note::default());
        }
        Ok(Self {
            clock,
            durations: HashMap::new(),
            expiries: BTreeSet::new(),
            events: events.map(EventLog::new).transpose()?,
            tenancy: None,
            policies: policies.map(|policy| policy.map(Guarded::new)),
            store: store.map(Guarded::new),
            notes,
            now: Duration::ZERO,
            now_ms: 0,
        })
    }

    /// The time, which is remembered for what need not be exact. It stands still where the caller's
    /// clock goes back, and ends after 584 years. To be read before anything has changed: the clock may
    /// panic.
    pub(crate) fn now(&mut self) -> Duration {
        let now = Duration::from_nanos(nanos(self.clock.now()));
        self.now = guard!("pool.time-stands-still", self.now.max(now), else now);
        self.now_ms = self.now.as_millis() as u64;
        self.now
    }

    /// The same while an operation is half done: the time stands still also where the clock panics.
    fn now_at_any_cost(&mut self) -> Duration {
        guard!(
            "pool.clock-panics-end-in-the-pool",
            caught(|| self.now()).unwrap_or(self.now),
            else self.now()
        )
    }

    /// The same, for those who go by the time that is remembered.
    fn note_time(&mut self) {
        self.now_at_any_cost();
    }

    /// Whether there is no policy.
    pub(crate) fn is_plain(&self) -> bool {
        self.notes.is_empty()
    }

    /// How long a block keeps its priority after its release, if not for as long as it is cached.
    pub(crate) fn duration(&self, id: RecordId) -> Option<Duration> {
        self.durations.get(&id).map(|(duration, _)| *duration)
    }

    /// When the duration of a block is over, if it has begun.
    pub(crate) fn expiry(&self, id: RecordId) -> Option<Duration> {
        self.durations.get(&id)?.1
    }

    /// Whether the durations that have begun are those that are to end.
    pub(crate) fn expiries_are_consistent(&self) -> bool {
        let begun = self.durations.iter().filter_map(|(&id, (_, expiry))| Some(((*expiry)?, id)));
        let all: BTreeSet<_> = begun.collect();
        all == self.expiries
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Tells the policy of a tier something, if it has one.
    #[inline]
    pub(super) fn tell(
        &mut self,
        tier: Tier,
        call: impl FnOnce(&mut (dyn EvictionPolicy + 'static)),
    ) {
        if let Some(policy) = &mut self.policies[tier.index()] {
            policy.tell(call);
        }
    }

    #[inline]
    pub(crate) fn emit(&mut self, event: impl FnOnce() -> PoolEvent) {
        if let Some(events) = &mut self.events {
            events.push(event());
        }
    }
}

impl PoolState {
    /// Says that content got its name, and was named after `parent`.
    #[inline]
    pub(crate) fn emit_stored(&mut self, id: RecordId, parent: BlockHash) {
        let blocks = &self.blocks;
        self.watch.emit(|| PoolEvent::Stored {
            block: id,
            hash: blocks.hash(id),
            parent,
            location: blocks.location(id),
            priority: blocks.priority(id),
        });
    }

    /// Says that content loses its name, which it has still.
    #[inline]
    pub(crate) fn emit_removed(&mut self, id: RecordId) {
        let hash = self.blocks.hash(id);
        // Of content on its way, readers know where it came from.
        let expected = self.blocks.is(id, Flag::EXPECTED);
        let known = if expected { self.blocks.partner(id) } else { id };
        let location = self.blocks.location(known);
        self.watch.emit(|| PoolEvent::Removed { block: id, hash, location });
    }

    pub(crate) fn emit_moved(&mut self, id: RecordId, from: Location) {
        let (hash, to) = (self.blocks.hash(id), self.blocks.location(id));
        if self.blocks.is(id, Flag::NAMED) {
            self.watch.emit(|| PoolEvent::Moved { block: id, hash, from, to });
        }
    }

    /// Says what a held block is worth from its release on.
    pub(crate) fn set_retention(&mut self, id: RecordId, retention: Retention) {
        let Retention { priority, duration } = retention;
        self.blocks.clear(id, Flag::OVER);
        self.set_priority(id, priority);
        match duration {
            Some(duration) => {
                self.blocks.set(id, Flag::TIMED);
                self.watch.durations.entry(id).or_default().0 = duration;
            }
            None => self.untime(id),
        }
    }

    /// Changes the priority of a block that is in no queue.
    fn set_priority(&mut self, id: RecordId, to: Priority) {
        let from = self.blocks.priority(id);
        self.blocks.set_priority(id, to);
        if from != to && self.blocks.bears_a_name(id) {
            let hash = self.blocks.hash(id);
            self.watch.emit(|| PoolEvent::PriorityChanged { block: id, hash, from, to });
        }
    }

    /// Forgets the duration of a block, and that it is over: it is used again, or has lost its content.
    #[inline]
    pub(crate) fn untime(&mut self, id: RecordId) {
        if self.blocks.is(id, Flag::TIMED) {
            self.untime_timed(id);
        }
    }

    fn untime_timed(&mut self, id: RecordId) {
        self.blocks.clear(id, Flag::TIMED);
        if let Some((_, Some(expiry))) = self.watch.durations.remove(&id) {
            self.watch.expiries.remove(&(expiry, id));
        }
        if self.blocks.is(id, Flag::OVER) {
            self.blocks.clear(id, Flag::OVER);
            self.set_priority(id, Priority::DEFAULT);
        }
    }

    /// Takes a hint about blocks that their holder is about to release, from last to first, and whether nobody
    /// shares its reference to each; of how many.
    pub(crate) fn hint(
        &mut self,
        held: impl Iterator<Item = (RecordId, bool)>,
        hint: ReuseHint,
    ) -> usize {
        if hint == ReuseHint::Over {
            return self.end(held);
        }
        let (now, mut taken) = (self.policy_time(), 0);
        for (id, _) in held {
            let tier = self.blocks.tier(id).index();
            let named = self.blocks.is(id, Flag::NAMED);
            if let Some(policy) = self.watch.policies[tier].as_mut().filter(|_| named) {
                policy.tell(|policy| policy.hinted(id, hint, now));
                taken += 1;
            }
        }
        taken
    }

    /// Gives blocks the lowest priority up to the first that more than one block follows, or another than the
    /// one before: other sessions begin with it.
    fn end(&mut self, held: impl Iterator<Item = (RecordId, bool)>) -> usize {
        let (mut after, mut ended) = (None, 0);
        for (id, sole) in held {
            let follows = after.is_some_and(|after| self.blocks.parent(after) == Some(id));
            if guard!(
                "pool.hint-ends-before-a-shared-head",
                self.blocks.children(id) > u32::from(follows),
                else false
            ) {
                break;
            }
            after = Some(id);
            let default = self.blocks.priority(id) == Priority::DEFAULT;
            let alone = sole
                && guard!(
                    "pool.what-others-hold-is-not-over",
                    self.blocks.references(id) == 1,
                    else true
                );
            if default && alone && self.blocks.is(id, Flag::NAMED) {
                self.untime(id);
                self.set_priority(id, Priority::MIN);
                self.blocks.set(id, Flag::OVER);
                self.blocks.set(id, Flag::TIMED);
                ended += 1;
            }
        }
        ended
    }

    /// Lets the duration of a block begin, which nobody holds any more.
    #[inline]
    pub(crate) fn arm(&mut self, id: RecordId) {
        if self.blocks.is(id, Flag::TIMED) {
            self.arm_timed(id);
        }
    }

    fn arm_timed(&mut self, id: RecordId) {
        let Some(&(duration, running)) = self.watch.durations.get(&id) else { return };
        if self.blocks.priority(id) == Priority::DEFAULT || !self.blocks.is(id, Flag::NAMED) {
            return;
        }
        // It goes on while the content moves, or a copy reads the block id: neither is a use.
        if running.is_some() {
            return;
        }
        // In whole nanoseconds, up to 584 years.
        let expiry = nanos(self.watch.now_at_any_cost().saturating_add(duration));
        let expiry = Duration::from_nanos(expiry);
        self.watch.durations.insert(id, (duration, Some(expiry)));
        self.watch.expiries.insert((expiry, id));
    }

    /// Gives blocks whose duration is over the default priority. Reads the clock once for each block
    /// that it looks at.
    pub(crate) fn refresh(&mut self) -> usize {
        let mut expired = 0;
        while let Some(&(expiry, id)) = self.watch.expiries.first() {
            if expiry > self.watch.now() {
                break;
            }
            let queued = self.is_unused(id);
            if queued {
                self.take_out(id);
            }
            self.untime(id);
            self.set_priority(id, Priority::DEFAULT);
            if queued {
                self.enqueue(id);
            }
            expired += 1;
        }
        expired
    }

    /// The time as policies count it.
    pub(crate) fn policy_time(&self) -> PolicyTime {
        PolicyTime { lookups: self.counters.lookups, ms: self.watch.now_ms() }
    }

    /// Notes that a block's content is new.
    #[inline]
    pub(crate) fn note_new(&mut self, id: RecordId) {
        if self.watch.notes.is_empty() {
            return;
        }
        let used = self.policy_time();
        let note = &mut self.watch.notes[id.index()];
        (note.used, note.found) = (used, 0);
        self.tell_used([id].into_iter());
    }

    /// Notes that one lookup found these blocks. To be called before they are pinned, so that their policies hear of the
    /// find first.
    #[inline]
    pub(crate) fn note_found(&mut self, found: &[BlockAt]) {
        if self.watch.notes.is_empty() {
            return;
        }
        let used = self.policy_time();
        for at in found {
            let note = &mut self.watch.notes[at.block().index()];
            (note.used, note.found) = (used, note.found.saturating_add(1));
        }
        // A policy is called once for all of its tier that lie together.
        for together in found.chunk_by(|one, other| one.location().tier == other.location().tier) {
            self.tell_found(together, used);
        }
        self.tell_used(found.iter().map(|at| at.block()));
    }

    /// Tells the store policy that the content of blocks is used.
    fn tell_used(&mut self, used: impl Iterator<Item = RecordId>) {
        let Some(store) = &mut self.watch.store else { return };
        let (blocks, mut regretted) = (&self.blocks, 0);
        store.tell(|store| {
            used.for_each(|id| regretted += u64::from(store.used(blocks.hash(id))));
        });
        self.counters.regretted += regretted;
    }

    /// Whether evicted content is worth a block of the secondary tier.
    pub(super) fn is_worth_storing(&mut self, id: RecordId) -> bool {
        if self.watch.store.is_none() {
            return true;
        }
        // What may be stored in a time goes by it.
        guard!("pool.store-policy-knows-the-time", self.watch.note_time());
        let content = self.candidate(id);
        let Some(store) = &mut self.watch.store else { return true };
        let Some(stores) = store.ask(|store| store.stores(Tier::Secondary, &content)) else {
            self.counters.policy_faults += 1;
            store.end();
            self.watch.store = None;
            return true;
        };
        stores
    }

    /// What a store policy is told of content.
    pub(crate) fn candidate(&self, id: RecordId) -> Candidate {
        let note = |id: RecordId| self.watch.notes.get(id.index()).map_or(0, |note| note.found);
        Candidate {
            name: self.blocks.hash(id),
            depth: self.blocks.depth(id).into(),
            found: note(id),
            parent_found: self.blocks.parent(id).map_or(0, note),
            followed: self.blocks.children(id) > 0,
            priority: self.blocks.priority(id),
            now_ms: self.watch.now_ms(),
        }
    }

    /// Tells the policy of a tier that blocks were found there, and those of nearer tiers that they were not found there.
    fn tell_found(&mut self, found: &[BlockAt], now: PolicyTime) {
        let Some(tier) = found.first().map(|at| at.location().tier) else { return };
        let blocks = &self.blocks;
        for policy in self.watch.policies[..tier.index()].iter_mut().flatten() {
            let hashes = found.iter().map(|at| blocks.hash(at.block()));
            policy.tell(|policy| hashes.for_each(|hash| policy.missed(hash, now)));
        }
        self.watch.tell(tier, |policy| {
            found.iter().for_each(|at| policy.found(at.block(), now));
        });
    }

    /// Tells the policy of the block's tier that content was named there, or has come there.
    #[inline]
    pub(crate) fn note_stored(&mut self, id: RecordId) {
        if self.watch.notes.is_empty() {
            return;
        }
        let facts = self.facts(id);
        self.watch.tell(self.blocks.tier(id), |policy| policy.stored(id, &facts));
    }

    /// Tells the policy of a tier that content has left it for another.
    #[inline]
    pub(crate) fn note_left(&mut self, id: RecordId, tier: Tier) {
        self.watch.tell(tier, |policy| policy.removed(id));
    }

    /// Whether a policy wants to know of uses.
    #[inline]
    pub(crate) fn has_notes(&self) -> bool {
        !self.watch.is_plain()
    }

    /// Tells the policies that a lookup asked for what is not cached.
    #[inline]
    pub(crate) fn note_miss(&mut self, hash: BlockHash) {
        if !self.watch.notes.is_empty() {
            self.tell_missed(hash);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_missed(&mut self, hash: BlockHash) {
        let now = self.policy_time();
        for policy in self.watch.policies.iter_mut().flatten() {
            policy.tell(|policy| policy.missed(hash, now));
        }
    }

    /// Counts a successor of `parent` that lies in `tier`, or one less.
    #[inline]
    pub(crate) fn note_child(&mut self, parent: RecordId, tier: Tier, one_more: bool) {
        if self.watch.notes.is_empty() {
            return;
        }
        let count = &mut self.watch.notes[parent.index()].children[tier.index()];
        *count = if one_more { *count + 1 } else { count.saturating_sub(1) };
        let changed = *count == u32::from(one_more);
        let has_children = one_more;
        if changed
            && self.blocks.tier(parent) == tier
            && self.blocks.place(parent) == BlockPhase::Queued
            && let Some(policy) = &mut self.watch.policies[tier.index()]
        {
            policy.tell(|policy| policy.children(parent, has_children));
            if has_children {
                self.hold_back(parent, tier);
            } else {
                self.hold_back_no_more(parent);
            }
        }
    }

    /// Cuts off the counts of a block that has lost its name.
    #[inline]
    pub(crate) fn note_removed(&mut self, id: RecordId) {
        if self.watch.notes.is_empty() {
            return;
        }
        self.watch.notes[id.index()].children = [0; Tier::COUNT];
        self.watch.tell(self.blocks.tier(id), |policy| policy.removed(id));
    }

    pub(crate) fn facts(&self, id: RecordId) -> BlockFacts {
        let (blocks, note) = (&self.blocks, self.watch.notes[id.index()]);
        let tier = blocks.tier(id);
        BlockFacts {
            parent: blocks.parent(id).filter(|&parent| blocks.tier(parent) == tier),
            depth: blocks.depth(id).into(),
            found: note.found,
            has_children: note.children[tier.index()] > 0,
            priority: blocks.priority(id),
            tenant: blocks.tenant(id).into(),
            used: note.used,
            ..BlockFacts::new(blocks.hash(id))
        }
    }
}
