//! Nodes over sockets: several on one host, peers that go, and peers and networks that mean harm.

use crate::common::proxy::{HANDSHAKE, Proxy, Tamper};
use crate::common::{block, serve_at};
use crate::prelude::*;
use kv_remote::Transfer;

const SECOND: Duration = Duration::from_secs(1);

fn port(server: &Server) -> SocketAddr {
    match server.address() {
        Address::Tcp(at) => *at,
        Address::Unix(path) => panic!("{path:?} is no port"),
    }
}

fn by_proxy(server: &Server, tamper: Tamper) -> (Proxy, Member) {
    let proxy = Proxy::to(port(server), tamper);
    let member = Member { name: "a".to_owned(), address: Address::Tcp(proxy.address) };
    (proxy, member)
}

/// Stores blocks and reads them back.
fn store_and_read(peer: &mut Peer, numbers: std::ops::Range<u64>) {
    for number in numbers.clone() {
        peer.put(block(number), record(number), far()).unwrap();
    }
    let wanted = blocks(numbers.clone());
    let found = peer.find_and_pin(&wanted, SECOND * 10, far()).unwrap();
    assert_eq!(found.blocks.len(), wanted.len());
    let read = peer.read(&mut SocketTransfer, &found, &wanted, far()).unwrap();
    let right: Vec<_> = numbers.map(|number| Ok(record(number))).collect();
    assert_eq!(read, right);
    peer.end(found.lease.unwrap(), far()).unwrap();
}

/// Reads the peer's memory without a word to it.
#[derive(Debug)]
struct OneSided(Arc<dyn Memory>);

impl Transfer for OneSided {
    fn read(
        &mut self,
        _: &mut Peer,
        _: LeaseId,
        spans: &[Span],
        _: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        for (place, span) in spans.iter().enumerate() {
            let mut bytes = vec![0; span.bytes as usize];
            assert!(self.0.read(span.address, &mut bytes));
            each(place, &bytes);
        }
        Ok(())
    }
}

/// Memory that says how it is reached, and how often it has said so.
#[derive(Debug)]
struct Described {
    memory: HostMemory,
    asked: AtomicU64,
}

impl Memory for Described {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.memory.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        self.memory.write(address, from)
    }

    fn descriptor(&self) -> Option<Vec<u8>> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        Some(format!("{asked}").into_bytes())
    }
}

#[test]
fn a_peer_is_told_once_how_the_memory_of_a_node_is_reached() {
    let (_server, member) = serve("a", 4);
    let mut peer = connect(&member);
    assert!(peer.describe(far()).unwrap().is_empty(), "bytes come over the connection alone");
    let memory = HostMemory::new(1 << 16).unwrap();
    let memory = Arc::new(Described { memory, asked: AtomicU64::new(7) });
    let clock = Arc::new(SystemClock::new());
    let node = Arc::new(Node::new(&NodeOptions::new("b", 300), memory, clock).unwrap());
    let (_server, member) = serve_node(&node);
    for expected in [&b"7"[..], b"8"] {
        let mut peer = connect(&member);
        assert_eq!(&*peer.describe(far()).unwrap(), expected);
        assert_eq!(&*peer.describe(far()).unwrap(), expected);
    }
}

/// H11: no two listen at one place, whatever else listens on the host, and each has its own.
#[test]
fn two_workers_in_one_network_namespace_serve_and_read_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let ((a, at_a), (b, at_b)) = (serve("a", 16), serve("b", 16));
    let path = Address::Unix(folder.path().join("c.sock"));
    let (c, at_c) = serve_at("c", 16, path.clone());
    assert_ne!(port(&a), port(&b));
    std::thread::scope(|scope| {
        for (turn, member) in (0..).zip([&at_a, &at_b, &at_c, &at_b, &at_a, &at_c]) {
            scope.spawn(move || store_and_read(&mut connect(member), turn * 4..turn * 4 + 4));
        }
    });
    for server in [&a, &b, &c] {
        until("all connections have ended", || server.stats().open == 0);
        let leases = server.node().stats().leases;
        assert_eq!((leases.granted, leases.returned, leases.open), (2, 2, 0));
        assert_eq!(server.stats().let_in, 2);
    }
    // A place that is taken is an error at once, and no wait.
    let node = Arc::clone(a.node());
    for taken in [a.address().clone(), path] {
        let options = ServerOptions::new(taken, key());
        let error = Server::start(Arc::clone(&node), options).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    }
    drop(c);
    assert!(!folder.path().join("c.sock").exists());
}

