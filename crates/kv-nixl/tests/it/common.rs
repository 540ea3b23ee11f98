//! Nodes in memory, and blocks whose bytes say whose they are.
#![allow(dead_code, reason = "the trials of devices use a part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::clock::SystemClock;
use kv_pool::{BlockHash, GroupId};
use kv_remote::{HostMemory, Key, Member, Node, NodeOptions, Server, ServerOptions};
use kv_tier::RecordKey;

pub(crate) type Block = RecordKey;

pub(crate) const RECORD_BYTES: u64 = 300;

pub(crate) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The block of a number.
pub(crate) fn block(number: u64) -> Block {
    let mut state = number;
    let name = u128::from(random(&mut state)) << 64 | u128::from(random(&mut state));
    let group = GroupId((number % 2) as u16);
    RecordKey { format: 7, group, name: BlockHash::from_u128(name) }
}

/// The record of a number: its length and bytes follow from it.
pub(crate) fn record(number: u64) -> Vec<u8> {
    let mut state = number ^ 0xabcd;
    let length = RECORD_BYTES as usize - (number % 3) as usize * 70;
    (0..length.div_ceil(8)).flat_map(|_| random(&mut state).to_le_bytes()).take(length).collect()
}

pub(crate) fn blocks(numbers: impl IntoIterator<Item = u64>) -> Vec<Block> {
    numbers.into_iter().map(block).collect()
}

pub(crate) fn key() -> Key {
    Key::new(b"a key of more than 16 bytes").unwrap()
}

/// A node with so many slots, of whose memory NIXL knows nothing, served over TCP at a port that is free.
pub(crate) fn serve(name: &str, slots: u64) -> (Server, Member) {
    let slot_bytes = (64 + RECORD_BYTES).next_multiple_of(64);
    let memory = Arc::new(HostMemory::new(slots * slot_bytes).unwrap());
    let options = NodeOptions::new(name, RECORD_BYTES);
    let node = Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap();
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    let server = Server::start(Arc::new(node), options).unwrap();
    let member = Member { name: name.to_owned(), address: server.address().clone() };
    (server, member)
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
