//! Nodes in memory, and blocks whose bytes say whose they are.

pub(crate) mod engine;
pub(crate) mod proxy;
pub(crate) mod worker;

use kv_remote::Transfer;

use crate::prelude::*;

/// The format of the records of most workers, and of the engine.
pub(crate) const FORMAT: u64 = 7;

pub(crate) const RECORD_BYTES: u64 = 300;

pub(crate) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    kv_testkit::mix(*state)
}

/// The key of the record of a number's block.
pub(crate) fn block(number: u64) -> RecordKey {
    let mut state = number;
    let name = u128::from(random(&mut state)) << 64 | u128::from(random(&mut state));
    let group = GroupId((number % 2) as u16);
    RecordKey { format: FORMAT, group, name: BlockHash::from_u128(name) }
}

/// Its block.
pub(crate) fn pair(number: u64) -> (GroupId, BlockHash) {
    let RecordKey { group, name, .. } = block(number);
    (group, name)
}

/// The record of a number: its length and bytes follow from it.
pub(crate) fn record(number: u64) -> Vec<u8> {
    let mut state = number ^ 0xabcd;
    let length = RECORD_BYTES as usize - (number % 3) as usize * 70;
    (0..length.div_ceil(8)).flat_map(|_| random(&mut state).to_le_bytes()).take(length).collect()
}

pub(crate) fn blocks(numbers: impl IntoIterator<Item = u64>) -> Vec<RecordKey> {
    numbers.into_iter().map(block).collect()
}

/// A node over so many bytes.
pub(crate) fn node_of(options: &NodeOptions, bytes: u64, clock: Arc<dyn Clock>) -> Node {
    Node::new(options, Arc::new(HostMemory::new(bytes).unwrap()), clock).unwrap()
}

pub(crate) fn node_with(name: &str, slots: u64, clock: Arc<dyn Clock>) -> Node {
    let slot_bytes = (64 + RECORD_BYTES).next_multiple_of(64);
    node_of(&NodeOptions::new(name, RECORD_BYTES), slots * slot_bytes, clock)
}

pub(crate) fn manual_node(slots: u64) -> (Node, ManualClock) {
    let clock = ManualClock::new();
    (node_with("a", slots, Arc::new(clock.clone())), clock)
}

pub(crate) fn key() -> Key {
    Key::new(b"a key of more than 16 bytes").unwrap()
}

/// A node with so many slots, served over TCP at a port that is free.
pub(crate) fn serve(name: &str, slots: u64) -> (Server, Member) {
    serve_at(name, slots, "tcp:127.0.0.1:0".parse().unwrap())
}

pub(crate) fn serve_at(name: &str, slots: u64, address: Address) -> (Server, Member) {
    let node = Arc::new(node_with(name, slots, Arc::new(SystemClock::new())));
    let mut options = ServerOptions::new(address, key());
    options.handshake_max = Duration::from_millis(300);
    options.frame_max = Duration::from_millis(300);
    let server = Server::start(node, options).unwrap();
    let member = Member { name: name.to_owned(), address: server.address().clone() };
    (server, member)
}

/// A node that is served over TCP at a port that is free.
pub(crate) fn serve_node(node: &Arc<Node>) -> (Server, Member) {
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    let server = Server::start(Arc::clone(node), options).unwrap();
    let member = Member { name: node.name().to_owned(), address: server.address().clone() };
    (server, member)
}

pub(crate) fn connect(member: &Member) -> Peer {
    Peer::connect(member, &key(), far()).unwrap()
}

/// A deadline that nothing should come near to.
pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Waits until something that threads do has come true.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed().as_secs() < 20, "not in 20 s: {what}");
        std::thread::park_timeout(Duration::from_micros(200));
    }
}

pub(crate) fn number_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |value| value.parse().unwrap())
}

/// Bytes by the connection, and until when those of each read were to come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Noted(Arc<Mutex<Vec<Instant>>>);

impl Noted {
    pub(crate) fn deadlines(&self) -> Vec<Instant> {
        self.0.lock().unwrap().clone()
    }
}

impl Transfer for Noted {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        self.0.lock().unwrap().push(deadline);
        SocketTransfer.read(peer, lease, spans, deadline, each)
    }
}
