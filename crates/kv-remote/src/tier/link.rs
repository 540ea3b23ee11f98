//! The thread of one member: it has the connection, and does what it is told in order.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kv_pool::guard;
use kv_tier::RecordKey;

use super::blocks::{Loading, Storing};
use super::stats::Miss;
use super::{News, Shared};
use crate::address::after;
use crate::message::{Block, Cursor, Found, LIST_MAX, Located};
use crate::{Member, Peer, PeerError, Transfer, Unfit};

/// What a member's thread is to do.
#[derive(Debug)]
pub(super) enum Order {
    Store(Vec<Arc<Storing>>),
    Load(Vec<Arc<Loading>>),
    Forget(Vec<RecordKey>),
    Clear,
}

/// Blocks of a load that are asked for at a time.
const FIND_MAX: usize = 256;

/// Bytes that are read in the time of one answer, but for one block that has more.
const READ_BYTES: u64 = 16 << 20;

/// The block of a record of this tier's format.
pub(super) fn block_of(RecordKey { group, name, .. }: RecordKey) -> Block {
    (group, name)
}

/// How many of the first blocks are read in the time of one answer.
fn first_read(blocks: &[Located]) -> usize {
    let mut bytes = 0;
    let fits = |at: &&Located| {
        bytes += u64::from(at.span.bytes);
        guard!("remote.each-answer-has-its-time", bytes <= READ_BYTES, else true)
    };
    blocks.iter().take_while(fits).count().max(1)
}

/// A thread's state.
pub(super) struct Link {
    /// Its place among the members.
    place: usize,
    member: Member,
    shared: Arc<Shared>,
    orders: Receiver<Order>,
    /// Set when the member is one no more.
    left: Arc<AtomicBool>,
    /// Made by its first read, and anew after a panic.
    transfer: Option<Box<dyn Transfer>>,
    peer: Option<Peer>,
    /// When a member that is down may be called again.
    again: Option<Instant>,
    /// What the member was not told to forget, because it was down. It is told before anything else.
    owed: Owed,
    cursor: Cursor,
    followed: Instant,
    /// Blocks that the member has room for, as far as is known.
    room: u64,
}

/// What a member is told to forget before anything else.
#[derive(Debug)]
pub(super) enum Owed {
    Blocks(Vec<RecordKey>),
    All,
}

impl Default for Owed {
    fn default() -> Self {
        Self::Blocks(Vec::new())
    }
}

impl Owed {
    fn is_nothing(&self) -> bool {
        matches!(self, Self::Blocks(blocks) if blocks.is_empty())
    }
}

/// Answers of members that wait to be taken in, at which they are asked no more.
pub(crate) const NEWS_MAX: usize = 256;

/// Blocks that a member is told one by one to forget, when it comes back. Of more, it forgets everything.
const OWED_MAX: usize = 1 << 16;

impl Link {
    pub(super) fn new(
        (place, member): (usize, Member),
        shared: Arc<Shared>,
        (orders, left): (Receiver<Order>, Arc<AtomicBool>),
        owed: Owed,
    ) -> Self {
        Self {
            place,
            member,
            shared,
            orders,
            left,
            transfer: None,
            peer: None,
            again: None,
            owed,
            cursor: Cursor::default(),
            followed: Instant::now(),
            room: u64::MAX,
        }
    }

