//! Sequences that are handed over: part by part while they are computed, and whoever dies, cancels, lags or lies.

use std::sync::atomic::Ordering::Relaxed;

use crate::common::random;
use crate::prelude::*;
use kv_remote::handover::{HandoverError, Places, Progress, Verdict};
use kv_remote::message::Change;

const SECOND: Duration = Duration::from_secs(1);
const ID: HandoverId = HandoverId(77);

/// A node with room for so many records of 300 bytes, and a connection to it.
fn served(slots: u64) -> (Arc<Node>, Server, Peer) {
    let node = Arc::new(node_with("a", slots, Arc::new(SystemClock::new())));
    let (server, member) = serve_node(&node);
    (node, server, connect(&member))
}

/// An offer of all of a sheet.
fn offer_of(node: &Arc<Node>, whole: &Sheet) -> Offer {
    Offer::new(node, ID, whole.clone(), 10 * SECOND).unwrap()
}

/// Such a node, and an offer there of all of a sheet.
fn offered(slots: u64, whole: Sheet) -> ((Arc<Node>, Server, Peer), Sheet, Offer) {
    let served = served(slots);
    let offer = offer_of(&served.0, &whole);
    (served, whole, offer)
}

/// Another connection to the node.
fn another(server: &Server) -> Peer {
    connect(&Member { name: "a".to_owned(), address: server.address().clone() })
}

fn format(kind: GroupKind) -> GroupFormat {
    GroupFormat { kind, block_tokens: 16, draft_model: false }
}

/// Two groups, of which the second keeps a window only, on two shards.
fn sheet(places: u32, chunk_places: u32) -> Sheet {
    let window = GroupKind::Window { tokens: 20, sinks: 4 };
    let group = |kind, layers, part_bytes, places| GroupSheet {
        format: format(kind),
        layers,
        part_bytes,
        places,
    };
    Sheet {
        tokens: u64::from(places) * 16 - 5,
        draft_tokens: 0,
        ids: (0..places * 16 - 5).collect(),
        shards: 2,
        readers: 1,
        chunk_places,
        content: 0x5eed,
        groups: vec![
            group(GroupKind::Full, 3, 96, (0..places).collect()),
            group(window, 2, 40, vec![0, places - 2, places - 1]),
        ],
    }
}

fn bytes_of(part: Part, length: u32) -> Vec<u8> {
    let Part { group, place, layer, shard } = part;
    let number = u64::from(group.0) << 48 | u64::from(place) << 24 | u64::from(layer * 64 + shard);
    let mut state = number;
    (0..length).map(|_| random(&mut state) as u8).collect()
}

fn give(offer: &mut Offer, parts: &[Part]) -> Result<(), HandoverError> {
    let sheet = offer.sheet().clone();
    let bytes: Vec<_> =
        parts.iter().map(|&part| bytes_of(part, sheet.part_bytes(part).unwrap())).collect();
    let given: Vec<_> = parts.iter().copied().zip(bytes.iter().map(Vec::as_slice)).collect();
    offer.give(&given)
}

fn open(peer: &mut Peer, id: HandoverId) -> Option<Pull> {
    Pull::open(peer, &mut SocketTransfer, (id, 0), 10 * SECOND, far()).unwrap()
}

/// Waits for all that is offered, and takes it.
fn take_all(peer: &mut Peer) {
    let mut pull = open(peer, ID).unwrap();
    pull.wait(peer, &mut SocketTransfer, far(), |_, _| {}).unwrap();
    pull.take(peer, far()).unwrap();
}

fn drop_it(pull: Option<Pull>) -> usize {
    pull.map_or(0, |pull| pull.left())
}

fn no_lease(node: &Node) {
    until("no lease is open", || node.stats().leases.open == 0);
    let leases = node.stats().leases;
    assert_eq!(leases.granted, leases.returned + leases.cancelled + leases.expired);
}

