//! Peers that have the key and lie: what they say is refused with a reason.
#![cfg(test)]

use std::time::{Duration, Instant};

use kv_pool::{BlockHash, GroupId};
use kv_tier::RecordKey;

use crate::address::{Address, Listener};
use crate::channel::{Channel, Facts};
use crate::message::{Found, LeaseId, Located, Reply, Request, Span};
use crate::{
    FrameError, Key, Lie, Member, Peer, PeerError, Refusal, SocketTransfer, Transfer, Unfit,
};

const FACTS: Facts = Facts { memory_bytes: 10_000, slot_bytes: 1000 };

fn far() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn key() -> Key {
    Key::new(&[7; 32]).unwrap()
}

/// A node that lets one peer in and answers with these bodies, whatever it is asked.
fn liar(answers: Vec<Vec<u8>>) -> (Peer, std::thread::JoinHandle<()>) {
    node(move |channel| {
        for answer in answers {
            channel.receive(far()).unwrap();
            channel.send(&answer, far()).unwrap();
        }
    })
}

/// A node that lets one peer in and does this.
fn node(serve: impl FnOnce(&mut Channel) + Send + 'static) -> (Peer, std::thread::JoinHandle<()>) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address: Address = listener.address().clone();
    let thread = std::thread::spawn(move || {
        let stream = loop {
            if let Some(stream) = listener.accept().unwrap() {
                break stream;
            }
            std::thread::yield_now();
        };
        serve(
            &mut Channel::accept(stream, ("a", FACTS), &key(), 16 << 20, far(), || true).unwrap(),
        );
    });
    let member = Member { name: "a".to_owned(), address };
    (Peer::connect(&member, &key(), far()).unwrap(), thread)
}

