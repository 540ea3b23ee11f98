//! A node: memory in slots, which records lie there, and who may read them until when.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kv_pool::clock::Clock;
use kv_pool::{BlockHash, BlockPool, Claimed, Loan, PoolConfig, Priority, Tier, guard};
use kv_tier::{HostChange, HostLoan, HostShare, RecordKey};
use parking_lot::Mutex;

use crate::auth::random;
use crate::channel::NAME_MAX;
use crate::entry::{ENTRY_BYTES, Entry};
use crate::host_tier::{HostTier, host_tier_address};
use crate::leases::{Lease, LeaseCounts, Leases, Left, Lent, PeerHost, ReaderId};
use crate::log::Log;
use crate::memory::Memory;
use crate::message::{Block, Changes, Cursor, Found, LIST_MAX, LeaseId, Located, Span};
use crate::{NodeError, Refusal};

/// Bytes of the longest frame.
pub(crate) const FRAME_MAX: u64 = 64 << 20;

/// Slots begin at multiples of it.
const ALIGN: u64 = 64;

/// How a node is made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeOptions {
    /// Its name among the members, 1 to 64 bytes.
    pub name: String,
    /// Bytes of the longest record.
    pub record_bytes: u64,
    /// Bytes of the host tier that the node will [share](Node::share); 0 for none.
    pub host_bytes: u64,
    /// Bytes of the host tier that all leases together pin, at most; a quarter of it without a number. What is beyond is not found.
    /// The connections of one host together have half of that.
    pub host_lent_max: Option<u64>,
    /// How long a lease may be. A longer one is cut.
    pub lease_max: Duration,
    /// Leases that are open at most, beside those of [offers](crate::handover::Offer). The connections of one host together have half of
    /// them. They leave an eighth of the slots unpinned: what is beyond is not found.
    pub leases_max: usize,
}

impl NodeOptions {
    /// A node for records of at most so many bytes, with leases of up to 10 s, of which 1,024 are open at most.
    #[must_use]
    pub fn new(name: &str, record_bytes: u64) -> Self {
        let lease_max = Duration::from_secs(10);
        Self {
            name: name.to_owned(),
            record_bytes,
            host_bytes: 0,
            host_lent_max: None,
            lease_max,
            leases_max: 1024,
        }
    }
}

/// Counts of a node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct NodeStats {
    /// Slots of its memory.
    pub slots: u64,
    /// Slots with a record that is found, or that a lease keeps.
    pub used_slots: u64,
    /// Records that were stored.
    pub stored: u64,
    /// Records that made room for others.
    pub evicted: u64,
    /// Records that were asked for and found.
    pub found: u64,
    /// Those of them that lay in the host tier.
    pub hosted: u64,
    /// Records that were asked for, first or behind others that were found, and not found.
    pub absent: u64,
    /// Bytes that the node has copied for readers.
    pub read_bytes: u64,
    /// Its leases.
    pub leases: LeaseCounts,
}

/// A node. Threads share it behind an [`Arc`]; [`Server`](crate::Server) serves it to peers.
pub struct Node {
    name: String,
    memory: Arc<dyn Memory>,
    slot_bytes: u64,
    record_bytes: u64,
    lease_max: Duration,
    leases_max: usize,
    clock: Arc<dyn Clock>,
    /// Its blocks are the slots. A block has a name there as long as its record is found.
    pool: BlockPool,
    /// The host tier of an engine, served beside the slots.
    host: OnceLock<HostTier>,
    host_bytes: u64,
    host_lent_max: Option<u64>,
    /// Taken before the pool's lock, which is taken within. Not held while records are copied.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What each slot holds that is found.
    kept: Vec<Option<Kept>>,
    /// What lies in the host tier.
    hosted: HashSet<RecordKey>,
    leases: Leases,
    /// Of the slots.
    log: Log,
    /// Of the slots and the host tier.
    all: Option<Log>,
    generation: u64,
    /// Changed by a clear. What began to be written before is not kept.
    epoch: u64,
    stats: NodeStats,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    key: RecordKey,
    generation: u64,
    /// Bytes of the entry and the record.
    bytes: u32,
    sum: u64,
}