#[test]
fn parts_come_while_they_are_computed_in_any_order_of_chunks() {
    for chunk_places in [1, 3, u32::MAX] {
        let (node, server, mut peer) = served(200);
        assert!(open(&mut peer, ID).is_none(), "nothing is offered yet");
        let whole = sheet(7, chunk_places);
        let mut offer = offer_of(&node, &whole);
        let parts = whole.parts();
        assert_eq!(offer.left(), parts.len());
        let came = std::thread::scope(|scope| {
            let pulls = scope.spawn(|| {
                let mut pull = open(&mut peer, ID).unwrap();
                assert_eq!(*pull.sheet(), whole);
                let mut came = Vec::new();
                let each = |part, bytes: &[u8]| came.push((part, bytes.to_vec()));
                pull.wait(&mut peer, &mut SocketTransfer, far(), each).unwrap();
                pull.take(&mut peer, far()).unwrap();
                came
            });
            let mut state = u64::from(chunk_places);
            let mut rest = parts.as_slice();
            while !rest.is_empty() {
                let count = 1 + random(&mut state) as usize % rest.len();
                let (now, later) = rest.split_at(count);
                assert_eq!(offer.verdict(), Verdict::Waiting);
                give(&mut offer, now).unwrap();
                rest = later;
            }
            pulls.join().unwrap()
        });
        let came: BTreeMap<Part, Vec<u8>> = came.into_iter().collect();
        assert_eq!(came.len(), parts.len(), "each once");
        for part in &parts {
            assert_eq!(came[part], bytes_of(*part, whole.part_bytes(*part).unwrap()), "{part:?}");
        }
        until("it is taken", || offer.verdict() == Verdict::Taken);
        drop(offer);
        // At once, and not when their time has come.
        assert_eq!(node.stats().leases.open, 0);
        no_lease(&node);
        assert_eq!(node.stats().used_slots, 0);
        assert!(open(&mut another(&server), ID).is_none(), "nobody takes it twice");
    }
}

/// As a device would: writes parts where there is room for them, and sums them.
fn write(node: &Node, places: &Places, parts: &[Part], sheet: &Sheet) -> Vec<u64> {
    let write = |(span, &part): (Span, &Part)| {
        let bytes = bytes_of(part, sheet.part_bytes(part).unwrap());
        assert_eq!(bytes.len(), span.bytes as usize);
        assert!(node.memory().write(span.address, &bytes));
        sum(&bytes)
    };
    places.spans().zip(parts).map(write).collect()
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

#[test]
fn parts_that_something_else_writes_and_reads_come_right_or_are_read_again() {
    let ((node, _server, mut peer), whole, mut offer) = offered(200, sheet(5, 1));
    let mut pull = open(&mut peer, ID).unwrap();
    let memory = Arc::clone(node.memory());
    let (mut came, mut turn) = (BTreeMap::new(), 0_u64);
    let mut left = whole.parts().len();
    for some in whole.parts().chunks(7) {
        let places = offer.reserve(some).unwrap();
        let sums = write(&node, &places, some, &whole);
        let mut read = |_: &mut Peer, parts: &[Part], found: &Found| {
            assert_eq!(parts.len(), found.blocks.len());
            let read = parts.iter().zip(&found.blocks).map(|(&part, at)| {
                let mut bytes = vec![0; at.record_span().bytes as usize];
                assert!(memory.read(at.record_span().address, &mut bytes));
                turn += 1;
                // Every third comes wrong, and is to be read again.
                if turn.is_multiple_of(3) {
                    bytes[0] ^= 1;
                }
                let is_right = sum(&bytes) == at.sum;
                if is_right {
                    assert!(came.insert(part, bytes).is_none(), "each once");
                }
                is_right
            });
            Ok(read.collect())
        };
        // Nothing is there before it is given.
        let progress = pull.look_by(&mut peer, far(), &mut read).unwrap();
        assert_eq!(progress, Progress { came: 0, left });
        offer.give_written(places, &sums).unwrap();
        left -= some.len();
        while pull.left() > left {
            pull.look_by(&mut peer, far(), &mut read).unwrap();
        }
    }
    for part in whole.parts() {
        assert_eq!(came[&part], bytes_of(part, whole.part_bytes(part).unwrap()));
    }
    assert_eq!(offer.left(), 0);
    pull.take(&mut peer, far()).unwrap();
    until("it is taken", || offer.verdict() == Verdict::Taken);
    drop(offer);
    no_lease(&node);
    assert_eq!(node.stats().used_slots, 0);
}

#[test]
fn room_for_parts_is_for_parts_of_its_offer_and_comes_back() {
    let (node, _server, mut peer) = served(60);
    let whole = sheet(3, 1);
    let parts = whole.parts();
    let (other_id, until_then) = (HandoverId(78), 10 * SECOND);
    let mut offer = Offer::new(&node, ID, whole.clone(), until_then).unwrap();
    let mut other = Offer::new(&node, other_id, whole.clone(), until_then).unwrap();
    let before = node.pool().claimable();
    let no_part = Part { place: 3, ..parts[0] };
    for wrong in [&[no_part][..], &[parts[0], parts[0]]] {
        let refused = offer.reserve(wrong).map(drop);
        assert!(matches!(refused, Err(HandoverError::NoPart { .. })), "{refused:?}");
    }
    // Room of another offer, too few sums, and a part that was given in between.
    let places = other.reserve(&parts[..2]).unwrap();
    let refused = offer.give_written(places, &[1, 2]);
    assert!(matches!(refused, Err(HandoverError::NoPart { part }) if part == parts[0]));
    let places = offer.reserve(&parts[..2]).unwrap();
    let refused = offer.give_written(places, &[1]);
    assert!(matches!(refused, Err(HandoverError::Node(Refusal::Length))), "{refused:?}");
    assert_eq!(node.pool().claimable(), before, "all that was refused has come back");
    let (first, second) =
        (offer.reserve(&parts[..1]).unwrap(), offer.reserve(&parts[..1]).unwrap());
    offer.give_written(first, &[1]).unwrap();
    let refused = offer.give_written(second, &[1]);
    assert!(matches!(refused, Err(HandoverError::NoPart { .. })), "{refused:?}");
    assert_eq!((offer.left(), other.left()), (parts.len() - 1, parts.len()));
    // Whoever reads it as bytes of the host waits for it, and is told so.
    let mut pull = open(&mut peer, ID).unwrap();
    let progress = pull.look(&mut peer, &mut SocketTransfer, far(), |_, _| panic!("none is right"));
    assert_eq!(progress.unwrap(), Progress { came: 0, left: parts.len() });
    // What a reader answers in error is told, and costs no part.
    let failed = pull.look_by(&mut peer, far(), |_, _, _| Err(PeerError::Late));
    assert!(matches!(failed, Err(HandoverError::Peer(PeerError::Late))), "{failed:?}");
    assert_eq!(pull.left(), parts.len());
    // Fewer answers than parts, and more.
    for said in [vec![], vec![false; 100]] {
        let progress = pull.look_by(&mut peer, far(), |_, _, _| Ok(said.clone())).unwrap();
        assert_eq!(progress, Progress { came: 0, left: parts.len() });
    }
    give(&mut other, &parts).unwrap();
    drop((offer, other));
    no_lease(&node);
    assert_eq!(node.pool().claimable(), 60);
}

/// Of two nodes in one process, each has its share of a sequence under the same id.
#[test]
fn room_for_parts_is_of_the_offers_node() {
    let [(node, _server, _), (elsewhere, _other_server, mut peer)] = [served(60), served(60)];
    let whole = sheet(3, 1);
    let parts = whole.parts();
    let mut offer = offer_of(&node, &whole);
    let other = Offer::new(&elsewhere, ID, whole, 10 * SECOND).unwrap();
    let used = elsewhere.stats().used_slots;
    let refused = offer.give_written(other.reserve(&parts).unwrap(), &vec![1; parts.len()]);
    assert!(matches!(refused, Err(HandoverError::NoPart { part }) if part == parts[0]));
    assert_eq!((offer.left(), elsewhere.stats().used_slots), (parts.len(), used));
    let mut pull = open(&mut peer, ID).unwrap();
    let progress = pull.look_by(&mut peer, far(), |_, _, _| panic!("nothing was given")).unwrap();
    assert_eq!(progress, Progress { came: 0, left: parts.len() });
}

/// Memory that takes so many writes yet.
#[derive(Debug)]
struct Worn(HostMemory, AtomicUsize);

impl Memory for Worn {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.0.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        let takes = self.1.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        takes.is_ok() && self.0.write(address, from)
    }
}

