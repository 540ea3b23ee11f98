//! A connection to another node, as the side that asks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::guard;
use kv_tier::RecordKey;

use crate::channel::{Channel, Facts};
use crate::entry::{ENTRY_BYTES, Unfit};
use crate::joined::Joined;
use crate::message::{Changes, Cursor, Found, LIST_MAX, LeaseId, Reply, Request, Span};
use crate::node::FRAME_MAX;
use crate::transfer::Transfer;
use crate::{Key, Lie, Member, PeerError};

/// A record that was read, or why it is not to be used.
pub type Read = Result<Vec<u8>, Unfit>;

/// Bytes that are read as one span, at most, unless one block has more: what was read is looked at while it is in a cache.
const JOINED_MAX: u64 = 512 << 10;

/// A connection to a node. Each call has a deadline.
///
/// After an error that is no [refusal](PeerError::is_refusal), the connection is of no use: drop it. The
/// node then ends its leases. A node ends a connection itself over which it is asked nothing for as long as
/// [`idle_max`](crate::ServerOptions::idle_max), so who keeps one for later looks first whether it is still there, such as by
/// [`find_and_pin`](Self::find_and_pin) of no block.
#[derive(Debug)]
pub struct Peer {
    channel: Channel,
    facts: Facts,
    /// What the node has said of its memory, once it was asked.
    descriptor: Option<Arc<[u8]>>,
    /// Reads whose answers have not been received. Those that nobody has waited for come before the next answer.
    unread: usize,
}

