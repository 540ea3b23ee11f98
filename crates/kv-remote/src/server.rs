//! Serves a node to its peers: a thread that lets them in, and one for each connection.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_pool::guard;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::address::{Address, Listener, Stream, after};
use crate::channel::{Channel, Facts};
use crate::leases::{PeerHost, ReaderId};
use crate::message::{BYTES, LeaseId, Reply, Request, Span};
use crate::node::FRAME_MAX;
use crate::{FrameError, Key, Node, PeerError, Refusal};

/// How long threads wait before they look whether they are to end.
const LOOK: Duration = Duration::from_millis(5);

/// Connections that have not proved the key: of one host, and of all. One more ends the one that has waited longest, so that who has
/// the key gets in, however many others say nothing.
const HANDSHAKES_A_HOST: usize = 32;
const HANDSHAKES_MAX: usize = 128;

/// How a node is served.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub address: Address,
    /// The key that peers have.
    pub key: Key,
    /// Connections with the key that are open at most, of which one host has half. Those that have not proved it are not counted: they
    /// have limits of their own.
    pub connections_max: usize,
    /// How long a handshake may take.
    pub handshake_max: Duration,
    /// How long a frame may take once it has begun, and an answer until the peer has taken it.
    pub frame_max: Duration,
    /// How long a connection may be open without a request.
    pub idle_max: Duration,
}

impl ServerOptions {
    /// At most 256 connections, with 2 s for a handshake, 10 s for a frame, and 10 minutes without a request.
    #[must_use]
    pub fn new(address: Address, key: Key) -> Self {
        let (handshake_max, frame_max) = (Duration::from_secs(2), Duration::from_secs(10));
        let idle_max = Duration::from_secs(600);
        Self { address, key, connections_max: 256, handshake_max, frame_max, idle_max }
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
    /// Peers that were not let in in time, went before, or made room for others that had not proved the key either.
    pub unfinished: u64,
    /// Connections beyond the most.
    pub too_many: u64,
    /// Connections that ended because nothing was asked.
    pub idle: u64,
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
    let_in: LetIn,
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
        let (ends, let_in) = (AtomicBool::new(false), LetIn::default());
        let shared = Arc::new(Shared { node, options, ends, let_in, stats });
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
#[derive(Debug)]
struct Connection {
    host: PeerHost,
    stream: Option<Stream>,
    /// Whether it has proved the key. Set once; it orders no other memory.
    is_let_in: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Connection {
    fn shut(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.shut();
        }
    }
}

/// Ends a handshake if there are as many as may be: of this host, or of the one that has most of all, the one that has waited longest.
fn make_room(connections: &mut [Connection], host: PeerHost) {
    let mut waiting: Vec<_> = connections
        .iter_mut()
        .filter(|of| of.stream.is_some() && !of.is_let_in.load(Ordering::Relaxed))
        .collect();
    let of =
        |host: PeerHost, all: &[&mut Connection]| all.iter().filter(|of| of.host == host).count();
    let host = if of(host, &waiting) >= HANDSHAKES_A_HOST {
        Some(host)
    } else if waiting.len() >= HANDSHAKES_MAX {
        // Of several, the one whose first has waited longest.
        waiting.iter().rev().map(|one| one.host).max_by_key(|host| of(*host, &waiting))
    } else {
        None
    };
    // They are in the order in which they came.
    if let Some(longest) = waiting.iter_mut().find(|of| Some(of.host) == host) {
        longest.shut();
    }
}

/// Connections of this process, of all its servers: a node may have several.
static CONNECTIONS: AtomicU64 = AtomicU64::new(1);

fn accept_all(listener: &Listener, shared: &Arc<Shared>) {
    let mut connections: Vec<Connection> = Vec::new();
    let wait = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
    while !shared.ends.load(Ordering::Relaxed) {
        let mut waits = [PollFd::new(listener, PollFlags::IN)];
        // A wait that is interrupted is as good as one that has ended.
        let _ = poll(&mut waits, Some(&wait));
        guard!("remote.ends-overdue-leases", shared.node.end_overdue());
        connections.retain(|of| !of.thread.is_finished());
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
        // One that cannot be ended could not be made room for others.
        let (Ok(host), Ok(ender)) = (stream.host(), stream.try_clone()) else { continue };
        make_room(&mut connections, host);
        // Relaxed: the counter only has to give each connection of the process a number of its own.
        let reader = ReaderId(CONNECTIONS.fetch_add(1, Ordering::Relaxed));
        let is_let_in = Arc::<AtomicBool>::default();
        let (flag, shared) = (Arc::clone(&is_let_in), Arc::clone(shared));
        let thread = std::thread::Builder::new().name("kv-remote-peer".to_owned());
        match thread.spawn(move || serve(stream, (reader, host), &flag, &shared)) {
            Ok(thread) => {
                connections.push(Connection { host, stream: Some(ender), is_let_in, thread });
            }
            Err(error) => tracing::warn!(%error, "a connection has no thread"),
        }
    }
    connections.iter_mut().for_each(Connection::shut);
    for connection in connections {
        drop(connection.thread.join());
    }
}

/// Connections that have proved the key, of each host.
#[derive(Debug, Default)]
struct LetIn(Mutex<HashMap<PeerHost, usize>>);

impl LetIn {
    /// A place of a host, which dropping it gives back.
    fn take(&self, host: PeerHost, max: usize) -> Option<Place<'_>> {
        let mut all = self.0.lock();
        let (count, of_host) = (all.values().sum::<usize>(), all.get(&host).copied().unwrap_or(0));
        let of_host_max = guard!("remote.halves-connections", max.div_ceil(2), else max);
        let has_room = count < max && of_host < of_host_max;
        has_room.then(|| {
            all.insert(host, of_host + 1);
            Place { of: self, host }
        })
    }
}

struct Place<'a> {
    of: &'a LetIn,
    host: PeerHost,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = self.of.0.lock();
        if let Some(count) = all.get_mut(&self.host) {
            *count -= 1;
        }
        all.retain(|_, count| *count > 0);
    }
}