#[test]
fn parts_of_an_offer_that_has_failed_go_with_it() {
    let memory = Arc::new(Worn(HostMemory::new(60 * 384).unwrap(), AtomicUsize::new(usize::MAX)));
    let (options, clock) = (NodeOptions::new("a", 300), Arc::new(SystemClock::new()));
    let node = Arc::new(Node::new(&options, Arc::clone(&memory) as _, clock).unwrap());
    let whole = sheet(3, 1);
    let parts = whole.parts();
    let offered = |id| Offer::new(&node, id, whole.clone(), 10 * SECOND).unwrap();
    let refuses = |mut offer: Offer, refused: Result<(), HandoverError>| {
        assert!(matches!(refused, Err(HandoverError::Node(Refusal::NoRoom))), "{refused:?}");
        assert!(node.stats().used_slots > 2 && offer.verdict() == Verdict::Waiting);
    };
    let mut offer = offered(ID);
    give(&mut offer, &parts[..1]).unwrap();
    // An entry, its record, and the entry of the next part.
    memory.1.store(3, Relaxed);
    let refused = give(&mut offer, &parts[1..]);
    memory.1.store(usize::MAX, Relaxed);
    refuses(offer, refused);
    // That it is withdrawn.
    assert_eq!(node.stats().used_slots, 1);
    // What was written can be pinned no more, because another offer pins as much as both may.
    let (mut offer, mut other) = (offered(ID), offered(HandoverId(78)));
    let places = offer.reserve(&parts).unwrap();
    assert!(parts.iter().any(|&part| give(&mut other, &[part]).is_err()));
    let refused = offer.give_written(places, &vec![1; parts.len()]);
    refuses(offer, refused);
    drop(other);
    assert_eq!(node.stats().used_slots, 2);
}