#[test]
fn a_reader_that_goes_has_its_leases_ended() {
    let (server, member) = serve("a", 4);
    let mut peer = connect(&member);
    (1..=2).for_each(|number| peer.put(block(number), record(number), far()).unwrap());
    for _ in 0..3 {
        let found = peer.find_and_pin(&blocks([1, 2]), SECOND * 10, far()).unwrap();
        assert_eq!(found.blocks.len(), 2);
    }
    assert_eq!(server.node().pool().loans(), 3);
    drop(peer);
    until("leases of a reader that is gone", || server.node().pool().loans() == 0);
    let leases = server.node().stats().leases;
    assert_eq!((leases.granted, leases.cancelled, leases.open), (3, 3, 0));
}

#[test]
fn a_lease_ends_by_time_without_a_call_and_its_late_reader_misses() {
    let (server, member) = serve("a", 2);
    let mut peer = connect(&member);
    peer.put(block(1), record(1), far()).unwrap();
    let wanted = blocks([1]);
    let found = peer.find_and_pin(&wanted, Duration::from_millis(1), far()).unwrap();
    until("the lease has ended by time", || server.node().stats().leases.expired == 1);
    let ended = peer.end(found.lease.unwrap(), far());
    assert!(matches!(ended, Err(PeerError::Refused(Refusal::NoLease))), "{ended:?}");
    let read = peer.read(&mut SocketTransfer, &found, &wanted, far());
    assert!(matches!(read, Err(PeerError::Refused(Refusal::NoLease))), "{read:?}");
    // A one-sided reader is not asked for its lease. It sees another write.
    (2..5).for_each(|number| peer.put(block(number), record(number), far()).unwrap());
    let mut one_sided = OneSided(Arc::clone(server.node().memory()));
    let read = peer.read(&mut one_sided, &found, &wanted, far()).unwrap();
    assert_eq!(read, [Err(Unfit::Stale)]);
    assert_eq!(server.stats().refused[&Refusal::NoLease], 2);
}

#[test]
fn a_lease_that_is_released_has_ended_before_the_next_answer() {
    let (server, member) = serve("a", 4);
    let mut peer = connect(&member);
    peer.put(block(1), record(1), far()).unwrap();
    let wanted = blocks([1]);
    for turn in 1..=50 {
        let found = peer.find_and_pin(&wanted, SECOND * 10, far()).unwrap();
        let read = peer.read(&mut SocketTransfer, &found, &wanted, far()).unwrap();
        assert_eq!(read, [Ok(record(1))]);
        peer.release(found.lease.unwrap(), far()).unwrap();
        // One that has ended is not ended again, and nothing is said of it.
        peer.release(found.lease.unwrap(), far()).unwrap();
        peer.changes(Cursor::default(), (false, FORMAT), far()).unwrap();
        let leases = server.node().stats().leases;
        assert_eq!((leases.granted, leases.returned, leases.open), (turn, turn, 0));
    }
    let mut other = connect(&member);
    let found = peer.find_and_pin(&wanted, SECOND * 10, far()).unwrap();
    other.release(found.lease.unwrap(), far()).unwrap();
    other.changes(Cursor::default(), (false, FORMAT), far()).unwrap();
    assert_eq!(server.node().stats().leases.open, 1, "it is another connection's");
    assert!(server.stats().refused.is_empty());
}

