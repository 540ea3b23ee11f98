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
    /// Says `each` the place and the bytes of every span, once they have come. The spans are within the peer's memory and do
    /// not overlap.
    ///
    /// # Errors
    /// [`PeerError`]. What was said before is right all the same.
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError>;
}

/// The peer sends the bytes over its connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketTransfer;

/// Bytes that are asked for at a time. Several requests in a row keep a frame from taking long.
const REQUEST_BYTES: u64 = 4 << 20;

impl Transfer for SocketTransfer {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        let (mut rest, mut places) = (spans, 0..);
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
                    let mut left = bytes.as_slice();
                    for (span, place) in now.iter().zip(&mut places) {
                        let (of, behind) =
                            left.split_at_checked(span.bytes as usize).unwrap_or_default();
                        each(place, of);
                        left = behind;
                    }
                }
                Reply::Bytes(bytes) => {
                    return Err(Lie::Bytes { bytes: bytes.len(), asked: asked as usize }.into());
                }
                _ => return Err(Lie::Answer.into()),
            }
            rest = later;
        }
        Ok(())
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
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        for (place, span) in spans.iter().enumerate() {
            self.bytes.resize(span.bytes as usize, 0);
            if !self.memory.read(span.address, &mut self.bytes) {
                let (address, bytes) = (span.address, span.bytes.into());
                return Err(
                    Lie::Address { address, bytes, memory_bytes: self.memory.bytes() }.into()
                );
            }
            each(place, &self.bytes);
        }
        Ok(())
    }
}