impl State {
    /// Notes what has become of a slot's block.
    fn note(&mut self, is_there: bool, key: RecordKey) {
        let kept = self.kept.iter().flatten().map(|kept| kept.key);
        self.log.push(is_there, key, kept);
        if !self.hosted.contains(&key) {
            self.note_of_all(is_there, key);
        }
    }

    /// Notes what has become of a block that neither is in a slot nor in the host tier before or behind this.
    fn note_of_all(&mut self, is_there: bool, key: RecordKey) {
        let (kept, hosted) = (&self.kept, &self.hosted);
        let there = || -> HashSet<RecordKey> {
            kept.iter().flatten().map(|kept| kept.key).chain(hosted.iter().copied()).collect()
        };
        if let Some(log) = &mut self.all {
            log.push(is_there, key, std::iter::once_with(there).flatten());
        }
    }

    /// Takes out what a slot holds.
    fn take(&mut self, slot: usize) -> Option<Kept> {
        let kept = self.kept.get_mut(slot)?.take()?;
        self.note(false, kept.key);
        Some(kept)
    }
}

/// The name of a record in the pool. Blocks of two groups, or of two formats, may have the same name.
fn pool_name(RecordKey { format, group, name }: RecordKey) -> BlockHash {
    const SPREAD: [u128; 2] =
        [0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835, 0xc2b2_ae3d_27d4_eb4f_1656_67b1_9e37_79f9];
    let group = SPREAD[0].wrapping_mul(group.0.into());
    BlockHash::from_u128(name.to_u128() ^ group ^ SPREAD[1].wrapping_mul(format.into()))
}