#[test]
fn offers_leave_slots_for_what_readers_say() {
    for slots in 60..69 {
        let (node, _server, mut peer) = served(slots);
        let whole = sheet(3, 1);
        let mut offer = offer_of(&node, &whole);
        give(&mut offer, &whole.parts()).unwrap();
        // Others take what they are given.
        let another = |number| Offer::new(&node, HandoverId(number), whole.clone(), 10 * SECOND);
        let others: Vec<_> = (1000..).map_while(|number| another(number).ok()).collect();
        take_all(&mut peer);
        assert_eq!(offer.verdict(), Verdict::Taken, "{slots} slots, {} others", others.len());
        // Nobody has an eighth of them.
        assert!(node.pool().claimable() as u64 > slots / 8);
    }
}

#[test]
fn readers_find_what_is_offered_however_many_leases_offers_have() {
    let options = NodeOptions { leases_max: 2, ..NodeOptions::new("a", 300) };
    let node = Arc::new(node_of(&options, 60 * 1024, Arc::new(SystemClock::new())));
    let (_server, member) = serve_node(&node);
    let mut peer = connect(&member);
    let whole = sheet(3, 1);
    let mut offer = offer_of(&node, &whole);
    whole.parts().into_iter().for_each(|part| give(&mut offer, &[part]).unwrap());
    assert!(node.stats().leases.open > 2);
    take_all(&mut peer);
    assert_eq!(offer.verdict(), Verdict::Taken);
}

#[test]
fn a_reader_hears_of_what_will_not_be_offered() {
    let (node, _server, mut peer) = served(100);
    let is_withdrawn = |peer: &mut Peer, id| {
        let opened = Pull::open(peer, &mut SocketTransfer, (id, 0), SECOND, far()).map(drop_it);
        matches!(opened, Err(HandoverError::Withdrawn))
    };
    Offer::decline(&node, ID).unwrap();
    assert!(is_withdrawn(&mut peer, ID));
    let refused = Sheet { readers: 0, ..sheet(3, 1) };
    let other = HandoverId(78);
    let refused = Offer::new(&node, other, refused, SECOND).map(drop);
    assert!(matches!(refused, Err(HandoverError::Sheet { .. })), "{refused:?}");
    assert!(is_withdrawn(&mut peer, other));
    let _offer = Offer::new(&node, ID, sheet(3, 1), SECOND).unwrap();
    assert!(open(&mut peer, ID).is_some(), "it is offered all the same");
}

#[test]
fn a_part_of_another_length_than_the_sheet_says_is_not_read() {
    let (node, _server, mut peer) = served(60);
    let mut long = sheet(3, 1);
    let mut offer = Offer::new(&node, ID, long.clone(), 10 * SECOND).unwrap();
    let parts = long.parts();
    let places = offer.reserve(&parts).unwrap();
    let sums = write(&node, &places, &parts, &long);
    offer.give_written(places, &sums).unwrap();
    // A host whose sheet says another length, and whose parts have the same names.
    let mut pull = open(&mut peer, ID).unwrap();
    long.groups[0].part_bytes = 88;
    let other = Offer::new(&node, ID, long, 10 * SECOND).unwrap();
    let mut lied = open(&mut peer, ID).unwrap();
    let refused = lied.look_by(&mut peer, far(), |_, _, _| panic!("nothing of it is read"));
    let expected = matches!(refused, Err(HandoverError::Length { bytes: 96, expected: 88, .. }));
    assert!(expected, "{refused:?}");
    let progress = pull.look_by(&mut peer, far(), |_, parts, _| Ok(vec![true; parts.len()]));
    assert_eq!(progress.unwrap().left, 0);
    drop((offer, other));
    no_lease(&node);
}

#[test]
fn parts_come_in_the_order_that_the_sheet_says() {
    let by_block = sheet(3, 1).parts();
    let firsts: Vec<_> = by_block.iter().map(|part| (part.place, part.layer)).collect();
    assert!(firsts.is_sorted(), "block by block, and of each layer by layer");
    let by_layer = sheet(3, u32::MAX).parts();
    let firsts: Vec<_> = by_layer.iter().map(|part| (part.layer, part.group)).collect();
    assert!(firsts.is_sorted(), "layer by layer");
    assert_eq!(by_block.len(), 3 * 3 * 2 + 3 * 2 * 2);
}

