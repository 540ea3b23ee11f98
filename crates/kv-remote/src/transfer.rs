//! How the bytes of a peer's blocks come: over the connection, or from memory that this process reaches.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::memory::Memory;
use crate::message::{LeaseId, Reply, Request, Span};
use crate::node::FRAME_MAX;
use crate::{Lie, Peer, PeerError, Refusal};

/// Reads the memory of a peer. What it brings is checked by its caller, so a transfer may be one-sided: the peer need
/// not know of it.
pub trait Transfer: fmt::Debug + Send {
    /// The bytes of `spans`, one behind the other. The spans are within the peer's memory and do not overlap.
    ///
    /// # Errors
    /// [`PeerError`].
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
    ) -> Result<&[u8], PeerError>;
}

/// The peer sends the bytes over its connection.
#[derive(Debug, Default)]
pub struct SocketTransfer {
    bytes: Vec<u8>,
}

/// Bytes that are asked for at a time. Several requests in a row keep a frame from taking long.
const REQUEST_BYTES: u64 = 4 << 20;

impl Transfer for SocketTransfer {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
    ) -> Result<&[u8], PeerError> {
        self.bytes.clear();
        let mut rest = spans;
        while !rest.is_empty() {
            let (mut asked, mut count) = (0_u64, 0);
            while let Some(span) = rest.get(count) {
                let with = asked + u64::from(span.bytes);
                if count > 0 && with > REQUEST_BYTES || with > FRAME_MAX {
                    break;
                }
                (asked, count) = (with, count + 1);
            }
            // A span alone is longer than a frame.
            let (now, later) = rest.split_at_checked(count).ok_or(Refusal::Length)?;
            if now.is_empty() {
                return Err(Refusal::Length.into());
            }
            let request = Request::Read { lease, spans: now.to_vec() };
            match peer.ask(&request, deadline)? {
                Reply::Bytes(bytes) if bytes.len() as u64 == asked => {
                    self.bytes.extend_from_slice(&bytes);
                }
                Reply::Bytes(bytes) => {
                    return Err(Lie::Bytes { bytes: bytes.len(), asked: asked as usize }.into());
                }
                _ => return Err(Lie::Answer.into()),
            }
            rest = later;
        }
        Ok(&self.bytes)
    }
}

/// The peer's memory is memory of this process, and is read without a word.
#[derive(Debug)]
pub struct MemoryTransfer {
    memory: Arc<dyn Memory>,
    bytes: Vec<u8>,
}

impl MemoryTransfer {
    /// Reads this memory.
    #[must_use]
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self { memory, bytes: Vec::new() }
    }
}

impl Transfer for MemoryTransfer {
    fn read(
        &mut self,
        _: &mut Peer,
        _: LeaseId,
        spans: &[Span],
        _: Instant,
    ) -> Result<&[u8], PeerError> {
        self.bytes.clear();
        for span in spans {
            let before = self.bytes.len();
            self.bytes.resize(before + span.bytes as usize, 0);
            let to = self.bytes.get_mut(before..).unwrap_or_default();
            if !self.memory.read(span.address, to) {
                let (address, bytes) = (span.address, span.bytes.into());
                return Err(
                    Lie::Address { address, bytes, memory_bytes: self.memory.bytes() }.into()
                );
            }
        }
        Ok(&self.bytes)
    }
}
