//! The peers as a tier under host memory: each block is kept by a few of them, and loaded from the first that answers.

mod blocks;
mod holders;
mod link;
mod roster;
mod stats;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kv_pool::clock::{Clock, SystemClock};
use kv_pool::guard;
use kv_tier::{BlockSink, BlockSource, LowerTier, RecordKey};
use parking_lot::Mutex;

use crate::members::Member;
use crate::message::Block;
use crate::{Key, SocketTransfer, Transfer};

use blocks::{Loading, Storing};
use holders::Holders;
pub(crate) use holders::MEMBERS_MAX;
#[cfg(test)]
pub(crate) use link::NEWS_MAX;
use link::{Link, Order, Owed, block_of};
use roster::{Current, Roster};
pub use stats::{Miss, RemoteStats};

/// Makes the transfer that a member's memory is read by.
type MakeTransfer = Arc<dyn Fn(&Member) -> Box<dyn Transfer> + Send + Sync>;

/// Which members there are, and how long is waited for them.
#[derive(Clone)]
pub struct RemoteOptions {
    /// The members at the beginning, 64 at most. The list may be in another order on each host, and
    /// [`RemoteWatch::set_members`] changes it.
    pub members: Vec<Member>,
    /// The member that is a node of this host, if one is: what lies in the host tier that it [shares](crate::Node::share) is this host's
    /// own, and is not counted as stored.
    pub own: Option<String>,
    /// The key that all members have.
    pub key: Key,
    /// Members that keep a block.
    pub replicas: usize,
    /// How long found blocks are pinned for a read.
    pub lease: Duration,
    /// After so long without an answer, the next member that keeps a block is asked, too.
    pub hedge_after: Duration,
    /// A load or store that has not ended by then has failed.
    pub wait_max: Duration,
    /// How long a member may take for one answer, or for the next 16 MiB of blocks. One that takes longer is down.
    pub answer_max: Duration,
    /// How long a member that is down is left alone.
    pub retry_after: Duration,
    /// How often members are asked what has come to them and gone.
    pub follow_every: Duration,
    /// Measures `hedge_after` and `wait_max`.
    pub clock: Arc<dyn Clock>,
    /// How bytes are read.
    transfer: MakeTransfer,
}

impl RemoteOptions {
    /// Two replicas; leases of 2 s; another member is asked after 20 ms; a load or store ends within 1 s; an answer takes
    /// 500 ms at most; a member that is down is called again after 1 s; news every 5 ms. Bytes come over the connection.
    #[must_use]
    pub fn new(members: Vec<Member>, key: Key) -> Self {
        Self {
            members,
            own: None,
            key,
            replicas: 2,
            lease: Duration::from_secs(2),
            hedge_after: Duration::from_millis(20),
            wait_max: Duration::from_secs(1),
            answer_max: Duration::from_millis(500),
            retry_after: Duration::from_secs(1),
            follow_every: Duration::from_millis(5),
            clock: Arc::new(SystemClock::new()),
            transfer: Arc::new(|_| Box::new(SocketTransfer)),
        }
    }

    /// Has the memory of members read by what `make` returns, in place of their connections.
    pub fn set_transfer(
        &mut self,
        make: impl Fn(&Member) -> Box<dyn Transfer> + Send + Sync + 'static,
    ) {
        self.transfer = Arc::new(make);
    }
}

/// Peers as a tier. A thread for each of them has its connection.
///
/// Dropping it ends the threads: what waits is given up, and each call that a thread is in ends within
/// [`answer_max`](RemoteOptions::answer_max), of which a load has four in a row at most: to connect, find, read and give back.
#[derive(Debug)]
pub struct RemoteTier {
    shared: Arc<Shared>,
    loads: Vec<Arc<Loading>>,
    stores: Vec<Arc<Storing>>,
    holders: Holders,
    gained: Vec<Block>,
}

/// Shows what a tier does, and changes its members, wherever the tier itself has gone.
#[derive(Clone, Debug)]
pub struct RemoteWatch {
    shared: Arc<Shared>,
}

