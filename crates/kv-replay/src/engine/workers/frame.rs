//! Frames: what the manager's process and its workers tell each other over pipes.
//!
//! A frame is `KVRW`, its kind (4 bytes), the length of its body (8 bytes), the body, and the 64 bits of XXH3
//! over all before. Both ends are one program on one machine, so numbers are in its byte order. Plans,
//! snapshots and completions are frames whose bodies are messages of `kv-manager`.

use std::io::Read;

use bytemuck::{NoUninit, Pod};
use cuda_driver::guard;
use kv_plane::manager::Row;
use kv_pool::Slot;
use serde::{Serialize, de::DeserializeOwned};
use xxhash_rust::xxh3::xxh3_64;

use super::error::FrameError;
use crate::engine::batch::{Batch, Further, Launch, Rejected};

const MAGIC: [u8; 4] = *b"KVRW";
const HEAD: usize = 16;
const TAIL: usize = 8;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// To a worker: the device to open.
    Open = 1,
    /// To the manager: the device is open.
    Opened = 2,
    /// To a worker: its share of the model.
    Share = 3,
    /// To the manager: the share has memory.
    Ready = 4,
    /// A message of `kv-manager`, in either direction.
    Message = 5,
    /// To a worker: what the engine computes in the step of the plan before it.
    Work = 6,
    /// To the manager: the checksums that were read in a step.
    Checksums = 7,
    /// To a worker: so many device blocks are to have memory, and whether to answer.
    Memory = 8,
    /// To the manager: the memory that blocks have.
    Mapped = 9,
    /// To a worker: there will be no more plans.
    Close = 10,
    /// To the manager: everything is released.
    Closed = 11,
    /// To the manager: the worker cannot go on, and why.
    Refused = 12,
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::Open,
        Self::Opened,
        Self::Share,
        Self::Ready,
        Self::Message,
        Self::Work,
        Self::Checksums,
        Self::Memory,
        Self::Mapped,
        Self::Close,
        Self::Closed,
        Self::Refused,
    ];
}

#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
}

pub(super) fn append(into: &mut Vec<u8>, kind: Kind, write: impl FnOnce(&mut Vec<u8>)) {
    let start = into.len();
    into.extend_from_slice(&MAGIC);
    into.extend_from_slice(&(kind as u32).to_ne_bytes());
    into.extend_from_slice(&[0; 8]);
    write(into);
    let length = (into.len() - start - HEAD) as u64;
    into[start + HEAD - 8..start + HEAD].copy_from_slice(&length.to_ne_bytes());
    let checksum = xxh3_64(&into[start..]);
    into.extend_from_slice(&checksum.to_ne_bytes());
}

pub(super) fn of_value(kind: Kind, value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A value of numbers and texts is always written.
    let text = serde_json::to_vec(value).unwrap_or_default();
    append(&mut bytes, kind, |body| body.extend_from_slice(&text));
    bytes
}

impl Frame {
    /// Reads the next frame; `None` if the stream has ended before it.
    pub(super) fn read(from: &mut impl Read) -> Result<Option<Self>, FrameError> {
        let mut bytes = Vec::new();
        from.by_ref().take(HEAD as u64).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let Some(&head) = bytes.first_chunk::<HEAD>() else {
            return Err(FrameError::Torn { bytes: bytes.len() as u64, expected: HEAD as u64 });
        };
        let [m0, m1, m2, m3, k0, k1, k2, k3, length @ ..] = head;
        let (magic, kind) = ([m0, m1, m2, m3], u32::from_ne_bytes([k0, k1, k2, k3]));
        if magic != MAGIC {
            return Err(FrameError::Magic { found: magic });
        }
        let length = u64::from_ne_bytes(length);
        // What is not sent is not allocated, whatever the length says.
        let rest = length.saturating_add(TAIL as u64);
        let read = from.by_ref().take(rest).read_to_end(&mut bytes)? as u64;
        if read != rest {
            return Err(FrameError::Torn { bytes: read, expected: rest });
        }
        let found = bytes.split_off(bytes.len() - TAIL);
        let sum = xxh3_64(&bytes).to_ne_bytes();
        if guard!("replay.frame-sum-compared", found != sum, else false) {
            return Err(FrameError::Checksum { bytes: length });
        }
        let known = Kind::ALL.into_iter().find(|known| *known as u32 == kind);
        let kind = known.ok_or(FrameError::Kind { kind })?;
        Ok(Some(Self { kind, body: bytes.split_off(HEAD) }))
    }