impl Node {
    /// A node over all of `memory`. Leases are measured by `clock`.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn new(
        options: &NodeOptions,
        memory: Arc<dyn Memory>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NodeError> {
        let NodeOptions { name, record_bytes, host_bytes, host_lent_max, lease_max, leases_max } =
            options.clone();
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(NodeError::Name { bytes: name.len(), max: NAME_MAX });
        }
        let max = FRAME_MAX - (ENTRY_BYTES as u64 + ALIGN);
        if record_bytes == 0 || record_bytes > max {
            return Err(NodeError::Record { bytes: record_bytes, max });
        }
        let slot_bytes = (ENTRY_BYTES as u64 + record_bytes).next_multiple_of(ALIGN);
        let slots = memory.bytes() / slot_bytes;
        if slots == 0 {
            return Err(NodeError::TooSmall { bytes: memory.bytes(), slot_bytes });
        }
        let pool = BlockPool::builder(&PoolConfig::primary_only(slots));
        let too_many = || NodeError::TooManySlots { slots };
        let pool = pool.clock(Arc::clone(&clock)).build().map_err(|_| too_many())?;
        let mut kept = Vec::new();
        kept.try_reserve_exact(slots as usize).map_err(|_| too_many())?;
        kept.resize(slots as usize, None);
        // So that no write and no log of an earlier node of this name has the same number.
        let random = random().map_err(|_| NodeError::System { bytes: 16 })?;
        let random = u128::from_le_bytes(random);
        let state = State {
            kept,
            hosted: HashSet::new(),
            leases: Leases::default(),
            log: Log::new(random as u64, slots as usize),
            all: None,
            generation: (random >> 64) as u64,
            epoch: 0,
            stats: NodeStats { slots, ..NodeStats::default() },
        };
        let state = Mutex::new(state);
        Ok(Self {
            name,
            memory,
            slot_bytes,
            record_bytes,
            lease_max,
            leases_max,
            clock,
            pool,
            host: OnceLock::new(),
            host_bytes,
            host_lent_max,
            state,
        })
    }

    /// Lends peers the blocks that lie in the host tier of an engine in this process, too, from now on, at
    /// [addresses](host_tier_address) behind the node's memory. A block that a lease pins is not evicted there, so leases take from what
    /// the engine can claim, up to [`host_lent_max`](NodeOptions::host_lent_max). Peers know of these blocks by
    /// [`note_changes`](Self::note_changes), and take them for stored as long as they are there.
    ///
    /// # Errors
    /// [`NodeError::Record`] if a block has more bytes than the longest record; [`NodeError::Host`] if the tier has more than
    /// [`host_bytes`](NodeOptions::host_bytes), or the node shares one already.
    pub fn share(&self, host: Arc<HostShare>) -> Result<(), NodeError> {
        let (bytes, max) = (host.block_bytes_max() as u64, self.record_bytes);
        if bytes > max {
            return Err(NodeError::Record { bytes, max });
        }
        let (all, max) = (host.bytes(), self.host_bytes);
        let is_shared = || NodeError::Host { bytes: all, max };
        if all > max {
            return Err(is_shared());
        }
        let mut state = self.state.lock();
        let first = host_tier_address(self.memory.bytes());
        self.host.set(HostTier { share: host, first }).map_err(|_| is_shared())?;
        let blocks = state.kept.len() as u64 + self.host.get().map_or(0, |of| of.share.blocks());
        let mut log = Log::new(state.log.id().wrapping_add(1 << 63), blocks as usize);
        let there: Vec<_> = state.kept.iter().flatten().map(|kept| kept.key).collect();
        there.iter().for_each(|key| log.push(true, *key, there.iter().copied()));
        state.all = Some(log);
        Ok(())
    }

    /// Takes in what has happened in the host tier that the node [shares](Self::share), for the peers that follow what it holds:
    /// what the events of the engine's cache say of it (`CacheEvent::in_host` of `kv-manager`), in their order, all from the first one
    /// on. Before a tier is shared, nothing is noted.
    pub fn note_changes(&self, changes: impl IntoIterator<Item = HostChange>) {
        let mut state = self.state.lock();
        let Some(format) = self.host.get().map(|host| host.share.format()) else { return };
        let key = |(group, name): Block| RecordKey { format, group, name };
        for change in changes {
            match change {
                HostChange::Come(blocks) => {
                    for key in blocks.into_iter().map(key) {
                        if state.hosted.insert(key) && !self.is_kept(&state, key) {
                            state.note_of_all(true, key);
                        }
                    }
                }
                HostChange::Gone(blocks) => {
                    self.unhost(&mut state, blocks.into_iter().map(key));
                }
                HostChange::Cleared => {
                    let all = state.hosted.clone();
                    self.unhost(&mut state, all);
                }
            }
        }
    }

    fn unhost(&self, state: &mut State, keys: impl IntoIterator<Item = RecordKey>) {
        for key in keys {
            if state.hosted.remove(&key) && !self.is_kept(state, key) {
                state.note_of_all(false, key);
            }
        }
    }

    /// Whether a slot holds a record.
    fn is_kept(&self, state: &State, key: RecordKey) -> bool {
        let at = self.pool.locate(pool_name(key)).map(|(_, at)| at.id.index());
        let kept = at.and_then(|slot| state.kept.get(slot).copied().flatten());
        kept.is_some_and(|kept| kept.key == key)
    }

    /// Bytes at addresses that peers are told of: of its memory, and those that are kept for a host tier.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        match self.host_bytes {
            0 => self.memory.bytes(),
            bytes => host_tier_address(self.memory.bytes()).saturating_add(bytes),
        }
    }

    /// Its name among the members.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Bytes of a slot: of an entry of 64 bytes and the longest record, rounded up.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The pool whose blocks are the slots. A program that claims blocks there has their slots for itself; it cannot claim
    /// those that a lease pins (H8, H9, H10).
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Counts of what it has done.
    #[must_use]
    pub fn stats(&self) -> NodeStats {
        let state = self.state.lock();
        let slots = self.pool.stats().primary;
        let used_slots = slots.cached + slots.pinned;
        NodeStats { used_slots, leases: state.leases.counts(), ..state.stats }
    }

    /// Finds the longest run of `keys` that the node has, and pins it for `lease` or until the lease is
    /// [ended](Self::end), in one step. Without a first block, there is no lease. Of more than [`LIST_MAX`] blocks, the
    /// first ones are looked for.
    ///
    /// # Errors
    /// [`Refusal::Busy`] if no lease is left, or what was left has been given to others meanwhile.
    pub fn find_and_pin(
        &self,
        reader: ReaderId,
        keys: &[RecordKey],
        lease: Duration,
    ) -> Result<Found, Refusal> {
        let keys = keys.get(..LIST_MAX).unwrap_or(keys);
        let lasts = lease.min(self.lease_max);
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.leases.end_overdue(&self.pool, now);
        let mut left = self.left(&state, reader);
        if left.leases == 0 {
            return Err(Refusal::Busy);
        }
        let names: Vec<_> = keys.iter().map(|&key| pool_name(key)).collect();
        let (mut lent, mut located) =
            (Lent { pool: &self.pool, loans: Vec::new(), hosts: Vec::new() }, Vec::new());
        loop {
            let at = located.len();
            let (rest, names) = (keys.get(at..).unwrap_or_default(), names.get(at..));
            // A run in the slots, and one in the host tier, until there is neither.
            let names = names.unwrap_or_default();
            let loan = self.lend_slots(&state, reader, names, &mut left.slots);
            guard!("remote.pins-what-is-found", {}, else {
                loan.iter().for_each(|loan| _ = self.pool.end_loan(loan.id));
            });
            let slots = loan.iter().flat_map(|loan| &loan.blocks).zip(rest);
            located.extend(slots.map_while(|(at, of)| {
                let slot = at.id.index();
                // Two groups, or two formats, may have two names that the pool takes for one.
                let kept = state.kept.get(slot).copied().flatten().filter(
                    |kept| guard!("remote.finds-by-the-whole-name", kept.key == *of, else true),
                )?;
                let span = Span { address: slot as u64 * self.slot_bytes, bytes: kept.bytes };
                let Kept { generation, sum, .. } = kept;
                Some(Located { span, generation, sum, head: None })
            }));
            lent.loans.extend(loan);
            let rest = keys.get(located.len()..).unwrap_or_default();
            let Some(host) = self.host.get().filter(|_| !rest.is_empty()) else { break };
            // Headers may have to be summed up: nobody waits for that.
            drop(state);
            let hosted = host.lend(rest, left.host_bytes);
            state = self.state.lock();
            let Some((loan, mut more)) = hosted else { break };
            left.host_bytes = left.host_bytes.saturating_sub(loan.bytes());
            lent.hosts.push(loan);
            located.append(&mut more);
        }
        // While nobody waited, others may have been given what was left.
        let host_bytes: u64 = lent.hosts.iter().map(HostLoan::bytes).sum();
        let slots = state.leases.more(reader, &lent.loans);
        let left = self.left(&state, reader);
        let is_too_much = guard!(
            "remote.counts-what-is-lent-meanwhile",
            host_bytes > left.host_bytes,
            else false
        );
        if left.leases == 0 || slots > left.slots || is_too_much {
            return Err(Refusal::Busy);
        }
        state.stats.found += located.len() as u64;
        state.stats.hosted += located.iter().filter(|at| at.head.is_some()).count() as u64;
        state.stats.absent += u64::from(located.len() < keys.len());
        if located.is_empty() {
            return Ok(Found::default());
        }
        let lease = state.leases.grant(reader, now.saturating_add(lasts), lent);
        Ok(Found { lease, blocks: located })
    }

    /// Lends the longest run of slots that a reader may pin: those that its host pins already cost nothing.
    fn lend_slots(
        &self,
        state: &State,
        reader: ReaderId,
        names: &[BlockHash],
        left: &mut usize,
    ) -> Option<Loan> {
        let loan = self.pool.lend(names, Tier::Primary)?;
        let leases = &state.leases;
        let more: Vec<_> = (0..loan.blocks.len())
            .filter(|at| loan.blocks.get(*at).is_some_and(|of| !leases.pins(reader, of.id)))
            .collect();
        let Some(&end) = more.get(*left) else {
            *left -= more.len();
            return Some(loan);
        };
        *left = 0;
        self.pool.end_loan(loan.id);
        self.pool.lend(names.get(..end)?, Tier::Primary)
    }

    /// What a reader may hold beside what it does.
    fn left(&self, state: &State, reader: ReaderId) -> Left {
        // Offers are held to slots: however many leases these take, readers find what is offered.
        let of_offers = state.leases.held(PeerHost::Offers).leases;
        let offers = guard!("remote.counts-offers-apart", of_offers, else 0);
        let leases = self.leases_max.saturating_sub(state.leases.len() - offers);
        let (mut host_max, mut block_max) = (0, 0);
        if let Some(host) = self.host.get() {
            host_max = self.host_lent_max.unwrap_or_else(|| host.share.bytes() / 4);
            block_max = host.share.block_bytes_max() as u64;
        }
        let host_bytes = host_max.saturating_sub(state.leases.host_bytes());
        // A reader of this process is no other host.
        let Some(host) = state.leases.host(reader) else {
            return Left { leases, slots: usize::MAX, host_bytes };
        };
        let held = state.leases.held(host);
        let slots = (state.kept.len() - state.kept.len() / 8).saturating_sub(held.slots);
        if host == PeerHost::Offers {
            let most = guard!("remote.offers-leave-slots", slots, else usize::MAX);
            return Left { leases: usize::MAX, slots: most, host_bytes };
        }
        let host_share = host_max.div_ceil(2).max(block_max.min(host_max));
        let leases_left = self.leases_max.div_ceil(2).saturating_sub(held.leases);
        let host_left = host_share.saturating_sub(held.host_bytes);
        Left {
            leases: guard!("remote.halves-leases", leases.min(leases_left), else leases),
            slots,
            host_bytes: guard!(
                "remote.halves-the-host-tier",
                host_bytes.min(host_left),
                else host_bytes
            ),
        }
    }

    /// Has what a reader holds counted with what others of its host do, until the reader [ends](Self::end_reader).
    pub(crate) fn join(&self, reader: ReaderId, host: PeerHost) {
        self.state.lock().leases.join(reader, host);
    }

    /// Copies bytes of blocks that a lease pins, of one span behind the other, to the end of `into`.
    ///
    /// # Errors
    /// [`Refusal::NoLease`], [`Refusal::OutsideLease`]; [`Refusal::Length`] for more than a frame takes. `into` is as it
    /// was.
    pub fn read(
        &self,
        reader: ReaderId,
        lease: LeaseId,
        spans: &[Span],
        into: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let before = into.len();
        let bytes = self.admit(reader, lease, spans, FRAME_MAX.saturating_sub(before as u64))?;
        into.resize(before + bytes, 0);
        let copied = self.copy(spans, into.get_mut(before..).unwrap_or_default());
        if copied.is_err() {
            into.truncate(before);
        }
        copied
    }

    /// Checks that a lease pins these spans now, and counts their bytes as read.
    ///
    /// # Errors
    /// As of [`read`](Self::read); [`Refusal::Length`] for more than so many bytes.
    pub(crate) fn admit(
        &self,
        reader: ReaderId,
        lease: LeaseId,
        spans: &[Span],
        bytes_max: u64,
    ) -> Result<usize, Refusal> {
        let bytes: u64 = spans.iter().map(|span| u64::from(span.bytes)).sum();
        if bytes > bytes_max {
            return Err(Refusal::Length);
        }
        let now = self.clock.now();
        let mut state = self.state.lock();
        let lease = state.leases.get((reader, lease), now).ok_or(Refusal::NoLease)?;
        if !spans.iter().all(|span| self.covers(lease, *span)) {
            return Err(Refusal::OutsideLease);
        }
        state.stats.read_bytes += bytes;
        Ok(bytes as usize)
    }

    /// Copies spans, one behind the other, to where there is room for them.
    pub(crate) fn copy(&self, spans: &[Span], mut into: &mut [u8]) -> Result<(), Refusal> {
        for span in spans {
            let (to, rest) = std::mem::take(&mut into)
                .split_at_mut_checked(span.bytes as usize)
                .ok_or(Refusal::Length)?;
            if !self.read_at(span.address, to) {
                return Err(Refusal::OutsideLease);
            }
            into = rest;
        }
        Ok(())
    }

    /// Whether a lease pins all that a span touches: slots, or blocks of the host tier.
    fn covers(&self, lease: &Lease, span: Span) -> bool {
        let Some(end) = span.address.checked_add(span.bytes.into()) else { return false };
        if let Some(first) = self.host.get().map(|host| host.first)
            && span.address >= first
        {
            return lease.covers_host(&(span.address - first..end - first));
        }
        let last = end.saturating_sub(1).max(span.address);
        let slots = span.address / self.slot_bytes..=last / self.slot_bytes;
        guard!("remote.reads-under-a-lease", lease.covers_slots(slots), else true)
    }

    fn read_at(&self, address: u64, into: &mut [u8]) -> bool {
        match self.host.get() {
            Some(host) if address >= host.first => host.share.read(address - host.first, into),
            _ => self.memory.read(address, into),
        }
    }

    /// Bytes of the longest record.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// The longest lease.
    pub(crate) fn lease_max(&self) -> Duration {
        self.lease_max
    }

    /// Ends a lease: its blocks may make room for others.
    ///
    /// # Errors
    /// [`Refusal::NoLease`] if it has ended, or is another reader's.
    pub fn end(&self, reader: ReaderId, lease: LeaseId) -> Result<(), Refusal> {
        let ended = self.state.lock().leases.end(reader, lease, &self.pool);
        if ended { Ok(()) } else { Err(Refusal::NoLease) }
    }

    /// Ends all leases of a reader that is gone.
    pub fn end_reader(&self, reader: ReaderId) {
        self.state.lock().leases.end_reader(reader, &self.pool);
    }

    /// Ends the leases whose time has come. To be called now and then; [`find_and_pin`](Self::find_and_pin) does so, too.
    pub fn end_overdue(&self) {
        let now = self.clock.now();
        self.state.lock().leases.end_overdue(&self.pool, now);
    }

    /// Keeps a record under a key. What was there under the key is replaced: a lease of it keeps its bytes until it
    /// ends.
    ///
    /// # Errors
    /// [`Refusal::Length`]; [`Refusal::NoRoom`] if all slots are pinned or being written.
    pub fn put(&self, key: RecordKey, record: &[u8]) -> Result<(), Refusal> {
        let bytes = u32::try_from(record.len()).map_err(|_| Refusal::Length)?;
        self.check_length(bytes)?;
        let place = self.claim(&[(key, bytes)])?.pop().ok_or(Refusal::NoRoom)?;
        let entry = Entry::of(key, place.generation, record);
        let written = self.memory.write(place.address, &entry.bytes())
            && self.memory.write(place.address + ENTRY_BYTES as u64, record);
        if !written {
            return Err(Refusal::NoRoom);
        }
        self.keep(place, entry.sum);
        Ok(())
    }

    /// Makes room for records, each with its bytes, that something else than this call writes, such as copies on a device. Nobody is
    /// told of them before they are [kept](Reserved::keep).
    ///
    /// Only who knows how they are summed can read them: to readers of the host's memory they are
    /// [stale](crate::Unfit::Stale).
    ///
    /// # Errors
    /// [`Refusal::Length`]; [`Refusal::NoRoom`] if there are not as many slots that are not pinned or being written. No record has
    /// made room then.
    pub fn reserve(self: &Arc<Self>, records: &[(RecordKey, u32)]) -> Result<Reserved, Refusal> {
        records.iter().try_for_each(|&(_, bytes)| self.check_length(bytes))?;
        Ok(Reserved { node: Arc::clone(self), places: self.claim(records)? })
    }

    /// Refuses an offer more records than there are slots now that it may pin. One of these stays free: what readers say is pinned while
    /// it is read.
    pub(crate) fn check_room(&self, offer: ReaderId, records: usize) -> Result<(), Refusal> {
        let slots = self.left(&self.state.lock(), offer).slots;
        let fits = records < slots && records <= self.pool.claimable();
        if fits { Ok(()) } else { Err(Refusal::NoRoom) }
    }

    fn check_length(&self, bytes: u32) -> Result<(), Refusal> {
        if bytes == 0 || u64::from(bytes) > self.record_bytes {
            return Err(Refusal::Length);
        }
        Ok(())
    }

    /// A slot for each record, or none at all. What they held is found no more.
    fn claim(&self, records: &[(RecordKey, u32)]) -> Result<Vec<Claim>, Refusal> {
        let mut state = self.state.lock();
        let count = guard!(
            "remote.claims-all-or-none",
            records.len(),
            else records.len().min(self.pool.claimable())
        );
        let mut claimed = self.pool.claim(count).map_err(|_| Refusal::NoRoom)?;
        let mut places = Vec::new();
        for &(key, bytes) in records {
            let claimed = claimed.take_first().ok_or(Refusal::NoRoom)?;
            let slot = claimed.ids().next().map(|id| id.index()).ok_or(Refusal::NoRoom)?;
            if state.take(slot).is_some() {
                state.stats.evicted += 1;
            }
            state.generation = state.generation.wrapping_add(1);
            let (generation, epoch) = (state.generation, state.epoch);
            let address = slot as u64 * self.slot_bytes;
            places.push(Claim { claimed, key, slot, address, bytes, generation, epoch });
        }
        Ok(places)
    }

    /// Names what was written, unless all was cleared meanwhile. Nobody is told of a slot before it is whole.
    fn keep(&self, place: Claim, sum: u64) {
        let Claim { mut claimed, key, slot, bytes, generation, epoch, .. } = place;
        let mut state = self.state.lock();
        if guard!("remote.drops-what-was-cleared", state.epoch != epoch, else false) {
            return;
        }
        self.remove(&mut state, key);
        drop(claimed.register(&[pool_name(key)], Priority::DEFAULT));
        if let Some(kept) = state.kept.get_mut(slot) {
            *kept = Some(Kept { key, generation, bytes: ENTRY_BYTES as u32 + bytes, sum });
        }
        state.note(true, key);
        state.stats.stored += 1;
    }

    fn remove(&self, state: &mut State, key: RecordKey) {
        let name = pool_name(key);
        if let Some((_, at)) = self.pool.locate(name) {
            state.take(at.id.index());
            self.pool.remove(name);
        }
    }

    /// Forgets records of the slots. A lease of one keeps its bytes until it ends. What lies in the host tier, its engine forgets.
    pub fn forget(&self, keys: &[RecordKey]) {
        let mut state = self.state.lock();
        keys.iter().for_each(|&key| self.remove(&mut state, key));
    }

    /// Forgets everything in the slots, and what is being written there.
    pub fn clear(&self) {
        self.clear_those(|_| true);
    }

    /// Forgets all records of a format in the slots, and whatever is being written there.
    pub fn clear_format(&self, format: u64) {
        self.clear_those(|key| guard!("remote.clears-one-format", key.format == format, else true));
    }

    fn clear_those(&self, goes: impl Fn(&RecordKey) -> bool) {
        let mut state = self.state.lock();
        state.epoch += 1;
        let kept = state.kept.iter().flatten().map(|kept| kept.key);
        let keys: Vec<_> = kept.filter(goes).collect();
        keys.into_iter().for_each(|key| self.remove(&mut state, key));
    }

    /// What has become of records of a format from a place on; with `hosted`, also in the host tier.
    #[must_use]
    pub fn changes(&self, from: Cursor, (hosted, format): (bool, u64)) -> Changes {
        let state = self.state.lock();
        state.all.as_ref().filter(|_| hosted).unwrap_or(&state.log).read(from, format)
    }
}