#[test]
fn a_peer_without_the_key_or_of_another_name_is_not_let_in() {
    let (server, member) = serve("a", 4);
    let other = Key::new(b"another key of 16 bytes").unwrap();
    let called = Peer::connect(&member, &other, far());
    assert!(matches!(called, Err(PeerError::Key)), "{called:?}");
    let renamed = Member { name: "b".to_owned(), ..member.clone() };
    let called = Peer::connect(&renamed, &key(), far());
    assert!(matches!(called, Err(PeerError::OtherNode)), "{called:?}");
    // One that has the key for the first half only: it says something else than its proof.
    let mut stream = TcpStream::connect(port(&server)).unwrap();
    stream.set_read_timeout(Some(SECOND * 20)).unwrap();
    stream.write_all(&[b"KVRM\x04\x00".as_slice(), &[9; 32], &[1; 32]].concat()).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    until("the wrong proof is counted", || server.stats().wrong_key == 1);
    assert_eq!(server.stats().let_in, 0);
    assert!(matches!(Key::new(b"short"), Err(NodeError::Key { bytes: 5, .. })));
    connect(&member);
}

#[test]
fn a_server_without_the_key_is_told_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let answers = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 38]).unwrap();
        let welcome = [b"KVRM\x04\x00".as_slice(), &[1; 32 + 16], b"\x01a", &[2; 32]].concat();
        stream.write_all(&welcome).unwrap();
        let mut told = Vec::new();
        stream.read_to_end(&mut told).unwrap();
        told
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    let called = Peer::connect(&Member { name: "a".to_owned(), address }, &key(), deadline);
    assert!(matches!(called, Err(PeerError::Key)), "{called:?}");
    assert_eq!(answers.join().unwrap(), b"", "no proof is given to one that gives none");
}

#[test]
fn what_was_said_once_lets_nobody_in_again() {
    let (server, _) = serve("a", 4);
    let (proxy, member) = by_proxy(&server, Tamper::Nothing);
    store_and_read(&mut connect(&member), 1..3);
    let said = proxy.sent.lock().unwrap().clone();
    assert!(said.len() > HANDSHAKE);
    let before = server.node().stats();
    let mut stream = TcpStream::connect(port(&server)).unwrap();
    stream.write_all(&said).unwrap();
    until("the replay is refused", || server.stats().wrong_key == 1);
    let after = server.node().stats();
    assert_eq!((after.stored, after.leases.granted), (before.stored, before.leases.granted));
    assert_eq!(server.stats().let_in, 1);
}

#[test]
fn frames_that_are_changed_or_said_twice_end_the_connection() {
    let (server, _) = serve("a", 4);
    // A request of three fields: length 0 to 3, kind 4, lease 5 to 12, tag behind.
    for (at, frame) in [(4, false), (7, false), (13, false), (28, false), (3, true)] {
        let before = server.stats();
        let (_proxy, member) = by_proxy(&server, Tamper::Flip(at));
        let ended = connect(&member).end(LeaseId(7), far());
        assert!(matches!(ended, Err(PeerError::Closed)), "{at}: {ended:?}");
        until("the changed frame is counted", || {
            let stats = server.stats();
            let counts = (stats.wrong_tags - before.wrong_tags, stats.too_long - before.too_long);
            counts == (u64::from(!frame), u64::from(frame))
        });
    }
    let before = server.stats();
    let (_proxy, member) = by_proxy(&server, Tamper::Twice);
    let mut peer = connect(&member);
    peer.put(block(1), record(1), far()).unwrap();
    until("the repeated frame is counted", || server.stats().wrong_tags == before.wrong_tags + 1);
    assert_eq!(server.node().stats().stored, 1, "a repeated request is not carried out");
    assert!(peer.put(block(2), record(2), far()).is_err());
}

#[test]
fn another_protocol_and_another_version_are_refused_by_either_side() {
    let (server, _) = serve("a", 4);
    let say = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(port(&server)).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A server that has not read all resets the connection.
        drop(stream.read_to_end(&mut answer));
        answer
    };
    assert_eq!(say(b"GET / HTTP/1.1\r\n\r\n"), b"");
    assert_eq!(say(b"KVRM\x02\x00"), b"KVRM\x04\x00", "its own version is all that it says");
    until("both are counted", || {
        let stats = server.stats();
        (stats.foreign, stats.wrong_version) == (1, 1)
    });
    for (answer, expected) in [
        (b"KVRM\x07\x00".as_slice(), PeerError::Version { ours: 4, theirs: 7 }),
        (b"HTTP/1.1 400 Bad Request".as_slice(), PeerError::Foreign { found: *b"HTTP" }),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let member = Member { name: "a".to_owned(), address };
        let answers = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 38]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let called = Peer::connect(&member, &key(), far());
        answers.join().unwrap();
        assert_eq!(called.map(drop).unwrap_err().to_string(), expected.to_string());
    }
}

