//! What goes wrong between nodes: frames, handshakes, connections, and what a node refuses.

use std::io;

use kv_tier::codec::FieldError;

/// Why bytes are no frame or no message.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The message ends before its last field.
    #[error("a field of {wanted} bytes is wanted, and {left} are left")]
    Short {
        /// Bytes of the field.
        wanted: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// Bytes are left behind the last field.
    #[error("{bytes} bytes are left behind the last field")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// There is no message of this kind.
    #[error("no message is of kind {kind}")]
    Kind {
        /// The number found.
        kind: u8,
    },
    /// A number that its field does not take.
    #[error("{value} is no value of the field {field}")]
    Value {
        /// The field.
        field: &'static str,
        /// The number found.
        value: u64,
    },
    /// A list has more entries than a receiver takes.
    #[error("{count} entries are listed, and at most {max} are taken")]
    TooMany {
        /// Entries listed.
        count: usize,
        /// Entries that are taken.
        max: usize,
    },
    /// The frame is longer than a receiver takes.
    #[error("the frame has {bytes} bytes, and at most {max} are taken")]
    TooLong {
        /// Bytes of the frame.
        bytes: usize,
        /// Bytes that are taken.
        max: usize,
    },
    /// The frame's tag is not that of its bytes, its place and its session.
    #[error("the tag of frame {number} is wrong")]
    Tag {
        /// Frames of this direction before it.
        number: u64,
    },
}

impl From<FieldError> for FrameError {
    fn from(error: FieldError) -> Self {
        match error {
            FieldError::Short { wanted, left } => Self::Short { wanted, left },
            FieldError::TooMany { count, max } => Self::TooMany { count, max },
            FieldError::TooLong { bytes, max } => Self::TooLong { bytes, max },
            FieldError::Trailing { bytes } => Self::Trailing { bytes },
            FieldError::Value { field, value } => Self::Value { field, value },
        }
    }
}

/// Why a node did not do what it was asked.
#[derive(Clone, Copy, Eq, Hash, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The reader has no such lease: it has ended, or was never the reader's.
    #[error("the reader has no such lease")]
    NoLease,
    /// The address is not one of the lease's blocks.
    #[error("the address is not one of the lease's blocks")]
    OutsideLease,
    /// All slots are in use.
    #[error("all slots are in use")]
    NoRoom,
    /// A record is longer than a slot, or has no byte.
    #[error("the record does not fit a slot")]
    Length,
    /// The node has as many leases or connections open as it takes.
    #[error("the node has no lease or connection left")]
    Busy,
}

impl Refusal {
    /// All refusals, each at the place of its number on the wire.
    pub const ALL: [Self; 5] =
        [Self::NoLease, Self::OutsideLease, Self::NoRoom, Self::Length, Self::Busy];
}

/// How a peer's answer contradicts what it has said before.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Lie {
    /// More blocks than were asked for.
    #[error("{blocks} blocks are answered, and {asked} were asked for")]
    Blocks {
        /// Blocks in the answer.
        blocks: usize,
        /// Blocks asked for.
        asked: usize,
    },
    /// A block that is not within the peer's memory.
    #[error(
        "a block of {bytes} bytes at {address} is not within the {memory_bytes} bytes of the peer's memory"
    )]
    Address {
        /// Its address.
        address: u64,
        /// Its bytes.
        bytes: u64,
        /// Bytes of the peer's memory.
        memory_bytes: u64,
    },
    /// Another number of bytes than were asked for.
    #[error("{bytes} bytes are answered, and {asked} were asked for")]
    Bytes {
        /// Bytes in the answer.
        bytes: usize,
        /// Bytes asked for.
        asked: usize,
    },
    /// An answer to another question.
    #[error("the answer is of another kind than the question")]
    Answer,
}

