//! The side that goes on with a sequence: takes its parts as they come.

use std::time::{Duration, Instant};

use kv_pool::guard;
use kv_tier::RecordKey;

use super::offer::{CANCELLED, TAKEN, WITHDRAWN};
use super::{HandoverError, HandoverId, Kind, Part, Sheet, key};
use crate::address::after;
use crate::entry::ENTRY_BYTES;
use crate::message::Found;
use crate::{Peer, PeerError, Transfer};

/// Parts that are asked for at a time.
const ASK_MAX: usize = 256;
/// The shortest and the longest pause between two looks for parts that are not there.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(2)];

/// What a look for parts has brought.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Progress {
    /// Parts that have come by this look.
    pub came: usize,
    /// Parts that have not come.
    pub left: usize,
}

/// Which parts have come, and whether it is of use to go on.
type Outcome = (Vec<bool>, Result<(), HandoverError>);

/// Parts that were asked for and are there.
struct Asked<'a> {
    parts: &'a [Part],
    names: &'a [RecordKey],
    found: &'a Found,
    /// By when they are to be read.
    deadline: Instant,
}

/// A sequence that is taken over from another host.
///
/// Dropping it says nothing to the other side, which waits until its offer's time is over: [`take`](Self::take) it or
/// [`cancel`](Self::cancel) it.
#[derive(Debug)]
pub struct Pull {
    id: HandoverId,
    reader: u32,
    sheet: Sheet,
    /// Those that have not come, in the order in which they come, the next one last.
    left: Vec<Part>,
    lease: Duration,
}

impl Pull {
    /// Looks whether a sequence is offered under this number. None if it is not, or not yet. `reader` is this one's number among those
    /// of the [sheet](Sheet::readers); 0 if there is one. Parts are pinned for `lease` while they are read.
    ///
    /// # Errors
    /// [`HandoverError::Withdrawn`] if it was, and nobody has taken it; [`HandoverError::None`] if the sheet has no such reader;
    /// [`HandoverError::Sheet`], [`HandoverError::Peer`].
    pub fn open(
        peer: &mut Peer,
        transfer: &mut dyn Transfer,
        (id, reader): (HandoverId, u32),
        lease: Duration,
        deadline: Instant,
    ) -> Result<Option<Self>, HandoverError> {
        let mut whole = Vec::new();
        let mut next = 0..1_u32;
        while !next.is_empty() {
            let count = next.len().min(ASK_MAX);
            let asked: Vec<_> =
                next.clone().take(count).map(|at| key(id, Kind::Sheet(at))).collect();
            let found = peer.find_and_pin(&asked, lease, deadline)?;
            let Some(of) = found.lease else { return Ok(None) };
            let mut pieces = vec![None; found.blocks.len()];
            let read = peer.read_each(transfer, &found, &asked, deadline, |at, record| {
                if let (Some(piece), Ok(record)) = (pieces.get_mut(at), record) {
                    *piece = Some(record.to_vec());
                }
            });
            peer.release(of, deadline)?;
            read?;
            // What was written anew, or is gone, was withdrawn.
            for record in pieces {
                let Some(record) = record else { return Ok(None) };
                if record == [WITHDRAWN] {
                    return Err(HandoverError::Withdrawn);
                }
                let (length, piece) = Sheet::piece(&record)?;
                if next.start == 0 {
                    next.end = length.div_ceil(piece.len()) as u32;
                }
                next.start += 1;
                whole.extend_from_slice(piece);
                if whole.len() > length {
                    return Err(HandoverError::Sheet { field: "length" });
                }
            }
        }
        let sheet = Sheet::parse(&whole)?;
        if reader >= sheet.readers {
            let (what, count) = ("readers", sheet.readers);
            return Err(HandoverError::None { what, number: reader, count });
        }
        let mut left = sheet.parts();
        left.reverse();
        Ok(Some(Self { id, reader, sheet, left, lease }))
    }

    /// Takes the parts of these shards only: those that this reader's rank has heads of. To be called before parts are taken.
    ///
    /// # Errors
    /// [`HandoverError::None`] if the sheet has no such shard; all are taken then.
    pub fn take_shards(&mut self, shards: &[u32]) -> Result<(), HandoverError> {
        let count = self.sheet.shards;
        if let Some(&number) = shards.iter().find(|shard| **shard >= count) {
            return Err(HandoverError::None { what: "shards", number, count });
        }
        self.left.retain(|part| shards.contains(&part.shard));
        Ok(())
    }

    /// What is offered.
    #[must_use]
    pub fn sheet(&self) -> &Sheet {
        &self.sheet
    }

