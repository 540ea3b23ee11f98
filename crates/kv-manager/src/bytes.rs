//! Messages between processes: plans, snapshots and completions as bytes, versioned and checked.
//!
//! A message is `KVPL`, the version and the kind (2 bytes each), the length of the body (4 bytes), the body,
//! and the 64 bits of XXH3 over all before. Numbers are little-endian.

use std::io::{self, Read};

use kv_pool::{BlockHash, BlockId, Location, TableEntry, Tier};
use xxhash_rust::xxh3::xxh3_64;

use crate::plan::{
    BatchRow, BlockCopy, BlockScrub, Completion, GranuleMove, LayerLoad, Outcome, RowEdit,
    Snapshot, SnapshotTable, Start, StepPlan,
};
use crate::tickets::{Direction, Dropped, Forget, Settled, TicketId, Transfer};
use crate::tiers::BlockFault;
use crate::{GroupId, Row, WorkerId};

const MAGIC: [u8; 4] = *b"KVPL";
const VERSION: u16 = 9;
/// The owner of a granule that is nobody's.
const NOBODY: u32 = 1 << 16;

const HEAD: usize = 12;
const TAIL: usize = 8;

const PLAN: u16 = 1;
const SNAPSHOT: u16 = 2;
const COMPLETION: u16 = 3;
const SETTLED: u16 = 4;
const DROPPED: u16 = 5;

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

impl StepPlan {
    /// Appends the plan to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, PLAN, |out| {
            out.u64(self.step);
            out.u64(self.after);
            out.list(&self.copies, |out, copy| {
                out.u32(copy.group.0.into());
                out.location(copy.from);
                out.location(copy.to);
                out.u32(copy.tokens);
                out.u64(copy.written_by);
            });
            out.list(&self.scrubs, |out, scrub| {
                out.u32(scrub.group.0.into());
                out.u32(scrub.block.index() as u32);
                out.u32(scrub.after);
            });
            out.list(&self.edits, |out, edit| {
                out.u32(edit.group.0.into());
                out.u32(edit.row.index() as u32);
                out.u32(edit.first);
                out.u32(edit.count);
            });
            out.list(&self.edit_ids, |out, &id| out.u32(id.get() as u32));
            out.list(&self.batch, Writer::batch_row);
            out.list(&self.draft_batch, Writer::batch_row);
            out.list(&self.forgets, |out, forget| {
                let (all, group, name) = match *forget {
                    Forget::Block(_, group, name) => (0, group, name),
                    Forget::All(_) => (1, GroupId(0), BlockHash::ROOT),
                };
                out.u32(forget.tier().index() as u32);
                out.u32(all);
                out.u32(group.0.into());
                out.name(name);
            });
            out.list(&self.transfers, |out, transfer| {
                out.u64(transfer.ticket.0);
                out.u32(transfer.tier.index() as u32);
                out.u32(transfer.group.0.into());
                out.u32(u32::from(transfer.direction == Direction::Load));
                out.list(&transfer.blocks, |out, &(name, block)| {
                    out.name(name);
                    out.u32(block.index() as u32);
                });
            });
            out.list(&self.layer_loads, |out, load| {
                out.u64(load.ticket.0);
                out.u32(load.group.0.into());
                out.u32(load.from.index() as u32);
                out.u32(load.to.index() as u32);
            });
            out.list(&self.moves, |out, one| {
                out.u32(one.granule);
                out.owner(one.from);
                out.owner(one.to);
            });
        });
    }
}

impl Settled {
    /// Appends it to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, SETTLED, |out| {
            out.u32(self.worker.0.into());
            out.u64(self.ticket.0);
            out.list(&self.wrong, |out, &(index, fault)| {
                out.u32(index);
                out.u32(fault.index() as u32);
            });
        });
    }
}

impl Dropped {
    /// Appends it to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, DROPPED, |out| {
            out.u32(self.worker.0.into());
            out.u32(self.tier.index() as u32);
            out.list(&self.blocks, |out, &(group, name)| {
                out.u32(group.0.into());
                out.name(name);
            });
        });
    }
}

impl Snapshot {
    /// Appends the snapshot to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, SNAPSHOT, |out| {
            out.u64(self.step);
            out.list(&self.tables, |out, table| {
                out.u32(table.width);
                out.list(&table.ids, |out, &id| out.u32(id.get() as u32));
            });
            out.list(&self.granules, |out, &owner| out.owner(owner));
        });
    }
}