#[test]
fn a_peer_that_is_slow_holds_nobody_up() {
    let (server, member) = serve("a", 4);
    // One says nothing, one half of a frame. Neither keeps others from being served.
    let _silent = TcpStream::connect(port(&server)).unwrap();
    let (_proxy, through) = by_proxy(&server, Tamper::Stall(9));
    let mut stalled = connect(&through);
    let soon = Instant::now() + Duration::from_millis(100);
    let ended = stalled.end(LeaseId(1), soon);
    assert!(matches!(ended, Err(PeerError::Late)), "{ended:?}");
    store_and_read(&mut connect(&member), 1..3);
    until("both are given up", || {
        let stats = server.stats();
        (stats.unfinished, stats.slow) == (1, 1)
    });
    // A host that takes connections and says nothing.
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(deaf.local_addr().unwrap());
    let soon = Instant::now() + Duration::from_millis(50);
    let called = Peer::connect(&Member { name: "a".to_owned(), address }, &key(), soon);
    assert!(matches!(called, Err(PeerError::Late)), "{called:?}");
    // A deadline that has passed is late before a byte is sent.
    let called = Peer::connect(&member, &key(), Instant::now());
    assert!(matches!(called, Err(PeerError::Late)), "{called:?}");
}

#[test]
fn a_server_that_goes_ends_its_connections_and_a_new_one_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = Address::Unix(folder.path().join("a.sock"));
    let (server, member) = serve_at("a", 4, path.clone());
    let mut peer = connect(&member);
    peer.put(block(1), record(1), far()).unwrap();
    let found = peer.find_and_pin(&blocks([1]), SECOND * 10, far()).unwrap();
    let cursor = peer.changes(Cursor::default(), (false, FORMAT), far()).unwrap().next;
    drop(server);
    let late = peer.find_and_pin(&blocks([1]), SECOND, far());
    assert!(matches!(late, Err(PeerError::Closed)), "{late:?}");
    let (server, member) = serve_at("a", 4, path);
    let mut peer = connect(&member);
    for number in 1..=4 {
        peer.put(block(number), record(number), far()).unwrap();
    }
    let changes = peer.changes(cursor, (false, FORMAT), far()).unwrap();
    assert!(changes.next.log != cursor.log && changes.changes.len() == 4);
    // The same block of the new node is another write, though it may lie at the same place.
    let mut one_sided = OneSided(Arc::clone(server.node().memory()));
    let again = peer.find_and_pin(&blocks([1]), SECOND * 10, far()).unwrap();
    assert_ne!(again.blocks[0].generation, found.blocks[0].generation);
    let read = peer.read(&mut one_sided, &found, &blocks([1]), far()).unwrap();
    assert!(read[0].is_err(), "{read:?}");
}