    /// Parts that have not come.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Reads the parts that are there, in their order, as far as none is missing, and says each once. Each is right: whole, of
    /// this hand-over and place, and of the length that the sheet says. Each call of the node has the time of a lease; behind the deadline,
    /// no further one is begun.
    ///
    /// # Errors
    /// [`HandoverError::Withdrawn`] if the offer is not there any more; [`HandoverError::Length`]; [`HandoverError::Peer`]. Parts that were said
    /// before are right, and are not asked for again.
    pub fn look(
        &mut self,
        peer: &mut Peer,
        transfer: &mut dyn Transfer,
        deadline: Instant,
        mut each: impl FnMut(Part, &[u8]),
    ) -> Result<Progress, HandoverError> {
        self.look_at(peer, deadline, by_host(transfer, &mut each))
    }

    /// Looks for parts as [`look`](Self::look) does, and has `read` read them and say of each whether it is right: what was
    /// [written](super::Offer::reserve) by something else than the host is read by something else, such as copies between devices, and its
    /// sum compared with [`Located::sum`](crate::message::Located::sum). `read` is told parts and where they are, in the same order; they are
    /// pinned meanwhile. Each has the length that the sheet says. Parts that are not right are asked for again.
    ///
    /// # Errors
    /// As of [`look`](Self::look), and what `read` answers; no part that it was told of has come then.
    pub fn look_by(
        &mut self,
        peer: &mut Peer,
        deadline: Instant,
        read: impl FnMut(&mut Peer, &[Part], &Found) -> Result<Vec<bool>, PeerError>,
    ) -> Result<Progress, HandoverError> {
        self.look_at(peer, deadline, by_another(read))
    }

