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
use crate::tickets::{Dropped, Forget, Gained, Settled};
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
const GAINED: u16 = 6;

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

impl StepPlan {
    /// Appends the plan to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, PLAN, |out| {
            out.u64(self.step);
            out.u64(self.after);
            out.list(&self.copies, |out, copy| {
                out.u32(copy.group.0.into());
                write_location(out, copy.from);
                write_location(out, copy.to);
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
            out.list(&self.batch, write_batch_row);
            out.list(&self.draft_batch, write_batch_row);
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
                write_owner(out, one.from);
                write_owner(out, one.to);
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
        message(into, DROPPED, |out| write_names(out, self.worker, self.tier, &self.blocks));
    }
}

impl Gained {
    /// Appends it to `into` as a message.
    pub fn to_bytes(&self, into: &mut Vec<u8>) {
        message(into, GAINED, |out| write_names(out, self.worker, self.tier, &self.blocks));
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
            out.list(&self.granules, |out, &owner| write_owner(out, owner));
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
            PLAN => Self::Plan(plan(&mut body)?),
            SNAPSHOT => Self::Snapshot(snapshot(&mut body)?),
            COMPLETION => Self::Completion(completion(&mut body)?),
            SETTLED => Self::Settled(settled(&mut body)?),
            DROPPED => Self::Dropped(dropped(&mut body)?),
            GAINED => {
                let Dropped { worker, tier, blocks } = dropped(&mut body)?;
                Self::Gained(Gained { worker, tier, blocks })
            }
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

/// Appends a message whose body `write` writes.
fn message(into: &mut Vec<u8>, kind: u16, write: impl FnOnce(&mut Writer)) {
    let start = into.len();
    let mut out = Writer(std::mem::take(into));
    out.raw(&MAGIC);
    out.u16(VERSION);
    out.u16(kind);
    out.u32(0);
    write(&mut out);
    let length = (out.0.len() - start - HEAD) as u32;
    out.0[start + HEAD - 4..start + HEAD].copy_from_slice(&length.to_le_bytes());
    out.u64(xxh3_64(&out.0[start..]));
    *into = out.0;
}

/// Writes a group, or 65,536 for none.
fn write_owner(out: &mut Writer, owner: Option<GroupId>) {
    out.u32(owner.map_or(NOBODY, |group| group.0.into()));
}

fn write_location(out: &mut Writer, location: Location) {
    out.u32(location.tier.index() as u32);
    out.u32(location.id.index() as u32);
}

fn write_names(
    out: &mut Writer,
    WorkerId(worker): WorkerId,
    tier: Tier,
    blocks: &[(GroupId, BlockHash)],
) {
    out.u32(worker.into());
    out.u32(tier.index() as u32);
    out.list(blocks, |out, &(group, name)| {
        out.u32(group.0.into());
        out.name(name);
    });
}

fn write_batch_row(out: &mut Writer, row: &BatchRow) {
    out.u32(row.row.index() as u32);
    out.u32(row.tokens);
    out.u32(row.drafts);
    out.u32(row.input);
    let (open, resolved, upper) = match row.start {
        Start::At(tokens) => (0, tokens, tokens),
        Start::Open { resolved, upper } => (1, resolved, upper),
    };
    out.u32(open);
    out.u64(resolved);
    out.u64(upper);
}

/// A list of values, each at least `size` bytes long.
fn list<T>(
    from: &mut Fields<'_>,
    size: usize,
    each: impl FnMut(&mut Fields<'_>) -> Result<T, FieldError>,
) -> Result<Vec<T>, FieldError> {
    from.list(usize::MAX, size, each)
}

fn block(from: &mut Fields<'_>, field: &'static str) -> Result<BlockId, FieldError> {
    let id = from.u32()?;
    BlockId::new(id).ok_or(FieldError::Value { field, value: id.into() })
}

fn entry(from: &mut Fields<'_>) -> Result<TableEntry, FieldError> {
    let (entry, field) = (from.u32()?, "entry of a block table");
    TableEntry::new(entry as i32).ok_or(FieldError::Value { field, value: entry.into() })
}

fn tier(from: &mut Fields<'_>) -> Result<Tier, FieldError> {
    Ok(Tier::ALL[from.choice("tier", Tier::ALL.len() as u32)? as usize])
}

fn location(from: &mut Fields<'_>) -> Result<Location, FieldError> {
    Ok(Location { tier: tier(from)?, id: block(from, "block id")? })
}

fn worker(from: &mut Fields<'_>) -> Result<WorkerId, FieldError> {
    Ok(WorkerId(from.choice("worker", 1 << 16)? as u16))
}

fn group(from: &mut Fields<'_>) -> Result<GroupId, FieldError> {
    Ok(GroupId(from.choice("group", 1 << 16)? as u16))
}

fn owner(from: &mut Fields<'_>) -> Result<Option<GroupId>, FieldError> {
    match from.choice("owner of a granule", NOBODY + 1)? {
        NOBODY => Ok(None),
        group => Ok(Some(GroupId(group as u16))),
    }
}

fn plan(from: &mut Fields<'_>) -> Result<StepPlan, FieldError> {
    Ok(StepPlan {
        step: from.u64()?,
        after: from.u64()?,
        copies: list(from, 32, |from| {
            let group = group(from)?;
            let (here, there) = (location(from)?, location(from)?);
            let (tokens, written_by) = (from.u32()?, from.u64()?);
            Ok(BlockCopy { group, from: here, to: there, tokens, written_by })
        })?,
        scrubs: list(from, 12, |from| {
            let (group, block) = (group(from)?, block(from, "scrubbed block")?);
            Ok(BlockScrub { group, block, after: from.u32()? })
        })?,
        edits: list(from, 16, |from| {
            let (group, row) = (group(from)?, Row::new(from.u32()?));
            Ok(RowEdit { group, row, first: from.u32()?, count: from.u32()? })
        })?,
        edit_ids: list(from, 4, entry)?,
        batch: list(from, 36, batch_row)?,
        draft_batch: list(from, 36, batch_row)?,
        forgets: list(from, 28, |from| {
            let (tier, all) = (tier(from)?, from.choice("forget", 2)?);
            let (group, name) = (group(from)?, from.name()?);
            Ok(if all == 1 { Forget::All(tier) } else { Forget::Block(tier, group, name) })
        })?,
        transfers: list(from, 24, |from| {
            Ok(Transfer {
                ticket: TicketId(from.u64()?),
                tier: tier(from)?,
                group: group(from)?,
                direction: match from.choice("direction", 2)? {
                    0 => Direction::Store,
                    _ => Direction::Load,
                },
                blocks: list(from, 20, |from| {
                    Ok((from.name()?, block(from, "transferred block")?))
                })?,
            })
        })?,
        layer_loads: list(from, 20, |from| {
            let (ticket, group) = (TicketId(from.u64()?), group(from)?);
            let (from, to) = (block(from, "loaded block")?, block(from, "device block")?);
            Ok(LayerLoad { ticket, group, from, to })
        })?,
        moves: list(from, 12, |from| {
            Ok(GranuleMove { granule: from.u32()?, from: owner(from)?, to: owner(from)? })
        })?,
    })
}

fn settled(from: &mut Fields<'_>) -> Result<Settled, FieldError> {
    let (worker, ticket) = (worker(from)?, TicketId(from.u64()?));
    let faults = BlockFault::ALL;
    let wrong = list(from, 8, |from| {
        let (index, fault) = (from.u32()?, from.choice("fault", faults.len() as u32)?);
        Ok((index, faults[fault as usize]))
    })?;
    Ok(Settled { worker, ticket, wrong })
}

fn dropped(from: &mut Fields<'_>) -> Result<Dropped, FieldError> {
    let (worker, tier) = (worker(from)?, tier(from)?);
    let blocks = list(from, 20, |from| Ok((group(from)?, from.name()?)))?;
    Ok(Dropped { worker, tier, blocks })
}

fn batch_row(from: &mut Fields<'_>) -> Result<BatchRow, FieldError> {
    let (row, tokens) = (Row::new(from.u32()?), from.u32()?);
    let (drafts, input, open) = (from.u32()?, from.u32()?, from.choice("start", 2)?);
    let (resolved, upper) = (from.u64()?, from.u64()?);
    let start = if open == 1 { Start::Open { resolved, upper } } else { Start::At(resolved) };
    Ok(BatchRow { row, start, tokens, drafts, input })
}

fn snapshot(from: &mut Fields<'_>) -> Result<Snapshot, FieldError> {
    let step = from.u64()?;
    let tables = list(from, 8, |from| {
        let width = from.u32()?;
        Ok(SnapshotTable { width, ids: list(from, 4, entry)? })
    })?;
    Ok(Snapshot { step, tables, granules: list(from, 4, owner)? })
}

fn completion(from: &mut Fields<'_>) -> Result<Completion, FieldError> {
    let (worker, failed) = (worker(from)?, from.choice("outcome", 2)?);
    let outcome = if failed == 1 { Outcome::Failed } else { Outcome::Done };
    Ok(Completion { worker, step: from.u64()?, outcome })
}
