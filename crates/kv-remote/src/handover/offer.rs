//! The side that computes: gives parts as they come to be, and waits for the other side's word.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_pool::guard;
use kv_tier::RecordKey;

use super::{HandoverError, HandoverId, Kind, Part, Sheet, key};
use crate::address::after;
use crate::leases::{PeerHost, ReaderId};
use crate::message::{LIST_MAX, Span};
use crate::{Node, Refusal, Reserved};

/// What has become of an offer.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// The other side has not said anything, and there is time.
    Waiting,
    /// The other side has all parts: the blocks may be released.
    Taken,
    /// The other side does not want it any more.
    Cancelled,
    /// Its time is over. The other side may be gone, or may have taken it and not have been heard.
    Expired,
}

/// What the other side says: the first byte of its record.
pub(super) const TAKEN: u8 = 1;
pub(super) const CANCELLED: u8 = 2;
/// All that is left of an offer that was not taken, in place of its sheet.
pub(super) const WITHDRAWN: u8 = 3;

/// A sequence that is offered to another host. Its parts lie in the node's memory, pinned under leases.
///
/// All offers of a node together leave an eighth of its slots to what is not offered, such as the words of the other side.
///
/// Dropping it withdraws it: its leases end once, and its parts are found no more. A reader that is at it finds out, and so does
/// one that comes later.
#[derive(Debug)]
pub struct Offer {
    node: Arc<Node>,
    id: HandoverId,
    sheet: Sheet,
    reader: ReaderId,
    given: HashSet<Part>,
    /// Readers that have not taken it.
    readers: Vec<u32>,
    until: Instant,
    verdict: Verdict,
}

/// Readers of this process, from the last number downwards: those of connections are counted from the first one.
static READERS: AtomicU64 = AtomicU64::new(u64::MAX);

impl Offer {
    /// Offers a sequence under a number, for so long, or for the longest lease of the node if that is shorter. The sheet is there at
    /// once; the parts come by [`give`](Self::give). One that is refused is [declined](Self::decline).
    ///
    /// # Errors
    /// [`HandoverError::Sheet`], [`HandoverError::Node`].
    pub fn new(
        node: &Arc<Node>,
        id: HandoverId,
        sheet: Sheet,
        lasts: Duration,
    ) -> Result<Self, HandoverError> {
        if let Err(error) = sheet.check() {
            let _ = Self::decline(node, id);
            return Err(error);
        }
        let lasts = lasts.min(node.lease_max());
        let offer = Self {
            node: Arc::clone(node),
            id,
            reader: ReaderId(READERS.fetch_sub(1, Ordering::Relaxed)),
            given: HashSet::new(),
            readers: (0..sheet.readers).collect(),
            until: guard!("remote.long-offers-last", after(lasts), else Instant::now()),
            sheet,
            verdict: Verdict::Waiting,
        };
        node.join(offer.reader, PeerHost::Offers);
        let records = offer.sheet.records(node.record_bytes() as usize);
        let named = (0..).zip(&records);
        let named: Vec<_> =
            named.map(|(at, record)| (key(id, Kind::Sheet(at)), record.as_slice())).collect();
        node.check_room(offer.reader, named.len())?;
        // The first piece comes last: a reader that finds it finds all.
        let (first, others) = named.split_at(1);
        for records in others.chunks(LIST_MAX).chain([first]) {
            offer.keep(records)?;
        }
        Ok(offer)
    }

    /// Tells the other side that a sequence will not be offered under this number: it waits for it no more.
    ///
    /// # Errors
    /// [`HandoverError::Node`] if there is no room for that, and the other side waits until its deadline.
    pub fn decline(node: &Node, id: HandoverId) -> Result<(), HandoverError> {
        Ok(node.put(key(id, Kind::Sheet(0)), &[WITHDRAWN])?)
    }

    /// What is offered.
    #[must_use]
    pub fn sheet(&self) -> &Sheet {
        &self.sheet
    }

    /// Parts that were not given.
    #[must_use]
    pub fn left(&self) -> usize {
        let count = self.sheet.part_count().unwrap_or(0) as usize;
        count.saturating_sub(self.given.len())
    }

    /// Gives parts whose bytes are final: those of steps that are complete. They are copied. The reader takes them in the order of
    /// the [sheet](Sheet::chunk_places), and waits for the first one that is missing.
    ///
    /// # Errors
    /// [`HandoverError::NoPart`], [`HandoverError::Length`], and nothing was given; [`HandoverError::Node`], and the offer is of no
    /// use any more: drop it. [`HandoverError::Withdrawn`] if its time is over.
    pub fn give(&mut self, parts: &[(Part, &[u8])]) -> Result<(), HandoverError> {
        let lengths = parts.iter().map(|&(part, bytes)| (part, bytes.len()));
        let new = self.check(lengths)?;
        let of = |&(part, bytes): &(Part, _)| (key(self.id, Kind::Part(part)), bytes);
        let records: Vec<(RecordKey, &[u8])> = parts.iter().map(of).collect();
        self.node.check_room(self.reader, records.len())?;
        // First, so that whatever is kept of them is forgotten with the offer.
        guard!("remote.remembers-parts-first", self.given.extend(new));
        records.chunks(LIST_MAX).try_for_each(|records| self.keep(records))
    }

    /// Makes room for parts that something else than the host writes, such as copies on a device, into the node's memory. They are
    /// offered once they are [given](Self::give_written).
    ///
    /// # Errors
    /// As of [`give`](Self::give).
    pub fn reserve(&self, parts: &[Part]) -> Result<Places, HandoverError> {
        let length = |part| (part, self.sheet.part_bytes(part).unwrap_or(0) as usize);
        self.check(parts.iter().map(|&part| length(part)))?;
        let record = |&part: &Part| (key(self.id, Kind::Part(part)), length(part).1 as u32);
        let records: Vec<_> = parts.iter().map(record).collect();
        self.node.check_room(self.reader, records.len())?;
        Ok(Places { reserved: self.node.reserve(&records)?, parts: parts.to_vec() })
    }

