//! Messages between processes: plans, snapshots and completions as bytes, versioned and checked.
//!
//! A message is `KVPL`, the version and the kind (2 bytes each), the length of the body (4 bytes), the body,
//! and the 64 bits of XXH3 over all before. Numbers are little-endian.

use std::io::{self, Read};

use kv_pool::{BlockHash, BlockId, Location, TableEntry, Tier};
use kv_tier::codec::{FieldError, Fields, Writer};
use kv_tier::{BlockFault, Direction, TicketId, Transfer};
use xxhash_rust::xxh3::xxh3_64;

use crate::plan::{
    BatchRow, BlockCopy, BlockScrub, Completion, GranuleMove, LayerLoad, Outcome, RowEdit,
    Snapshot, SnapshotTable, Start, StepPlan,
};
use crate::plan::{Dropped, Forget, Gained, Settled};
use crate::{GroupId, Row, WorkerId};

const MAGIC: [u8; 4] = *b"KVPL";
const VERSION: u16 = 9;
/// The owner of a granule that is nobody's.
const NOBODY: u32 = 1 << 16;

const HEAD: usize = 12;
const TAIL: usize = 8;

/// What one process tells another.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Message {
    /// To a worker: a step.
    Plan(StepPlan),
    /// To a worker that was started anew, or has missed a plan.
    Snapshot(Snapshot),
    /// To the manager: what came of a step.
    Completion(Completion),
    /// To the manager: a ticket has ended.
    Settled(Settled),
    /// To the manager: a tier has dropped names.
    Dropped(Dropped),
    /// To the manager: names have come to a tier.
    Gained(Gained),
}

/// Why bytes are no message.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BytesError {
    /// There are fewer bytes than the message has, or more.
    #[error("{bytes} bytes are not a message of {expected}")]
    Length {
        /// Bytes given.
        bytes: usize,
        /// Bytes that the message has, or the fewest of any.
        expected: usize,
    },
    /// It does not begin as a message does.
    #[error("a message begins with {found:02x?}, not with {MAGIC:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// Another version of this crate wrote it.
    #[error("a message of version {version}, where {VERSION} is understood")]
    Version {
        /// The message's version.
        version: u16,
    },
    /// Its checksum is wrong.
    #[error("a message whose checksum is {found:#018x}, not {expected:#018x}")]
    Checksum {
        /// The checksum in the message.
        found: u64,
        /// The checksum of its bytes.
        expected: u64,
    },
    /// A field has a value that no message has.
    #[error("a message with {value} for its {field}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

kv_pool::one_line_debug!(BytesError);

/// A part of a message.
trait Wire: Sized {
    /// The fewest bytes that it has.
    const LEAST: usize;

    fn write(&self, out: &mut Writer);

