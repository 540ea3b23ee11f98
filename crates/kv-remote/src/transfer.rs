//! How the bytes of a peer's blocks come: over the connection, or from memory that this process reaches.

use std::fmt;
use std::time::Instant;

use crate::message::{LeaseId, Span};
use crate::node::FRAME_MAX;
use crate::{Peer, PeerError, Refusal};

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

/// Bytes that are asked for at a time: so few that they are still in a cache when they are sent and when they are checked.
const REQUEST_BYTES: u64 = 1 << 20;
/// Spans that are asked for at a time: so few that a request is taken by the system while the peer sends, and reads nothing.
const REQUEST_SPANS: usize = 256;

/// The spans that are asked for first, and the others.
fn first_request(spans: &[Span]) -> (&[Span], &[Span]) {
    let (mut bytes, mut count) = (0_u64, 0);
    while let Some(span) = spans.get(count).filter(|_| count < REQUEST_SPANS) {
        bytes += u64::from(span.bytes);
        if count > 0 && bytes > REQUEST_BYTES {
            break;
        }
        count += 1;
    }
    spans.split_at_checked(count).unwrap_or((spans, &[]))
}

impl Transfer for SocketTransfer {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        // Of an answer, the first byte says what it is.
        if spans.iter().any(|span| u64::from(span.bytes) >= FRAME_MAX) {
            return Err(Refusal::Length.into());
        }
        peer.drop_answers(deadline)?;
        let mut places = 0..;
        let (mut now, mut rest) = first_request(spans);
        if !now.is_empty() {
            peer.ask_bytes(lease, now, deadline)?;
        }
        while !now.is_empty() {
            // Asked for before the former bytes are received, so that the peer sends these while those are checked.
            let (next, later) = first_request(rest);
            if !next.is_empty() {
                peer.ask_bytes(lease, next, deadline)?;
            }
            let asked = now.iter().map(|span| span.bytes as usize).sum();
            let mut left = peer.bytes(asked, deadline)?;
            for (span, place) in now.iter().zip(&mut places) {
                let (of, behind) = left.split_at_checked(span.bytes as usize).unwrap_or_default();
                each(place, of);
                left = behind;
            }
            (now, rest) = (next, later);
        }
        Ok(())
    }
}
