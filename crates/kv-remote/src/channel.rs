//! A connection that has proved itself: frames with tags, each way with deadlines.
//!
//! A connection begins with the client's *hello* (`KVRM`, version, nonce), the server's *welcome* (`KVRM`, version, nonce, facts,
//! name, proof), and the client's *proof*. All later bytes are frames: the length of the body, four bytes; the body; and
//! the tag, 16 bytes. The server's first frame is empty, or refuses. A server of another version answers `KVRM` and its version.

use std::time::{Duration, Instant};

use kv_pool::guard;

use crate::address::{Address, Stream, after};
use crate::auth::{NONCE_BYTES, PROOF_BYTES, Role, TAG_BYTES, Tags, Transcript, random};
use crate::message::Reply;
use crate::{FrameError, Key, Lie, PeerError, Refusal};

const MAGIC: [u8; 4] = *b"KVRM";
/// The version of the protocol.
const VERSION: u16 = 4;
/// Bytes that both sides' first messages begin with.
const HEAD: usize = 6;
/// Bytes of what a node says of itself.
const FACTS: usize = 16;
/// Bytes of the longest name of a node.
pub(crate) const NAME_MAX: usize = 64;

/// What a node says of itself, under its proof.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Facts {
    /// Bytes of its memory.
    pub(crate) memory_bytes: u64,
    /// Bytes of a slot.
    pub(crate) slot_bytes: u64,
}

impl Facts {
    fn bytes(self) -> [u8; FACTS] {
        let mut bytes = [0; FACTS];
        bytes[..8].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; FACTS]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| words.get(at).map_or(0, |word| u64::from_le_bytes(*word));
        Self { memory_bytes: word(0), slot_bytes: word(1) }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Stream,
    sends: Tags,
    receives: Tags,
    /// Bytes of the longest body that is received.
    body_max: usize,
    /// What was sent last, and what was received, with room that is kept for the next one.
    outbox: Vec<u8>,
    inbox: Vec<u8>,
}

/// Bytes before a frame's body.
const LENGTH: usize = 4;
/// Bytes of the longest frame whose room is kept.
const KEPT_MAX: usize = 8 << 20;

/// Room for so many bytes, which holds what it held. Room that is new is zero, and is touched by what fills it alone.
pub(crate) fn room(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes || (buffer.len() > KEPT_MAX && bytes <= KEPT_MAX) {
        *buffer = vec![0; bytes];
    }
    buffer.get_mut(..bytes).unwrap_or_default()
}

/// Gives up room that is much.
fn trim(buffer: &mut Vec<u8>) {
    if buffer.len() > KEPT_MAX {
        *buffer = Vec::new();
    }
}

fn head() -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC);
    head[4..].copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// Checks the first bytes of a peer.
fn check_head(head: [u8; HEAD]) -> Result<(), PeerError> {
    let [a, b, c, d, low, high] = head;
    let (found, theirs) = ([a, b, c, d], u16::from_le_bytes([low, high]));
    if found != MAGIC {
        return Err(PeerError::Foreign { found });
    }
    if theirs != VERSION {
        return Err(PeerError::Version { ours: VERSION, theirs });
    }
    Ok(())
}

fn nonce() -> Result<[u8; NONCE_BYTES], PeerError> {
    let random = guard!("remote.draws-nonces", random(), else Ok([0; NONCE_BYTES]));
    random.map_err(PeerError::io("reading random numbers"))
}

