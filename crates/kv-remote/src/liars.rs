//! Peers that have the key and lie: what they say is refused with a reason.
#![cfg(test)]

use std::time::{Duration, Instant};

use kv_manager::GroupId;
use kv_pool::BlockHash;

use crate::address::{Address, Listener};
use crate::channel::{Channel, Facts};
use crate::message::{Found, LeaseId, Located, Reply, Request, Span};
use crate::{FrameError, Key, Lie, Member, Peer, PeerError, SocketTransfer, Unfit};

const FACTS: Facts = Facts { memory_bytes: 10_000, slot_bytes: 1000 };

fn far() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn key() -> Key {
    Key::new(&[7; 32]).unwrap()
}

/// A node that lets one peer in and answers with these bodies, whatever it is asked.
fn liar(answers: Vec<Vec<u8>>) -> (Peer, std::thread::JoinHandle<()>) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address: Address = listener.address().clone();
    let thread = std::thread::spawn(move || {
        let stream = loop {
            if let Some(stream) = listener.accept().unwrap() {
                break stream;
            }
            std::thread::yield_now();
        };
        let mut channel = Channel::accept(stream, "a", FACTS, &key(), 1 << 20, far()).unwrap();
        for answer in answers {
            channel.receive(far()).unwrap();
            channel.send(&answer, far()).unwrap();
        }
    });
    let member = Member { name: "a".to_owned(), address };
    (Peer::connect(&member, &key(), far()).unwrap(), thread)
}

fn block(number: u128) -> (GroupId, BlockHash) {
    (GroupId(0), BlockHash::from_u128(number))
}

fn found(spans: &[(u64, u32)]) -> Reply {
    let located = |&(address, bytes): &(u64, u32)| Located {
        span: Span { address, bytes },
        generation: 1,
        sum: 0,
        head: None,
    };
    Reply::Found(Found { lease: Some(LeaseId(5)), blocks: spans.iter().map(located).collect() })
}

/// What a reader of two blocks says to an answer.
fn find(answer: &Reply) -> PeerError {
    let (mut peer, thread) = liar(vec![answer.body()]);
    let error = peer.find_and_pin(&[block(1), block(2)], Duration::from_secs(1), far());
    thread.join().unwrap();
    error.unwrap_err()
}

#[test]
fn addresses_outside_of_the_peers_memory_are_refused() {
    for (address, bytes) in
        [(10_000, 100), (9_950, 100), (u64::MAX, 100), (u64::MAX - 100, 101), (0, 1001), (0, 63)]
    {
        let error = find(&found(&[(0, 500), (address, bytes)]));
        let (bytes, memory_bytes) = (bytes.into(), FACTS.memory_bytes);
        let expected = Lie::Address { address, bytes, memory_bytes };
        assert!(matches!(&error, PeerError::Lie(lie) if *lie == expected), "{error:?}");
        assert!(!error.is_refusal());
    }
}

#[test]
fn more_blocks_than_were_asked_for_and_other_answers_are_refused() {
    let error = find(&found(&[(0, 100), (1000, 100), (2000, 100)]));
    let expected = Lie::Blocks { blocks: 3, asked: 2 };
    assert!(matches!(&error, PeerError::Lie(lie) if *lie == expected), "{error:?}");
    let error = find(&Reply::Done);
    assert!(matches!(error, PeerError::Lie(Lie::Answer)), "{error:?}");
    let (mut peer, thread) = liar(vec![vec![200, 1]]);
    let error = peer.end(LeaseId(1), far()).unwrap_err();
    thread.join().unwrap();
    assert!(matches!(error, PeerError::Frame(FrameError::Kind { kind: 200 })), "{error:?}");
}

#[test]
fn fewer_bytes_than_were_asked_for_are_refused_and_wrong_ones_are_a_miss() {
    let answer = found(&[(0, 100), (1000, 100)]);
    for (bytes, is_right) in [(199, false), (0, false), (201, false), (200, true)] {
        let (mut peer, thread) = liar(vec![answer.body(), Reply::Bytes(vec![1; bytes]).body()]);
        let blocks = [block(1), block(2)];
        let found = peer.find_and_pin(&blocks, Duration::from_secs(1), far()).unwrap();
        let read = peer.read(&mut SocketTransfer, &found, &blocks, far());
        thread.join().unwrap();
        match read {
            Err(PeerError::Lie(Lie::Bytes { bytes: said, asked: 200 })) => {
                assert!(!is_right && said == bytes);
            }
            Ok(read) => assert!(is_right && read == [Err(Unfit::Torn), Err(Unfit::Torn)]),
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn a_client_that_sends_no_message_is_counted_and_let_go() {
    use crate::{HostMemory, Node, NodeOptions, Server, ServerOptions};
    use kv_pool::clock::SystemClock;
    use std::sync::Arc;

    let memory = Arc::new(HostMemory::new(4096).unwrap());
    let node = Node::new(&NodeOptions::new("a", 100), memory, Arc::new(SystemClock::new()));
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    let server = Server::start(Arc::new(node.unwrap()), options).unwrap();
    let call = || Channel::connect(server.address(), "a", &key(), 1 << 20, far()).unwrap().0;
    for (body, malformed) in [(vec![0], 1), (vec![], 2), (vec![1, 2], 3), (vec![6, 6], 4)] {
        let mut channel = call();
        channel.send(&body, far()).unwrap();
        let answer = channel.receive(far());
        assert!(matches!(answer, Err(PeerError::Closed)), "{answer:?}");
        assert_eq!(server.stats().malformed, malformed);
    }
    // A list that says more than there is, and a message that is right behind it.
    let mut channel = call();
    channel.send(&Request::Clear.body(), far()).unwrap();
    assert_eq!(channel.receive(far()).unwrap(), Reply::Done.body());
}