impl RemoteWatch {
    /// Counts of what the tier has done.
    #[must_use]
    pub fn stats(&self) -> RemoteStats {
        self.shared.stats.lock().clone()
    }

    /// The members that there are from now on, 64 at most. One that is not in the list is left: what it was asked before, it may
    /// still answer, and its blocks count as gone. A new one has a thread and is asked what it has; if it has been a member
    /// before and does not know all that was forgotten meanwhile, it is told to forget everything. One whose address has changed is
    /// a new one. Blocks stay where they are, and are found by what members say of themselves; new ones are stored where the new
    /// list has them. A tier that is gone keeps no members.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for more than 64 members, and nothing has changed; [`io::ErrorKind::WouldBlock`] if the places of
    /// members that have left are not free, which they are when the calls that their threads are in have ended, each within
    /// [`answer_max`](RemoteOptions::answer_max): say the list again then; the system's, if it has no thread. In these two cases,
    /// some members of the list are not there.
    pub fn set_members(&self, members: &[Member]) -> io::Result<()> {
        Shared::set_members(&self.shared, members)
    }

    /// The members that there are.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        self.shared.roster.lock().current().members().to_vec()
    }
}

/// What the tier and the threads of its members have together.
struct Shared {
    options: RemoteOptions,
    /// Of the tier's records. Members are asked for nothing before it is known.
    format: OnceLock<u64>,
    /// No other lock is taken under it.
    roster: Mutex<Roster>,
    stats: Mutex<RemoteStats>,
    /// What members have said that they have got or lost: which member, whether it begins anew, and the changes.
    news: Mutex<Vec<News>>,
}

#[derive(Debug)]
struct News {
    member: usize,
    anew: bool,
    changes: Vec<(bool, Block)>,
    /// Blocks that the member has room for.
    room: u64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("members", &self.options.members).finish_non_exhaustive()
    }
}

impl Shared {
    fn set_members(shared: &Arc<Self>, members: &[Member]) -> io::Result<()> {
        if members.len() > MEMBERS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut roster = shared.roster.lock();
        if roster.has_ended() {
            return Ok(());
        }
        let new = roster.leave_but(members);
        let joined = new.into_iter().try_for_each(|member| {
            let free = roster.free_place(&member);
            let (place, owes_all) = free.ok_or(io::ErrorKind::WouldBlock)?;
            let (orders, received) = mpsc::channel();
            let owed = if owes_all { Owed::All } else { Owed::default() };
            let (of, shared) = (member.clone(), Arc::clone(shared));
            let left = Arc::<AtomicBool>::default();
            let leaves = Arc::clone(&left);
            let thread = std::thread::Builder::new().name(format!("kv-remote-{place}"));
            let link = Link::new((place, of), shared, (received, leaves), owed);
            let thread = thread.spawn(move || link.run())?;
            roster.sit(place, member, orders, (left, thread));
            Ok(())
        });
        roster.count_anew();
        let current = roster.current();
        drop(roster);
        let mut stats = shared.stats.lock();
        for member in current.members() {
            stats.loaded.entry(member.name.clone()).or_default();
        }
        joined
    }

    /// Sends an order to a member. If it is not there any more, it does not do what it is told.
    fn send(&self, place: usize, order: Order) {
        let Err(unsent) = self.roster.lock().send(place, order) else { return };
        match unsent {
            Order::Store(stores) => stores.iter().for_each(|store| self.answered(store, false)),
            Order::Load(loads) => {
                loads.iter().for_each(|load| load.missed());
                self.forward(loads);
            }
            // Nobody sends these to one member.
            Order::Forget(_) | Order::Clear => {}
        }
    }

    /// A member has kept a block, or has not.
    fn answered(&self, store: &Storing, keeps: bool) {
        let ended = store.answered(keeps);
        let mut stats = self.stats.lock();
        stats.put += u64::from(keeps);
        match ended {
            Some(true) => stats.stored += 1,
            Some(false) => stats.unstored += 1,
            None => {}
        }
    }