impl Completion {
    /// Appends the completion to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, COMPLETION, |out| {
            out.u32(u32::from(self.worker.0));
            out.u32(u32::from(self.outcome == Outcome::Failed));
            out.u64(self.step);
        });
    }
}

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
        let mut head = Reader { bytes: head };
        let magic = head.array()?;
        if magic != MAGIC {
            return Err(BytesError::Magic { found: magic });
        }
        let [version, kind] =
            [u16::from_le_bytes(head.array()?), u16::from_le_bytes(head.array()?)];
        if version != VERSION {
            return Err(BytesError::Version { version });
        }
        let length = head.u32()? as usize;
        let expected = HEAD.saturating_add(length).saturating_add(TAIL);
        if bytes.len() != expected {
            return Err(BytesError::Length { bytes: bytes.len(), expected });
        }
        let (body, mut tail) = (&rest[..length], Reader { bytes: &rest[length..] });
        let (found, expected) = (tail.u64()?, xxh3_64(&bytes[..HEAD + length]));
        if found != expected {
            return Err(BytesError::Checksum { found, expected });
        }
        let mut body = Reader { bytes: body };
        let message = match kind {
            PLAN => Self::Plan(body.plan()?),
            SNAPSHOT => Self::Snapshot(body.snapshot()?),
            COMPLETION => Self::Completion(body.completion()?),
            SETTLED => Self::Settled(body.settled()?),
            DROPPED => Self::Dropped(body.dropped()?),
            _ => return Err(BytesError::Value { field: "kind", value: kind.into() }),
        };
        match body.bytes.len() {
            0 => Ok(message),
            left => Err(BytesError::Value { field: "bytes behind its end", value: left as u64 }),
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

/// Appends a message whose body `write` writes.
fn message(into: &mut Vec<u8>, kind: u16, write: impl FnOnce(&mut Writer<'_>)) {
    let start = into.len();
    into.extend_from_slice(&MAGIC);
    into.extend_from_slice(&VERSION.to_le_bytes());
    into.extend_from_slice(&kind.to_le_bytes());
    into.extend_from_slice(&[0; 4]);
    write(&mut Writer { into });
    let length = (into.len() - start - HEAD) as u32;
    into[start + HEAD - 4..start + HEAD].copy_from_slice(&length.to_le_bytes());
    let checksum = xxh3_64(&into[start..]);
    into.extend_from_slice(&checksum.to_le_bytes());
}

/// Writes the fields of a body.
struct Writer<'a> {
    into: &'a mut Vec<u8>,
}

impl Writer<'_> {
    fn u32(&mut self, value: u32) {
        self.into.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.into.extend_from_slice(&value.to_le_bytes());
    }

    fn name(&mut self, name: BlockHash) {
        self.into.extend_from_slice(&name.to_u128().to_le_bytes());
    }

    /// A group, or 65,536 for none.
    fn owner(&mut self, owner: Option<GroupId>) {
        self.u32(owner.map_or(NOBODY, |group| group.0.into()));
    }

    fn location(&mut self, location: Location) {
        self.u32(location.tier.index() as u32);
        self.u32(location.id.index() as u32);
    }

    fn batch_row(&mut self, row: &BatchRow) {
        self.u32(row.row.index() as u32);
        self.u32(row.tokens);
        self.u32(row.drafts);
        self.u32(row.input);
        let (open, resolved, upper) = match row.start {
            Start::At(tokens) => (0, tokens, tokens),
            Start::Open { resolved, upper } => (1, resolved, upper),
        };
        self.u32(open);
        self.u64(resolved);
        self.u64(upper);
    }

    fn list<T>(&mut self, all: &[T], each: impl Fn(&mut Self, &T)) {
        self.u32(all.len() as u32);
        all.iter().for_each(|one| each(self, one));
    }
}

