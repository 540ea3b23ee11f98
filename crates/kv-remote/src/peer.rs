//! A connection to another node, as the side that asks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::channel::{Channel, Facts};
use crate::entry::{ENTRY_BYTES, Unfit};
use crate::message::{Changes, Cursor, Found, LIST_MAX, LeaseId, Reply, Request, Span};
use crate::node::FRAME_MAX;
use crate::transfer::Transfer;
use crate::wire::Key as Block;
use crate::{Key, Lie, Member, PeerError};

/// A record that was read, or why it is not to be used.
pub type Read = Result<Vec<u8>, Unfit>;

/// Bytes between two blocks that are read with them rather than left out.
const GAP: u64 = 64;

/// Bytes that are read as one span, at most, unless one block has more: what was read is looked at while it is in a cache.
const JOINED_MAX: u64 = 512 << 10;

/// A connection to a node. Each call has a deadline.
///
/// After an error that is no [refusal](PeerError::is_refusal), the connection is of no use: drop it. The
/// node then ends its leases.
#[derive(Debug)]
pub struct Peer {
    channel: Channel,
    facts: Facts,
    /// What the node has said of its memory, once it was asked.
    descriptor: Option<Arc<[u8]>>,
}

impl Peer {
    /// Calls a member. Both sides prove that they have the key.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn connect(member: &Member, key: &Key, deadline: Instant) -> Result<Self, PeerError> {
        let Member { name, address } = member;
        let (channel, facts) = Channel::connect(address, name, key, FRAME_MAX as usize, deadline)?;
        Ok(Self { channel, facts, descriptor: None })
    }

    /// Bytes of the node's memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.facts.memory_bytes
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
        self.channel.send(&request.body(), deadline)?;
        let body = self.channel.receive(deadline)?;
        match Reply::parse(&body)? {
            Reply::Refused(refusal) => Err(refusal.into()),
            reply => Ok(reply),
        }
    }

    fn done(&mut self, request: &Request, deadline: Instant) -> Result<(), PeerError> {
        match self.ask(request, deadline)? {
            Reply::Done => Ok(()),
            _ => Err(Lie::Answer.into()),
        }
    }

    /// Finds the longest run of `blocks` that the node holds, and pins it for `lease`. Of more than [`LIST_MAX`] blocks,
    /// the first ones are asked for.
    ///
    /// # Errors
    /// [`PeerError`]; a [`Lie`] if an address is not within the node's memory.
    pub fn find_and_pin(
        &mut self,
        blocks: &[Block],
        lease: Duration,
        deadline: Instant,
    ) -> Result<Found, PeerError> {
        let blocks = blocks.get(..LIST_MAX).unwrap_or(blocks).to_vec();
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
            if !within || bytes < ENTRY_BYTES as u64 {
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
        blocks: &[Block],
        deadline: Instant,
    ) -> Result<Vec<Read>, PeerError> {
        let count = found.lease.map_or(0, |_| found.blocks.len().min(blocks.len()));
        let mut records = vec![Err(Unfit::Short); count];
        let keep = |at: usize, record: Result<&[u8], Unfit>| {
            if let Some(kept) = records.get_mut(at) {
                *kept = record.map(<[u8]>::to_vec);
            }
        };
        self.read_each(transfer, found, blocks, deadline, keep)?;
        Ok(records)
    }

    /// Reads the blocks of an answer to `blocks`, in few spans: those that lie side by side are read as one. Says of each, with
    /// its place in `blocks`, once what was read, in the order in which it comes. A record counts only if it is the right
    /// one of the right write, whole (H8, H21); the lease may have ended meanwhile.
    ///
    /// # Errors
    /// [`PeerError`], if bytes did not come. What was said before is right all the same.
    pub fn read_each(
        &mut self,
        transfer: &mut dyn Transfer,
        found: &Found,
        blocks: &[Block],
        deadline: Instant,
        mut each: impl FnMut(usize, Result<&[u8], Unfit>),
    ) -> Result<(), PeerError> {
        let Some(lease) = found.lease else { return Ok(()) };
        let Joined { spans, mut places } = Joined::of(found);
        let mut say = |span: usize, bytes: &[u8]| {
            let first = places.partition_point(|place| place.span < span);
            for place in places.iter_mut().skip(first).take_while(|place| place.span == span) {
                let of = found.blocks.get(place.block).zip(blocks.get(place.block));
                let (Some((at, &block)), false) = (of, std::mem::replace(&mut place.said, true))
                else {
                    continue;
                };
                let slot = bytes.get(place.offset..).unwrap_or_default();
                let slot = slot.get(..at.span.bytes as usize).unwrap_or(slot);
                each(place.block, at.record(slot, block));
            }
        };
        transfer.read(self, lease, &spans, deadline, &mut say)?;
        for place in places.iter().filter(|place| !place.said && place.block < blocks.len()) {
            each(place.block, Err(Unfit::Short));
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

    /// Has the node keep a record.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn put(
        &mut self,
        (group, name): Block,
        record: Vec<u8>,
        deadline: Instant,
    ) -> Result<(), PeerError> {
        self.done(&Request::Put { group, name, record }, deadline)
    }

    /// Has the node forget blocks.
    ///
    /// # Errors
    /// [`PeerError`]. Some may be forgotten.
    pub fn forget(&mut self, blocks: &[Block], deadline: Instant) -> Result<(), PeerError> {
        for blocks in blocks.chunks(LIST_MAX) {
            self.done(&Request::Forget { blocks: blocks.to_vec() }, deadline)?;
        }
        Ok(())
    }

    /// Has the node forget everything.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn clear(&mut self, deadline: Instant) -> Result<(), PeerError> {
        self.done(&Request::Clear, deadline)
    }

    /// What has come to the node and gone, from a place on: at most [`LIST_MAX`] changes.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn changes(&mut self, from: Cursor, deadline: Instant) -> Result<Changes, PeerError> {
        match self.ask(&Request::Changes { from }, deadline)? {
            Reply::Changes(changes) => Ok(changes),
            _ => Err(Lie::Answer.into()),
        }
    }
}