    /// Gives a record that a member has sent to the load that wants it, unless another member was faster.
    fn arrived(&self, member: &Member, load: &Loading, record: &[u8]) {
        let taken = load.arrived(record);
        let mut stats = self.stats.lock();
        match taken {
            Some(true) => *stats.loaded.entry(member.name.clone()).or_default() += 1,
            Some(false) => *stats.missed.entry(Miss::Foreign).or_default() += 1,
            None => {}
        }
    }

    /// Sends each block to the next member that it wants.
    fn forward(&self, loads: impl IntoIterator<Item = Arc<Loading>>) {
        let mut parts: HashMap<usize, Vec<Arc<Loading>>> = HashMap::new();
        for load in loads {
            if let Some(member) = load.next() {
                parts.entry(member).or_default().push(load);
            }
        }
        parts.into_iter().for_each(|(member, part)| self.send(member, Order::Load(part)));
    }
}

impl RemoteTier {
    /// Starts a thread for each member. Members need not be there: they are called when there is something to ask.
    ///
    /// # Errors
    /// The system's, if it has no thread; [`io::ErrorKind::InvalidInput`] for more than 64 members.
    pub fn new(options: RemoteOptions) -> io::Result<Self> {
        let members = options.members.clone();
        let shared = Arc::new(Shared {
            options,
            format: OnceLock::new(),
            roster: Mutex::default(),
            stats: Mutex::default(),
            news: Mutex::default(),
        });
        let tier = Self {
            shared,
            loads: Vec::new(),
            stores: Vec::new(),
            holders: Holders::default(),
            gained: Vec::new(),
        };
        // From here on, what was begun ends with the tier.
        Shared::set_members(&tier.shared, &members)?;
        Ok(tier)
    }

    /// Shows what the tier does from now on, also when it has been given away.
    #[must_use]
    pub fn watch(&self) -> RemoteWatch {
        RemoteWatch { shared: Arc::clone(&self.shared) }
    }

    /// Who is asked for a block: those who have said that they hold it, and those who keep it by the list.
    fn asked(&self, current: &Current, block: Block) -> Vec<usize> {
        let count = self.shared.options.replicas;
        let holds = |place: &usize| self.holders.has(*place, block);
        let (mut asked, mut others) = (Vec::new(), Vec::new());
        for (rank, place) in current.ranked(block).enumerate() {
            match holds(&place) {
                true => asked.push(place),
                false if rank < count => others.push(place),
                false => {}
            }
        }
        asked.append(&mut others);
        asked
    }

    /// Takes in what members have said.
    fn take_news(&mut self, dropped: &mut Vec<Block>) {
        let news = std::mem::take(&mut *self.shared.news.lock());
        for News { member, anew, changes, room } in news {
            let mut gone = Vec::new();
            if anew {
                self.holders.forget_member(member, &mut gone);
            }
            // What it still has is neither gone nor gained.
            let mut gone: HashSet<Block> = gone.into_iter().collect();
            for (is_there, block) in changes {
                match is_there {
                    true if self.holders.add(member, block, room) => {
                        if !gone.remove(&block) {
                            self.gained.push(block);
                        }
                    }
                    true => {}
                    false if self.holders.remove(member, block) => dropped.push(block),
                    false => {}
                }
            }
            dropped.extend(gone);
        }
    }
}

impl LowerTier for RemoteTier {
    fn set_format(&mut self, format: u64) {
        self.shared.format.get_or_init(|| format);
    }