#[test]
fn connections_and_leases_have_limits() {
    let (server, member) = serve("a", 4);
    let node = Arc::clone(server.node());
    let mut options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    options.connections_max = 1;
    let small = Server::start(node, options).unwrap();
    let near = Member { address: small.address().clone(), ..member.clone() };
    let first = connect(&near);
    let second = Peer::connect(&near, &key(), far()).map(drop);
    assert!(matches!(second, Err(PeerError::Refused(Refusal::Busy))), "{second:?}");
    until("the second is counted", || small.stats().too_many == 1);
    drop(first);
    // Its place is another one's, as often as that is so.
    for _ in 0..3 {
        let mut next = None;
        until("its place is given back", || {
            next = Peer::connect(&near, &key(), far()).ok();
            next.is_some()
        });
    }
    let mut peer = connect(&member);
    peer.put(block(1), record(1), far()).unwrap();
    // One host has half of the leases, and as many connections as it likes have no more.
    for _ in 0..512 {
        peer.find_and_pin(&blocks([1]), SECOND * 10, far()).unwrap();
    }
    let busy = peer.find_and_pin(&blocks([1]), SECOND * 10, far());
    assert!(matches!(busy, Err(PeerError::Refused(Refusal::Busy))), "{busy:?}");
    let busy = connect(&member).find_and_pin(&blocks([1]), SECOND * 10, far());
    assert!(matches!(busy, Err(PeerError::Refused(Refusal::Busy))), "{busy:?}");
    let (node, own) = (server.node(), ReaderId(1 << 40));
    let others = (0..512).map(|_| node.find_and_pin(own, &blocks([1]), SECOND * 10));
    assert!(others.into_iter().all(|found| found.is_ok_and(|found| found.lease.is_some())));
    assert_eq!(node.find_and_pin(own, &blocks([1]), SECOND), Err(Refusal::Busy));
    node.end_reader(own);
    let long = peer.put(block(1), vec![1; 301], far());
    assert!(matches!(long, Err(PeerError::Refused(Refusal::Length))), "{long:?}");
    // More names than a list takes are cut; the connection goes on.
    let many = blocks(0..LIST_MAX as u64 + 10);
    peer.forget(&many, far()).unwrap();
    let many = peer.find_and_pin(&many, SECOND, far());
    assert!(matches!(many, Err(PeerError::Refused(Refusal::Busy))), "{many:?}");
}

#[test]
fn a_frame_of_no_message_ends_its_connection_and_is_told() {
    // The reader of messages says what is wrong with them; the fuzz test has many more.
    use kv_remote::message::{Reply, Request};
    assert_eq!(Request::parse(&[]), Err(FrameError::Short { wanted: 1, left: 0 }));
    assert_eq!(Request::parse(&[99]), Err(FrameError::Kind { kind: 99 }));
    assert_eq!(Request::parse(&[8, 0]), Err(FrameError::Trailing { bytes: 1 }));
    let long = [vec![5], u32::MAX.to_le_bytes().to_vec()].concat();
    let max = LIST_MAX;
    assert_eq!(Request::parse(&long), Err(FrameError::TooMany { count: u32::MAX as usize, max }));
    let few = [vec![5], 2_u32.to_le_bytes().to_vec(), vec![0; 20]].concat();
    assert_eq!(Request::parse(&few), Err(FrameError::Short { wanted: 52, left: 20 }));
    assert_eq!(Reply::parse(&[5, 77]), Err(FrameError::Value { field: "refusal", value: 77 }));
    let unpinned = [vec![1], vec![0; 8], 1_u32.to_le_bytes().to_vec(), vec![0; 32]].concat();
    assert_eq!(Reply::parse(&unpinned), Err(FrameError::Value { field: "lease", value: 0 }));
}

#[test]
fn the_connections_of_one_host_leave_an_eighth_of_the_slots() {
    let (server, member) = serve("a", 8);
    let mut peers = [connect(&member), connect(&member)];
    for number in 0..8 {
        peers[0].put(block(number), record(number), far()).unwrap();
    }
    let found = peers[0].find_and_pin(&blocks(0..6), SECOND * 10, far()).unwrap();
    assert_eq!(found.blocks.len(), 6);
    let more = peers[1].find_and_pin(&blocks(5..8), SECOND * 10, far()).unwrap();
    assert_eq!(
        more.blocks.len(),
        2,
        "the sixth again, which costs nothing, and the seventh of eight"
    );
    for peer in &mut peers {
        assert_eq!(peer.find_and_pin(&blocks(7..8), SECOND, far()).unwrap().lease, None);
    }
    // Others store what they like, and what is given back may be had again.
    for number in 20..40 {
        peers[1].put(block(number), record(number), far()).unwrap();
    }
    peers[0].end(found.lease.unwrap(), far()).unwrap();
    let again = peers[1].find_and_pin(&blocks(0..5), SECOND * 10, far()).unwrap();
    assert_eq!(again.blocks.len(), 5);
    // With its connections, what a host held has gone.
    let [first, second] = peers;
    drop(second);
    until("its leases have ended", || server.node().stats().leases.open == 0);
    let mut first = first;
    let found = first.find_and_pin(&blocks(39..40), SECOND * 10, far()).unwrap();
    assert_eq!(found.blocks.len(), 1);
}