/// The blocks of an answer as few spans, in the order of their addresses.
struct Joined {
    spans: Vec<Span>,
    /// Where each block is, in the same order.
    places: Vec<Place>,
}

/// Where a block is in the bytes of a span.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Place {
    /// Its place in the answer.
    block: usize,
    span: usize,
    offset: usize,
    /// Whether it was said what was read.
    said: bool,
}

impl Joined {
    fn of(found: &Found) -> Self {
        let mut order: Vec<_> = (0..).zip(found.blocks.iter().map(|block| block.span)).collect();
        order.sort_unstable_by_key(|(_, span)| span.address);
        let (mut spans, mut places) = (Vec::<Span>::new(), Vec::with_capacity(order.len()));
        for (block, span) in order {
            let end = span.address.saturating_add(span.bytes.into());
            let joins = spans.last_mut().filter(|last| {
                let last_end = last.address.saturating_add(last.bytes.into());
                span.address <= last_end.saturating_add(GAP) && end - last.address <= JOINED_MAX
            });
            let offset = match joins {
                Some(last) => {
                    let bytes = u64::from(last.bytes).max(end - last.address);
                    last.bytes = bytes as u32;
                    (span.address - last.address) as usize
                }
                None => {
                    spans.push(span);
                    0
                }
            };
            places.push(Place { block, span: spans.len() - 1, offset, said: false });
        }
        Self { spans, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Located;

    type Spans = Vec<(u64, u32)>;
    type Places = Vec<(usize, usize)>;

    /// The spans, and of each block its span and where it begins there.
    fn joined(spans: &[(u64, u32)]) -> (Spans, Places) {
        let span = |&(address, bytes): &(u64, u32)| Span { address, bytes };
        let blocks =
            spans.iter().map(|of| Located { span: span(of), generation: 0 }).collect::<Vec<_>>();
        let joined = Joined::of(&Found { lease: None, blocks });
        let spans = joined.spans.iter().map(|span| (span.address, span.bytes)).collect();
        let mut places = joined.places;
        places.sort_unstable_by_key(|place| place.block);
        (spans, places.iter().map(|place| (place.span, place.offset)).collect())
    }

    #[test]
    fn blocks_side_by_side_are_one_span_and_each_is_found_in_the_bytes() {
        assert_eq!(
            joined(&[(0, 100), (128, 100), (256, 100)]),
            (vec![(0, 356)], vec![(0, 0), (0, 128), (0, 256)])
        );
        assert_eq!(
            joined(&[(256, 100), (0, 100), (128, 90)]),
            (vec![(0, 356)], vec![(0, 256), (0, 0), (0, 128)])
        );
        let apart = joined(&[(1000, 10), (0, 10), (1064, 10), (500, 10)]);
        assert_eq!(
            apart,
            (vec![(0, 10), (500, 10), (1000, 74)], vec![(2, 0), (0, 0), (2, 64), (1, 0)])
        );
        // A peer may name one block twice, or one within the other.
        assert_eq!(
            joined(&[(0, 100), (0, 100), (10, 20)]),
            (vec![(0, 100)], vec![(0, 0), (0, 0), (0, 10)])
        );
        assert_eq!(joined(&[]), (vec![], vec![]));
    }
}