    pub(super) fn value<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        serde_json::from_slice(&self.body).map_err(FrameError::Value)
    }
}

/// Appends numbers, with how many there are.
pub(super) fn put<T: NoUninit>(into: &mut Vec<u8>, numbers: &[T]) {
    into.extend_from_slice(&(numbers.len() as u64).to_ne_bytes());
    into.extend_from_slice(bytemuck::cast_slice(numbers));
}

/// Takes numbers that [`put`] has appended from the front.
pub(super) fn take<T: Pod>(from: &mut &[u8]) -> Result<Vec<T>, FrameError> {
    let short = FrameError::Body { bytes: from.len() };
    let Some((count, rest)) = from.split_first_chunk::<8>() else { return Err(short) };
    let count = usize::try_from(u64::from_ne_bytes(*count)).unwrap_or(usize::MAX);
    let Some((numbers, rest)) = rest.split_at_checked(count.saturating_mul(size_of::<T>())) else {
        return Err(short);
    };
    *from = rest;
    Ok(bytemuck::pod_collect_to_vec(numbers))
}

/// Takes slots that [`put`] has appended from the front.
fn take_slots(from: &mut &[u8]) -> Result<Vec<Slot>, FrameError> {
    let slot = |number| Slot::new(number).ok_or(FrameError::Slot { number });
    take::<i64>(from)?.into_iter().map(slot).collect()
}

impl Batch {
    pub(super) fn put(&self, into: &mut Vec<u8>) {
        put(into, &self.slots);
        put(into, &self.keys);
        put(into, &self.lengths);
        put(into, &self.accepted);
        let rejected = self.rejected.iter();
        let rejected: Vec<_> =
            rejected.map(|one| [one.index as u32, one.row.index() as u32]).collect();
        put(into, &rejected);
        let launches = self.launches().iter();
        let launches: Vec<_> =
            launches.map(|one| [one.first, one.tokens, one.skip].map(|all| all as u64)).collect();
        put(into, &launches);
        put(into, &[self.further.len() as u64]);
        for further in &self.further {
            put(into, &further.slots);
            put(into, &further.keys);
            put(into, &further.lengths);
        }
    }