    /// Asks for parts until one is missing or has not come, or the time is over. `read` reads those that are there.
    fn look_at(
        &mut self,
        peer: &mut Peer,
        until: Instant,
        mut read: impl FnMut(&mut Peer, &Sheet, Asked<'_>) -> Outcome,
    ) -> Result<Progress, HandoverError> {
        // One that is cut off spoils the connection, so each call has its time.
        let call = |lease| guard!("remote.each-call-has-its-time", after(lease), else until);
        let before = self.left.len();
        while !self.left.is_empty() {
            let deadline = call(self.lease);
            let mut asked: Vec<Part> = self.left.iter().rev().take(ASK_MAX).copied().collect();
            let mut names: Vec<_> =
                asked.iter().map(|part| key(self.id, Kind::Part(*part))).collect();
            let found = peer.find_and_pin(&names, self.lease, deadline)?;
            let Some(lease) = found.lease else { break };
            let is_all = found.blocks.len() >= asked.len();
            asked.truncate(found.blocks.len());
            names.truncate(found.blocks.len());
            let of = Asked { parts: &asked, names: &names, found: &found, deadline };
            let (came, outcome) = read(peer, &self.sheet, of);
            // Those that came are not left, in whatever order they came, and whatever came behind them.
            let parts: Vec<Part> =
                asked.iter().zip(&came).filter(|(_, came)| **came).map(|(part, _)| *part).collect();
            let from = self.left.len().saturating_sub(asked.len());
            let mut tail = self.left.split_off(from);
            tail.retain(|part| !parts.contains(part));
            self.left.append(&mut tail);
            let ended = peer.release(lease, deadline);
            outcome?;
            ended?;
            if parts.is_empty() || !is_all || Instant::now() >= until {
                break;
            }
        }
        let progress = Progress { came: before - self.left.len(), left: self.left.len() };
        let is_left = progress.came == 0 && progress.left > 0;
        if is_left
            && guard!("remote.notices-withdrawal", !self.is_offered(peer, call(self.lease))?, else false)
        {
            return Err(HandoverError::Withdrawn);
        }
        Ok(progress)
    }

    /// Whether the sheet is still there: it has more bytes than what is left of an offer that was withdrawn.
    fn is_offered(&self, peer: &mut Peer, deadline: Instant) -> Result<bool, PeerError> {
        let found = peer.find_and_pin(&[key(self.id, Kind::Sheet(0))], self.lease, deadline)?;
        let Some(lease) = found.lease else { return Ok(false) };
        peer.release(lease, deadline)?;
        let bytes = found.blocks.first().map_or(0, |at| at.span.bytes as usize);
        Ok(bytes > ENTRY_BYTES + 1)
    }

    /// [Looks](Self::look) for parts until all have come, with short pauses while there are none.
    ///
    /// # Errors
    /// As of [`look`](Self::look), and [`HandoverError::Late`] at the deadline; the connection goes on then, and so may the wait.
    pub fn wait(
        &mut self,
        peer: &mut Peer,
        transfer: &mut dyn Transfer,
        deadline: Instant,
        mut each: impl FnMut(Part, &[u8]),
    ) -> Result<(), HandoverError> {
        self.wait_at(peer, deadline, by_host(transfer, &mut each))
    }

    /// The same with [`look_by`](Self::look_by).
    ///
    /// # Errors
    /// As of [`look_by`](Self::look_by), and [`HandoverError::Late`] at the deadline.
    pub fn wait_by(
        &mut self,
        peer: &mut Peer,
        deadline: Instant,
        read: impl FnMut(&mut Peer, &[Part], &Found) -> Result<Vec<bool>, PeerError>,
    ) -> Result<(), HandoverError> {
        self.wait_at(peer, deadline, by_another(read))
    }

    fn wait_at(
        &mut self,
        peer: &mut Peer,
        deadline: Instant,
        mut read: impl FnMut(&mut Peer, &Sheet, Asked<'_>) -> Outcome,
    ) -> Result<(), HandoverError> {
        let [shortest, longest] = PAUSES;
        let mut pause = shortest;
        loop {
            let progress = self.look_at(peer, deadline, &mut read)?;
            if progress.left == 0 {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(HandoverError::Late { left: progress.left });
            }
            pause = if progress.came > 0 { shortest } else { (pause * 2).min(longest) };
            std::thread::park_timeout(pause);
        }
    }

    /// Tells the other side that all parts have come to this reader. It releases its blocks when all readers have said so.
    ///
    /// # Errors
    /// [`HandoverError::Late`] if parts are missing; [`HandoverError::Peer`]. The other side may or may not have heard it: it may be told
    /// again.
    pub fn take(&self, peer: &mut Peer, deadline: Instant) -> Result<(), HandoverError> {
        if !self.left.is_empty() {
            return Err(HandoverError::Late { left: self.left.len() });
        }
        Ok(peer.put(key(self.id, Kind::Verdict(self.reader)), vec![TAKEN], deadline)?)
    }

    /// Tells the other side that a sequence which it has not offered yet is not wanted: when it offers it, it finds that it is
    /// cancelled.
    ///
    /// # Errors
    /// [`HandoverError::Peer`]. The other side may or may not have heard it.
    pub fn decline(
        peer: &mut Peer,
        (id, reader): (HandoverId, u32),
        deadline: Instant,
    ) -> Result<(), HandoverError> {
        Ok(peer.put(key(id, Kind::Verdict(reader)), vec![CANCELLED], deadline)?)
    }

    /// Tells the other side that the sequence is not wanted any more.
    ///
    /// # Errors
    /// [`HandoverError::Peer`]. The other side may or may not have heard it.
    pub fn cancel(self, peer: &mut Peer, deadline: Instant) -> Result<(), HandoverError> {
        Self::decline(peer, (self.id, self.reader), deadline)
    }
}

/// Reads parts to the host, and says each that is right.
fn by_host<'a>(
    transfer: &'a mut dyn Transfer,
    each: &'a mut dyn FnMut(Part, &[u8]),
) -> impl FnMut(&mut Peer, &Sheet, Asked<'_>) -> Outcome + 'a {
    |peer, sheet, Asked { parts, names, found, deadline }| {
        let (mut came, mut wrong) = (vec![false; parts.len()], None);
        let read = peer.read_each(transfer, found, names, deadline, |at, record| {
            let (Some(&part), Ok(bytes)) = (parts.get(at), record) else { return };
            let expected = sheet.part_bytes(part).unwrap_or(0);
            if bytes.len() != expected as usize {
                wrong = Some(HandoverError::Length { part, bytes: bytes.len(), expected });
                return;
            }
            each(part, bytes);
            if let Some(came) = came.get_mut(at) {
                *came = true;
            }
        });
        (came, read.map_err(HandoverError::from).and(wrong.map_or(Ok(()), Err)))
    }
}

/// Has parts of the right length read by something else.
fn by_another(
    mut read: impl FnMut(&mut Peer, &[Part], &Found) -> Result<Vec<bool>, PeerError>,
) -> impl FnMut(&mut Peer, &Sheet, Asked<'_>) -> Outcome {
    move |peer, sheet, Asked { parts, found, .. }| {
        for (&part, at) in parts.iter().zip(&found.blocks) {
            let expected = sheet.part_bytes(part).unwrap_or(0);
            let bytes = at.record_span().bytes as usize;
            if bytes != expected as usize {
                return (Vec::new(), Err(HandoverError::Length { part, bytes, expected }));
            }
        }
        match read(peer, parts, found) {
            Ok(came) => (came, Ok(())),
            Err(error) => (Vec::new(), Err(error.into())),
        }
    }
}