#[test]
fn what_is_given_stays_as_long_as_the_offer_whatever_else_is_stored() {
    let ((node, _server, mut peer), whole, mut offer) = offered(60, sheet(4, 1));
    give(&mut offer, &whole.parts()).unwrap();
    for number in 0..500 {
        let _ = node.put(common::block(number), &common::record(number));
    }
    let mut pull = open(&mut peer, ID).unwrap();
    let mut came = 0;
    pull.wait(&mut peer, &mut SocketTransfer, far(), |_, _| came += 1).unwrap();
    assert_eq!(came, whole.parts().len());
    drop(offer);
    no_lease(&node);
}

#[test]
fn an_offer_that_does_not_fit_is_refused_and_leaves_nothing() {
    let (node, _server, _) = served(12);
    let whole = sheet(4, 1);
    let other = common::block(3);
    node.put(other, b"another record").unwrap();
    let mut offer = offer_of(&node, &whole);
    let refused = give(&mut offer, &whole.parts());
    let found = node.find_and_pin(ReaderId(1), &[other], SECOND).unwrap();
    node.end(ReaderId(1), found.lease.expect("no record has made room")).unwrap();
    assert!(matches!(refused, Err(HandoverError::Node(Refusal::NoRoom))), "{refused:?}");
    drop(offer);
    no_lease(&node);
    assert_eq!(node.pool().claimable(), 12, "no slot is lost");
    // A sheet that is longer than all records.
    let long = Sheet { ids: vec![7; 1000], ..whole };
    let refused = Offer::new(&node, ID, long, SECOND).map(drop);
    assert!(matches!(refused, Err(HandoverError::Node(Refusal::NoRoom))), "{refused:?}");
    no_lease(&node);
    assert_eq!(node.pool().claimable(), 12);
}

#[test]
fn parts_that_the_sheet_does_not_name_are_refused() {
    let ((_node, _server, _), whole, mut offer) = offered(100, sheet(4, 1));
    let first = whole.parts()[0];
    let wrong = [
        Part { group: GroupId(2), ..first },
        Part { place: 4, ..first },
        Part { layer: 3, ..first },
        Part { shard: 2, ..first },
        Part { group: GroupId(1), place: 1, ..first },
    ];
    for part in wrong {
        let refused = offer.give(&[(part, &[0; 96])]);
        assert!(matches!(refused, Err(HandoverError::NoPart { part: of }) if of == part));
    }
    for bytes in [0, 95, 97] {
        let refused = offer.give(&[(first, &vec![0; bytes])]);
        assert!(matches!(refused, Err(HandoverError::Length { expected: 96, .. })), "{refused:?}");
    }
    give(&mut offer, &[first]).unwrap();
    assert!(matches!(give(&mut offer, &[first]), Err(HandoverError::NoPart { .. })), "again");
    let twice = [whole.parts()[1]; 2];
    assert!(matches!(give(&mut offer, &twice), Err(HandoverError::NoPart { .. })), "twice");
    assert_eq!(offer.left(), whole.parts().len() - 1, "nothing of these was given");
}

#[test]
fn a_side_that_cancels_withdraws_or_dies_lets_the_other_go_on() {
    // The side that goes on does not want it any more.
    let ((node, server, mut peer), whole, mut offer) = offered(100, sheet(4, 1));
    give(&mut offer, &whole.parts()[..5]).unwrap();
    let mut pull = open(&mut peer, ID).unwrap();
    let progress = pull.look(&mut peer, &mut SocketTransfer, far(), |_, _| {}).unwrap();
    assert_eq!((progress.came, progress.left), (5, whole.parts().len() - 5));
    pull.cancel(&mut peer, far()).unwrap();
    until("it is cancelled", || offer.verdict() == Verdict::Cancelled);
    drop(offer);
    // It has not waited for it at all.
    Pull::decline(&mut peer, (ID, 0), far()).unwrap();
    let mut offer = offer_of(&node, &whole);
    assert_eq!(offer.verdict(), Verdict::Cancelled);
    drop(offer);
    // The side that computes withdraws it.
    let mut offer = offer_of(&node, &whole);
    give(&mut offer, &whole.parts()[..5]).unwrap();
    let mut pull = open(&mut peer, ID).unwrap();
    let _ = pull.look(&mut peer, &mut SocketTransfer, far(), |_, _| {}).unwrap();
    drop(offer);
    let looked = pull.look(&mut peer, &mut SocketTransfer, far(), |_, _| unreachable!());
    assert!(matches!(looked, Err(HandoverError::Withdrawn)), "{looked:?}");
    // So does one who comes later, as long as the node remembers it, and waits for nothing.
    let opened = Pull::open(&mut peer, &mut SocketTransfer, (ID, 0), SECOND, far()).map(drop_it);
    assert!(matches!(opened, Err(HandoverError::Withdrawn)), "{opened:?}");
    no_lease(&node);
    // Nobody comes: the offer's time is over, and its leases end.
    let mut offer = Offer::new(&node, ID, whole.clone(), SECOND / 20).unwrap();
    give(&mut offer, &whole.parts()[..5]).unwrap();
    until("its time is over", || offer.verdict() == Verdict::Expired);
    until("its leases have ended", || node.stats().leases.open == 0);
    let late = give(&mut offer, &whole.parts()[5..6]);
    assert!(matches!(late, Err(HandoverError::Withdrawn)), "{late:?}");
    drop(offer);
    // The side that computes dies.
    let mut offer = offer_of(&node, &whole);
    give(&mut offer, &whole.parts()[..5]).unwrap();
    let mut pull = open(&mut peer, ID).unwrap();
    drop(server);
    let looked = pull.wait(&mut peer, &mut SocketTransfer, far(), |_, _| {});
    assert!(matches!(looked, Err(HandoverError::Peer(_))), "{looked:?}");
    drop(offer);
    no_lease(&node);
}