    /// Takes a batch from the front. It is that of a plan only if the worker's buffers have room for it.
    pub(super) fn take(from: &mut &[u8]) -> Result<Self, FrameError> {
        let (slots, keys) = (take_slots(from)?, take::<u64>(from)?);
        let (lengths, accepted) = (take::<u32>(from)?, take::<u32>(from)?);
        let rejected = take::<[u32; 2]>(from)?.into_iter();
        let rejected = rejected
            .map(|[index, row]| Rejected { index: index as usize, row: Row::new(row) })
            .collect();
        let launches = take::<[u64; 3]>(from)?.into_iter();
        let launches: Vec<_> = launches
            .map(|one| one.map(|all| usize::try_from(all).unwrap_or(usize::MAX)))
            .map(|[first, tokens, skip]| Launch { first, tokens, skip })
            .collect();
        // What is not there is not allocated, whatever the number says.
        let groups = take::<u64>(from)?.first().copied().unwrap_or(0);
        let mut one =
            || Ok(Further { slots: take_slots(from)?, keys: take(from)?, lengths: take(from)? });
        let further = (0..groups).map(|_| one());
        let further = further.collect::<Result<Vec<_>, FrameError>>()?;
        let ends = |launch: &Launch| launch.first.checked_add(launch.tokens);
        let covered =
            launches.iter().all(|launch| ends(launch).is_some_and(|end| end <= keys.len()));
        if !covered || !(slots.is_empty() || slots.len() == keys.len()) {
            return Err(FrameError::Launches { tokens: keys.len(), slots: slots.len() });
        }
        for further in further.iter().filter(|further| further.lengths.is_empty()) {
            // A state of each sequence has a key, and a token the same one in all groups.
            let expected = match further.keys.len() {
                0 => slots.len(),
                states => states,
            };
            if further.slots.len() != expected {
                return Err(FrameError::Launches { tokens: expected, slots: further.slots.len() });
            }
        }
        let open = keys.len();
        Ok(Self { slots, keys, lengths, accepted, rejected, further, launches, open, written: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
        Frame::read(&mut &bytes[..])
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        append(&mut bytes, Kind::Work, |body| put(body, &[1_u64, 2, 3]));
        append(&mut bytes, Kind::Close, |_| ());
        let from = &mut &bytes[..];
        let frame = Frame::read(from).unwrap().unwrap();
        assert_eq!(frame.kind, Kind::Work);
        assert_eq!(take::<u64>(&mut &frame.body[..]).unwrap(), [1, 2, 3]);
        assert_eq!(Frame::read(from).unwrap().unwrap().kind, Kind::Close);
        assert!(Frame::read(from).unwrap().is_none());
    }

    #[test]
    fn no_byte_of_a_frame_may_be_another() {
        let bytes = of_value(Kind::Ready, &7);
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x10;
            assert!(read(&wrong).is_err(), "byte {at}");
            assert!(at == 0 || read(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(read(&bytes).unwrap().unwrap().value::<u64>().unwrap(), 7);
    }

    fn slots<const N: usize>(places: [u32; N]) -> Vec<Slot> {
        places.map(Slot::from).to_vec()
    }

    /// What is written in a group of windows and in one of states, of one sequence.
    fn further(window: Vec<Slot>) -> Vec<Further> {
        let window = Further { slots: window, ..Further::default() };
        let states = Further { slots: slots([3]), keys: vec![30], ..Further::default() };
        let drafts = Further { keys: vec![8, 9], lengths: vec![2], ..Further::default() };
        vec![window, states, drafts]
    }

    #[test]
    fn a_batch_arrives_as_it_was() {
        let batch = Batch {
            slots: slots([5, 6, 7]),
            keys: vec![50, 60, 70],
            lengths: vec![3],
            accepted: vec![1],
            rejected: vec![Rejected { index: 0, row: Row::new(9) }],
            further: further(vec![Slot::from(5), Slot::NONE, Slot::from(7)]),
            launches: vec![Launch { first: 0, tokens: 3, skip: 1 }],
            ..Batch::default()
        };
        let mut bytes = Vec::new();
        batch.put(&mut bytes);
        let arrived = Batch::take(&mut &bytes[..]).unwrap();
        assert_eq!(format!("{:?}", arrived.launches()), format!("{:?}", batch.launches()));
        assert_eq!((arrived.slots, arrived.keys), (batch.slots, batch.keys));
        assert_eq!((arrived.lengths, arrived.accepted), (batch.lengths, batch.accepted));
        assert_eq!(arrived.rejected, batch.rejected);
        assert_eq!(arrived.further, batch.further);
        assert!(Batch::take(&mut &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn a_batch_whose_launches_go_beyond_its_tokens_is_refused() {
        let launch = Launch { first: 1, tokens: usize::MAX, skip: 0 };
        let batch = Batch { keys: vec![1, 2], launches: vec![launch], ..Batch::default() };
        let mut bytes = Vec::new();
        batch.put(&mut bytes);
        let refused = Batch::take(&mut &bytes[..]).unwrap_err();
        assert!(matches!(refused, FrameError::Launches { tokens: 2, slots: 0 }), "{refused}");
    }

    #[test]
    fn a_batch_with_too_few_slots_of_a_group_is_refused() {
        let (window, states) = (further(slots([5])), further(slots([5, 6])));
        let of_states = |one: Further| if one.keys == [30] { slots([3, 4]) } else { one.slots };
        let states = states
            .into_iter()
            .map(|one| Further { slots: of_states(one.clone()), ..one })
            .collect();
        for (further, tokens, given) in [(window, 2, 1), (states, 1, 2)] {
            let (own, keys) = (slots([5, 6]), vec![1, 2]);
            let batch = Batch { slots: own, keys, further, ..Batch::default() };
            let mut bytes = Vec::new();
            batch.put(&mut bytes);
            let refused = Batch::take(&mut &bytes[..]).unwrap_err();
            let expected = FrameError::Launches { tokens, slots: given };
            assert_eq!(refused.to_string(), expected.to_string());
        }
    }
}