/// Why a call to a peer had no answer. But for a [refusal](Self::Refused), its connection is of no use any more.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The answer did not come in time.
    #[error("the peer has not answered by the deadline")]
    Late,
    /// The peer has ended the connection.
    #[error("the peer has ended the connection")]
    Closed,
    /// The system refused.
    #[error("{operation} was refused")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The peer sends what is no frame or message.
    #[error("the peer sends what is no message")]
    Frame(#[from] FrameError),
    /// The first bytes are not those of this protocol.
    #[error("the first bytes are {found:02x?}, which is not this protocol")]
    Foreign {
        /// The bytes.
        found: [u8; 4],
    },
    /// The peer speaks another version.
    #[error("the peer speaks version {theirs}, and this is version {ours}")]
    Version {
        /// This side's.
        ours: u16,
        /// The peer's.
        theirs: u16,
    },
    /// The peer does not have the key, or says again what was said before.
    #[error("the peer does not prove that it has the key")]
    Key,
    /// Another node than the one that was called.
    #[error("the node's name is not that of the member that was called")]
    OtherNode,
    /// The peer's answer cannot be true.
    #[error("the peer's answer cannot be true")]
    Lie(#[from] Lie),
    /// The peer does not do what it was asked. The connection goes on.
    #[error("the peer refuses")]
    Refused(#[from] Refusal),
}

impl PeerError {
    /// The error of an operation of the system; late, if it ended because of its deadline.
    pub(crate) fn io(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Late,
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io { operation, error },
        }
    }

    /// Whether the connection can be used on.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}

/// Why there is no node, or no part of one: its memory, key, address or membership.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The name is empty, or longer than a handshake takes.
    #[error("a node's name has 1 to {max} bytes, and this one has {bytes}")]
    Name {
        /// Bytes of the name.
        bytes: usize,
        /// Bytes of the longest name.
        max: usize,
    },
    /// The memory has no room for one slot.
    #[error("{bytes} bytes have no room for a slot of {slot_bytes}")]
    TooSmall {
        /// Bytes of the memory.
        bytes: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// A slot is larger than a frame, or has no byte.
    #[error("a record of {bytes} bytes is none, or does not fit a frame of {max}")]
    Record {
        /// Bytes of a record.
        bytes: u64,
        /// Bytes of the longest frame.
        max: u64,
    },
    /// The host tier is larger than the node was made for, or another one is shared.
    #[error(
        "a host tier of {bytes} bytes is not the one of {max} at most that the node was made for"
    )]
    Host {
        /// Bytes of the host tier.
        bytes: u64,
        /// Bytes of the one that is shared, at most.
        max: u64,
    },
    /// There are more slots than a pool has blocks, or no memory to count them.
    #[error("{slots} slots are more than can be counted")]
    TooManySlots {
        /// How many.
        slots: u64,
    },
    /// The system has no random numbers, or no memory.
    #[error("the system has refused random numbers or {bytes} bytes of memory")]
    System {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A key is too short.
    #[error("a key has at least {min} bytes, and this one has {bytes}")]
    Key {
        /// Bytes given.
        bytes: usize,
        /// Bytes of the shortest key.
        min: usize,
    },
    /// A text is no address.
    #[error(
        "{found:?} is no address; expected unix:PATH or tcp:HOST:PORT with a number for the host"
    )]
    Address {
        /// The text.
        found: String,
    },
    /// No endpoint is named.
    #[error("no endpoint of etcd is named")]
    NoEndpoint,
    /// An endpoint is no URL of this kind.
    #[error("{endpoint:?} is no endpoint; expected http://HOST:PORT")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The prefix of etcd's keys is empty, so that keys of others would be taken for members.
    #[error("the prefix of the keys is empty")]
    NoPrefix,
    /// The node's name at etcd is empty, too long, or has a slash, so that no list would take it for a member.
    #[error("{name:?} is no name of a node; it has 1 to {max} bytes, and no slash")]
    MemberName {
        /// The name.
        name: String,
        /// Bytes of the longest name.
        max: usize,
    },
    /// The lease at etcd is too short for its renewals.
    #[error("a lease of {ttl_ms} ms is shorter than {min_ms} ms")]
    EtcdLease {
        /// Milliseconds of the lease.
        ttl_ms: u128,
        /// Milliseconds of the shortest.
        min_ms: u128,
    },
    /// The system has no thread.
    #[error("the system has no thread: {reason}")]
    Thread {
        /// The system's reason.
        reason: String,
    },
}

kv_pool::one_line_debug!(FrameError, Refusal, Lie, PeerError, NodeError);
