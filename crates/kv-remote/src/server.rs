//! Serves a node to its peers: a thread that lets them in, and one for each connection.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::address::{Address, Listener, Stream, after};
use crate::channel::{Channel, Facts};
use crate::leases::ReaderId;
use crate::message::{BYTES, LeaseId, Reply, Request, Span};
use crate::node::FRAME_MAX;
use crate::{FrameError, HandshakeError, Key, Node, PeerError, Refusal};

/// How long threads wait before they look whether they are to end.
const LOOK: Duration = Duration::from_millis(5);

/// How a node is served.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub address: Address,
    /// The key that peers have.
    pub key: Key,
    /// Connections that are open at most.
    pub connections_max: usize,
    /// How long a handshake may take.
    pub handshake_max: Duration,
    /// How long a frame may take once it has begun, and an answer until the peer has taken it.
    pub frame_max: Duration,
}

impl ServerOptions {
    /// At most 256 connections, with 2 s for a handshake and 10 s for a frame.
    #[must_use]
    pub fn new(address: Address, key: Key) -> Self {
        let (handshake_max, frame_max) = (Duration::from_secs(2), Duration::from_secs(10));
        Self { address, key, connections_max: 256, handshake_max, frame_max }
    }
}

/// Counts of a server.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Peers that were let in.
    pub let_in: u64,
    /// Peers that do not have the key, or said again what was said before.
    pub wrong_key: u64,
    /// Peers of another version.
    pub wrong_version: u64,
    /// Peers of another protocol.
    pub foreign: u64,
    /// Peers that were not let in in time, or went before.
    pub unfinished: u64,
    /// Connections beyond the most.
    pub too_many: u64,
    /// Frames with a wrong tag. Each has ended its connection, as the next three have.
    pub wrong_tags: u64,
    /// Frames that were too long.
    pub too_long: u64,
    /// Frames that were no message.
    pub malformed: u64,
    /// Frames that began and did not end in time, and answers that were not taken in time.
    pub slow: u64,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that were refused, by reason.
    pub refused: HashMap<Refusal, u64>,
    /// Connections that are open.
    pub open: u64,
}

/// Serves a node, until it is dropped. Dropping it ends all connections; their leases have ended then.
#[derive(Debug)]
pub struct Server {
    address: Address,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    node: Arc<Node>,
    options: ServerOptions,
    /// Set once. Threads look at it after each wait; it orders no other memory.
    ends: AtomicBool,
    stats: Mutex<ServerStats>,
}

impl Server {
    /// Listens, and starts the threads.
    ///
    /// # Errors
    /// The system's, if the address cannot be listened at, or there is no thread.
    pub fn start(node: Arc<Node>, options: ServerOptions) -> io::Result<Self> {
        let listener = Listener::bind(&options.address)?;
        let address = listener.address().clone();
        let stats = Mutex::default();
        let shared = Arc::new(Shared { node, options, ends: AtomicBool::new(false), stats });
        let threads = Arc::clone(&shared);
        let acceptor = std::thread::Builder::new().name("kv-remote".to_owned());
        let acceptor = acceptor.spawn(move || accept_all(&listener, &threads))?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens, with the port that was free.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Its node.
    #[must_use]
    pub fn node(&self) -> &Arc<Node> {
        &self.shared.node
    }

    /// Counts of what it has done.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.shared.stats.lock().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            // What it panicked with was printed.
            drop(acceptor.join());
        }
    }
}

/// A connection's thread, and what ends its waits.
type Connection = (Option<Stream>, JoinHandle<()>);

fn accept_all(listener: &Listener, shared: &Arc<Shared>) {
    let mut connections: Vec<Connection> = Vec::new();
    let wait = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
    let mut next = 1;
    while !shared.ends.load(Ordering::Relaxed) {
        let mut waits = [PollFd::new(listener, PollFlags::IN)];
        // A wait that is interrupted is as good as one that has ended.
        let _ = poll(&mut waits, Some(&wait));
        shared.node.end_overdue();
        connections.retain(|(_, thread)| !thread.is_finished());
        shared.stats.lock().open = connections.len() as u64;
        let stream = match listener.accept() {
            Ok(Some(stream)) => stream,
            Ok(None) => continue,
            Err(error) => {
                // Such as too many open files: peers come again.
                tracing::warn!(%error, "a connection was not accepted");
                std::thread::park_timeout(LOOK);
                continue;
            }
        };
        if connections.len() >= shared.options.connections_max {
            shared.stats.lock().too_many += 1;
            continue;
        }
        let reader = ReaderId(next);
        next += 1;
        let (ender, shared) = (stream.try_clone().ok(), Arc::clone(shared));
        let thread = std::thread::Builder::new().name("kv-remote-peer".to_owned());
        match thread.spawn(move || serve(stream, reader, &shared)) {
            Ok(thread) => connections.push((ender, thread)),
            Err(error) => tracing::warn!(%error, "a connection has no thread"),
        }
    }
    connections.iter().filter_map(|(ender, _)| ender.as_ref()).for_each(Stream::shut);
    for (_, thread) in connections {
        drop(thread.join());
    }
}

