//! What nodes say to each other once each has proved that it has the key: a request, and one reply, which [`Request::Release`] alone
//! does not have.
//!
//! A message is the body of a frame: its kind, one byte, and its fields. Numbers are little-endian.

use std::sync::Arc;
use std::time::Duration;

use kv_pool::{BlockHash, GroupId};
use kv_tier::RecordKey;
use kv_tier::codec::{FieldError, Fields, KEY_BYTES, RECORD_KEY_BYTES, Writer};

use crate::{FrameError, Refusal};

/// A block of one format: its group, and its name.
pub(crate) type Block = (GroupId, BlockHash);

/// Entries of a list, at most.
pub const LIST_MAX: usize = 4096;

/// Bytes of a descriptor of memory, at most.
pub const DESCRIPTOR_MAX: usize = 64 << 10;

/// Bytes of the beginning of a record that is not with the rest, at most.
pub(crate) const HEAD_MAX: usize = 64 << 10;

/// The number of a lease. No two leases of a process have the same.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LeaseId(pub u64);

/// Consecutive bytes of a node's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Span {
    /// Where they begin.
    pub address: u64,
    /// How many they are.
    pub bytes: u32,
}

/// A block in the memory of a node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Located {
    /// Its entry and, behind it, its record; of a block with a head, the rest of its record.
    pub span: Span,
    /// The number of the write that the slot holds. No two writes of a node have the same, before and after a restart.
    pub generation: u64,
    /// The sum of the record: XXH3 of what came from the host's memory; of what [`Node::reserve`](crate::Node::reserve) made room for,
    /// whatever its writer has said; 0 of a block with a head.
    pub sum: u64,
    /// The beginning of the record, of a block that lies in the [host tier](crate::Node::share) of the node's engine: the bytes there have
    /// no entry, and this has their sums.
    pub head: Option<Arc<[u8]>>,
}

/// The longest run of what was asked for that a node holds.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Found {
    /// The lease that pins the blocks; none if there is no block.
    pub lease: Option<LeaseId>,
    /// The blocks, in the order in which they were asked for.
    pub blocks: Vec<Located>,
}

/// A change of what a node holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Change {
    /// Whether the block has come, or gone.
    pub is_there: bool,
    /// The block's group.
    pub group: GroupId,
    /// The block's name.
    pub name: BlockHash,
}

/// A place in the changes of a node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Cursor {
    /// Which log: a node begins another one when it starts, and when the log has become long.
    pub log: u64,
    /// Changes of the log that were read.
    pub read: u64,
}

/// Changes of what a node holds, from a place on.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Changes {
    /// Where the next ones are. If it is of another log than was asked for, these are the first of that
    /// log, and what was known before is void.
    pub next: Cursor,
    /// The changes, the oldest first.
    pub changes: Vec<Change>,
}

/// What is asked of a node. A [`Peer`](crate::Peer) has a call for each.
#[doc(hidden)]
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Request {
    /// The longest run of these blocks is to be found and pinned for so long.
    Find {
        /// How long, in whole milliseconds.
        lease: Duration,
        /// The blocks.
        blocks: Vec<RecordKey>,
    },
    /// Bytes of blocks that a lease pins.
    Read {
        /// The lease.
        lease: LeaseId,
        /// Which bytes.
        spans: Vec<Span>,
    },
    /// A lease has ended.
    End {
        /// The lease.
        lease: LeaseId,
    },
    /// A lease has ended, and its reader wants no reply. A lease that the node does not know has ended before.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// A record is to be kept under a key.
    Put {
        /// The key.
        key: RecordKey,
        /// The record.
        record: Vec<u8>,
    },
    /// Blocks are to be forgotten.
    Forget {
        /// The blocks.
        blocks: Vec<RecordKey>,
    },
    /// All records of a format are to be forgotten.
    Clear {
        /// The format.
        format: u64,
    },
    /// What has changed from a place on.
    Changes {
        /// The place.
        from: Cursor,
        /// Whether the host tier of the node's engine is asked for, too.
        hosted: bool,
        /// The format of the records that are asked for.
        format: u64,
    },
    /// What is a transfer to know that reads the node's memory by itself?
    Describe,
}

/// What a node answers.
#[doc(hidden)]
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Reply {
    /// To [`Request::Find`].
    Found(Found),
    /// To [`Request::Read`]: the bytes of all spans, one behind the other.
    Bytes(Vec<u8>),
    /// To what has no other answer: it was done.
    Done,
    /// To [`Request::Changes`].
    Changes(Changes),
    /// It was not done.
    Refused(Refusal),
    /// To [`Request::Describe`]: the [descriptor](crate::Memory::descriptor) of the node's memory; empty if there is none.
    Described(Vec<u8>),
}

/// The kind of [`Reply::Bytes`], which stands before the bytes.
pub(crate) const BYTES: u8 = 2;

fn span(fields: &mut Fields<'_>) -> Result<Span, FieldError> {
    Ok(Span { address: fields.u64()?, bytes: fields.u32()? })
}

fn cursor(fields: &mut Fields<'_>) -> Result<Cursor, FieldError> {
    Ok(Cursor { log: fields.u64()?, read: fields.u64()? })
}

fn located(fields: &mut Fields<'_>) -> Result<Located, FieldError> {
    let (span, generation) = (span(fields)?, fields.u64()?);
    let (sum, head) = (fields.u64()?, fields.bytes(HEAD_MAX)?);
    let head = (!head.is_empty()).then(|| head.into());
    Ok(Located { span, generation, sum, head })
}

fn change(fields: &mut Fields<'_>) -> Result<Change, FieldError> {
    let (is_there, (group, name)) = (fields.flag("is_there")?, fields.key()?);
    Ok(Change { is_there, group, name })
}