    fn store(&mut self, blocks: Vec<BlockSource>) {
        let now = self.shared.options.clock.now();
        let until = now.saturating_add(self.shared.options.wait_max);
        let current = self.shared.roster.lock().current();
        let mut parts: HashMap<usize, Vec<Arc<Storing>>> = HashMap::new();
        for source in blocks {
            let key = source.key();
            self.shared.format.get_or_init(|| key.format);
            let places = current.keepers(block_of(key), self.shared.options.replicas);
            let store = Arc::new(Storing::new(source, places.len(), until));
            if places.is_empty() {
                // Nobody answers.
                store.answered(false);
            }
            for place in places {
                parts.entry(place).or_default().push(Arc::clone(&store));
            }
            self.stores.push(store);
        }
        parts.into_iter().for_each(|(member, part)| self.shared.send(member, Order::Store(part)));
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        let now = self.shared.options.clock.now();
        let RemoteOptions { hedge_after, wait_max, .. } = self.shared.options;
        let (hedge, until) = (now.saturating_add(hedge_after), now.saturating_add(wait_max));
        let current = self.shared.roster.lock().current();
        let loads: Vec<_> = blocks
            .into_iter()
            .map(|sink| {
                let key = sink.key();
                self.shared.format.get_or_init(|| key.format);
                let places = self.asked(&current, block_of(key));
                Arc::new(Loading::new(sink, places, hedge, until))
            })
            .collect();
        self.loads.extend(loads.iter().cloned());
        self.shared.forward(loads);
    }

    fn forget(&mut self, blocks: &[Block]) {
        // All are told: who holds a block is known only some time after, and who keeps it may have changed since. Under one hold, so
        // that a member is told or owed it, whenever it leaves.
        if let Some(&format) = self.shared.format.get() {
            let keys = blocks.iter().map(|&(group, name)| RecordKey { format, group, name });
            let keys: Vec<_> = keys.collect();
            self.shared.roster.lock().tell_all(|| Order::Forget(keys.clone()));
        }
        blocks.iter().for_each(|&block| self.holders.forget(block));
        guard!(
            "remote.gains-nothing-forgotten",
            self.gained.retain(|block| !blocks.contains(block))
        );
    }

    fn clear(&mut self) {
        self.holders = Holders::default();
        self.gained.clear();
        self.shared.roster.lock().tell_all(|| Order::Clear);
    }

    fn poll(&mut self, dropped: &mut Vec<Block>) {
        let now = self.shared.options.clock.now();
        let shared = &self.shared;
        self.loads.retain(|load| !load.has_ended());
        let late = self.loads.iter().filter(|load| load.until <= now).filter(|load| load.give_up());
        let late = late.count() as u64;
        let hedged: Vec<_> =
            self.loads.iter().filter(|load| load.is_to_be_hedged(now)).cloned().collect();
        let mut stats = shared.stats.lock();
        stats.hedged += hedged.len() as u64;
        *stats.missed.entry(Miss::Late).or_default() += late;
        drop(stats);
        shared.forward(hedged);
        self.stores.retain(|store| !store.has_ended());
        let late = self.stores.iter().filter(|store| store.until <= now && store.give_up());
        let late = late.count() as u64;
        shared.stats.lock().unstored += late;
        self.take_news(dropped);
    }

    fn gained(&mut self, found: &mut Vec<Block>) {
        found.append(&mut self.gained);
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        // Threads end when nobody can send them anything; blocks that they have not begun have failed.
        let threads = self.shared.roster.lock().end();
        for load in &self.loads {
            load.give_up();
        }
        for store in &self.stores {
            store.give_up();
        }
        for thread in threads {
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::{BlockHash, GroupId};

    use super::*;

    #[test]
    fn what_is_forgotten_is_not_gained() {
        let key = Key::new(&[7; 32]).unwrap();
        let mut tier = RemoteTier::new(RemoteOptions::new(Vec::new(), key)).unwrap();
        let block = |name| (GroupId(0), BlockHash::from_u128(name));
        let changes = vec![(true, block(1)), (true, block(2))];
        tier.shared.news.lock().push(News { member: 0, anew: true, changes, room: 9 });
        tier.poll(&mut Vec::new());
        tier.forget(&[block(1)]);
        let mut gained = Vec::new();
        tier.gained(&mut gained);
        assert_eq!(gained, [block(2)]);
    }
}