/// A server at which a handshake may take for ever.
fn patient(connections_max: usize, idle_max: Duration) -> (Server, Member) {
    let node = Arc::new(common::node_with("a", 8, Arc::new(SystemClock::new())));
    let mut options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    options.handshake_max = Duration::from_secs(3600);
    (options.connections_max, options.idle_max) = (connections_max, idle_max);
    let server = Server::start(node, options).unwrap();
    let member = Member { name: "a".to_owned(), address: server.address().clone() };
    (server, member)
}

#[test]
fn who_has_not_proved_the_key_keeps_out_nobody_who_has() {
    let (server, member) = patient(8, Duration::from_secs(3600));
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(port(&server)).unwrap()).collect();
    let mut peers: Vec<_> = (0..4).map(|_| connect(&member)).collect();
    for peer in &mut peers {
        store_and_read(peer, 1..3);
    }
    assert!(Peer::connect(&member, &key(), far()).is_err(), "half with the key");
    // Of those that say nothing, as many are left as one host may have, less those that the five have ended.
    until("the others are ended", || (68..=73).contains(&server.stats().unfinished));
    until("few are left", || server.stats().open <= 36);
    drop(silent);
    until("all are gone", || server.stats().open == 4);
    assert_eq!(server.stats().too_many, 1);
}

#[test]
fn a_connection_that_asks_nothing_ends() {
    let (server, member) = patient(4, Duration::ZERO);
    let mut peer = connect(&member);
    until("it is idle", || server.stats().idle == 1);
    assert!(peer.clear(FORMAT, far()).is_err());
    until("it is gone", || server.stats().open == 0);
    let (server, member) = patient(4, Duration::MAX);
    let mut peer = connect(&member);
    store_and_read(&mut peer, 1..3);
    assert_eq!(server.stats().idle, 0);
}

#[test]
fn a_socket_that_a_killed_node_has_left_is_no_obstacle_and_a_living_ones_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    // A listener of the standard library leaves its file, as a process does that is killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let (first, member) = serve_at("a", 8, Address::Unix(path.clone()));
    store_and_read(&mut connect(&member), 1..3);
    let node = Arc::clone(first.node());
    let at = || ServerOptions::new(Address::Unix(path.clone()), key());
    let taken = Server::start(Arc::clone(&node), at()).map(drop).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    store_and_read(&mut connect(&member), 1..3);
    // Somebody has taken its file away, and another node has come to its place.
    std::fs::remove_file(&path).unwrap();
    let (second, _) = serve_at("a", 8, Address::Unix(path.clone()));
    drop(first);
    store_and_read(&mut connect(&member), 1..3);
    drop(second);
    assert!(!path.exists(), "its own file goes with a server");
    // While somebody holds the folder, nothing is taken away; what has no need of that, starts.
    let held = std::fs::File::open(folder.path()).unwrap();
    held.lock().unwrap();
    drop(Server::start(Arc::clone(&node), at()).unwrap());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let waits = Server::start(Arc::clone(&node), at()).map(drop).unwrap_err();
    assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    drop(held);
    std::fs::remove_file(&path).unwrap();
    // What is no socket is nobody's to take away.
    std::fs::write(&path, b"letters").unwrap();
    let taken = Server::start(node, at()).map(drop).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&path).unwrap(), b"letters");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn who_sees_a_nodes_socket_can_connect_to_it() {
    let folder = tempfile::tempdir().unwrap();
    for turn in 0..200 {
        let path = folder.path().join(format!("{turn}.sock"));
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !path.exists() {
                    std::hint::spin_loop();
                }
                std::os::unix::net::UnixStream::connect(&path).map(drop)
            });
            let (server, _) = serve_at("a", 4, Address::Unix(path.clone()));
            looks.join().unwrap().unwrap();
            drop(server);
        });
    }
}