fn block(number: u128) -> RecordKey {
    RecordKey { format: 7, group: GroupId(0), name: BlockHash::from_u128(number) }
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

/// Spans of one byte each, which take two requests.
fn two_requests() -> Vec<Span> {
    (0..300).map(|address| Span { address, bytes: 1 }).collect()
}

#[test]
fn bytes_are_asked_for_before_the_former_ones_have_come() {
    let (mut peer, thread) = node(|channel| {
        // Answers nothing before it was asked for all.
        let asked =
            [channel.receive(far()).unwrap().to_vec(), channel.receive(far()).unwrap().to_vec()];
        for body in asked {
            let Ok(Request::Read { spans, .. }) = Request::parse(&body) else { panic!("{body:?}") };
            let bytes = spans.iter().map(|span| span.address as u8).collect();
            channel.send(&Reply::Bytes(bytes).body(), far()).unwrap();
        }
    });
    let mut said = Vec::new();
    let mut each = |place: usize, bytes: &[u8]| said.push((place, bytes.to_vec()));
    SocketTransfer.read(&mut peer, LeaseId(5), &two_requests(), far(), &mut each).unwrap();
    thread.join().unwrap();
    assert!(said.iter().map(|(place, _)| *place).eq(0..300));
    assert!(said.iter().all(|(place, bytes)| *bytes == [*place as u8]));
}

#[test]
fn a_second_answer_that_is_wrong_is_refused_as_the_first_one() {
    let wrong = [
        Reply::Bytes(vec![1; 43]).body(),
        Reply::Bytes(vec![1; 45]).body(),
        Reply::Done.body(),
        vec![],
        vec![200],
    ];
    for answer in wrong {
        let (mut peer, thread) = liar(vec![Reply::Bytes(vec![1; 256]).body(), answer.clone()]);
        let mut said = 0;
        let mut each = |_, _: &[u8]| said += 1;
        let read = SocketTransfer.read(&mut peer, LeaseId(5), &two_requests(), far(), &mut each);
        thread.join().unwrap();
        let is_refused = matches!(
            read,
            Err(PeerError::Lie(Lie::Bytes { bytes: 43 | 45, asked: 44 } | Lie::Answer)
                | PeerError::Frame(_))
        );
        assert!(is_refused, "{answer:?}: {read:?}");
        assert_eq!(said, 256);
    }
}

#[test]
fn answers_that_nobody_has_waited_for_are_no_later_ones() {
    let refused = Reply::Refused(Refusal::NoLease).body();
    let bytes = Reply::Bytes(vec![1; 44]).body();
    let first = Reply::Bytes(vec![1; 256]).body();
    // The first request is refused; or its caller panics.
    for (first, panics) in [(refused, false), (first, true)] {
        let answers = vec![first, bytes.clone(), Reply::Done.body(), Reply::Bytes(vec![7]).body()];
        let (mut peer, thread) = liar(answers);
        let read = std::panic::AssertUnwindSafe(|| {
            let mut each = |_, _: &[u8]| panic!("as it should");
            SocketTransfer.read(&mut peer, LeaseId(5), &two_requests(), far(), &mut each)
        });
        match std::panic::catch_unwind(read) {
            Ok(read) => assert!(matches!(read, Err(PeerError::Refused(Refusal::NoLease)))),
            Err(_) => assert!(panics),
        }
        peer.end(LeaseId(5), far()).unwrap();
        let mut said = Vec::new();
        let mut each = |_, bytes: &[u8]| said.extend_from_slice(bytes);
        let one = [Span { address: 0, bytes: 1 }];
        SocketTransfer.read(&mut peer, LeaseId(5), &one, far(), &mut each).unwrap();
        thread.join().unwrap();
        assert_eq!(said, [7]);
    }
}

#[test]
fn a_lease_is_given_back_to_one_that_says_nothing() {
    let (mut peer, thread) = node(|channel| {
        let body = channel.receive(far()).unwrap();
        assert_eq!(Request::parse(body), Ok(Request::Release { lease: LeaseId(5) }));
        // The answer is that to the next request.
        channel.receive(far()).unwrap();
        channel.send(&Reply::Described(vec![7]).body(), far()).unwrap();
    });
    peer.release(LeaseId(5), far()).unwrap();
    assert_eq!(*peer.describe(far()).unwrap(), [7]);
    thread.join().unwrap();
}

#[test]
fn room_for_a_frame_is_kept_unless_it_is_much() {
    use crate::channel::room;
    let mut buffer = Vec::new();
    for (bytes, kept) in
        [(10, 10), (5, 10), (9 << 20, 9 << 20), (9 << 20, 9 << 20), (8 << 20, 8 << 20)]
    {
        assert_eq!(room(&mut buffer, bytes).len(), bytes);
        assert_eq!(buffer.len(), kept);
    }
}

#[test]
fn room_for_a_long_frame_is_given_up_when_nothing_is_said() {
    let (mut peer, thread) = node(|channel| {
        let long = channel.receive(far()).unwrap().len();
        channel.send(&vec![3; long], far()).unwrap();
        assert!(channel.kept() > 2 * long);
        let idle = Instant::now() + Duration::from_millis(1);
        assert!(matches!(channel.receive_within(idle, Duration::ZERO), Ok(None)));
        assert_eq!(channel.kept(), 0);
        // What is not much is kept.
        channel.send(&[3], far()).unwrap();
        let idle = Instant::now() + Duration::from_millis(1);
        assert!(matches!(channel.receive_within(idle, Duration::ZERO), Ok(None)));
        assert!(channel.kept() > 0);
    });
    // The answer is none; what counts is on the other side.
    let put = peer.put(block(1), vec![7; 9 << 20], far());
    assert!(put.is_err());
    thread.join().unwrap();
}

/// A node that says of more and more blocks that it has them, and counts how often it was asked.
fn boaster(facts: Facts, asked: &std::sync::Arc<std::sync::atomic::AtomicUsize>) -> Member {
    use crate::message::{Change, Changes, Cursor, LIST_MAX};
    use std::sync::atomic::Ordering::SeqCst;
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address: Address = listener.address().clone();
    let asked = std::sync::Arc::clone(asked);
    std::thread::spawn(move || {
        let stream = loop {
            if let Some(stream) = listener.accept().unwrap() {
                break stream;
            }
            std::thread::yield_now();
        };
        let mut channel =
            Channel::accept(stream, ("a", facts), &key(), 16 << 20, far(), || true).unwrap();
        while let Ok(body) = channel.receive(far()) {
            let reply = match Request::parse(body).unwrap() {
                Request::Changes { from, .. } => {
                    let names = from.read..from.read + LIST_MAX as u64;
                    let next = Cursor { log: 1, read: names.end };
                    let change = |name: u64| {
                        let RecordKey { group, name, .. } = block(name.into());
                        Change { is_there: true, group, name }
                    };
                    asked.fetch_add(1, SeqCst);
                    Reply::Changes(Changes { next, changes: names.map(change).collect() })
                }
                Request::Find { .. } => Reply::Found(Found::default()),
                _ => Reply::Done,
            };
            if channel.send(&reply.body(), far()).is_err() {
                return;
            }
        }
    });
    Member { name: "a".to_owned(), address }
}

#[test]
fn a_member_that_boasts_is_believed_what_it_has_room_for_and_asked_no_more_than_is_taken_in() {
    use crate::{RemoteOptions, RemoteTier};
    use kv_tier::LowerTier as _;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    // Blocks of one group may have any part of the bytes that a slot has for those of another one.
    for facts in [FACTS, Facts { memory_bytes: 1 << 20, slot_bytes: 1 << 18 }] {
        let asked = std::sync::Arc::<AtomicUsize>::default();
        let until = |count: usize| {
            while asked.load(SeqCst) < count {
                std::thread::park_timeout(Duration::from_micros(100));
            }
        };
        let mut options = RemoteOptions::new(vec![boaster(facts, &asked)], key());
        options.follow_every = Duration::ZERO;
        let mut tier = RemoteTier::new(options).unwrap();
        tier.set_format(7);
        let max = crate::tier::NEWS_MAX;
        until(max);
        // Each of these is an order that it has carried out, behind which it would have asked again.
        for _ in 0..20 {
            tier.forget(&[(GroupId(0), block(9).name)]);
            std::thread::park_timeout(Duration::from_micros(300));
        }
        assert!(asked.load(SeqCst) <= max + 1, "{} answers are kept", asked.load(SeqCst));
        let (mut gained, mut dropped) = (Vec::new(), Vec::new());
        for turn in 1..4 {
            tier.poll(&mut dropped);
            tier.gained(&mut gained);
            until(max + turn);
        }
        let room = facts.memory_bytes / 64;
        assert_eq!((gained.len() as u64, dropped.len()), (room, 0), "of {}", asked.load(SeqCst));
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
    channel.send(&Request::Clear { format: 7 }.body(), far()).unwrap();
    assert_eq!(channel.receive(far()).unwrap(), Reply::Done.body());
}