    /// Does what it is told until nobody can tell it anything.
    pub(super) fn run(mut self) {
        let every = self.shared.options.follow_every.max(Duration::from_micros(100));
        loop {
            match self.orders.recv_timeout(every) {
                Ok(Order::Store(blocks)) => self.store(&blocks),
                Ok(Order::Load(blocks)) => self.load(blocks),
                // What a member that has left is not told any more, it is owed.
                Ok(Order::Forget(blocks)) => {
                    self.owe(Owed::Blocks(blocks));
                    self.pay();
                }
                Ok(Order::Clear) => {
                    self.owe(Owed::All);
                    self.pay();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.followed.elapsed() >= every && !self.has_left() {
                self.follow();
                self.followed = Instant::now();
            }
        }
        if !self.owed.is_nothing() {
            let roster = &self.shared.roster;
            guard!("remote.notes-debts", roster.lock().note_unpaid(&self.member.name));
        }
        // Behind all that it has said before: the place may become another member's.
        self.say(true, Vec::new());
    }

    fn owe(&mut self, more: Owed) {
        match (&mut self.owed, more) {
            (Owed::Blocks(owed), Owed::Blocks(more)) if owed.len() + more.len() <= OWED_MAX => {
                owed.extend(more);
            }
            (owed, _) => *owed = Owed::All,
        }
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    fn pay(&mut self) {
        if self.has_left() {
            return;
        }
        // Connecting pays what is owed; a connection that is there has to be asked.
        drop(self.with_peer(|_, _| Ok(())));
    }

    fn deadline(&self) -> Instant {
        after(self.shared.options.answer_max)
    }

    /// Calls the member with a connection to it, which has been told what it is owed. An error that spoils the connection
    /// makes the member down for a while, and so does a panic: a transfer is the caller's code, and this thread has debts.
    fn with_peer<T>(
        &mut self,
        call: impl FnOnce(&mut Self, &mut Peer) -> Result<T, PeerError>,
    ) -> Result<T, PeerError> {
        if self.again.is_some_and(|again| again > Instant::now()) {
            return Err(PeerError::Closed);
        }
        let connected = self.connected();
        // A node that has no connection left has none in a moment either.
        let is_out = connected.is_err();
        let called = connected.and_then(|mut peer| {
            let paid = guard!("remote.pays-debts-first", self.pay_to(&mut peer), else Ok(()));
            let called = paid.and_then(|()| {
                let call = AssertUnwindSafe(|| call(self, &mut peer));
                panic::catch_unwind(call).unwrap_or_else(|of| {
                    guard!("remote.transfers-may-panic", drop(of), else panic::resume_unwind(of));
                    self.transfer = None;
                    Err(PeerError::Closed)
                })
            });
            if called.as_ref().err().is_none_or(PeerError::is_refusal) {
                self.peer = Some(peer);
            }
            called
        });
        if is_out || called.as_ref().is_err_and(|error| !error.is_refusal()) {
            self.again = Some(after(self.shared.options.retry_after));
            self.shared.stats.lock().downs += 1;
        }
        called
    }

    fn connected(&mut self) -> Result<Peer, PeerError> {
        if let Some(peer) = self.peer.take() {
            return Ok(peer);
        }
        let options = &self.shared.options;
        let peer = Peer::connect(&self.member, &options.key, self.deadline())?;
        self.room = peer.blocks_max();
        Ok(peer)
    }

    fn pay_to(&mut self, peer: &mut Peer) -> Result<(), PeerError> {
        match (&self.owed, self.shared.format.get()) {
            (owed, _) if owed.is_nothing() => return Ok(()),
            (Owed::Blocks(blocks), _) => peer.forget(blocks, self.deadline())?,
            (Owed::All, Some(&format)) => peer.clear(format, self.deadline())?,
            // Nothing of this tier is anywhere.
            (Owed::All, None) => {}
        }
        self.owed = Owed::default();
        Ok(())
    }

    fn store(&mut self, blocks: &[Arc<Storing>]) {
        for store in blocks {
            // A member that has left, and may be back over another connection, is not given anything over this one.
            let put = match store.record().filter(|_| !self.has_left()) {
                Some(record) => {
                    let record = record.to_vec();
                    let put =
                        self.with_peer(|link, peer| peer.put(store.key, record, link.deadline()));
                    if self.has_left() {
                        // Over another connection, it may have been told before to forget this.
                        self.owe(Owed::All);
                    }
                    put
                }
                None => Err(PeerError::Closed),
            };
            if put.is_ok() {
                // Said before the store has ended, so that it is known then who holds the block, whatever the list says by then.
                self.say(false, vec![(true, block_of(store.key))]);
            }
            self.shared.answered(store, put.is_ok());
        }
    }

    /// Loads blocks run by run. What this member does not give, the next one is asked for.
    fn load(&mut self, mut loads: Vec<Arc<Loading>>) {
        let mut missed = Vec::new();
        // Another member may have been faster.
        loads.retain(|load| !load.has_ended());
        let mut rest = loads.as_slice();
        if self.has_left() {
            missed.extend(rest.iter().map(|load| (Arc::clone(load), Miss::Down)));
            rest = &[];
        }
        while !rest.is_empty() {
            let asked = rest.get(..FIND_MAX.min(LIST_MAX)).unwrap_or(rest);
            match self.with_peer(|link, peer| link.load_run(peer, asked)) {
                Ok(run) => {
                    let unfit = run.unfit.into_iter().filter_map(|(index, unfit)| {
                        Some((Arc::clone(asked.get(index)?), Miss::of(unfit)))
                    });
                    missed.extend(unfit);
                    let absent = asked.get(run.found);
                    missed.extend(absent.map(|load| (Arc::clone(load), Miss::Absent)));
                    let passed = run.found + usize::from(absent.is_some());
                    rest = rest.get(passed..).unwrap_or_default();
                }
                Err(error) => {
                    let miss = Miss::of_error(&error);
                    // A lease that has ended, or a refusal, is of these blocks; a member that is down gives none.
                    let passed = if error.is_refusal() { asked.len() } else { rest.len() };
                    let (gone, left) = rest.split_at(passed);
                    // Some may have come before the connection was spoilt.
                    let gone = gone.iter().filter(|load| !load.has_ended());
                    missed.extend(gone.map(|load| (Arc::clone(load), miss)));
                    rest = left;
                }
            }
        }
        self.pass_on(missed);
    }

    fn pass_on(&self, missed: Vec<(Arc<Loading>, Miss)>) {
        let mut stats = self.shared.stats.lock();
        for (load, miss) in &missed {
            load.missed();
            *stats.missed.entry(*miss).or_default() += 1;
        }
        drop(stats);
        self.shared.forward(missed.into_iter().map(|(load, _)| load));
    }

    /// The longest run of blocks that the member has, read, checked and brought to where it is wanted, with its lease ended.
    fn load_run(&mut self, peer: &mut Peer, loads: &[Arc<Loading>]) -> Result<Run, PeerError> {
        let keys: Vec<_> = loads.iter().map(|load| load.key).collect();
        let Found { lease: Some(lease), blocks: located } =
            peer.find_and_pin(&keys, self.shared.options.lease, self.deadline())?
        else {
            return Ok(Run::default());
        };
        let (found, mut unfit) = (located.len(), Vec::new());
        let (mut rest, mut read) = (located.as_slice(), Ok(()));
        while !rest.is_empty() && read.is_ok() {
            if self.has_left() {
                return Err(PeerError::Closed);
            }
            let (first, (now, later)) = (found - rest.len(), rest.split_at(first_read(rest)));
            rest = later;
            let loads = loads.get(first..first + now.len()).unwrap_or_default();
            // Nobody waits for it any more.
            if loads.iter().all(|load| load.has_ended()) {
                continue;
            }
            let deadline = self.deadline();
            let (shared, member) = (&self.shared, &self.member);
            let each = |at: usize, record: Result<&[u8], Unfit>| match (loads.get(at), record) {
                (Some(load), Ok(record)) => shared.arrived(member, load, record),
                (Some(_), Err(reason)) => unfit.push((first + at, reason)),
                (None, _) => {}
            };
            let now = Found { lease: Some(lease), blocks: now.to_vec() };
            let keys = keys.get(first..).unwrap_or_default();
            let transfer = self.transfer.get_or_insert_with(|| (shared.options.transfer)(member));
            read = peer.read_each(transfer.as_mut(), &now, keys, deadline, each);
        }
        // A connection that a read has spoilt is not asked again: the lease ends with it.
        if read.as_ref().is_err_and(|error| !error.is_refusal()) {
            return read.map(|()| Run::default());
        }
        // Not waited for: if its time had come, what was read says itself whether it is right.
        peer.release(lease, self.deadline())?;
        read?;
        self.shared.stats.lock().read += found as u64;
        Ok(Run { found, unfit })
    }

    fn say(&self, anew: bool, changes: Vec<(bool, Block)>) {
        let (member, room) = (self.place, self.room);
        self.shared.news.lock().push(News { member, anew, changes, room });
    }

    /// Asks what has come to the member and gone.
    fn follow(&mut self) {
        // What nobody has taken in is not added to, however much the member says.
        if self.shared.news.lock().len() >= NEWS_MAX {
            return;
        }
        let Some(&format) = self.shared.format.get() else { return };
        // What lies in this host's own memory, its manager knows.
        let own = self.shared.options.own.as_ref();
        let hosted =
            guard!("remote.passes-over-its-own-tier", own != Some(&self.member.name), else true);
        let (from, what) = (self.cursor, (hosted, format));
        let changes = self.with_peer(|link, peer| peer.changes(from, what, link.deadline()));
        let Ok(changes) = changes else { return };
        let anew = changes.next.log != self.cursor.log;
        self.cursor = changes.next;
        if !anew && changes.changes.is_empty() {
            return;
        }
        let changes = changes.changes.iter().map(|of| (of.is_there, (of.group, of.name))).collect();
        self.say(anew, changes);
    }
}

/// What a member has given.
#[derive(Debug, Default)]
struct Run {
    /// Blocks that it has found.
    found: usize,
    /// Those of them that are not to be used, each with its place in what was asked for.
    unfit: Vec<(usize, Unfit)>,
}