impl Peer {
    /// Calls a member. Both sides prove that they have the key.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn connect(member: &Member, key: &Key, deadline: Instant) -> Result<Self, PeerError> {
        let Member { name, address } = member;
        let (channel, facts) = Channel::connect(address, name, key, FRAME_MAX as usize, deadline)?;
        Ok(Self { channel, facts, descriptor: None, unread: 0 })
    }

    /// Bytes of the node's memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.facts.memory_bytes
    }

    /// Blocks that the node has room for at most, of whatever group: a slot is as long as the longest record, and the host tier that it
    /// shares may have blocks of any length.
    pub(crate) fn blocks_max(&self) -> u64 {
        self.facts.memory_bytes / ENTRY_BYTES as u64
    }

    /// What a one-sided [`Transfer`] has to know of the node's memory; empty if bytes come over the connection alone. The node
    /// is asked once.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn describe(&mut self, deadline: Instant) -> Result<Arc<[u8]>, PeerError> {
        if let Some(known) = &self.descriptor {
            return Ok(Arc::clone(known));
        }
        match self.ask(&Request::Describe, deadline)? {
            Reply::Described(descriptor) => {
                let descriptor: Arc<[u8]> = descriptor.into();
                self.descriptor = Some(Arc::clone(&descriptor));
                Ok(descriptor)
            }
            _ => Err(Lie::Answer.into()),
        }
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, request: &Request, deadline: Instant) -> Result<Reply, PeerError> {
        self.drop_answers(deadline)?;
        self.channel.send(&request.body(), deadline)?;
        match Reply::parse(self.channel.receive(deadline)?)? {
            Reply::Refused(refusal) => Err(refusal.into()),
            reply => Ok(reply),
        }
    }

    /// Asks for bytes, which [`bytes`](Self::bytes) waits for.
    pub(crate) fn ask_bytes(
        &mut self,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
    ) -> Result<(), PeerError> {
        let request = Request::Read { lease, spans: spans.to_vec() };
        self.channel.send(&request.body(), deadline)?;
        self.unread += 1;
        Ok(())
    }

    /// Waits for the answer to the first request for bytes that has none: so many.
    pub(crate) fn bytes(&mut self, asked: usize, deadline: Instant) -> Result<&[u8], PeerError> {
        let body = self.channel.receive(deadline)?;
        self.unread = self.unread.saturating_sub(1);
        match Reply::bytes(body) {
            Some(bytes) if bytes.len() == asked => Ok(bytes),
            Some(bytes) => Err(Lie::Bytes { bytes: bytes.len(), asked }.into()),
            None => match Reply::parse(body)? {
                Reply::Refused(refusal) => Err(refusal.into()),
                _ => Err(Lie::Answer.into()),
            },
        }
    }

    /// Receives what nobody has waited for, because bytes before it were refused or their caller has panicked.
    pub(crate) fn drop_answers(&mut self, deadline: Instant) -> Result<(), PeerError> {
        while guard!("remote.drops-answers-of-others", self.unread > 0, else false) {
            self.channel.receive(deadline)?;
            self.unread -= 1;
        }
        Ok(())
    }

    fn done(&mut self, request: &Request, deadline: Instant) -> Result<(), PeerError> {
        match self.ask(request, deadline)? {
            Reply::Done => Ok(()),
            _ => Err(Lie::Answer.into()),
        }
    }

    /// Finds the longest run of `keys` that the node holds, and pins it for `lease`. Of more than [`LIST_MAX`] blocks,
    /// the first ones are asked for.
    ///
    /// # Errors
    /// [`PeerError`]; a [`Lie`] if an address is not within the node's memory.
    pub fn find_and_pin(
        &mut self,
        keys: &[RecordKey],
        lease: Duration,
        deadline: Instant,
    ) -> Result<Found, PeerError> {
        let blocks = keys.get(..LIST_MAX).unwrap_or(keys).to_vec();
        let asked = blocks.len();
        match self.ask(&Request::Find { lease, blocks }, deadline)? {
            Reply::Found(found) => {
                self.check(&found, asked)?;
                Ok(found)
            }
            _ => Err(Lie::Answer.into()),
        }
    }

    /// Checks that an answer can be true.
    fn check(&self, found: &Found, asked: usize) -> Result<(), Lie> {
        let Facts { memory_bytes, slot_bytes } = self.facts;
        if found.blocks.len() > asked {
            return Err(Lie::Blocks { blocks: found.blocks.len(), asked });
        }
        for block in &found.blocks {
            let Span { address, bytes } = block.span;
            let bytes = u64::from(bytes);
            let end = address.checked_add(bytes);
            let within = end.is_some_and(|end| end <= memory_bytes) && bytes <= slot_bytes;
            let is_too_short = block.head.is_none() && bytes < ENTRY_BYTES as u64;
            if !within || is_too_short {
                return Err(Lie::Address { address, bytes, memory_bytes });
            }
        }
        Ok(())
    }

    /// The same as [`read_each`](Self::read_each), with each record in memory of its own.
    ///
    /// # Errors
    /// [`PeerError`], if bytes did not come.
    pub fn read(
        &mut self,
        transfer: &mut dyn Transfer,
        found: &Found,
        keys: &[RecordKey],
        deadline: Instant,
    ) -> Result<Vec<Read>, PeerError> {
        let count = found.lease.map_or(0, |_| found.blocks.len().min(keys.len()));
        let mut records = vec![Err(Unfit::Short); count];
        let keep = |at: usize, record: Result<&[u8], Unfit>| {
            if let Some(kept) = records.get_mut(at) {
                *kept = record.map(<[u8]>::to_vec);
            }
        };
        self.read_each(transfer, found, keys, deadline, keep)?;
        Ok(records)
    }

    /// Reads the blocks of an answer to `keys`, in few spans: those that lie side by side are read as one. Says of each, with
    /// its place in `keys`, once what was read, in the order in which it comes. A record counts only if it is the right
    /// one of the right write, whole (H8, H21); the lease may have ended meanwhile.
    ///
    /// # Errors
    /// [`PeerError`], if bytes did not come. What was said before is right all the same.
    pub fn read_each(
        &mut self,
        transfer: &mut dyn Transfer,
        found: &Found,
        keys: &[RecordKey],
        deadline: Instant,
        mut each: impl FnMut(usize, Result<&[u8], Unfit>),
    ) -> Result<(), PeerError> {
        let Some(lease) = found.lease else { return Ok(()) };
        let joined = Joined::of(found, JOINED_MAX);
        let mut said = vec![false; found.blocks.len().min(keys.len())];
        let mut say = |span: usize, bytes: &[u8]| {
            for (place, offset) in joined.blocks_of(span) {
                let of = found.blocks.get(place).zip(keys.get(place));
                let (Some((at, &key)), Some(said)) = (of, said.get_mut(place)) else { continue };
                if std::mem::replace(said, true) {
                    continue;
                }
                let slot = bytes.get(offset..).unwrap_or_default();
                let slot = slot.get(..at.span.bytes as usize).unwrap_or(slot);
                let record = at.record(slot, key);
                each(place, record.as_deref().map_err(|unfit| *unfit));
            }
        };
        transfer.read(self, lease, joined.spans(), deadline, &mut say)?;
        for (place, _) in said.iter().enumerate().filter(|(_, said)| !**said) {
            each(place, Err(Unfit::Short));
        }
        Ok(())
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// [`PeerError`]; [`Refusal::NoLease`](crate::Refusal::NoLease) if its time had come before.
    pub fn end(&mut self, lease: LeaseId, deadline: Instant) -> Result<(), PeerError> {
        self.done(&Request::End { lease }, deadline)
    }

    /// Ends a lease without waiting: the node says nothing of it, not even that its time had come before.
    ///
    /// # Ordering
    /// The lease has ended before the node answers a later call of this connection.
    ///
    /// # Errors
    /// [`PeerError`], if it could not be sent.
    pub fn release(&mut self, lease: LeaseId, deadline: Instant) -> Result<(), PeerError> {
        self.channel.send(&Request::Release { lease }.body(), deadline)
    }

    /// Has the node keep a record.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn put(
        &mut self,
        key: RecordKey,
        record: Vec<u8>,
        deadline: Instant,
    ) -> Result<(), PeerError> {
        self.done(&Request::Put { key, record }, deadline)
    }

    /// Has the node forget records.
    ///
    /// # Errors
    /// [`PeerError`]. Some may be forgotten.
    pub fn forget(&mut self, keys: &[RecordKey], deadline: Instant) -> Result<(), PeerError> {
        for keys in keys.chunks(LIST_MAX) {
            self.done(&Request::Forget { blocks: keys.to_vec() }, deadline)?;
        }
        Ok(())
    }

    /// Has the node forget all records of a format.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn clear(&mut self, format: u64, deadline: Instant) -> Result<(), PeerError> {
        self.done(&Request::Clear { format }, deadline)
    }

    /// What has come to the node and gone of records of a format, from a place on: at most [`LIST_MAX`] changes. With `hosted`, also in
    /// the host tier that the node [shares](crate::Node::share). There are no more only if the place is still the same.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn changes(
        &mut self,
        from: Cursor,
        (hosted, format): (bool, u64),
        deadline: Instant,
    ) -> Result<Changes, PeerError> {
        match self.ask(&Request::Changes { from, hosted, format }, deadline)? {
            Reply::Changes(changes) => Ok(changes),
            _ => Err(Lie::Answer.into()),
        }
    }
}