impl Channel {
    /// Calls the node of a name.
    pub(crate) fn connect(
        address: &Address,
        name: &str,
        key: &Key,
        body_max: usize,
        deadline: Instant,
    ) -> Result<(Self, Facts), PeerError> {
        let mut stream = Stream::connect(address, deadline)?;
        let client = nonce()?;
        stream.write_all(&[head().as_slice(), &client].concat(), deadline)?;
        let mut theirs = [0; HEAD];
        stream.read_exact(&mut theirs, deadline)?;
        check_head(theirs)?;
        let (mut server, mut facts, mut length) = ([0; NONCE_BYTES], [0; FACTS], [0]);
        stream.read_exact(&mut server, deadline)?;
        stream.read_exact(&mut facts, deadline)?;
        stream.read_exact(&mut length, deadline)?;
        let [length] = length;
        let max = NAME_MAX;
        if usize::from(length) > max {
            return Err(FrameError::TooLong { bytes: length.into(), max }.into());
        }
        let mut called = vec![0; length.into()];
        stream.read_exact(&mut called, deadline)?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof, deadline)?;
        let called = String::from_utf8(called).map_err(|_| PeerError::OtherNode)?;
        let said = Transcript {
            version: VERSION,
            client: &client,
            server: &server,
            name: &called,
            facts: &facts,
        };
        guard!("remote.server-proves-the-key", said.check(key, Role::Server, &proof)?);
        // Only one who has the key is asked whether it is the right one.
        if called != name {
            return Err(PeerError::OtherNode);
        }
        stream.write_all(&said.prove(key, Role::Client), deadline)?;
        let mut channel = Self {
            stream,
            sends: said.tags(key, Role::Client),
            receives: said.tags(key, Role::Server),
            body_max,
            outbox: Vec::new(),
            inbox: Vec::new(),
        };
        // A server that does not believe the proof says nothing more.
        let said = channel.receive(deadline);
        match said.map(|body| (!body.is_empty()).then(|| Reply::parse(body))) {
            Ok(None) => Ok((channel, Facts::parse(&facts))),
            Ok(Some(reply)) => Err(match reply? {
                Reply::Refused(refusal) => refusal.into(),
                _ => Lie::Answer.into(),
            }),
            Err(PeerError::Closed) => Err(PeerError::Key),
            Err(error) => Err(error),
        }
    }

    /// Lets a client in, if it proves the key and there is `room` for it then.
    pub(crate) fn accept(
        mut stream: Stream,
        (name, facts): (&str, Facts),
        key: &Key,
        body_max: usize,
        deadline: Instant,
        room: impl FnOnce() -> bool,
    ) -> Result<Self, PeerError> {
        let mut theirs = [0; HEAD];
        stream.read_exact(&mut theirs, deadline)?;
        if let Err(error) = check_head(theirs) {
            if matches!(error, PeerError::Version { .. }) {
                stream.write_all(&head(), deadline)?;
            }
            return Err(error);
        }
        let mut client = [0; NONCE_BYTES];
        stream.read_exact(&mut client, deadline)?;
        let (server, facts) = (nonce()?, facts.bytes());
        let said =
            Transcript { version: VERSION, client: &client, server: &server, name, facts: &facts };
        let (head, length, proof) = (head(), [name.len() as u8], said.prove(key, Role::Server));
        let welcome: [&[u8]; 6] = [&head, &server, &facts, &length, name.as_bytes(), &proof];
        stream.write_all(&welcome.concat(), deadline)?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof, deadline)?;
        guard!("remote.client-proves-the-key", said.check(key, Role::Client, &proof)?);
        let mut channel = Self {
            stream,
            sends: said.tags(key, Role::Server),
            receives: said.tags(key, Role::Client),
            body_max,
            outbox: Vec::new(),
            inbox: Vec::new(),
        };
        if room() {
            channel.send(&[], deadline)?;
            return Ok(channel);
        }
        channel.send(&Reply::Refused(Refusal::Busy).body(), deadline)?;
        Err(Refusal::Busy.into())
    }

    /// Sends a frame. One that fails has spoilt the connection.
    pub(crate) fn send(&mut self, body: &[u8], deadline: Instant) -> Result<(), PeerError> {
        self.body(body.len()).copy_from_slice(body);
        self.send_body(body.len(), deadline)
    }

    /// Room for the body of the next frame, to be filled and [sent](Self::send_body). It holds anything.
    pub(crate) fn body(&mut self, bytes: usize) -> &mut [u8] {
        let frame = room(&mut self.outbox, LENGTH + bytes + TAG_BYTES);
        frame.get_mut(LENGTH..LENGTH + bytes).unwrap_or_default()
    }

    /// Sends the frame whose body has so many bytes, for which [room](Self::body) was made.
    pub(crate) fn send_body(&mut self, bytes: usize, deadline: Instant) -> Result<(), PeerError> {
        let length = u32::try_from(bytes)
            .map_err(|_| FrameError::TooLong { bytes, max: u32::MAX as usize })?;
        let frame = room(&mut self.outbox, LENGTH + bytes + TAG_BYTES);
        let (head, rest) = frame.split_at_mut(LENGTH);
        let (body, tag) = rest.split_at_mut(bytes);
        head.copy_from_slice(&length.to_le_bytes());
        tag.copy_from_slice(&self.sends.next(body));
        self.stream.write_all(frame, deadline)
    }

    /// Bytes of room that is kept.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.inbox.len() + self.outbox.len()
    }

    /// Receives a frame, all of it by the deadline; its body.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Result<&[u8], PeerError> {
        let mut length = [0; LENGTH];
        self.stream.read_exact(&mut length, deadline)?;
        self.receive_rest(length, deadline)
    }

    /// Waits for a frame to begin until `idle`, and then for so long for its end. None if none has begun.
    pub(crate) fn receive_within(
        &mut self,
        idle: Instant,
        rest: Duration,
    ) -> Result<Option<&[u8]>, PeerError> {
        let mut length = [0; LENGTH];
        let read = match self.stream.read(&mut length, idle) {
            Ok(read) => read,
            Err(PeerError::Late) => {
                // Who says nothing has no use of much room.
                guard!("remote.trims-idle-room", trim(&mut self.inbox));
                trim(&mut self.outbox);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let deadline = after(guard!("remote.ends-slow-frames", rest, else rest * 1000));
        let left = length.get_mut(read..).unwrap_or_default();
        self.stream.read_exact(left, deadline)?;
        self.receive_rest(length, deadline).map(Some)
    }

    fn receive_rest(
        &mut self,
        length: [u8; LENGTH],
        deadline: Instant,
    ) -> Result<&[u8], PeerError> {
        let (bytes, max) = (u32::from_le_bytes(length) as usize, self.body_max);
        if bytes > max {
            return Err(FrameError::TooLong { bytes, max }.into());
        }
        let frame = room(&mut self.inbox, bytes + TAG_BYTES);
        self.stream.read_exact(frame, deadline)?;
        let (body, tag) = frame.split_at(bytes);
        guard!("remote.checks-tags", self.receives.check(body, tag)?);
        Ok(body)
    }
}
