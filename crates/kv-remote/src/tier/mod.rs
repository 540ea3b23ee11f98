//! The peers as a tier under host memory: each block is kept by a few of them, and loaded from the first that answers.

mod blocks;
mod holders;
mod link;
mod stats;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_manager::tiers::{BlockSink, BlockSource, LowerTier};
use kv_pool::clock::{Clock, SystemClock};
use parking_lot::Mutex;

use crate::members::{Member, replicas};
use crate::wire::Key as Block;
use crate::{Key, SocketTransfer, Transfer};

use blocks::{Loading, Storing};
use holders::{Holders, MEMBERS_MAX};
use link::{Link, Order};
pub use stats::{Miss, RemoteStats};

/// Makes the transfer that a member's memory is read by.
type MakeTransfer = Arc<dyn Fn(&Member) -> Box<dyn Transfer> + Send + Sync>;

/// Which members there are, and how long is waited for them.
#[derive(Clone)]
pub struct RemoteOptions {
    /// The members, 64 at most. The list may be in another order on each host.
    pub members: Vec<Member>,
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
    /// How long a member may take for one answer. One that takes longer is down.
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
/// Dropping it ends the threads: what waits is given up, and the call that each is in ends within
/// [`answer_max`](RemoteOptions::answer_max).
#[derive(Debug)]
pub struct RemoteTier {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    loads: Vec<Arc<Loading>>,
    stores: Vec<Arc<Storing>>,
    holders: Holders,
    gained: Vec<Block>,
}

/// Shows what a tier does, wherever the tier itself has gone.
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
}

/// What the tier and the threads of its members have together.
struct Shared {
    options: RemoteOptions,
    links: Mutex<Vec<Sender<Order>>>,
    stats: Mutex<RemoteStats>,
    /// What members have said that they have got or lost: which member, whether it begins anew, and the changes.
    news: Mutex<Vec<News>>,
}

#[derive(Debug)]
struct News {
    member: usize,
    anew: bool,
    changes: Vec<(bool, Block)>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("members", &self.options.members).finish_non_exhaustive()
    }
}

impl Shared {
    fn send(&self, member: usize, order: Order) {
        // Without the tier, an order is dropped, and its blocks have failed.
        if let Some(link) = self.links.lock().get(member) {
            drop(link.send(order));
        }
    }

    /// Gives a record that a member has sent to the load that wants it, unless another member was faster.
    fn arrived(&self, member: usize, load: &Loading, record: &[u8]) {
        let taken = load.arrived(record);
        let mut stats = self.stats.lock();
        match taken {
            Some(true) => {
                let name = self.options.members.get(member).map(|member| &member.name);
                if let Some(count) = name.and_then(|name| stats.loaded.get_mut(name)) {
                    *count += 1;
                }
            }
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
        let members = options.members.len();
        if members > MEMBERS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (stats, news) = (Mutex::new(RemoteStats::of(&options.members)), Mutex::default());
        let shared = Arc::new(Shared { options, links: Mutex::default(), stats, news });
        let mut tier = Self {
            shared: Arc::clone(&shared),
            threads: Vec::new(),
            loads: Vec::new(),
            stores: Vec::new(),
            holders: Holders::default(),
            gained: Vec::new(),
        };
        for at in 0..members {
            let (orders, received) = mpsc::channel();
            shared.links.lock().push(orders);
            let thread = std::thread::Builder::new().name(format!("kv-remote-{at}"));
            let link = Link::new(at, Arc::clone(&shared), received);
            tier.threads.push(thread.spawn(move || link.run())?);
        }
        Ok(tier)
    }

    /// Shows what the tier does from now on, also when it has been given away.
    #[must_use]
    pub fn watch(&self) -> RemoteWatch {
        RemoteWatch { shared: Arc::clone(&self.shared) }
    }

    fn places(&self, block: Block) -> Vec<usize> {
        let RemoteOptions { members, replicas: count, .. } = &self.shared.options;
        replicas(members, block, *count)
    }

    /// Takes in what members have said.
    fn take_news(&mut self, dropped: &mut Vec<Block>) {
        let news = std::mem::take(&mut *self.shared.news.lock());
        for News { member, anew, changes } in news {
            if anew {
                self.holders.forget_member(member, dropped);
            }
            for (is_there, block) in changes {
                match is_there {
                    true if self.holders.add(member, block) => self.gained.push(block),
                    true => {}
                    false if self.holders.remove(member, block) => dropped.push(block),
                    false => {}
                }
            }
        }
    }
}

impl LowerTier for RemoteTier {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        let now = self.shared.options.clock.now();
        let until = now.saturating_add(self.shared.options.wait_max);
        let mut parts: HashMap<usize, Vec<Arc<Storing>>> = HashMap::new();
        for source in blocks {
            let places = self.places((source.group(), source.name()));
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
        let loads: Vec<_> = blocks
            .into_iter()
            .map(|sink| {
                let places = self.places((sink.group(), sink.name()));
                Arc::new(Loading::new(sink, places, hedge, until))
            })
            .collect();
        self.loads.extend(loads.iter().cloned());
        self.shared.forward(loads);
    }

    fn forget(&mut self, blocks: &[Block]) {
        let mut parts: HashMap<usize, Vec<Block>> = HashMap::new();
        for &block in blocks {
            self.holders.forget(block);
            for place in self.places(block) {
                parts.entry(place).or_default().push(block);
            }
        }
        self.gained.retain(|block| !blocks.contains(block));
        parts.into_iter().for_each(|(member, part)| self.shared.send(member, Order::Forget(part)));
    }

    fn clear(&mut self) {
        self.holders = Holders::default();
        self.gained.clear();
        let members = self.shared.options.members.len();
        (0..members).for_each(|member| self.shared.send(member, Order::Clear));
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
        self.shared.links.lock().clear();
        for load in &self.loads {
            load.give_up();
        }
        for store in &self.stores {
            store.give_up();
        }
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}