/// Reads the fields of a body.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], BytesError> {
        let (here, rest) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or(BytesError::Length { bytes: self.bytes.len(), expected: N })?;
        self.bytes = rest;
        Ok(*here)
    }

    fn u32(&mut self) -> Result<u32, BytesError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, BytesError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A list of values, each at least `size` bytes long.
    fn list<T>(
        &mut self,
        size: usize,
        each: impl Fn(&mut Self) -> Result<T, BytesError>,
    ) -> Result<Vec<T>, BytesError> {
        let count = self.u32()? as usize;
        let expected = count.saturating_mul(size);
        if expected > self.bytes.len() {
            return Err(BytesError::Length { bytes: self.bytes.len(), expected });
        }
        (0..count).map(|_| each(self)).collect()
    }

    fn block(&mut self, field: &'static str) -> Result<BlockId, BytesError> {
        let id = self.u32()?;
        BlockId::new(id).ok_or(BytesError::Value { field, value: id.into() })
    }

    fn entry(&mut self) -> Result<TableEntry, BytesError> {
        let entry = self.u32()?;
        let field = "entry of a block table";
        TableEntry::new(entry as i32).ok_or(BytesError::Value { field, value: entry.into() })
    }

    fn tier(&mut self) -> Result<Tier, BytesError> {
        let tier = self.u32()?;
        let value = u64::from(tier);
        let tier = Tier::ALL.get(tier as usize).copied();
        tier.ok_or(BytesError::Value { field: "tier", value })
    }

    fn location(&mut self) -> Result<Location, BytesError> {
        Ok(Location { tier: self.tier()?, id: self.block("block id")? })
    }

    fn name(&mut self) -> Result<BlockHash, BytesError> {
        Ok(BlockHash::from_u128(u128::from_le_bytes(self.array()?)))
    }

    /// One of so many numbers.
    fn choice(&mut self, field: &'static str, count: u32) -> Result<u32, BytesError> {
        match self.u32()? {
            value if value < count => Ok(value),
            value => Err(BytesError::Value { field, value: value.into() }),
        }
    }

    fn worker(&mut self) -> Result<WorkerId, BytesError> {
        Ok(WorkerId(self.choice("worker", 1 << 16)? as u16))
    }

    fn group(&mut self) -> Result<GroupId, BytesError> {
        let value = self.u32()?;
        let group = u16::try_from(value).map(GroupId);
        group.map_err(|_| BytesError::Value { field: "group", value: value.into() })
    }

    fn owner(&mut self) -> Result<Option<GroupId>, BytesError> {
        match self.choice("owner of a granule", NOBODY + 1)? {
            NOBODY => Ok(None),
            group => Ok(Some(GroupId(group as u16))),
        }
    }

    fn row(&mut self) -> Result<Row, BytesError> {
        Ok(Row::new(self.u32()?))
    }

    fn plan(&mut self) -> Result<StepPlan, BytesError> {
        Ok(StepPlan {
            step: self.u64()?,
            after: self.u64()?,
            copies: self.list(32, |from| {
                let group = from.group()?;
                let (here, there) = (from.location()?, from.location()?);
                let (tokens, written_by) = (from.u32()?, from.u64()?);
                Ok(BlockCopy { group, from: here, to: there, tokens, written_by })
            })?,
            scrubs: self.list(12, |from| {
                let (group, block) = (from.group()?, from.block("scrubbed block")?);
                Ok(BlockScrub { group, block, after: from.u32()? })
            })?,
            edits: self.list(16, |from| {
                let group = from.group()?;
                Ok(RowEdit { group, row: from.row()?, first: from.u32()?, count: from.u32()? })
            })?,
            edit_ids: self.list(4, Reader::entry)?,
            batch: self.list(36, Self::batch_row)?,
            draft_batch: self.list(36, Self::batch_row)?,
            forgets: self.list(28, |from| {
                let (tier, all) = (from.tier()?, from.choice("forget", 2)?);
                let (group, name) = (from.group()?, from.name()?);
                Ok(if all == 1 { Forget::All(tier) } else { Forget::Block(tier, group, name) })
            })?,
            transfers: self.list(24, |from| {
                Ok(Transfer {
                    ticket: TicketId(from.u64()?),
                    tier: from.tier()?,
                    group: GroupId(from.choice("group", 1 << 16)? as u16),
                    direction: match from.choice("direction", 2)? {
                        0 => Direction::Store,
                        _ => Direction::Load,
                    },
                    blocks: from
                        .list(20, |from| Ok((from.name()?, from.block("transferred block")?)))?,
                })
            })?,
            layer_loads: self.list(20, |from| {
                let (ticket, group) = (TicketId(from.u64()?), from.group()?);
                let (from, to) = (from.block("loaded block")?, from.block("device block")?);
                Ok(LayerLoad { ticket, group, from, to })
            })?,
            moves: self.list(12, |from| {
                let granule = from.u32()?;
                Ok(GranuleMove { granule, from: from.owner()?, to: from.owner()? })
            })?,
        })
    }

    fn settled(&mut self) -> Result<Settled, BytesError> {
        let (worker, ticket) = (self.worker()?, TicketId(self.u64()?));
        let faults = BlockFault::ALL;
        let wrong = self.list(8, |from| {
            let (index, fault) = (from.u32()?, from.choice("fault", faults.len() as u32)?);
            Ok((index, faults[fault as usize]))
        })?;
        Ok(Settled { worker, ticket, wrong })
    }

    fn dropped(&mut self) -> Result<Dropped, BytesError> {
        let (worker, tier) = (self.worker()?, self.tier()?);
        let blocks = self.list(20, |from| Ok((from.group()?, from.name()?)))?;
        Ok(Dropped { worker, tier, blocks })
    }

    fn batch_row(&mut self) -> Result<BatchRow, BytesError> {
        let (row, tokens) = (self.row()?, self.u32()?);
        let (drafts, input, open) = (self.u32()?, self.u32()?, self.u32()?);
        let (resolved, upper) = (self.u64()?, self.u64()?);
        let start = match open {
            0 => Start::At(resolved),
            1 => Start::Open { resolved, upper },
            _ => return Err(BytesError::Value { field: "start", value: open.into() }),
        };
        Ok(BatchRow { row, start, tokens, drafts, input })
    }

    fn snapshot(&mut self) -> Result<Snapshot, BytesError> {
        let step = self.u64()?;
        let tables = self.list(8, |from| {
            let width = from.u32()?;
            Ok(SnapshotTable { width, ids: from.list(4, Reader::entry)? })
        })?;
        Ok(Snapshot { step, tables, granules: self.list(4, Self::owner)? })
    }

    fn completion(&mut self) -> Result<Completion, BytesError> {
        let (worker, failed, step) = (self.worker()?, self.u32()?, self.u64()?);
        let outcome = match failed {
            0 => Outcome::Done,
            1 => Outcome::Failed,
            _ => return Err(BytesError::Value { field: "outcome", value: failed.into() }),
        };
        Ok(Completion { worker, step, outcome })
    }
}
