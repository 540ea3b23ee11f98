//! Why no addresses were reserved.

use cuda_driver::DeviceError;
use cuda_driver::messages::one_line_debug;

use crate::GrowError;

/// The reason why no addresses were reserved: for a reservation, an elastic pool or a space of sequences.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// The device cannot map pages of this size.
    #[error("page size {page_bytes} is not a positive multiple of the granularity {granularity}")]
    PageBytes {
        /// Requested size, in bytes.
        page_bytes: u64,
        /// Granularity of the device, in bytes.
        granularity: u64,
    },
    /// The length is 0 or not a multiple of the page size.
    #[error("{bytes} bytes are not a positive number of pages of {page_bytes} bytes")]
    Misaligned {
        /// Requested length, in bytes.
        bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A peer is named twice, or is the owner.
    #[error("device {peer} is named twice in the access list")]
    PeerTwice {
        /// Ordinal of the peer.
        peer: i32,
    },
    /// A peer cannot reach the owner's memory.
    #[error("device {peer} cannot access memory of device {owner}")]
    PeerUnreachable {
        /// Ordinal of the peer.
        peer: i32,
        /// Ordinal of the owner.
        owner: i32,
    },
    /// A block or the pool has no bytes.
    #[error(
        "cannot create a pool of {capacity_blocks} blocks of {block_bytes} bytes: it has no bytes"
    )]
    EmptyPool {
        /// Bytes of a block.
        block_bytes: u64,
        /// Blocks of the pool.
        capacity_blocks: u64,
    },
    /// The pool's size does not fit in 64 bits.
    #[error(
        "cannot create a pool of {capacity_blocks} blocks of {block_bytes} bytes in pages of {page_bytes} bytes: the size overflows 64 bits"
    )]
    PoolOverflow {
        /// Bytes of a block.
        block_bytes: u64,
        /// Blocks of the pool.
        capacity_blocks: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// The first blocks could not be mapped.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// One of the sizes of a space of sequences is 0.
    #[error(
        "cannot create a space of {sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes: it has no bytes"
    )]
    Empty {
        /// Number of seats.
        sequences: u64,
        /// Number of planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// The addresses of a space of sequences do not fit in 64 bits.
    #[error(
        "cannot create a space of {sequences} sequences of {planes} planes and {tokens_max} tokens of {token_bytes} bytes: the size overflows 64 bits"
    )]
    Overflow {
        /// Number of seats.
        sequences: u64,
        /// Number of planes.
        planes: u64,
        /// Bytes of a token in a plane.
        token_bytes: u64,
        /// Maximum number of tokens of a sequence.
        tokens_max: u64,
    },
    /// More seats than a space can have.
    #[error("cannot create a space of {sequences} sequences: at most {sequences_max} are possible")]
    TooManySeats {
        /// Requested number of seats.
        sequences: u64,
        /// Maximum number of seats.
        sequences_max: u64,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

one_line_debug!(SpaceError);