    /// Gives parts that were written where there was [room](Self::reserve) for them, each with its
    /// [sum](crate::message::Located::sum): both sides sum as they have agreed.
    ///
    /// # Errors
    /// As of [`give`](Self::give), and [`HandoverError::Node`] with [`Refusal::Length`] for another number of sums.
    pub fn give_written(&mut self, places: Places, sums: &[u64]) -> Result<(), HandoverError> {
        let Places { reserved, parts } = places;
        let length = |part| (part, self.sheet.part_bytes(part).unwrap_or(0) as usize);
        let new = self.check(parts.iter().map(|&part| length(part)))?;
        let names = reserved.keys();
        let is_here = reserved.is_of(&self.node);
        // Of another offer, or of the same sequence's on another node.
        if let Some((&part, _)) = parts
            .iter()
            .zip(&names)
            .find(|(part, of)| !is_here || key(self.id, Kind::Part(**part)) != **of)
        {
            return Err(HandoverError::NoPart { part });
        }
        reserved.keep(sums)?;
        // First, so that they are forgotten with the offer also where they cannot be pinned.
        self.given.extend(new);
        names.chunks(LIST_MAX).try_for_each(|names| self.pin(names))
    }

    /// Whether these parts can be given now.
    fn check(
        &self,
        parts: impl Iterator<Item = (Part, usize)>,
    ) -> Result<HashSet<Part>, HandoverError> {
        let mut new = HashSet::new();
        for (part, bytes) in parts {
            let expected = self.sheet.part_bytes(part).ok_or(HandoverError::NoPart { part })?;
            if bytes != expected as usize {
                return Err(HandoverError::Length { part, bytes, expected });
            }
            if self.given.contains(&part) || !new.insert(part) {
                return Err(HandoverError::NoPart { part });
            }
        }
        if Instant::now() >= self.until {
            return Err(HandoverError::Withdrawn);
        }
        Ok(new)
    }

    /// Puts records in the node's memory, and pins them until the end of the offer.
    fn keep(&self, records: &[(RecordKey, &[u8])]) -> Result<(), HandoverError> {
        for &(block, record) in records {
            self.node.put(block, record)?;
        }
        self.pin(&records.iter().map(|(block, _)| *block).collect::<Vec<_>>())
    }

    fn pin(&self, names: &[RecordKey]) -> Result<(), HandoverError> {
        let lasts = self.until.saturating_duration_since(Instant::now());
        let found = self.node.find_and_pin(self.reader, names, lasts)?;
        // What was not pinned has made room for another record meanwhile.
        if found.blocks.len() < names.len() {
            return Err(Refusal::NoRoom.into());
        }
        Ok(())
    }

    /// What the other side has said. To be called now and then, until it is no more [`Waiting`](Verdict::Waiting): it does not change
    /// any more then. It is taken when all readers have taken it, and cancelled when one does not want it.
    pub fn verdict(&mut self) -> Verdict {
        if self.verdict == Verdict::Waiting {
            let said: Vec<_> = self.readers.iter().map(|&reader| self.said(reader)).collect();
            let is_cancelled = said.iter().flatten().any(|said| *said != TAKEN);
            let mut said = said.into_iter();
            self.readers.retain(|_| said.next().flatten().is_none());
            let left = self.readers.len();
            let is_taken = guard!(
                "remote.waits-for-all-readers",
                left == 0,
                else left < self.sheet.readers as usize
            );
            self.verdict = match () {
                () if is_cancelled => Verdict::Cancelled,
                () if is_taken => Verdict::Taken,
                () if Instant::now() >= self.until => Verdict::Expired,
                () => Verdict::Waiting,
            };
        }
        self.verdict
    }

    /// The first byte of a reader's record, if it is there and right.
    fn said(&self, reader: u32) -> Option<u8> {
        let block = key(self.id, Kind::Verdict(reader));
        let found = self.node.find_and_pin(self.reader, &[block], Duration::from_secs(1)).ok()?;
        let (lease, at) = (found.lease?, found.blocks.first()?);
        let mut bytes = Vec::new();
        let read = self.node.read(self.reader, lease, &[at.span], &mut bytes);
        let _ = self.node.end(self.reader, lease);
        read.ok()?;
        at.record(&bytes, block).ok()?.first().copied()
    }
}

/// Room for parts in the node's memory, in the order in which they were named.
///
/// Drop it only when nothing writes there any more: others are given the room then.
#[derive(Debug)]
#[must_use = "dropping it gives the room to others"]
pub struct Places {
    reserved: Reserved,
    parts: Vec<Part>,
}

impl Places {
    /// Where each part is to be written in the node's memory.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = Span> + '_ {
        self.reserved.spans()
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        // The leases of this reader are those of this offer.
        guard!("remote.ends-leases-of-an-offer", self.node.end_reader(self.reader));
        let parts = self.given.iter().map(|part| key(self.id, Kind::Part(*part)));
        let pieces = self.sheet.records(self.node.record_bytes() as usize).len();
        let pieces = (0..pieces).map(|at| key(self.id, Kind::Sheet(at as u32)));
        let verdicts = (0..self.sheet.readers).map(|of| key(self.id, Kind::Verdict(of)));
        let all = pieces.chain(verdicts).chain(parts);
        guard!("remote.forgets-parts-of-an-offer", self.node.forget(&all.collect::<Vec<_>>()));
        if self.verdict != Verdict::Taken {
            let _ = Self::decline(&self.node, self.id);
        }
    }
}