#[test]
fn a_wait_has_an_end_and_goes_on_where_it_was() {
    let ((node, _server, mut peer), whole, mut offer) = offered(100, sheet(4, u32::MAX));
    let parts = whole.parts();
    give(&mut offer, &parts[..7]).unwrap();
    let mut pull = open(&mut peer, ID).unwrap();
    let mut came = Vec::new();
    let soon = Instant::now() + SECOND / 50;
    let is_over = AtomicBool::new(false);
    let late = std::thread::scope(|scope| {
        // A wait without an end looks more often than any that has one, and finds then that nothing is served any more.
        scope.spawn(|| {
            until("the wait is over, or has no end", || {
                is_over.load(Relaxed) || node.stats().leases.granted > 2_000
            });
            if !is_over.load(Relaxed) {
                node.clear();
            }
        });
        let late = pull.wait(&mut peer, &mut SocketTransfer, soon, |part, _| came.push(part));
        is_over.store(true, Relaxed);
        late
    });
    let left = parts.len() - 7;
    assert!(matches!(late, Err(HandoverError::Late { left: of }) if of == left), "{late:?}");
    assert!(matches!(pull.left(), of if of == left));
    give(&mut offer, &parts[7..]).unwrap();
    pull.wait(&mut peer, &mut SocketTransfer, far(), |part, _| came.push(part)).unwrap();
    assert_eq!(came.len(), parts.len(), "each once");
    assert_eq!(came, parts);
    // One that is not complete cannot be taken.
    let pull = open(&mut peer, ID).unwrap();
    let refused = pull.take(&mut peer, far());
    assert!(matches!(refused, Err(HandoverError::Late { .. })), "{refused:?}");
    assert_eq!(offer.verdict(), Verdict::Waiting);
}

/// However many parts are there when they are first looked for: what a link takes longer for than a lease comes, too.
#[test]
fn each_call_of_a_wait_has_its_time() {
    let (node, _server, mut peer) = served(900);
    let whole = sheet(100, 1);
    let mut offer = Offer::new(&node, ID, whole.clone(), 60 * SECOND).unwrap();
    give(&mut offer, &whole.parts()).unwrap();
    let (mut pull, mut by) = (open(&mut peer, ID).unwrap(), Noted::default());
    pull.wait(&mut peer, &mut by, far(), |_, _| {}).unwrap();
    let noted = by.deadlines();
    assert!(noted.len() > 2 && noted.is_sorted_by(|one, next| one < next), "{noted:?}");
    // The wait itself ends between two calls.
    let (mut pull, mut by) = (open(&mut peer, ID).unwrap(), Noted::default());
    let late = pull.wait(&mut peer, &mut by, Instant::now(), |_, _| {});
    assert!(matches!(late, Err(HandoverError::Late { .. })), "{late:?}");
    assert_eq!(by.deadlines().len(), 1);
}

#[test]
fn an_offer_lasts_however_long_it_is_to() {
    let mut options = NodeOptions::new("a", common::RECORD_BYTES);
    options.lease_max = Duration::MAX;
    let node = Arc::new(node_of(&options, 1 << 16, Arc::new(SystemClock::new())));
    let whole = sheet(3, 1);
    let mut offer = Offer::new(&node, ID, whole.clone(), Duration::MAX).unwrap();
    give(&mut offer, &whole.parts()).unwrap();
    assert_eq!(offer.verdict(), Verdict::Waiting);
}

