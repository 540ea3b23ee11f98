//! Frames: what the manager's process and its workers tell each other.
//!
//! A frame is `KVRW`, its kind (4 bytes), the length of its body (8 bytes), the body, and the 64 bits of XXH3
//! over all before. Numbers are little-endian. Plans, snapshots and completions are frames whose bodies are messages of
//! `kv-manager`; a kind that is the engine's has its bytes as they are.

use std::io::Read;

use cuda_driver::guard;
use xxhash_rust::xxh3::xxh3_64;

use super::error::FrameError;

const MAGIC: [u8; 4] = *b"KVRW";
const HEAD: usize = 16;
const TAIL: usize = 8;

/// Most bytes of a frame's body: more than any plan, snapshot or batch has, and few enough to have them in memory.
pub(super) const FRAME_BYTES_MAX: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// To a worker: who it is.
    Open = 1,
    /// To a worker: a question of the engine.
    Ask = 2,
    /// To the manager: the answer.
    Answer = 3,
    /// To a worker: the memory to begin with, and what the manager's tables look like.
    Begin = 4,
    /// To the manager: the worker has its memory.
    Ready = 5,
    /// A message of `kv-manager`, in either direction.
    Message = 6,
    /// To a worker: what the engine sends along with the plan before it.
    Work = 7,
    /// To the manager: what the engine says of a step that is complete, before its completion.
    Result = 8,
    /// To a worker: so many device blocks are to have memory, and whether to answer.
    Memory = 9,
    /// To the manager: the memory that blocks have.
    Mapped = 10,
    /// To a worker: there will be no more plans.
    Close = 11,
    /// To the manager: everything is released, and what the engine says at the end.
    Closed = 12,
    /// To the manager: the worker cannot go on, and why.
    Refused = 13,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::Open,
        Self::Ask,
        Self::Answer,
        Self::Begin,
        Self::Ready,
        Self::Message,
        Self::Work,
        Self::Result,
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
    into.extend_from_slice(&(kind as u32).to_le_bytes());
    into.extend_from_slice(&[0; 8]);
    write(into);
    let length = (into.len() - start - HEAD) as u64;
    into[start + HEAD - 8..start + HEAD].copy_from_slice(&length.to_le_bytes());
    let checksum = xxh3_64(&into[start..]);
    into.extend_from_slice(&checksum.to_le_bytes());
}

/// A frame of its own.
pub(super) fn of(kind: Kind, write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    append(&mut bytes, kind, write);
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
        let (magic, kind) = ([m0, m1, m2, m3], u32::from_le_bytes([k0, k1, k2, k3]));
        if magic != MAGIC {
            return Err(FrameError::Magic { found: magic });
        }
        let length = u64::from_le_bytes(length);
        if guard!("replay.frames-are-bounded", length > FRAME_BYTES_MAX, else false) {
            return Err(FrameError::TooLong { bytes: length });
        }
        // What is not sent is not allocated, whatever the length says.
        let rest = length.saturating_add(TAIL as u64);
        let read = from.by_ref().take(rest).read_to_end(&mut bytes)? as u64;
        if read != rest {
            return Err(FrameError::Torn { bytes: read, expected: rest });
        }
        let found = bytes.split_off(bytes.len() - TAIL);
        let sum = xxh3_64(&bytes).to_le_bytes();
        if guard!("replay.frame-sum-compared", found != sum, else false) {
            return Err(FrameError::Checksum { bytes: length });
        }
        let known = Kind::ALL.into_iter().find(|known| *known as u32 == kind);
        let kind = known.ok_or(FrameError::Kind { kind })?;
        Ok(Some(Self { kind, body: bytes.split_off(HEAD) }))
    }

    /// The same frame, if it is of the kind that was to come.
    pub(super) fn expected(self, kind: Kind, expected: &'static str) -> Result<Self, FrameError> {
        if self.kind == kind { Ok(self) } else { Err(self.unexpected(expected)) }
    }

    pub(super) fn unexpected(&self, expected: &'static str) -> FrameError {
        FrameError::Unexpected { found: format!("{:?}", self.kind), expected }
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
        append(&mut bytes, Kind::Work, |body| body.extend_from_slice(&[1, 2, 3]));
        append(&mut bytes, Kind::Close, |_| ());
        let from = &mut &bytes[..];
        let frame = Frame::read(from).unwrap().unwrap();
        assert_eq!((frame.kind, &frame.body[..]), (Kind::Work, &[1, 2, 3][..]));
        assert_eq!(Frame::read(from).unwrap().unwrap().kind, Kind::Close);
        assert!(Frame::read(from).unwrap().is_none());
    }

    #[test]
    fn no_byte_of_a_frame_may_be_another() {
        let bytes = of(Kind::Ready, |body| body.push(7));
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x10;
            assert!(read(&wrong).is_err(), "byte {at}");
            assert!(at == 0 || read(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(read(&bytes).unwrap().unwrap().body, [7]);
    }

    /// A frame that says of itself what cannot be, and its bytes come without an end.
    #[test]
    fn a_frame_without_an_end_is_not_read_to_it() {
        let mut head = of(Kind::Work, |_| ());
        head.truncate(HEAD);
        head[HEAD - 8..].copy_from_slice(&(FRAME_BYTES_MAX + 1).to_le_bytes());
        let refused = Frame::read(&mut &head[..]).unwrap_err();
        assert!(matches!(refused, FrameError::TooLong { bytes } if bytes > FRAME_BYTES_MAX));
    }
}