/// A slot that is being written.
#[derive(Debug)]
struct Claim {
    claimed: Claimed,
    key: RecordKey,
    slot: usize,
    address: u64,
    bytes: u32,
    generation: u64,
    epoch: u64,
}

/// Room for records that are being written.
///
/// Drop it only when nothing writes there any more: others are given its slots then.
#[derive(Debug)]
#[must_use = "dropping it gives the room to others"]
pub struct Reserved {
    node: Arc<Node>,
    places: Vec<Claim>,
}

impl Reserved {
    /// Whether the room is this node's.
    pub(crate) fn is_of(&self, node: &Arc<Node>) -> bool {
        Arc::ptr_eq(&self.node, node)
    }

    /// Where each record is to be written in the node's [memory](Node::memory), behind the room for an entry, at a multiple of 64.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = Span> + '_ {
        let span = |place: &Claim| Span {
            address: place.address + ENTRY_BYTES as u64,
            bytes: place.bytes,
        };
        self.places.iter().map(span)
    }

    /// Keeps the records, whose bytes are all written, each with its [sum](Located::sum). What was cleared meanwhile is not kept.
    ///
    /// # Errors
    /// [`Refusal::Length`] for another number of sums, and nothing is kept.
    pub fn keep(self, sums: &[u64]) -> Result<(), Refusal> {
        if sums.len() != self.places.len() {
            return Err(Refusal::Length);
        }
        for (place, &sum) in self.places.into_iter().zip(sums) {
            self.node.keep(place, sum);
        }
        Ok(())
    }

    /// The keys of the records, in order.
    pub(crate) fn keys(&self) -> Vec<RecordKey> {
        self.places.iter().map(|place| place.key).collect()
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Node");
        shown.field("name", &self.name).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
