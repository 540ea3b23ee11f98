//! Reads that a second thread makes while the caller looks at what has come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use kv_nixl::NixlTransfer;
use kv_remote::{Peer, PeerError};

use super::common::{block, blocks, far, random, until};
use super::process::NodeProcess;
use super::{SECOND, transfer};

/// Bytes of a record, of which two are a piece.
const BYTES: usize = 250 << 10;
const COUNT: u64 = 72;

fn record(number: u64) -> Vec<u8> {
    let mut state = number + 1;
    (0..BYTES / 8).flat_map(|_| random(&mut state).to_le_bytes()).collect()
}

fn stored() -> (NodeProcess, Peer, NixlTransfer) {
    let node = NodeProcess::start_with("a", 2 * COUNT, BYTES as u64);
    let mut peer = node.connect();
    (0..COUNT).for_each(|of| peer.put(block(of), record(of), far()).unwrap());
    (node, peer, transfer())
}

/// Reads all records, and says each, which is right.
fn read_all(
    (peer, transfer): (&mut Peer, &mut NixlTransfer),
    deadline: Instant,
    mut each: impl FnMut(usize, &[u8]),
) -> Result<(), PeerError> {
    let wanted = blocks(0..COUNT);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    let read = peer.read_each(transfer, &found, &wanted, deadline, |place, record| {
        each(place, record.unwrap());
    });
    peer.end(found.lease.unwrap(), far()).unwrap();
    read
}

fn check_all(peer: &mut Peer, transfer: &mut NixlTransfer) {
    let mut places = Vec::new();
    read_all((peer, transfer), far(), |place, bytes| {
        assert!(bytes == record(place as u64), "{place}");
        places.push(place);
    })
    .unwrap();
    assert!(places.iter().copied().eq(0..COUNT as usize), "{places:?}");
}

pub(crate) fn what_is_looked_at_does_not_change() {
    let (_node, mut peer, mut transfer) = stored();
    check_all(&mut peer, &mut transfer);
    read_all((&mut peer, &mut transfer), far(), |place, bytes| {
        let right = record(place as u64);
        // Much longer than it takes to read all the others.
        (0..200).for_each(|look| assert!(bytes == right, "{place}, look {look}"));
    })
    .unwrap();
}

pub(crate) fn a_panic_ends_the_read() {
    let (_node, mut peer, mut transfer) = stored();
    // By a deadline behind which the trial has long failed.
    let hour = Instant::now() + 3600 * SECOND;
    for last in [0, 1, 7, COUNT as usize - 1] {
        let wanted = blocks(0..COUNT);
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        let read = AssertUnwindSafe(|| {
            peer.read_each(&mut transfer, &found, &wanted, hour, |place, record| {
                record.unwrap();
                assert!(place < last, "as it should");
            })
        });
        assert!(catch_unwind(read).is_err());
        peer.end(found.lease.unwrap(), far()).unwrap();
        check_all(&mut peer, &mut transfer);
    }
    assert_eq!(transfer.late(), 0);
}

pub(crate) fn a_long_read_that_is_late_keeps_its_memory() {
    let (node, mut peer, mut transfer) = stored();
    check_all(&mut peer, &mut transfer);
    let wanted = blocks(0..COUNT);
    let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
    let (mut places, deadline) = (Vec::new(), Instant::now() + SECOND);
    let read = peer.read_each(&mut transfer, &found, &wanted, deadline, |place, bytes| {
        if places.is_empty() {
            node.stop();
        }
        assert!(bytes.unwrap() == record(place as u64), "{place}");
        places.push(place);
    });
    assert!(matches!(read, Err(PeerError::Late)), "over TCP the peer has a part in it: {read:?}");
    assert!(places.iter().copied().eq(0..places.len()) && places.len() < COUNT as usize);
    assert_eq!(transfer.late(), 1);
    node.go_on();
    until("the late read has ended", || {
        check_all(&mut peer, &mut transfer);
        transfer.late() == 0
    });
}

pub(crate) fn a_caller_that_is_slow_is_late_with_nothing_on_its_way() {
    let (_node, mut peer, mut transfer) = stored();
    check_all(&mut peer, &mut transfer);
    let deadline = Instant::now() + 3 * SECOND;
    let mut said = 0;
    let read = read_all((&mut peer, &mut transfer), deadline, |place, bytes| {
        assert!(bytes == record(place as u64), "{place}");
        said += 1;
        while Instant::now() < deadline + SECOND / 4 {
            std::thread::yield_now();
        }
    });
    assert!(matches!(read, Err(PeerError::Late)), "{read:?}");
    assert!(said > 0 && said < COUNT, "{said}");
    assert_eq!(transfer.late(), 0);
    check_all(&mut peer, &mut transfer);
}