/// A reader that returns nothing itself when it is gone, however its connection has ended (H30).
struct Reader<'a> {
    node: &'a Node,
    reader: ReaderId,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        guard!("remote.ends-leases-of-the-gone", self.node.end_reader(self.reader));
    }
}

fn serve(
    stream: Stream,
    (reader, host): (ReaderId, PeerHost),
    is_let_in: &AtomicBool,
    shared: &Shared,
) {
    let Shared { node, options, .. } = shared;
    let facts = Facts { memory_bytes: node.memory_bytes(), slot_bytes: node.slot_bytes() };
    let deadline = after(options.handshake_max);
    let (name, key, max) = (node.name(), &options.key, FRAME_MAX as usize);
    // Others may have got in while it proved itself.
    let mut place = None;
    let room = || {
        is_let_in.store(true, Ordering::Relaxed);
        place = shared.let_in.take(host, options.connections_max);
        place.is_some()
    };
    match Channel::accept(stream, (name, facts), key, max, deadline, room) {
        Ok(channel) => {
            shared.stats.lock().let_in += 1;
            node.join(reader, host);
            let _reader = Reader { node, reader };
            if let Err(error) = answer_all(channel, reader, shared) {
                shared.count(&error);
            }
        }
        Err(error) => shared.count_kept_out(&error),
    }
}

/// Answers one request after the other, until the peer goes.
fn answer_all(mut channel: Channel, reader: ReaderId, shared: &Shared) -> Result<(), PeerError> {
    let (frame_max, idle_max) = (shared.options.frame_max, shared.options.idle_max);
    let mut since = Instant::now();
    while !shared.ends.load(Ordering::Relaxed) {
        let idle = after(20 * LOOK);
        let Some(body) = channel.receive_within(idle, frame_max)? else {
            if guard!("remote.ends-idle-connections", since.elapsed() < idle_max, else true) {
                continue;
            }
            shared.stats.lock().idle += 1;
            return Ok(());
        };
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
        since = Instant::now();
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
        Request::Put { key, record } => return node.put(key, &record).into(),
        Request::Forget { blocks } => {
            node.forget(&blocks);
            Reply::Done
        }
        Request::Clear { format } => {
            node.clear_format(format);
            Reply::Done
        }
        Request::Changes { from, hosted, format } => {
            Reply::Changes(node.changes(from, (hosted, format)))
        }
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
            PeerError::Version { .. } => stats.wrong_version += 1,
            PeerError::Foreign { .. } => stats.foreign += 1,
            PeerError::Key | PeerError::OtherNode => stats.wrong_key += 1,
            PeerError::Refused(_) => stats.too_many += 1,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_half_of_the_connections_and_gives_each_back() {
        let (let_in, max) = (LetIn::default(), 5);
        let [one, two] = ["192.0.2.1", "192.0.2.2"].map(|of| PeerHost::of(of.parse().unwrap()));
        let take = |host| let_in.take(host, max);
        let mut first: Vec<_> = (0..9).filter_map(|_| take(one)).collect();
        assert_eq!(first.len(), 3);
        let second: Vec<_> = (0..9).filter_map(|_| take(two)).collect();
        assert_eq!((second.len(), take(PeerHost::Local).is_some()), (2, false));
        drop(first.pop());
        assert!([two, PeerHost::Local, one].into_iter().all(|host| take(host).is_some()));
        drop((first, second));
        assert!(let_in.0.lock().is_empty());
    }
}