#[test]
fn a_node_that_lies_about_parts_is_found_out() {
    let ((node, _server, mut peer), whole, mut offer) = offered(100, sheet(4, 1));
    let parts = whole.parts();
    give(&mut offer, &parts[..3]).unwrap();
    let open_before = node.stats().leases.open;
    let mut pull = open(&mut peer, ID).unwrap();
    // Another record under the name of the second part: a shorter one. `Peer::put` takes any name that one knows, so the name
    // is learnt from what the node tells of its changes.
    let changes = changes(&mut peer);
    let second = key_of(changes[changes.len() - 2]);
    peer.put(second, vec![1; 20], far()).unwrap();
    let mut came = Vec::new();
    let looked = pull.look(&mut peer, &mut SocketTransfer, far(), |part, _| came.push(part));
    let Err(HandoverError::Length { part, bytes: 20, expected: 96 }) = looked else {
        panic!("{looked:?}")
    };
    assert_eq!(part, parts[1]);
    assert_eq!(came, [parts[0], parts[2]], "what is right was said");
    until("the reader's leases have ended", || node.stats().leases.open == open_before);
}

/// What has come to the node of hand-overs.
fn changes(peer: &mut Peer) -> Vec<Change> {
    peer.changes(Cursor::default(), (false, 0), far()).unwrap().changes
}

fn key_of(Change { group, name, .. }: Change) -> RecordKey {
    RecordKey { format: 0, group, name }
}