    fn read(from: &mut Fields<'_>) -> Result<Self, FieldError>;
}

/// Values of which a message has all fields, one after the other.
macro_rules! of_fields {
    ($($of:ident { $($field:ident: $part:ty),+ $(,)? })+) => {$(
        impl Wire for $of {
            const LEAST: usize = 0 $(+ <$part>::LEAST)+;

            fn write(&self, out: &mut Writer) {
                $(self.$field.write(out);)+
            }

            fn read(from: &mut Fields<'_>) -> Result<Self, FieldError> {
                Ok(Self { $($field: Wire::read(from)?),+ })
            }
        }
    )+};
}

of_fields! {
    StepPlan {
        step: u64,
        after: u64,
        copies: Vec<BlockCopy>,
        scrubs: Vec<BlockScrub>,
        edits: Vec<RowEdit>,
        edit_ids: Vec<TableEntry>,
        batch: Vec<BatchRow>,
        draft_batch: Vec<BatchRow>,
        forgets: Vec<Forget>,
        transfers: Vec<Transfer>,
        layer_loads: Vec<LayerLoad>,
        moves: Vec<GranuleMove>,
    }
    BlockCopy { group: GroupId, from: Location, to: Location, tokens: u32, written_by: u64 }
    BlockScrub { group: GroupId, block: BlockId, after: u32 }
    RowEdit { group: GroupId, row: Row, first: u32, count: u32 }
    BatchRow { row: Row, tokens: u32, drafts: u32, input: u32, start: Start }
    Transfer {
        ticket: TicketId,
        tier: Tier,
        group: GroupId,
        direction: Direction,
        blocks: Vec<(BlockHash, BlockId)>,
    }
    LayerLoad { ticket: TicketId, group: GroupId, from: BlockId, to: BlockId }
    GranuleMove { granule: u32, from: Option<GroupId>, to: Option<GroupId> }
    Location { tier: Tier, id: BlockId }
    Snapshot { step: u64, tables: Vec<SnapshotTable>, granules: Vec<Option<GroupId>> }
    SnapshotTable { width: u32, ids: Vec<TableEntry> }
    Completion { worker: WorkerId, outcome: Outcome, step: u64 }
    Settled { worker: WorkerId, ticket: TicketId, wrong: Vec<(u32, BlockFault)> }
    Dropped { worker: WorkerId, tier: Tier, blocks: Vec<(GroupId, BlockHash)> }
    Gained { worker: WorkerId, tier: Tier, blocks: Vec<(GroupId, BlockHash)> }
}

/// Values of a fixed number of bytes: how they are written, and read.
macro_rules! of_bytes {
    ($($of:ty, $bytes:literal: $write:expr, $read:expr;)+) => {$(
        impl Wire for $of {
            const LEAST: usize = $bytes;

            fn write(&self, out: &mut Writer) {
                let write: fn(&Self, &mut Writer) = $write;
                write(self, out);
            }

            fn read(from: &mut Fields<'_>) -> Result<Self, FieldError> {
                let read: fn(&mut Fields<'_>) -> Result<Self, FieldError> = $read;
                read(from)
            }
        }
    )+};
}

of_bytes! {
    u32, 4: |number, out| out.u32(*number), |from| from.u32();
    u64, 8: |number, out| out.u64(*number), |from| from.u64();
    BlockHash, 16: |name, out| out.name(*name), |from| from.name();
    TicketId, 8: |ticket, out| out.u64(ticket.0), |from| from.u64().map(Self);
    Row, 4: |row, out| out.u32(row.index() as u32), |from| from.u32().map(Self::new);
    WorkerId, 4: |worker, out| out.u32(worker.0.into()), |from| {
        Ok(Self(from.choice("worker", 1 << 16)? as u16))
    };
    GroupId, 4: |group, out| out.u32(group.0.into()), |from| {
        Ok(Self(from.choice("group", 1 << 16)? as u16))
    };
    Option<GroupId>, 4: |owner, out| out.u32(owner.map_or(NOBODY, |group| group.0.into())), |from| {
        let owner = from.choice("owner of a granule", NOBODY + 1)?;
        Ok((owner < NOBODY).then_some(GroupId(owner as u16)))
    };
    BlockId, 4: |id, out| out.u32(id.index() as u32), |from| {
        let id = from.u32()?;
        Self::new(id).ok_or(FieldError::Value { field: "block id", value: id.into() })
    };
    TableEntry, 4: |entry, out| out.u32(entry.get() as u32), |from| {
        let (entry, field) = (from.u32()?, "entry of a block table");
        Self::new(entry as i32).ok_or(FieldError::Value { field, value: entry.into() })
    };
    Tier, 4: |tier, out| out.u32(tier.index() as u32), |from| {
        Ok(Self::ALL[from.choice("tier", Self::ALL.len() as u32)? as usize])
    };
    BlockFault, 4: |fault, out| out.u32(fault.index() as u32), |from| {
        Ok(Self::ALL[from.choice("fault", Self::ALL.len() as u32)? as usize])
    };
    Direction, 4: |direction, out| out.u32((*direction == Self::Load).into()), |from| {
        Ok([Self::Store, Self::Load][from.choice("direction", 2)? as usize])
    };
    Outcome, 4: |outcome, out| out.u32((*outcome == Self::Failed).into()), |from| {
        Ok([Self::Done, Self::Failed][from.choice("outcome", 2)? as usize])
    };
    Forget, 28: |forget, out| {
        let (all, group, name) = match *forget {
            Self::Block(_, group, name) => (0_u32, group, name),
            Self::All(_) => (1, GroupId(0), BlockHash::ROOT),
        };
        (forget.tier(), all).write(out);
        (group, name).write(out);
    }, |from| {
        let (tier, all) = (Tier::read(from)?, from.choice("forget", 2)?);
        let (group, name) = Wire::read(from)?;
        Ok(if all == 1 { Self::All(tier) } else { Self::Block(tier, group, name) })
    };
    Start, 20: |start, out| {
        let (open, ends) = match *start {
            Self::At(tokens) => (0_u32, (tokens, tokens)),
            Self::Open { resolved, upper } => (1, (resolved, upper)),
        };
        (open, ends).write(out);
    }, |from| {
        let open = from.choice("start", 2)?;
        let (resolved, upper) = Wire::read(from)?;
        Ok(if open == 1 { Self::Open { resolved, upper } } else { Self::At(resolved) })
    };
}

impl<T: Wire> Wire for Vec<T> {
    const LEAST: usize = 4;

    fn write(&self, out: &mut Writer) {
        out.list(self, |out, each| each.write(out));
    }

    fn read(from: &mut Fields<'_>) -> Result<Self, FieldError> {
        from.list(usize::MAX, T::LEAST, T::read)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    const LEAST: usize = A::LEAST + B::LEAST;

    fn write(&self, out: &mut Writer) {
        self.0.write(out);
        self.1.write(out);
    }

    fn read(from: &mut Fields<'_>) -> Result<Self, FieldError> {
        Ok((A::read(from)?, B::read(from)?))
    }
}

/// The kinds of messages, each with its number.
macro_rules! messages {
    ($($of:ident: $kind:literal),+) => {$(
        impl $of {
            const KIND: u16 = $kind;

            /// Appends it to `into` as a message.
            pub fn to_bytes(&self, into: &mut Vec<u8>) {
                let start = into.len();
                let mut out = Writer(std::mem::take(into));
                out.raw(&MAGIC);
                out.u16(VERSION);
                out.u16(Self::KIND);
                out.u32(0);
                self.write(&mut out);
                let length = (out.0.len() - start - HEAD) as u32;
                out.0[start + HEAD - 4..start + HEAD].copy_from_slice(&length.to_le_bytes());
                out.u64(xxh3_64(&out.0[start..]));
                *into = out.0;
            }
        }
    )+};
}

messages! { StepPlan: 1, Snapshot: 2, Completion: 3, Settled: 4, Dropped: 5, Gained: 6 }

impl Message {
    /// The message that these bytes are, all of them.
    ///
    /// # Errors
    /// [`BytesError`]. No bytes make this function panic, or allocate more than a small multiple of their
    /// number.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        let Some((head, rest)) = bytes.split_at_checked(HEAD) else {
            return Err(BytesError::Length { bytes: bytes.len(), expected: HEAD + TAIL });
        };
        let mut head = Fields::new(head);
        let (magic, version, kind) = (head.array()?, head.u16()?, head.u16()?);
        if magic != MAGIC {
            return Err(BytesError::Magic { found: magic });
        }
        if version != VERSION {
            return Err(BytesError::Version { version });
        }
        let length = head.u32()? as usize;
        let expected = HEAD.saturating_add(length).saturating_add(TAIL);
        if bytes.len() != expected {
            return Err(BytesError::Length { bytes: bytes.len(), expected });
        }
        let (body, mut tail) = (&rest[..length], Fields::new(&rest[length..]));
        let (found, expected) = (tail.u64()?, xxh3_64(&bytes[..HEAD + length]));
        if found != expected {
            return Err(BytesError::Checksum { found, expected });
        }
        let mut body = Fields::new(body);
        let message = match kind {
            StepPlan::KIND => Self::Plan(Wire::read(&mut body)?),
            Snapshot::KIND => Self::Snapshot(Wire::read(&mut body)?),
            Completion::KIND => Self::Completion(Wire::read(&mut body)?),
            Settled::KIND => Self::Settled(Wire::read(&mut body)?),
            Dropped::KIND => Self::Dropped(Wire::read(&mut body)?),
            Gained::KIND => Self::Gained(Wire::read(&mut body)?),
            _ => return Err(BytesError::Value { field: "kind", value: kind.into() }),
        };
        body.end()?;
        Ok(message)
    }
}

impl From<FieldError> for BytesError {
    fn from(error: FieldError) -> Self {
        match error {
            FieldError::Short { wanted: expected, left: bytes }
            | FieldError::TooMany { count: bytes, max: expected }
            | FieldError::TooLong { bytes, max: expected } => Self::Length { bytes, expected },
            FieldError::Trailing { bytes } => {
                Self::Value { field: "bytes behind its end", value: bytes as u64 }
            }
            FieldError::Value { field, value } => Self::Value { field, value },
        }
    }
}

impl Message {
    /// Reads the next message of a stream, such as a pipe or a socket, through `buffer`, whose memory is kept;
    /// `None` if the stream has ended before it.
    ///
    /// # Errors
    /// The stream's errors, `UnexpectedEof` for an end inside a message, and `InvalidData` with a
    /// [`BytesError`] for what is no message: the stream is of no use then.
    pub fn read_from(from: &mut impl Read, buffer: &mut Vec<u8>) -> io::Result<Option<Self>> {
        buffer.clear();
        from.by_ref().take(HEAD as u64).read_to_end(buffer)?;
        let Some(&[.., a, b, c, d]) = buffer.first_chunk::<HEAD>() else {
            return match buffer.len() {
                0 => Ok(None),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            };
        };
        let rest = u64::from(u32::from_le_bytes([a, b, c, d])) + TAIL as u64;
        // What is not sent is not allocated, whatever the length says.
        if from.by_ref().take(rest).read_to_end(buffer)? as u64 != rest {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message = Self::from_bytes(buffer);
        message.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}