fn write_span(out: &mut Writer, span: &Span) {
    out.u64(span.address);
    out.u32(span.bytes);
}

fn write_cursor(out: &mut Writer, cursor: &Cursor) {
    out.u64(cursor.log);
    out.u64(cursor.read);
}

impl Request {
    /// The request that a frame's body is.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn parse(body: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields::new(body);
        let request = match fields.u8()? {
            1 => Self::Find {
                lease: Duration::from_millis(fields.u32()?.into()),
                blocks: fields.list(LIST_MAX, RECORD_KEY_BYTES, Fields::record_key)?,
            },
            2 => Self::Read {
                lease: LeaseId(fields.u64()?),
                spans: fields.list(LIST_MAX, 12, span)?,
            },
            3 => Self::End { lease: LeaseId(fields.u64()?) },
            4 => Self::Put { key: fields.record_key()?, record: fields.rest().to_vec() },
            5 => Self::Forget {
                blocks: fields.list(LIST_MAX, RECORD_KEY_BYTES, Fields::record_key)?,
            },
            6 => Self::Clear { format: fields.u64()? },
            7 => Self::Changes {
                from: cursor(&mut fields)?,
                hosted: fields.flag("hosted")?,
                format: fields.u64()?,
            },
            8 => Self::Describe,
            9 => Self::Release { lease: LeaseId(fields.u64()?) },
            kind => return Err(FrameError::Kind { kind }),
        };
        fields.end()?;
        Ok(request)
    }

    /// The body of its frame. Of longer lists than [`LIST_MAX`], receivers take nothing.
    #[must_use]
    pub fn body(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Find { lease, blocks } => {
                out.u8(1);
                out.u32(u32::try_from(lease.as_millis()).unwrap_or(u32::MAX));
                out.list(blocks, Writer::record_key);
            }
            Self::Read { lease, spans } => {
                out.u8(2);
                out.u64(lease.0);
                out.list(spans, write_span);
            }
            Self::End { lease } => {
                out.u8(3);
                out.u64(lease.0);
            }
            Self::Put { key, record } => {
                out.u8(4);
                out.record_key(key);
                out.raw(record);
            }
            Self::Forget { blocks } => {
                out.u8(5);
                out.list(blocks, Writer::record_key);
            }
            Self::Clear { format } => {
                out.u8(6);
                out.u64(*format);
            }
            Self::Changes { from, hosted, format } => {
                out.u8(7);
                write_cursor(&mut out, from);
                out.u8((*hosted).into());
                out.u64(*format);
            }
            Self::Describe => out.u8(8),
            Self::Release { lease } => {
                out.u8(9);
                out.u64(lease.0);
            }
        }
        out.0
    }
}

impl Reply {
    /// The bytes of [`Reply::Bytes`], where they are; none if a frame's body is another reply.
    pub(crate) fn bytes(body: &[u8]) -> Option<&[u8]> {
        body.split_first().filter(|(kind, _)| **kind == BYTES).map(|(_, bytes)| bytes)
    }

    /// The reply that a frame's body is.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn parse(body: &[u8]) -> Result<Self, FrameError> {
        let mut fields = Fields::new(body);
        let reply = match fields.u8()? {
            1 => {
                let lease = fields.u64()?;
                let blocks = fields.list(LIST_MAX, 32, located)?;
                // A lease without blocks has nothing to end, and blocks without a lease are not pinned.
                if (lease == 0) != blocks.is_empty() {
                    return Err(FrameError::Value { field: "lease", value: lease });
                }
                Self::Found(Found { lease: (lease != 0).then_some(LeaseId(lease)), blocks })
            }
            BYTES => Self::Bytes(fields.rest().to_vec()),
            3 => Self::Done,
            4 => {
                let next = cursor(&mut fields)?;
                let changes = fields.list(LIST_MAX, 1 + KEY_BYTES, change)?;
                Self::Changes(Changes { next, changes })
            }
            5 => {
                let number = fields.u8()?;
                let value = FrameError::Value { field: "refusal", value: number.into() };
                Self::Refused(*Refusal::ALL.get(usize::from(number)).ok_or(value)?)
            }
            6 => match fields.rest() {
                descriptor if descriptor.len() <= DESCRIPTOR_MAX => {
                    Self::Described(descriptor.to_vec())
                }
                longer => {
                    let (bytes, max) = (longer.len(), DESCRIPTOR_MAX);
                    return Err(FrameError::TooLong { bytes, max });
                }
            },
            kind => return Err(FrameError::Kind { kind }),
        };
        fields.end()?;
        Ok(reply)
    }

    /// The body of its frame.
    #[must_use]
    pub fn body(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Found(Found { lease, blocks }) => {
                out.u8(1);
                out.u64(lease.map_or(0, |lease| lease.0));
                out.list(blocks, |out, block| {
                    write_span(out, &block.span);
                    out.u64(block.generation);
                    out.u64(block.sum);
                    out.bytes(block.head.as_deref().unwrap_or_default());
                });
            }
            Self::Bytes(bytes) => {
                out.u8(BYTES);
                out.raw(bytes);
            }
            Self::Done => out.u8(3),
            Self::Changes(Changes { next, changes }) => {
                out.u8(4);
                write_cursor(&mut out, next);
                out.list(changes, |out, change| {
                    out.u8(change.is_there.into());
                    out.key(&(change.group, change.name));
                });
            }
            Self::Refused(refusal) => {
                let number = Refusal::ALL.iter().position(|of| of == refusal);
                out.u8(5);
                out.u8(number.unwrap_or(0) as u8);
            }
            Self::Described(descriptor) => {
                out.u8(6);
                out.raw(descriptor);
            }
        }
        out.0
    }
}