#[test]
fn sheets_that_are_none_are_refused_and_noise_is_none() {
    let (node, _server, mut peer) = served(100);
    let whole = sheet(4, 1);
    let refused = |change: fn(&mut Sheet)| {
        let mut sheet = whole.clone();
        change(&mut sheet);
        match Offer::new(&node, ID, sheet, SECOND).map(drop) {
            Err(HandoverError::Sheet { field }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(|of| of.groups.clear()), "groups");
    assert_eq!(refused(|of| of.shards = 0), "shards");
    assert_eq!(refused(|of| of.readers = 0), "readers");
    assert_eq!(refused(|of| of.readers = u32::MAX), "readers");
    assert_eq!(refused(|of| of.chunk_places = 0), "chunk_places");
    // Blocks that do not belong to the tokens: none of the last one, one too many, and a window's behind the end.
    assert_eq!(refused(|of| of.groups[0].places.truncate(3)), "places");
    assert_eq!(refused(|of| of.groups[0].places.push(4)), "places");
    assert_eq!(refused(|of| of.groups[1].places.push(4)), "places");
    assert_eq!(refused(|of| of.ids.truncate(3)), "ids");
    assert_eq!(refused(|of| of.draft_tokens = u64::MAX), "draft_tokens");
    assert_eq!(refused(|of| of.groups[0].part_bytes = 0), "part_bytes");
    assert_eq!(refused(|of| of.groups[1].part_bytes = u32::MAX), "part_bytes");
    assert_eq!(refused(|of| of.groups[0].layers = 0), "layers");
    assert_eq!(refused(|of| of.groups[0].places = vec![1, 1]), "places");
    assert_eq!(refused(|of| of.groups[0].layers = u32::MAX), "parts");
    assert_eq!(refused(|of| of.shards = u32::MAX), "parts");
    // What comes as a sheet is read without trust: any change of its bytes makes another sheet, or none.
    let offer = Offer::new(&node, ID, whole.clone(), 10 * SECOND).unwrap();
    let changes = changes(&mut peer);
    let block = key_of(*changes.iter().rfind(|change| change.is_there).unwrap());
    let found = peer.find_and_pin(&[block], SECOND, far()).unwrap();
    let read = peer.read(&mut SocketTransfer, &found, &[block], far()).unwrap();
    let record = read[0].clone().unwrap();
    let mut state = 5;
    let (mut none, mut others) = (0, 0);
    for round in 0..2_000_usize {
        let mut changed = record.clone();
        match round % 3 {
            0 => changed.truncate(random(&mut state) as usize % record.len()),
            1 => changed[random(&mut state) as usize % record.len()] = random(&mut state) as u8,
            _ => {
                changed = (0..random(&mut state) % 200).map(|_| random(&mut state) as u8).collect()
            }
        }
        changed.push(0);
        if round % 3 == 1 {
            changed.pop();
        }
        peer.put(block, changed, far()).unwrap();
        match Pull::open(&mut peer, &mut SocketTransfer, (ID, 0), SECOND, far()) {
            Ok(Some(pull)) => others += usize::from(pull.left() > 0 || pull.sheet().tokens > 0),
            // It says that there are more pieces than there are.
            Ok(None) | Err(HandoverError::Sheet { .. }) => none += 1,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(none > 1_000 && others > 100, "{none}, {others}");
    drop(offer);
}

/// Four ranks compute, and two go on: each takes the two shards that it needs, at its own pace, and the
/// blocks are released when both have.
#[test]
fn ranks_of_another_degree_take_the_shards_that_they_need() {
    let (node, server, _) = served(200);
    let format = GroupFormat { kind: GroupKind::Full, block_tokens: 4, draft_model: false };
    let part_bytes = 64;
    let group = GroupSheet { format, layers: 3, part_bytes, places: vec![0, 1] };
    let (shards, readers) = (4, 2);
    let ids = (0..7).collect();
    let whole = Sheet {
        tokens: 7,
        draft_tokens: 0,
        ids,
        shards,
        readers,
        chunk_places: 1,
        content: 0,
        groups: vec![group],
    };
    let mut offer = offer_of(&node, &whole);
    for part in whole.parts() {
        offer.give(&[(part, &bytes_of(part, part_bytes))]).unwrap();
    }
    for rank in 0..2 {
        assert_eq!(offer.verdict(), Verdict::Waiting, "not all readers have taken it");
        let mut peer = another(&server);
        let opened = Pull::open(&mut peer, &mut SocketTransfer, (ID, rank), SECOND, far());
        let mut pull = opened.unwrap().unwrap();
        let needed = [2 * rank, 2 * rank + 1];
        pull.take_shards(&needed).unwrap();
        assert_eq!(pull.left(), 2 * 3 * 2, "two blocks, three layers, two of four shards");
        let mut came = 0;
        let each = |part: Part, bytes: &[u8]| {
            assert!(needed.contains(&part.shard) && bytes == bytes_of(part, part_bytes));
            came += 1;
        };
        pull.wait(&mut peer, &mut SocketTransfer, far(), each).unwrap();
        assert_eq!(came, 12);
        pull.take(&mut peer, far()).unwrap();
    }
    assert_eq!(offer.verdict(), Verdict::Taken);
    // A third reader, and a fifth shard.
    let mut peer = another(&server);
    let opened = Pull::open(&mut peer, &mut SocketTransfer, (ID, 2), SECOND, far()).map(drop_it);
    assert!(matches!(opened, Err(HandoverError::None { number: 2, count: 2, .. })), "{opened:?}");
    let mut pull = open(&mut peer, ID).unwrap();
    let refused = pull.take_shards(&[0, 4]);
    assert!(matches!(refused, Err(HandoverError::None { number: 4, count: 4, .. })), "{refused:?}");
    drop(offer);
    no_lease(&node);
    assert_eq!(node.stats().used_slots, 0);
}

#[test]
fn many_sequences_are_handed_over_at_a_time() {
    let clock = Arc::new(SystemClock::new());
    let node = Arc::new(node_of(&NodeOptions::new("a", 512), 4 << 20, clock));
    let (server, _) = serve_node(&node);
    let count = common::number_of("KV_REMOTE_HANDOVERS", 40) as u128;
    std::thread::scope(|scope| {
        for side in 0..2_u128 {
            let (node, server) = (&node, &server);
            let ids = move || (0..count).filter(move |id| id % 2 == side).map(HandoverId);
            scope.spawn(move || {
                for id in ids() {
                    let whole = sheet(3 + (id.0 % 4) as u32, 1 + (id.0 % 3) as u32);
                    let mut offer = Offer::new(node, id, whole.clone(), 10 * SECOND).unwrap();
                    for parts in whole.parts().chunks(5) {
                        give(&mut offer, parts).unwrap();
                    }
                    // Each third is cancelled.
                    let expected = match id.0 % 3 {
                        0 => Verdict::Cancelled,
                        _ => Verdict::Taken,
                    };
                    until("it is taken or cancelled", || offer.verdict() != Verdict::Waiting);
                    assert_eq!(offer.verdict(), expected);
                }
            });
            scope.spawn(move || {
                let mut peer = another(server);
                for id in ids() {
                    let mut pull = None;
                    until("it is offered", || {
                        pull = open(&mut peer, id);
                        pull.is_some()
                    });
                    let mut pull = pull.unwrap();
                    if id.0.is_multiple_of(3) {
                        pull.cancel(&mut peer, far()).unwrap();
                        continue;
                    }
                    let sheet = pull.sheet().clone();
                    let right = |part: Part, bytes: &[u8]| {
                        assert_eq!(bytes, bytes_of(part, sheet.part_bytes(part).unwrap()));
                    };
                    pull.wait(&mut peer, &mut SocketTransfer, far(), right).unwrap();
                    pull.take(&mut peer, far()).unwrap();
                }
            });
        }
    });
    no_lease(&node);
    // Of those that were cancelled, the node remembers that they were.
    assert_eq!(u128::from(node.stats().used_slots), count.div_ceil(3));
}