fn serve(stream: Stream, reader: ReaderId, shared: &Shared) {
    let Shared { node, options, .. } = shared;
    let facts = Facts { memory_bytes: node.memory_bytes(), slot_bytes: node.slot_bytes() };
    let deadline = after(options.handshake_max);
    let (name, key, max) = (node.name(), &options.key, FRAME_MAX as usize);
    match Channel::accept(stream, name, facts, key, max, deadline) {
        Ok(channel) => {
            shared.stats.lock().let_in += 1;
            let ended = answer_all(channel, reader, shared);
            // A reader that is gone returns nothing itself (H30).
            node.end_reader(reader);
            if let Err(error) = ended {
                shared.count(&error);
            }
        }
        Err(error) => shared.count_kept_out(&error),
    }
}

/// Answers one request after the other, until the peer goes.
fn answer_all(mut channel: Channel, reader: ReaderId, shared: &Shared) -> Result<(), PeerError> {
    let frame_max = shared.options.frame_max;
    while !shared.ends.load(Ordering::Relaxed) {
        let idle = after(20 * LOOK);
        let Some(body) = channel.receive_within(idle, frame_max)? else { continue };
        let request = Request::parse(body)?;
        let answer = answer(&mut channel, &shared.node, reader, request);
        let mut stats = shared.stats.lock();
        match &answer {
            Answer::Reply(Reply::Refused(refusal)) => {
                *stats.refused.entry(*refusal).or_default() += 1;
            }
            Answer::Reply(_) | Answer::Body(_) => stats.answered += 1,
            Answer::None => {}
        }
        drop(stats);
        let deadline = after(frame_max);
        match answer {
            Answer::Reply(reply) => channel.send(&reply.body(), deadline)?,
            Answer::Body(bytes) => channel.send_body(bytes, deadline)?,
            Answer::None => {}
        }
    }
    Ok(())
}

/// A node's answer.
enum Answer {
    Reply(Reply),
    /// It is in the channel, and has so many bytes.
    Body(usize),
    /// The reader waits for none.
    None,
}

impl From<Result<(), Refusal>> for Answer {
    fn from(outcome: Result<(), Refusal>) -> Self {
        Self::Reply(outcome.map_or_else(Reply::Refused, |()| Reply::Done))
    }
}

/// A node's answer to a reader.
fn answer(channel: &mut Channel, node: &Node, reader: ReaderId, request: Request) -> Answer {
    Answer::Reply(match request {
        Request::Find { lease, blocks } => match node.find_and_pin(reader, &blocks, lease) {
            Ok(found) => Reply::Found(found),
            Err(refusal) => Reply::Refused(refusal),
        },
        Request::Read { lease, spans } => match read(channel, node, reader, (lease, &spans)) {
            Ok(bytes) => return Answer::Body(bytes),
            Err(refusal) => Reply::Refused(refusal),
        },
        Request::End { lease } => return node.end(reader, lease).into(),
        Request::Release { lease } => {
            // One that has ended is as its reader wants it.
            let _ = node.end(reader, lease);
            return Answer::None;
        }
        Request::Put { group, name, record } => return node.put((group, name), &record).into(),
        Request::Forget { blocks } => {
            node.forget(&blocks);
            Reply::Done
        }
        Request::Clear => {
            node.clear();
            Reply::Done
        }
        Request::Changes { from, hosted } => Reply::Changes(node.changes(from, hosted)),
        Request::Describe => Reply::Described(node.memory().descriptor().unwrap_or_default()),
    })
}

/// Puts the answer to a read where it is sent from; its length. So bytes are copied once, from the node's memory.
fn read(
    channel: &mut Channel,
    node: &Node,
    reader: ReaderId,
    (lease, spans): (LeaseId, &[Span]),
) -> Result<usize, Refusal> {
    // Nothing is allocated for a reader that has no lease of as much.
    let bytes = node.admit(reader, lease, spans, FRAME_MAX - 1)?;
    let (kind, record) = channel.body(1 + bytes).split_first_mut().ok_or(Refusal::Length)?;
    *kind = BYTES;
    node.copy(spans, record)?;
    Ok(1 + bytes)
}

impl Shared {
    /// Counts a peer that was not let in.
    fn count_kept_out(&self, error: &PeerError) {
        let mut stats = self.stats.lock();
        match error {
            PeerError::Handshake(HandshakeError::Version { .. }) => stats.wrong_version += 1,
            PeerError::Handshake(HandshakeError::Foreign { .. }) => stats.foreign += 1,
            PeerError::Handshake(_) => stats.wrong_key += 1,
            _ => stats.unfinished += 1,
        }
    }

    /// Counts what has ended a connection.
    fn count(&self, error: &PeerError) {
        let mut stats = self.stats.lock();
        match error {
            PeerError::Frame(FrameError::Tag { .. }) => stats.wrong_tags += 1,
            PeerError::Frame(FrameError::TooLong { .. }) => stats.too_long += 1,
            PeerError::Frame(_) => stats.malformed += 1,
            PeerError::Late => stats.slow += 1,
            _ => {}
        }
    }
}
